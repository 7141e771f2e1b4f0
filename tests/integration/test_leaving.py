"""Workers that leave before the others: SIGTERM, `worker.leave()`, and what stays of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import crew
import forked
import freewheel as fw
from freewheel.runtime.checkpoint.shards import Writer
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.leaving import Leaving, Left

DEADLINE_S = 120.0
NOBODY = 9
"""Whom both wait for until the test goes in its place."""
SAMPLES = 600

SCRIPT = """
import os, signal, sys, time
import torch
import freewheel as fw

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
def going():
    open(f"going-{rank}", "w").close()
def others_go():  # whoever is fast leaves them enough of the data
    end_s = time.monotonic() + 60
    while not all(os.path.exists(f"going-{one}") for one in LEAVERS) and time.monotonic() < end_s:
        time.sleep(0.01)
data = torch.utils.data.TensorDataset(torch.arange(600.0).reshape(-1, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
seen = open(f"seen-{rank}", "a")
if rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: print("noticed"))
with fw.attach(model, optimizer, resume="checkpoints", leave_s=LEAVE_S) as worker:
    worker.checkpoint("checkpoints", every=1000)
    for k, (x,) in enumerate(worker.loader(data, batch_size=4, epochs=1, num_workers=LOADERS)):
        if k == 20 and rank not in LEAVERS:
            others_go()
        STUCK
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.write(" ".join(str(round(one)) for one in x.flatten().tolist()) + "\\n")
        seen.flush()
        time.sleep(0.002)
        LEAVE
print("done", worker.metrics()["samples_again"])
"""


def script(
    folder: Path,
    leave: str = "",
    stuck: str = "",
    leave_s: str = "10.0",
    loaders: int = 0,
    leavers: tuple[int, ...] = (),
) -> list[str]:
    """Write it; those who are to leave say when they are `going()`."""
    text = SCRIPT.replace("LEAVE_S", leave_s).replace("LOADERS", str(loaders))
    text = text.replace("LEAVERS", str(leavers))
    path = folder / "train.py"
    path.write_text(text.replace("STUCK", stuck or "pass").replace("LEAVE", leave or "pass"))
    return [sys.executable, str(path)]


def seen(folder: Path) -> Counter[int]:
    return Counter(int(one) for path in folder.glob("seen-*") for one in path.read_text().split())


def events(folder: Path) -> list[tuple[str, int | None]]:
    lines = [
        json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()
    ]
    return [(line["what"], line["rank"]) for line in lines]


def test_who_is_told_to_leave_goes_and_every_sample_is_used_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave = (
        "if k == 12 and rank == 1: going(); os.kill(os.getpid(), signal.SIGTERM)\n"
        "        if k == 16 and rank == 0: going(); worker.leave()"
    )
    output, folder = Captured(), tmp_path / "run"
    folder.mkdir()
    command = script(tmp_path, leave, loaders=1, leavers=(0, 1))
    assert launch(command, 3, output=output, restarts=3, options=Options(folder=folder)) == 0
    assert list(output.lines[2])[-1] == "done 0"
    assert "noticed" in output.lines[1]  # by the script's own handler
    assert all(any("has left the run as it was asked to" in line for line in output.lines[k]) for k in (0, 1))
    assert not any("done" in line for rank in (0, 1) for line in output.lines[rank])
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}
    happened = Counter(events(folder))
    assert {what for what, _ in happened} == {"left", "checkpoint"}
    assert {rank for what, rank in happened if what == "left"} == {0, 1}
    assert not any("starts again" in line for line in output.lines[None])


def test_where_all_leave_a_resumed_run_goes_on_from_there(tmp_path):
    """As Slurm and Kubernetes do it: notice to the launcher, and the same command again."""
    command = [*forked.FREEWHEEL, "run", "-n", "2", *script(tmp_path, leavers=(NOBODY,))[1:]]
    first = forked.start(*command, cwd=tmp_path, stderr=forked.STDOUT)
    try:
        while len(seen(tmp_path)) < SAMPLES // 5:
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        said = ""
        while "SIGTERM" not in said:
            line = first.stdout.readline()
            assert line, said
            said += line
        (tmp_path / f"going-{NOBODY}").touch()
        said += first.communicate(timeout=DEADLINE_S)[0]
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 143
    assert "SIGTERM: all workers leave" in said
    assert "Traceback" not in said
    assert len(seen(tmp_path)) < SAMPLES
    again = forked.run(*command, cwd=tmp_path, timeout=DEADLINE_S)
    assert again.returncode == 0, again.stderr
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}


def test_who_exits_by_its_own_handler_or_cannot_end_its_step_leaves_nothing_unused(tmp_path, monkeypatch):
    """The one is let exit, and what it has used counts; the other's batch is another's."""
    monkeypatch.chdir(tmp_path)
    leave = (
        "if k == 5 and rank == 1:\n"
        "            signal.signal(signal.SIGTERM, lambda *_: (worker.leave(), sys.exit(0)))\n"
        "            going()\n"
        "            os.kill(os.getpid(), signal.SIGTERM)"
    )
    stuck = "if k == 5 and rank == 2: going(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)"
    output = Captured()
    command = script(tmp_path, leave, stuck, leave_s="2.0 if rank == 2 else 10.0", leavers=(1, 2))
    assert launch(command, 3, output=output) == 0
    assert list(output.lines[0])[-1] == "done 0"
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}


@pytest.mark.parametrize("width", [2, 400])  # a few numbers; some that travel through windows
def test_the_mean_of_those_who_stay_is_the_mean_of_all(width):
    """No exchange takes place but the last one; worker 2 steps last when the others have stepped."""
    stepped = threading.Barrier(3)

    def work(place: Place) -> torch.Tensor:
        model = nn.Linear(width, width)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        worker, optimizer = crew.worker(place, model, "adpsgd:every=1000000", lr=1.0)
        with worker:
            for k in range(2):
                optimizer.zero_grad()
                sum(one.sum() * -(place.rank + 1) for one in model.parameters()).backward()
                if k and place.rank == 2:
                    stepped.wait(DEADLINE_S)
                    worker.leave()
                optimizer.step()
            stepped.wait(DEADLINE_S)
            while 2 in worker.metrics()["members"]:
                time.sleep(0.01)
        return torch.cat([one.detach().flatten() for one in worker.consensus().parameters()])

    one, two, left = crew.outcomes(3, work)
    assert isinstance(left, Left)
    assert left.code == 0
    torch.testing.assert_close(one, torch.full_like(one, 2 * (1 + 2 + 3) / 3))
    torch.testing.assert_close(one, two)


def test_one_alone_leaves_and_sigterm_is_the_scripts_again():
    def handler(*_: object) -> None:
        noticed.append(True)

    noticed: list[bool] = []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = fw.attach(model, optimizer)
        steps = 0
        with pytest.raises(SystemExit) as left, worker:  # noqa: PT012
            for (x,) in worker.loader(torch.utils.data.TensorDataset(torch.ones(10, 1)), 1):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                steps += 1
                if steps == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert (left.value.code, steps, noticed) == (0, 3, [True])
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(fw.RunStopped, match="there is no consensus"):
            worker.consensus()
        with pytest.raises(fw.ConfigError, match="inside the with-block"):
            worker.leave()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_end_of_a_process_that_loads_data_does_not_interrupt_who_leaves(monkeypatch):
    """Notice goes to all processes of a group; DataLoader raises wherever the main thread is."""

    def raises(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    def leave(checkpoints: Checkpoints, within_s: float) -> None:
        os.kill(os.getpid(), signal.SIGCHLD)
        left(checkpoints, within_s)

    left = Checkpoints.leave
    monkeypatch.setattr(Checkpoints, "leave", leave)
    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with pytest.raises(Left), alone() as worker:  # noqa: PT012
            for (x,) in batches(worker):
                step(worker, x)
                notice()
        assert signal.getsignal(signal.SIGCHLD) is raises
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_gradients_that_are_added_up_are_not_left_behind():
    """Between two batches of one step nothing is left."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = fw.attach(model, optimizer)
    used = 0
    with pytest.raises(Left), worker:  # noqa: PT012
        for (x,) in worker.loader(torch.utils.data.TensorDataset(torch.ones(20, 1)), 1):
            model(x).sum().backward()
            used += 1
            if used == 5:
                worker.leave()
            if used % 4 == 0:
                optimizer.step()
    assert used == 8


def alone(strategy: str | fw.Strategy = "adpsgd", leave_s: float = 1000.0) -> fw.Worker:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = fw.attach(model, optimizer, strategy, leave_s=leave_s)
    worker.model, worker.optimizer = model, optimizer
    return worker


def step(worker: fw.Worker, x: torch.Tensor) -> None:
    worker.optimizer.zero_grad()
    worker.model(x).sum().backward()
    worker.optimizer.step()


def notice() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def batches(worker: fw.Worker, seed: int = 0):
    return worker.loader(torch.utils.data.TensorDataset(torch.ones(20, 1)), 1, seed=seed)


def test_who_leaves_in_validation_has_used_what_it_has_trained_on():
    worker = alone(leave_s=0.2)
    with pytest.raises(Left), worker:  # noqa: PT012
        training, validation = batches(worker), batches(worker, seed=1)
        for (x,) in training:
            step(worker, x)
            for _ in validation:
                notice()
                time.sleep(1000.0)
    assert worker.metrics()["samples"] == 1


def test_a_boundary_is_not_interrupted():
    worker, ended = alone(leave_s=0.1), []
    with pytest.raises(Left), worker:  # noqa: PT012
        boundary = worker._replica.boundary

        def slow() -> None:
            worker._replica.boundary = boundary
            notice()
            time.sleep(0.3)
            ended.append(True)

        worker._replica.boundary = slow
        step(worker, torch.ones(1, 1))
        time.sleep(1000.0)
    assert ended


def test_what_a_step_waits_for_ends_before_the_strategy_hands_over(monkeypatch):
    """The training thread is interrupted while it waits for the strategy."""
    said = []

    class Slow(fw.NoCommunication):
        async def after_step(self, node):
            await asyncio.sleep(1.5)
            said.append("after_step")

        async def leave(self, node):
            said.append("leave")

    def interrupt(self):
        raise Left

    monkeypatch.setattr(Agent, "waits_for_finished", interrupt)
    worker = alone(Slow())
    with pytest.raises(Left), worker:  # noqa: PT012
        worker.leave()
        step(worker, torch.ones(1, 1))
    assert said == ["after_step", "leave"]


def test_the_end_of_a_run_that_is_left_is_over_before_anything_is_handed_over(monkeypatch):
    said = []

    async def finish(self, store):
        try:
            await asyncio.sleep(1000.0)
        finally:
            said.append("finish")

    async def depart(self, *_):
        await asyncio.sleep(0)
        said.append("depart")
        return ""

    monkeypatch.setattr(Agent, "finish", finish)
    monkeypatch.setattr(Agent, "depart", depart)
    with pytest.raises(Left), alone(leave_s=0.2):
        notice()
    assert said == ["finish", "depart"]


def departing(give_back, leave) -> tuple[list[str], str]:
    """What is said by a worker that leaves with dealing and a strategy that do this; what it lacks."""
    said: list[str] = []

    async def goodbye() -> None:
        said.append("goodbye")

    def nothing() -> None:
        pass

    farewells = SimpleNamespace(goodbye=goodbye)
    agent = SimpleNamespace(
        me=SimpleNamespace(rank=0),
        node=SimpleNamespace(end_calls=nothing, leave=nothing, farewells=farewells),
        dealing=SimpleNamespace(give_back=lambda: give_back(said), part=nothing),
        strategy=SimpleNamespace(leave=lambda node: leave(said)),
    )
    return said, asyncio.run(Agent.depart(agent, 0.1, settled=True))


async def never(said: list[str]) -> None:
    await asyncio.Event().wait()


async def well(said: list[str]) -> None:
    said.append("handed over")


async def wrong(said: list[str]) -> None:
    raise AttributeError("merge")


@pytest.mark.parametrize(
    ("give_back", "leave", "said", "lacks"),
    [
        (never, well, ["handed over", "goodbye"], "what it held of the data"),
        (well, wrong, ["handed over", "goodbye"], "its last steps"),
        (never, never, ["goodbye"], "what it held of the data and its last steps"),
    ],
)
def test_what_cannot_be_handed_over_keeps_nothing_else_from_it(give_back, leave, said, lacks):
    found_said, found_lacks = departing(give_back, leave)
    assert found_said == said
    assert set(found_lacks.split(" and ")) == set(lacks.split(" and "))


def test_a_checkpoint_that_is_being_written_keeps_nobody_from_leaving(tmp_path, monkeypatch):
    waits = []
    worker = alone()
    with pytest.raises(Left), worker:  # noqa: PT012
        worker.checkpoint(tmp_path, every=1000)
        step(worker, torch.ones(1, 1))
        with monkeypatch.context() as slow:
            slow.setattr(Writer, "busy", True)
            slow.setattr(Writer, "wait", lambda self, timeout_s: waits.append(timeout_s))
            worker.leave()
            step(worker, torch.ones(1, 1))
    assert [one <= 500.0 for one in waits] == [True, False]  # the last one when it has left
    assert not list(tmp_path.iterdir())


def test_a_child_of_the_script_ends_as_it_would(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    killed = []
    leaving = Leaving(1000.0, lambda: False, lambda: None)
    leaving.watch()
    try:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: 1)
            child.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
            leaving._noticed(signal.SIGTERM, None)
        assert killed == [(1, signal.SIGTERM)]
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        leaving.unwatch()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("given", ["soon", "-1"])
def test_a_time_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("FREEWHEEL_LEAVE_S", given)
    model = nn.Linear(1, 1)
    with pytest.raises(fw.ConfigError, match=given):
        fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(fw.ConfigError, match=given):
        launch([sys.executable, "-c", "raise SystemExit(1)"], 1, output=Captured())
