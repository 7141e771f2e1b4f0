"""Datasets of a real Ray: rows are leased by blocks, each once in a pass, whoever is slow or dies."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import freewheel as fw
from crew import together, worker

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("pandas", reason="Ray Data needs pandas")
pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow")
import freewheel.ray  # noqa: E402
from freewheel.ray.data import Rows  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray Data warns of its own settings
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ROWS, BLOCKS = 240, 6


@pytest.fixture(scope="module", autouse=True)
def cluster():
    path = os.pathsep.join([str(Path(fw.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def rows():
    """Materialized once, by the driver, which owns the blocks."""
    blocks = ray.data.range(ROWS, override_num_blocks=BLOCKS)
    named = blocks.map_batches(
        lambda batch: {**batch, "x": batch["id"] * 0.5, "name": batch["id"].astype(str)}
    )
    return named.materialize()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict) -> list[int]:
    optimizer.zero_grad()
    (1e-6 * net(batch["x"].float().unsqueeze(1)).square().mean()).backward()
    optimizer.step()
    return batch["id"].tolist()


def test_every_row_once_in_a_pass_and_a_slow_worker_takes_fewer(rows):
    counts, moved = [0, 0], threading.Condition()

    def work(place):
        net = model()
        made, optimizer = worker(place, net)
        with made as me:
            loader, passes = me.loader(rows, batch_size=8, epochs=2), []
            for _ in range(2):
                used, fetched = [], []
                for batch in loader:
                    assert set(batch) == {"id", "x", "name"}
                    assert batch["x"].tolist() == [0.5 * one for one in batch["id"].tolist()]
                    assert batch["name"][0] == str(batch["id"][0].item())
                    used += step(net, optimizer, batch)
                    fetched.append(used[-1] // (ROWS // BLOCKS))
                    with moved:
                        counts[place.rank] += 1
                        moved.notify_all()
                        if place.rank == 1:  # whatever the machine does, the other does more
                            moved.wait_for(lambda: counts[0] > 3 * counts[1], 1.0)
                    time.sleep(0.02)
                passes.append((used, fetched))
            return passes

    fast, slow = together(2, work)
    for (one, _), (other, _) in zip(fast, slow, strict=True):
        assert sorted(one + other) == list(range(ROWS))
        assert len(one) > len(other)
    assert fast[0][0] != fast[1][0]
    for _, fetched in fast:  # the order goes from block to block
        assert sum(a != b for a, b in itertools.pairwise(fetched)) <= 2 * BLOCKS


def test_a_position_loads_at_another_number_of_workers(rows):
    def first(place):
        made, optimizer = worker(place, net := model())
        with made as me:
            loader, used = me.loader(rows, batch_size=8), []
            for batch in loader:
                used += step(net, optimizer, batch)
                if len(used) == 80:
                    break_at = loader.state_dict()
                    break
            return used, break_at

    def then(place):
        made, optimizer = worker(place, net := model())
        with made as me:
            loader = me.loader(rows, batch_size=4, epochs=1)
            loader.load_state_dict(state)
            return [one for batch in loader for one in step(net, optimizer, batch)]

    used, state = together(1, first)[0]
    rest = together(3, then)
    assert sorted([*used, *(one for some in rest for one in some)]) == list(range(ROWS))


def test_what_cannot_be_dealt_is_named(rows):
    def work(place):
        made, _ = worker(place, model())
        with made as me:
            with pytest.raises(fw.ConfigError, match=r"dataset.materialize\(\)"):
                me.loader(ray.data.range(10), batch_size=2)
            with pytest.raises(fw.ConfigError, match="takes no num_workers"):
                me.loader(rows, batch_size=2, num_workers=2)
            (batch,) = me.loader(rows, batch_size=ROWS, shuffle=False, collate_fn=sorted)
            assert batch == ["id", "name", "x"]  # it gets a dict of arrays

    together(1, work)
    assert len(Rows(rows, {})) == ROWS


def training(rows, folder: Path, ends: str):
    """A worker's function; worker 1 ends after a few batches, once, in the way that is named."""

    def train():
        made = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(made.parameters(), lr=1e-9)
        torch.set_num_threads(1)
        with fw.attach(made, optimizer, "adpsgd") as me, (folder / f"seen-{os.getpid()}").open("a") as seen:
            for number, batch in enumerate(me.loader(rows, batch_size=4, epochs=1)):
                optimizer.zero_grad()
                made(batch["x"].float().unsqueeze(1)).mean().backward()
                optimizer.step()
                print(*batch["id"].tolist(), file=seen, flush=True)
                time.sleep(0.005)
                for _ in range(6000 * (me.rank == 0 and number == 10)):  # it leaves the other enough
                    if (folder / "ended").exists():
                        break
                    time.sleep(0.01)
                if me.rank == 1 and number == 5 and not (folder / "ended").exists():
                    (folder / "ended").touch()
                    os.kill(os.getpid(), getattr(signal, ends))
        return me.metrics()["samples_again"]

    return train


def used(folder: Path) -> Counter[int]:
    assert (folder / "ended").exists()
    return Counter(int(one) for path in folder.glob("seen-*") for one in path.read_text().split())


def test_blocks_of_a_worker_that_is_killed_are_dealt_again(rows, tmp_path):
    again = freewheel.ray.run(training(rows, tmp_path, "SIGKILL"), 2, restarts=0)
    found = used(tmp_path)
    assert sorted(found) == list(range(ROWS))
    assert found.total() - ROWS <= sum(count or 0 for count in again.values())


def test_an_actor_that_is_told_to_leave_is_not_started_again_and_the_others_go_on(rows, tmp_path):
    assert freewheel.ray.run(training(rows, tmp_path, "SIGTERM"), 2, restarts=0) == {0: 0}
    found = used(tmp_path)
    assert sorted(found) == list(range(ROWS))
    assert set(found.values()) == {1}
