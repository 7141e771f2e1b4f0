"""Workers as actors of a real Ray on this machine."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import freewheel as fw

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
import freewheel.ray  # noqa: E402
from freewheel.ray.book import NAMESPACE, Line  # noqa: E402
from freewheel.ray.run import FIRST, Collector, unsent  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


SIZE = 80 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A head and three nodes; the folder's name is short, for sockets have names of 107 bytes at most."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="fwr", dir="/tmp")
    path = os.pathsep.join([str(Path(fw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "PYTHONPATH": path, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
            "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "4", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        head = {"num_cpus": 0, "resources": {"seat": 1}, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": SIZE})
        nodes = []
        made.add = lambda: nodes.append(made.add_node(num_cpus=1, object_store_memory=SIZE))
        for _ in range(3):
            made.add()
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made, nodes
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def training(folder: Path, wait_for: str, inside: str = ""):
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
            if inside:
                import ray.train

                with contextlib.suppress(fw.ConfigError):
                    ray.train.report({})
                    raise AssertionError("it was not refused")
                (folder / f"refused-{worker.rank}-{os.getpid()}").touch()
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


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until_all_are_in(book: Line) -> None:
    """Wait until another book than the one that was marked knows all four workers."""
    where = [f"{FIRST.rpartition('/')[0]}/address/{rank}" for rank in range(4)]
    for _ in range(1200):
        with contextlib.suppress(OSError):
            if not book.check(["marked"]) and book.check(where):
                return
        time.sleep(0.1)
    raise AssertionError("they never came back to it")


def begin(at: Path, **settings):
    """A run in a thread of its own; what becomes of it is in the list."""
    found: list = []

    def go():
        try:
            found.append(freewheel.ray.run(training(at, "end"), **settings))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    return thread, found


def pids(at: Path, rank: int) -> list[int]:
    """The processes a worker has had, the newest last."""
    found = sorted(at.glob(f"pid-{rank}-*"), key=lambda path: path.stat().st_mtime_ns)
    return [int(path.name.split("-")[2]) for path in found]


def node_of(name: str, rank: int) -> str:
    from ray._private.state import actors

    return next(one for one in actors().values() if one["Name"] == f"{name}-{rank}")["Address"]["NodeID"]


def test_what_is_lost_comes_back_and_what_is_added_is_used(tmp_path, cluster):
    """A node is added: who had no room joins. A worker is killed: it comes back. The book is killed: nobody
    stops, and the next one who is killed comes back, too. A node is killed: its worker moves."""
    made, nodes = cluster
    records = tmp_path / "records"
    thread, found = begin(tmp_path, workers=4, folder=records, name="lost")
    until(tmp_path, "pid-*", 3)
    made.add()
    until(tmp_path, "pid-*", 4)
    os.kill(pids(tmp_path, 1)[-1], signal.SIGKILL)
    until(tmp_path, "pid-1-*", 2)
    book = Line("lost-book", 10.0)
    book.set("marked", "")
    ray.kill(ray.get_actor("lost-book", namespace=NAMESPACE), no_restart=False)
    until_all_are_in(book)
    os.kill(pids(tmp_path, 0)[-1], signal.SIGKILL)
    made.add()  # room for whom the next one loses
    until(tmp_path, "pid-0-*", 2)
    where = {node_of("lost", rank): rank for rank in (2, 3)}
    where.pop(ray.get_runtime_context().get_node_id(), None)  # Ray does not let this process lose its own
    node, moved = next((node, where[node.node_id]) for node in nodes if node.node_id in where)
    made.remove_node(node, allow_graceful=False)
    until(tmp_path, f"pid-{moved}-*", 2)
    assert len(pids(tmp_path, 5 - moved)) == 1  # who was not touched went on
    (tmp_path / "end").touch()
    thread.join(120)
    (answers,) = found
    assert isinstance(answers, dict), answers
    assert set(answers) == {0, 1, 2, 3}
    assert len({answer for answer, _, _ in answers.values()}) == 1
    assert all(done > 0 for _, _, done in answers.values())
    for rank in answers:
        assert {line["rank"] for line in lines(records / f"worker-{rank}.jsonl")} == {rank}
    events = (records / "events-launcher.jsonl").read_text()
    assert "Ray has started it again" in events


def test_a_function_that_raises_everywhere_ends_with_one_traceback(tmp_path, caplog):
    def broken():
        raise ValueError("no such luck")

    with pytest.raises(fw.WorkerLost, match=r"failed alike before they began: .*no such luck"):
        freewheel.ray.run(broken, workers=2)
    assert caplog.text.count("in broken") == 1


def test_scripts_that_raise_once_they_train_are_started_again(tmp_path):
    def train():
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with fw.attach(model, optimizer, "adpsgd") as worker:
            first = tmp_path / f"first-{worker.rank}"
            again = first.exists()
            first.touch()
            while len(list(tmp_path.glob("first-*"))) < 2:
                time.sleep(0.01)
            for _ in range(20):
                model(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
            if not again:
                raise ValueError("no such luck")
        return "trained"

    records = tmp_path / "records"
    assert freewheel.ray.run(train, workers=2, restarts=1, folder=records) == {0: "trained", 1: "trained"}
    events = lines(records / "events-launcher.jsonl")
    for rank in range(2):
        found = [event["what"] for event in events if event["rank"] == rank]
        assert found == ["failed", "restarted"]
        lives = [sample["life"] for sample in lines(records / f"worker-{rank}.jsonl")]
        assert lives == sorted(lives)
        assert set(lives) == {1, 2}


def test_another_version_of_ray_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    with pytest.raises(fw.ConfigError, match=r"Ray 2\.61\.0 .* install ray>=2\.57,<2\.61"):
        importlib.reload(freewheel.ray)


@pytest.mark.filterwarnings("ignore")  # Ray warns of its own use of itself
def test_ray_train_replaces_the_lost_worker_alone_and_one_report_ends_it(tmp_path):
    pytest.importorskip("pandas", reason="the extra `ray-train` is not installed")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    train = training(tmp_path, "end", inside="report")

    def train_loop(config):
        import ray.train

        worker = ray.train.get_context().get_world_rank()
        (tmp_path / f"answer-{worker}").write_text(json.dumps(train()))
        ray.train.report({})

    trainer = TorchTrainer(
        train_loop,
        train_loop_config={},
        torch_config=freewheel.ray.FreewheelConfig(folder=tmp_path / "records"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "t"), failure_config=FailureConfig(max_failures=1)),
    )
    thread = threading.Thread(target=trainer.fit, daemon=True)
    thread.start()
    until(tmp_path, "pid-*", 2)
    os.kill(pids(tmp_path, 1)[-1], signal.SIGKILL)
    until(tmp_path, "pid-1-*", 2)
    assert len(pids(tmp_path, 0)) == 1
    (tmp_path / "end").touch()
    thread.join(120)
    answers = [json.loads((tmp_path / f"answer-{rank}").read_text()) for rank in range(2)]
    assert answers[0][:2] == answers[1][:2] == [answers[0][0], [0, 1]]
    assert len(list(tmp_path.glob("refused-*"))) == 3  # by each life, and it went on
    assert (tmp_path / "records" / "worker-1.jsonl").exists()


def test_two_runs_of_one_name_are_refused_and_a_worker_without_room_waits(tmp_path):
    thread, found = begin(tmp_path, workers=1, most=2, name="one", cpus=0, resources={"seat": 1})
    until(tmp_path, "pid-*")
    with pytest.raises(fw.ConfigError, match="a run named 'one'"):
        freewheel.ray.run(training(tmp_path, "end"), workers=1, name="one")
    (tmp_path / "end").touch()
    thread.join(60)
    assert {tuple(members) for _, members, _ in found[0].values()} in ({(0,)}, {(1,)})


def test_pieces_are_written_where_they_belong(tmp_path):
    """What a lost book had is sent again; a later life on another node begins its file anew."""
    collector = Collector(tmp_path)

    def write(life: int, *pieces: tuple[str, int, bytes]) -> None:
        for piece in pieces:
            collector.write(life, piece)

    write(1, ("worker-0.jsonl", 0, b"a\n"), ("worker-0.jsonl", 2, b"b\n"))
    write(1, ("worker-0.jsonl", 0, b"a\nb\nc\n"), ("run.json", 0, b"{12}"))
    write(2, ("worker-0.jsonl", 0, b"d\n"), ("run.json", 0, b"{3}"))
    write(2, ("worker-0.jsonl", 0, b"d\ne\n"))
    assert (tmp_path / "worker-0.jsonl").read_text() == "a\nb\nc\nd\ne\n"
    assert (tmp_path / "run.json").read_text() == "{3}"
    write(2, ("worker-0.jsonl", 0, b"e\n"), ("worker-0.jsonl", 2, b"f\n"))  # thinned
    write(3, ("worker-0.jsonl", 0, b"g\n"), ("worker-0.jsonl", 0, b"h\n"))
    write(2, ("worker-0.jsonl", 4, b"late\n"))
    assert (tmp_path / "worker-0.jsonl").read_text() == "a\nb\nc\ne\nf\nh\n"


def test_what_was_sent_is_not_sent_again_unless_it_has_changed(tmp_path):
    sent: dict[str, bytes] = {}

    def pieces(samples: bytes, about: bytes) -> list[tuple[str, int, bytes]]:
        (tmp_path / "run.json").write_bytes(about)
        (tmp_path / "worker-0.jsonl").write_bytes(samples)
        return list(unsent(tmp_path, sent))

    assert pieces(b"a\n", b"{1}") == [("run.json", 0, b"{1}"), ("worker-0.jsonl", 0, b"a\n")]
    assert pieces(b"a\nb\n", b"{1}") == [("worker-0.jsonl", 2, b"b\n")]
    assert pieces(b"a\nb\n", b"{12}") == [("run.json", 0, b"{12}")]
    assert pieces(b"b\n", b"{12}") == [("worker-0.jsonl", 0, b"b\n")]  # thinned
    sent.clear()  # the book was lost
    assert pieces(b"b\n", b"{12}") == [("run.json", 0, b"{12}"), ("worker-0.jsonl", 0, b"b\n")]
