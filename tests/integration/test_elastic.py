"""Workers come and go: who joins copies a living worker, whole, and the others go on."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import nn

import crew
from crew import next_life, together
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.resume import export
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import joining
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.ending import Ending
from freewheel.runtime.worker.settings import Settings

DEADLINE_S = 60.0


class Left(Exception):
    """What ends a worker's first life."""


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(2, 1))
    model[3].requires_grad_(False)
    return model


def attach(place: Place, seed: int, strategy: str = "adpsgd") -> tuple[nn.Module, crew.Worker]:
    model = net(seed)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    made = crew.Worker(
        model, optimizer, crew.strategies.resolve(strategy), Settings(join_timeout_s=30.0), place
    )
    made.model, made.optimizer = model, optimizer
    return model, made


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def everything(worker: crew.Worker) -> list[torch.Tensor]:
    """All that makes a worker: weights, statistics, frozen parameters, the optimizer's state."""
    model = [one.detach().clone() for one in worker.model.state_dict().values() if one.is_floating_point()]
    state = worker.optimizer.state_dict()["state"]
    return model + [one.clone() for k in sorted(state) for _, one in sorted(state[k].items())]


def test_all_begin_with_all_of_worker_0():
    """Buffers and frozen parameters too."""

    def work(place: Place) -> list[torch.Tensor]:
        _, worker = attach(place, seed=place.rank)
        with worker:
            return everything(worker)

    first, *others = together(3, work)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_worker_that_comes_back_is_a_copy_of_a_living_one():
    gone, still, back = threading.Event(), threading.Barrier(2), threading.Event()

    def work(place: Place) -> list[torch.Tensor]:
        model, worker = attach(place, seed=place.rank)
        if place.rank == 1:
            with contextlib.suppress(Left), worker:
                step(model, worker.optimizer)
                raise Left
            gone.set()
            still.wait(DEADLINE_S)
            model, worker = attach(next_life(place), seed=7)
            with worker:
                found = everything(worker)
                back.set()
            return found
        with worker:
            assert gone.wait(DEADLINE_S)
            for _ in range(5):
                step(model, worker.optimizer)
            still.wait(DEADLINE_S)  # from now on nothing moves
            assert back.wait(DEADLINE_S)
            return everything(worker)

    living, returned = together(2, work)
    assert len(living) == len(returned) > 10
    for mine, theirs in zip(living, returned, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_last_checkpoint_of_one_that_came_back_and_made_no_step_is_of_its_new_life(tmp_path):
    back, ended = threading.Event(), threading.Event()

    def work(place: Place) -> list[torch.Tensor]:
        model, worker = attach(place, seed=place.rank)
        if place.rank == 1:
            with contextlib.suppress(Left), worker:
                worker.checkpoint(tmp_path / "saved", every=1)
                step(model, worker.optimizer)
                raise Left
            model, worker = attach(next_life(place), seed=7)
            with worker:
                worker.checkpoint(tmp_path / "saved", every=1)
                back.set()
                assert ended.wait(DEADLINE_S)
            return list(worker.consensus().state_dict().values())
        with worker:
            worker.checkpoint(tmp_path / "saved", every=1)
            assert back.wait(DEADLINE_S)
            for _ in range(20):
                step(model, worker.optimizer)
            ended.set()
        return list(worker.consensus().state_dict().values())

    (answer, _), (found, _) = together(2, work), shards.find(tmp_path / "saved")
    last = max((one for one in found if one.rank == 1), key=lambda one: one.time)
    assert last.step == 0
    export(tmp_path / "saved", tmp_path / "model.pt")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    for one, other in zip(exported.values(), answer, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@pytest.fixture
def held_end(monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Tells that a loop has ended; the run ends only once the second event is set."""
    ended, back = threading.Event(), threading.Event()
    all_there = Ending._all_there

    def waits(ending: Ending) -> bool:
        ended.set()
        return back.is_set() and all_there(ending)

    monkeypatch.setattr(Ending, "_all_there", waits)
    return ended, back


@pytest.mark.parametrize("strategy", ["adpsgd", "sasgd:interval=2", "nodelay", "dpsgd"])
def test_who_comes_back_when_the_loops_of_all_others_have_ended_copies_one_of_them(
    strategy, held_end, caplog
):
    ended, back = held_end
    gone = threading.Event()

    def work(place: Place) -> list[torch.Tensor]:
        model, worker = attach(place, seed=place.rank, strategy=strategy)
        if place.rank == 1:
            with contextlib.suppress(Left), worker:
                raise Left
            gone.set()
            assert ended.wait(DEADLINE_S)
            model, worker = attach(next_life(place), seed=7, strategy=strategy)
            with worker:
                found = everything(worker)
                back.set()
            return found
        with worker:
            assert gone.wait(DEADLINE_S)
            for _ in range(6):
                step(model, worker.optimizer)
            return everything(worker)

    living, returned = together(2, work)
    assert "begins anew" not in caplog.text
    for mine, theirs in zip(living, returned, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["sasgd:interval=4", "nodelay", "dpsgd"])
def test_who_is_lost_after_the_loops_of_all_others_have_ended_comes_back(strategy, held_end):
    """In the view that all began with; no merge of a later one hands out weights any more."""
    ended, back = held_end

    def work(place: Place) -> list[torch.Tensor]:
        model, worker = attach(place, seed=place.rank, strategy=strategy)
        if place.rank == 0:
            with worker:
                step(model, worker.optimizer)
                return everything(worker)
        with contextlib.suppress(Left), worker:
            assert ended.wait(DEADLINE_S)
            raise Left
        _, worker = attach(next_life(place), seed=7, strategy=strategy)
        with worker:
            found = everything(worker)
            back.set()
        return found

    living, returned = together(2, work, deadline_s=30.0)
    for mine, theirs in zip(living, returned, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_worker_0_leaves_while_another_is_only_about_to_begin(monkeypatch):
    """Who begins last must not wait for first weights that nobody sends any more."""
    inner = joining.start

    async def start(agent: Agent, *arguments: object) -> None:
        while agent.me.rank == 2 and 0 in agent.fabric.members:
            await agent.fabric.changed()
        await inner(agent, *arguments)

    monkeypatch.setattr(joining, "start", start)

    def work(place: Place) -> list[int]:
        model, worker = attach(place, seed=place.rank)
        try:
            with worker:
                if place.rank == 0:
                    raise Left
                step(model, worker.optimizer)
        except Left:
            return []
        return worker.metrics()["members"]

    assert len(together(3, work)) == 3
