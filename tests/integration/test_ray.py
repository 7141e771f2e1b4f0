"""Workers as actors of a real Ray on this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import freewheel as fw

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
import freewheel.ray  # noqa: E402
from freewheel.ray.book import NAMESPACE  # noqa: E402
from freewheel.ray.records import Collector  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    path = os.pathsep.join([str(Path(fw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield
    ray.shutdown()


def training(folder: Path, wait_for: str):
    """A worker's function: it trains until a file is there, and says who it is."""

    def train():
        import hashlib

        import torch

        import freewheel as fw

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fw.attach(model, optimizer, "adpsgd") as worker:
            (folder / f"pid-{worker.rank}-{os.getpid()}").touch()
            while not (folder / wait_for).exists():
                model(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.005)
        answer = torch.cat([one.detach().flatten() for one in worker.consensus().parameters()])
        found = worker.metrics()
        return (
            hashlib.sha256(answer.numpy().tobytes()).hexdigest(),
            found["members"],
            found["exchanges"]["done"],
        )

    return train


def until(folder: Path, pattern: str, count: int = 1) -> list[Path]:
    for _ in range(1200):
        if len(found := sorted(folder.glob(pattern))) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{pattern} never came: {list(folder.iterdir())}")


def begin(at: Path, **settings):
    """A run in a thread of its own; what becomes of it is in the list."""
    found: list = []

    def go():
        try:
            found.append(freewheel.ray.run(training(at, "end"), cpus=1, **settings))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread, found


def test_a_killed_worker_and_a_killed_book_cost_nothing(tmp_path):
    """A worker is killed: it comes back. The book is killed: nobody stops, and the next one who is killed
    comes back, too."""
    records = tmp_path / "records"
    thread, found = begin(tmp_path, workers=2, most=3, folder=records, name="killed")
    first = until(tmp_path, "pid-*", 3)
    os.kill(int(first[1].name.split("-")[2]), signal.SIGKILL)
    until(tmp_path, "pid-1-*", 2)
    ray.kill(ray.get_actor("killed-book", namespace=NAMESPACE), no_restart=False)
    time.sleep(3)
    os.kill(int(first[0].name.split("-")[2]), signal.SIGKILL)
    until(tmp_path, "pid-0-*", 2)
    (tmp_path / "end").touch()
    thread.join(120)
    (answers,) = found
    assert isinstance(answers, dict), answers
    assert set(answers) == {0, 1, 2}
    assert len({answer for answer, _, _ in answers.values()}) == 1
    assert all(done > 0 for _, _, done in answers.values())
    for rank in answers:
        lines = [json.loads(line) for line in (records / f"worker-{rank}.jsonl").read_text().splitlines()]
        assert {line["rank"] for line in lines} == {rank}
    events = (records / "events-launcher.jsonl").read_text()
    assert "Ray has started it again" in events


def test_a_function_that_raises_everywhere_ends_with_one_error(tmp_path):
    def broken():
        raise ValueError("no such luck")

    with pytest.raises(fw.WorkerLost, match=r"failed: .*no such luck"):
        freewheel.ray.run(broken, workers=2, restarts=1)


def test_two_runs_of_one_name_are_refused_and_a_worker_without_room_waits(tmp_path):
    thread, found = begin(tmp_path, workers=1, most=4, name="one")
    until(tmp_path, "pid-*", 3)
    with pytest.raises(fw.ConfigError, match="a run named 'one'"):
        freewheel.ray.run(training(tmp_path, "end"), workers=1, name="one")
    (tmp_path / "end").touch()
    thread.join(60)
    assert {tuple(members) for _, members, _ in found[0].values()} == {(0, 1, 2)}


def test_pieces_are_written_where_they_belong(tmp_path):
    """What a lost book had is sent again; a later life on another node begins its file anew."""
    collector = Collector(tmp_path)
    collector.write([("worker-0.jsonl", 1, 0, b"a\n"), ("worker-0.jsonl", 1, 2, b"b\n")])
    collector.write([("worker-0.jsonl", 1, 0, b"a\nb\nc\n")])
    collector.write(
        [("worker-0.jsonl", 2, 0, b"d\n"), ("run.json", 1, -1, b"{12}"), ("run.json", 2, -1, b"{3}")]
    )
    collector.write([("worker-0.jsonl", 2, 0, b"d\ne\n")])
    assert (tmp_path / "worker-0.jsonl").read_text() == "a\nb\nc\nd\ne\n"
    assert (tmp_path / "run.json").read_text() == "{3}"
