"""Data run out, a loop ends early, raises or exits: what the others hear, and what the answer is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest
import torch

import freewheel as fw
from crew import outcomes, together
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import steps as steps_of
from freewheel.runtime.worker.leaving import Left
from loops import DEADLINE_S, flat, make, move_to, net, step

pytestmark = pytest.mark.integration


def test_the_loader_deals_every_sample_once():
    def work(place: Place) -> list[list[int]]:
        model = net()
        worker = make(place, model)
        passes = []
        with worker:
            loader = worker.loader(list(range(103)), batch_size=5)
            for _ in range(2):
                seen = []
                for batch in loader:
                    seen += batch.tolist()
                    step(model, worker.optimizer)
                passes.append(seen)
        return passes

    results = together(3, work)
    for k in range(2):
        dealt = [sample for passes in results for sample in passes[k]]
        assert sorted(dealt) == list(range(103))
    assert results[0][0] != results[0][1]


@pytest.mark.parametrize("strategy", ["adpsgd", "none"])
def test_stop_ends_the_loaders_of_all(strategy):
    def work(place: Place) -> tuple[bool, int]:
        model = net()
        worker = make(place, model, None, strategy)
        batches = 0
        with worker:
            loader = worker.loader(torch.zeros(40, 4), batch_size=2)
            while not worker.stopped:
                for _ in loader:
                    step(model, worker.optimizer)
                    batches += 1
                    if place.rank == 1 and batches == 12:
                        worker.stop()
            assert list(loader) == []  # no other pass begins
            return worker.stopped, batches

    results = together(3, work)
    assert all(stopped for stopped, _ in results)
    assert results[1][1] == 12


class OfTheUser(Exception):
    """Raised by a training loop."""


def test_an_exception_of_one_loop_is_its_own_and_leaves_the_others_running():
    failed = threading.Event()

    def work(place: Place) -> dict[str, Any]:
        model = net()
        worker = make(place, model)
        with worker:
            step(model, worker.optimizer)
            if place.rank == 1:
                failed.set()
                raise OfTheUser("of worker 1")
            assert failed.wait(DEADLINE_S)
            for k in range(50):
                step(model, worker.optimizer, k)
        return {**worker.metrics(), "answer": flat(worker.consensus())}

    first, error, last = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    assert error.__cause__ is None
    for metrics in (first, last):
        assert metrics["steps"] == 51
    assert torch.equal(first["answer"], last["answer"])


@pytest.mark.parametrize("strategy", ["asgd", "easgd:interval=1"])
def test_an_exception_of_one_loop_stops_those_who_need_it_with_a_clear_error(strategy):
    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(1000):
                if place.rank == 0 and k == 5:
                    raise OfTheUser("of worker 0")
                step(model, worker.optimizer, k)

    error, *others = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    for other in others:
        assert isinstance(other, fw.WorkerLost)
        # Who had not joined yet does not wait for it either.
        name = strategy.split(":")[0]
        assert f"{name} stopped: it lost worker" in str(other) or "needs worker 0" in str(other)
    assert any("it left with OfTheUser" in str(other) for other in others)


@pytest.mark.parametrize(
    ("raised", "as_what", "told"),
    [
        (SystemExit(), Left, "it was told to leave"),
        (SystemExit(3), SystemExit, "it left with SystemExit"),
        (fw.RunStopped("no more of it"), fw.RunStopped, "it left with RunStopped: no more of it"),
    ],
)
def test_the_others_are_told_how_a_worker_left(raised, as_what, told):
    """A script that exits with code 0 has left well: what it held of the data is another's."""
    used, begun = list[int](), threading.Barrier(2)

    def work(place: Place) -> str:
        model = net()
        worker = make(place, model, None, "adpsgd")
        with worker:
            for k, which in enumerate(worker.loader(list(range(12)), 2)):
                if not k:
                    begun.wait(DEADLINE_S)
                if place.rank == 1:
                    raise raised
                step(model, worker.optimizer, k)
                used.extend(which.tolist())
            while 1 in worker.metrics()["members"]:
                time.sleep(0.01)
            return worker._agent.fabric.why_lost(1)

    said, error = outcomes(2, work)
    assert said == told
    assert type(error) is as_what
    assert sorted(used) == list(range(12))


@pytest.mark.parametrize("strategy", ["asgd", "easgd"])
def test_without_the_server_there_is_no_answer(strategy):
    """Worker 0 leaves with an exception after the others have ended: what it held is gone."""
    others_done = threading.Barrier(3)

    def work(place: Place) -> torch.Tensor:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(3):
                step(model, worker.optimizer, k)
            others_done.wait(DEADLINE_S)
            if place.rank == 0:
                while len(worker._agent.ending._ended) < 2:
                    pass
                raise OfTheUser("of worker 0")
        return flat(worker.consensus())

    error, *others = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    for other in others:
        assert isinstance(other, fw.WorkerLost), other


@pytest.mark.parametrize(
    "strategy", ["allreduce", "sasgd", "dpsgd", "nodelay", "leader", "grouping:ratio=1e9"]
)
def test_a_loop_that_ends_early_is_a_clear_error_where_all_step_together(strategy, monkeypatch):
    monkeypatch.setattr(steps_of, "GRACE_S", 0.3)

    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(8 if place.rank == 1 else 40):
                worker.report(step(model, worker.optimizer, k))

    results = outcomes(3, work, deadline_s=40)
    stopped = [error for error in results if isinstance(error, fw.RunStopped)]
    assert any(
        "the loop of worker 1 has ended. Give all workers the same number of steps" in str(error)
        for error in stopped
    )
    assert isinstance(results[0], fw.RunStopped)
    assert isinstance(results[2], fw.RunStopped)


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "dasgd", "asgd", "downpour", "easgd", "none"])
def test_loops_of_different_length_where_nobody_waits(strategy):
    def work(place: Place) -> torch.Tensor:
        model = net(place.rank)
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(5 + 20 * place.rank):
                worker.report(step(model, worker.optimizer, k))
        assert worker.metrics()["steps"] == 5 + 20 * place.rank
        return flat(worker.consensus())

    answers = together(3, work)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_nobody_leaves_before_all_have_the_answer():
    """What a worker has sent last could be lost if it closed its connections at once."""

    def work(place: Place) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        model, seen = net(), []
        worker = make(place, model, torch.optim.SGD(model.parameters(), lr=0.0), "none")
        with worker:
            move_to(worker, float(place.rank))
            agent = worker._agent
            mean = agent.ending._mean

            async def slowly(*given: Any) -> Any:
                answer = await mean(*given)
                with contextlib.suppress(TimeoutError):  # the others have it by now
                    await asyncio.wait_for(agent.fabric.changed(), 0.5)
                seen.append(agent.fabric.members)
                return answer

            if place.rank == 1:
                agent.ending._mean = slowly
        return flat(worker.consensus()), seen

    results = together(4, work)
    assert results[1][1] == [(0, 1, 2, 3)]
    for answer, _ in results:
        torch.testing.assert_close(answer, torch.full_like(answer, 1.5))
