"""All workers of a run are lost and started again: they go on from their checkpoints, by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import crew
from crew import Launcher, free_port, next_life, together
from freewheel.errors import RunStopped, WorkerLost
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.launch import launcher as launching
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.generation import STARTS, Entry
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.strategies import resolve
from resumable import train

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
SAMPLES, BATCH, PASSES, EVERY, LAST = 72, 2, 3, 5, 8
RANKS = (0, 1, 2)


class Killed(Exception):
    """What ends a life."""


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, k: int) -> tuple[int, torch.Tensor]:
        return k, torch.ones(4)


@dataclass
class Lives:
    """Workers that train, die together after LAST steps of a life, and come back; and what they did."""

    launcher: Launcher
    folder: Path
    strategy: str = "adpsgd"
    resume: bool = True
    deaths: int = 1
    dying: tuple[int, ...] = RANKS
    """Who dies; a server's clients die of it."""
    back: tuple[int, ...] = RANKS
    """Who is started again."""
    began: dict[int, list[int]] = field(default_factory=dict)
    """The step at which each life of each worker began."""
    late: dict[int, list[bool]] = field(default_factory=dict)
    used: list[Counter[int]] = field(default_factory=lambda: [Counter() for _ in range(PASSES)])
    errors: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._at_last = threading.Barrier(len(RANKS))
        served = resolve(self.strategy).needs(0)
        self._dead = threading.Barrier(len(RANKS) if served else len(self.dying))

    def run(self) -> None:
        """All lives of all workers."""
        threads = self.launcher.run(self._lives)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads), "workers hang"

    def _lives(self, place: Place) -> None:
        try:
            for life in range(self.deaths + 1):
                with contextlib.suppress(Killed, WorkerLost if life < self.deaths else Killed):
                    self._live(next_life(place), dies=life < self.deaths)
                    return
                if place.rank not in self.back:
                    self.launcher.give_up(place.rank)
                self._dead.wait(DEADLINE_S)  # all are gone before anybody is back
                if place.rank not in self.back:
                    return
        except Exception as error:
            self.errors[place.rank] = error

    def _live(self, place: Place, dies: bool) -> None:
        model, rank = torch.nn.Linear(4, 1), place.rank
        settings = {"resume": self.folder} if self.resume else {}
        worker, optimizer = crew.worker(place, model, self.strategy, lr=0.01, **settings)
        with worker:
            worker.checkpoint(self.folder, every=EVERY)
            loader = worker.loader(Numbered(), BATCH)
            began = worker.metrics()["steps"]
            self.began.setdefault(rank, []).append(began)
            self.late.setdefault(rank, []).append(worker._agent.late)
            for _ in range(loader.epoch, PASSES):
                for which, inputs in loader:
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                    worker._checkpoints.wait()
                    # What a lost worker left of a pass may be dealt in the next one, and belongs to its own.
                    self.used[loader.leases.drawn[0].number].update(which.tolist())
                    if dies and worker.metrics()["steps"] == began + LAST:
                        self._at_last.wait(DEADLINE_S)
                        if rank in self.dying:
                            raise Killed


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(len(RANKS))
    yield made
    made.forget()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of beginning again."""
    return [one.getMessage() for one in caplog.records if one.module == "generation"]


def assert_every_sample_was_used(lives: Lives) -> None:
    for used in lives.used:
        assert set(used) == set(range(SAMPLES))


def test_they_go_on_from_their_checkpoints_again_and_again(launcher, tmp_path, caplog, monkeypatch):
    """As after kill -9: nobody has told the store that it is gone."""
    monkeypatch.setattr(Rendezvous, "leave", lambda self, why: None)
    lives = Lives(launcher, tmp_path / "saved", deaths=2)
    lives.run()
    assert not lives.errors
    assert lives.began == {rank: [0, EVERY, EVERY + EVERY] for rank in RANKS}
    assert lives.late == {rank: [False] * 3 for rank in RANKS}
    assert_every_sample_was_used(lives)
    assert [one for one in told(caplog) if "go on from" in one] == told(caplog)
    assert len(told(caplog)) == 2, "it is said once each time"


def test_those_whom_somebody_survived_copy_the_survivor(launcher, tmp_path):
    lives = Lives(launcher, tmp_path / "saved", dying=(0, 1))
    lives.run()
    assert not lives.errors
    assert lives.late == {0: [False, True], 1: [False, True], 2: [False]}
    assert lives.began[0] == [0, 0], "it counts anew, and has read no checkpoint"
    assert_every_sample_was_used(lives)
    launcher.forget()
    assert not launcher.store.check(["freewheel/0/0/beginning"])


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_one_that_is_not_started_again_is_not_waited_for(launcher, tmp_path, strategy):
    """The others go on from the mean of all, its data are dealt to them, and their checkpoints are whole."""
    lives = Lives(launcher, tmp_path / "saved", strategy, back=(0, 2), deaths=1)
    lives.run()
    assert not lives.errors
    assert lives.began == {0: [0, EVERY], 1: [0], 2: [0, EVERY]}
    assert_every_sample_was_used(lives)
    manifests = shards.find(tmp_path / "saved")[0]
    assert max(manifests, key=lambda one: one.time).world_size == 2


@pytest.mark.parametrize("resume", [True, False])
def test_a_server_that_is_lost_brings_all_back_to_their_checkpoints(launcher, tmp_path, resume, caplog):
    lives = Lives(launcher, tmp_path / "saved", "asgd", resume, dying=(0,))
    lives.run()
    assert not lives.errors
    assert lives.began[0] == [0, EVERY if resume else 0]
    for rank in (1, 2):  # until they know of the loss they go on, and may write more checkpoints
        assert lives.began[rank][1] in (range(EVERY, SAMPLES * PASSES, EVERY) if resume else (0,))
    assert_every_sample_was_used(lives)
    (said,) = told(caplog)
    assert ("go on from" if resume else "training begins anew") in said


def test_a_server_that_is_not_started_again_is_named(launcher, tmp_path):
    lives = Lives(launcher, tmp_path / "saved", "asgd", dying=(0,), back=(1, 2))
    lives.run()
    assert lives.errors.keys() == {1, 2}
    for error in lives.errors.values():
        assert "asgd needs worker 0" in str(error)
        assert "with resume it goes on from the last checkpoint" in str(error)


def test_who_may_still_train_out_of_reach_is_not_overtaken(launcher, tmp_path):
    """Nobody has said that worker 0 is dead: to go on from a checkpoint could split the run."""
    ended = threading.Event()

    def work(place: Place) -> None:
        worker, _ = crew.worker(place, torch.nn.Linear(4, 1), join_timeout_s=10.0)
        with contextlib.suppress(Killed), worker:
            if place.rank == 0:
                assert ended.wait(DEADLINE_S)
            raise Killed

    threads = launcher.run(work)
    for thread in threads[1:]:
        thread.join(DEADLINE_S)
    launcher.of_run.set("freewheel/0/0/address/0", f'["127.0.0.1", {free_port()}, 1]')  # it is cut off
    settings = {"resume": tmp_path, "join_timeout_s": 0.5}
    worker, _ = crew.worker(next_life(launcher.places[1]), torch.nn.Linear(4, 1), **settings)
    with pytest.raises(WorkerLost, match="worker 0 is lost or out of reach"):
        worker.__enter__()
    ended.set()
    threads[0].join(DEADLINE_S)


def enter(launcher: Launcher, rank: int, strategy: str = "adpsgd") -> tuple[Rendezvous, Entry]:
    """A new life of a worker comes to the store."""
    known = Rendezvous(next_life(launcher.places[rank]), 5.0)
    known.options()
    return known, known.enter(known.incarnation(), resolve(strategy))


def entered(launcher: Launcher, rank: int, strategy: str = "adpsgd") -> tuple[int, bool, bool]:
    entry = enter(launcher, rank, strategy)[1]
    return entry.beginning.number, entry.late, entry.back


def test_the_last_one_to_come_back_begins_again(launcher):
    for rank in RANKS:
        enter(launcher, rank)[0].begin(1)
    assert [entered(launcher, rank) for rank in RANKS] == [
        (0, True, True),
        (0, True, True),
        (1, False, False),
    ]
    assert entered(launcher, 0) == (1, False, False), "nobody has begun there yet"
    assert entered(launcher, 0) == (1, False, True), "worker 2 waits there for all"


def test_where_a_server_is_needed_its_return_begins_again(launcher):
    for rank in RANKS:
        enter(launcher, rank, "asgd")[0].begin(1)
    assert entered(launcher, 1, "asgd") == (0, True, True)
    assert entered(launcher, 0, "asgd") == (1, False, False)


def test_a_store_that_was_started_anew_is_told_which_beginning_it_is(launcher):
    enter(launcher, 0)[0].begin(1)
    survivor, entry = enter(launcher, 0)
    assert entry.beginning.number == 1
    survivor._model = "[]"
    survivor.publish("127.0.0.1", 1, 2)
    launcher.lose()
    launcher.host_again()
    survivor.register({0: 2, 1: 1}, members=(0,))
    assert entered(launcher, 1) == (1, True, False), "it comes into what goes on"


def test_launchers_say_who_is_not_started_again(monkeypatch):
    stores = []
    host = launching.host_store

    def kept(*arguments: Any) -> Any:
        stores.append(host(*arguments))
        return stores[-1]

    monkeypatch.setattr(launching, "host_store", kept)
    program = "import os, sys; sys.exit(3 * int(os.environ['RANK']))"
    assert launch([sys.executable, "-S", "-c", program], 2, output=Captured(), restarts=1) == 3
    store = stores[0][0]
    assert [bytes(store.get(f"{STARTS}/{rank}"))[64:] for rank in (0, 1)] == [b"0", b"0"]  # after the seal


PROCESS = """
import os, signal, sys
from pathlib import Path
import torch
import resumable
from freewheel.runtime.membership.place import Place
torch.set_num_threads(1)
home = Path(sys.argv[1])
def pause(step):
    if step == 8 and (home / "saved").exists() and not (home / "killed").exists():
        print("at", os.getpid(), flush=True)
        signal.pause()
got = resumable.train(home / "saved", place=Place.read(), strategy="allreduce", at_step=pause, resume=True,
                      noise=False)
torch.save((got["losses"], got["model"]), home / f"ended-{os.environ['RANK']}")
"""


@pytest.mark.slow
def test_processes_that_are_all_killed_end_with_the_uninterrupted_run_s_weights(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROCESS)
    lines, waiting = Captured(), []

    def output(rank: int | None, text: str, error: bool) -> None:
        lines(rank, text, error)
        if text.startswith("at "):
            waiting.append(int(text.split()[1]))
            if len(waiting) == 2:
                (tmp_path / "killed").touch()
                for pid in waiting:
                    os.kill(pid, signal.SIGKILL)

    env = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    code = launch([sys.executable, str(program), str(tmp_path)], 2, output=output, restarts=1, env=env)
    assert code == 0, lines.lines
    assert len(waiting) == 2
    whole = together(2, lambda place: train(None, place=place, strategy="allreduce", noise=False))
    for rank, want in enumerate(whole):
        losses, model = torch.load(tmp_path / f"ended-{rank}")
        assert min(losses) == 6
        assert losses == {step: want["losses"][step] for step in losses}
        assert all(torch.equal(model[name], tensor) for name, tensor in want["model"].items())


def test_a_later_life_that_comes_when_the_others_have_ended_is_done(launcher, tmp_path, caplog):
    """A first life is an error all the same, and so is one that has failed with the answer in its hands."""

    def attached(rank: int) -> Any:
        return crew.worker(next_life(launcher.places[rank]), torch.nn.Linear(2, 1), folder=tmp_path)[0]

    def live(rank: int) -> None:
        with contextlib.suppress(Killed), attached(rank):
            if rank == 1:
                raise Killed

    launcher.give_up(2)
    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    launcher.of_run.delete_key(f"{STARTS}/2")
    with pytest.raises(SystemExit) as left, attached(1):
        pass
    assert left.value.code == 0
    assert "worker 1 was started again when the others had ended the run" in caplog.text
    with pytest.raises(RunStopped, match="Nothing is left to train"), attached(2):
        pass
    with pytest.raises(RunStopped, match="An earlier life of it had it too"), attached(0):
        pass
    assert '"life": 2' not in (tmp_path / "events-1.jsonl").read_text()  # nothing has failed
