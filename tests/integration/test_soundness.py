"""When weights or steps are not as usual, nobody is spoilt by it and nobody is declared dead."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import threading
import time

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import outcomes, together, worker
from freewheel.errors import Diverged
from freewheel.strategies import resolve
from freewheel.strategies.adpsgd import ADPSGD

HEARTBEAT_S = 0.3
LONG_S = 5 * HEARTBEAT_S


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 120))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "sasgd:interval=2", "dasgd"])
def test_a_worker_that_diverges_says_so_and_spoils_nobody(strategy, tmp_path):
    events: dict[int, list[tuple[str, int | None, str]]] = {rank: [] for rank in range(3)}
    gone = threading.Event()

    def work(place):
        model = net()
        attached, optimizer = worker(place, model, strategy, lr=1e-3)
        with attached:
            note = attached._agent.fabric.notice

            def hear(what, peer, text):
                events[place.rank].append((what, peer, text))
                note(what, peer, text)

            attached._agent.fabric.notice = hear
            for k in range(4000):
                step(model, optimizer)
                if place.rank == 2 and k == 20:
                    with torch.no_grad():
                        model[1].bias[5] = float("nan")
                if k > 60 and gone.is_set():
                    break
                time.sleep(5e-4)
                if len(attached.metrics()["members"]) < 3:
                    gone.set()
        return attached.consensus()

    ended = outcomes(3, work)
    assert isinstance(ended[2], Diverged), ended[2]
    assert "worker 2 diverged at step" in str(ended[2])
    assert re.search(r"weights of [01]\.(weight|bias) are not finite", str(ended[2]))
    for rank in (0, 1):
        assert all(bool(p.isfinite().all()) for p in ended[rank].parameters())
        about = [
            (what, text) for what, peer, text in events[rank] if peer == 2 and what not in ("half", "joined")
        ]
        assert len(about) == 1, about
        assert about[0][0] == "left"
        assert "worker 2 diverged at step" in about[0][1]


def slow_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        time.sleep(LONG_S)  # the weights move as far as anybody else can tell
        return loss

    optimizer.step(closure)


def slow_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    time.sleep(LONG_S)
    step(model, optimizer)


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "dasgd:interval=1"])
def test_no_step_is_so_long_that_its_worker_is_taken_for_dead(strategy):
    """Five signs of life fall into each step; worker 2 asks for the weights meanwhile."""
    takes, over = (slow_closure, slow_gradient), (threading.Event(), threading.Event())

    def work(place):
        model = net()
        attached, optimizer = worker(place, model, strategy, lr=1e-3, heartbeat_s=HEARTBEAT_S)
        lost = []
        with attached:
            note = attached._agent.fabric.notice
            attached._agent.fabric.notice = lambda what, peer, text: (
                lost.append((what, peer)),
                note(what, peer, text),
            )
            if place.rank < 2:
                for _ in range(2):
                    takes[place.rank](model, optimizer)
                over[place.rank].set()
            else:
                while not all(one.is_set() for one in over):
                    step(model, optimizer)
                    attached.consensus()
                    time.sleep(0.01)
            held = list(lost)
        return [what for what in held if what[0] in ("died", "cut", "left")]

    assert together(3, work) == [[], [], []]


def test_a_call_that_holds_pythons_lock_is_taken_in_again_when_it_ends():
    """Nothing can be sent meanwhile: the promise is that the worker is back at once, with its weights."""
    hold = ctypes.PyDLL(
        None
    ).usleep  # a C call that keeps the interpreter's lock: it holds up this whole test
    over = threading.Barrier(2)

    def work(place):
        model = net()
        attached, optimizer = worker(place, model, "adpsgd", lr=1e-3, heartbeat_s=HEARTBEAT_S)
        with attached:
            for _ in range(20):
                step(model, optimizer)
            if place.rank == 0:
                hold(int(3 * HEARTBEAT_S * 1e6))
            done = attached.metrics()["exchanges"]["done"]
            end_s = time.monotonic() + 20
            while attached.metrics()["exchanges"]["done"] < done + 3:
                assert time.monotonic() < end_s
                step(model, optimizer)
                time.sleep(1e-3)
            with contextlib.suppress(threading.BrokenBarrierError):
                over.wait(20)
        return attached.metrics()["members"]

    assert together(2, work) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free"])
def test_a_long_closure_does_not_keep_the_others_from_each_other(strategy):
    """Whether its weights stand still or move: they meet it, or go on without it."""
    inside, enough = threading.Event(), [threading.Event(), threading.Event()]

    def done(attached) -> int:
        found = attached.metrics()
        return found["exchanges"]["done"] + found["merges"]["done"]

    def work(place):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-4, max_iter=1)
        attached = fw.Worker(model, optimizer, resolve(strategy), place=place)
        with attached:
            for k in range(5):
                take(model, optimizer, place.rank == 2 and k == 2)
            if place.rank < 2:
                assert inside.wait(30)
                before, end_s = done(attached), time.monotonic() + 30
                while done(attached) < before + 5 and time.monotonic() < end_s:
                    take(model, optimizer, False)
                    time.sleep(1e-3)
                met = done(attached) - before
                enough[place.rank].set()
                return met
        return 5

    def take(model, optimizer, long: bool) -> None:
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            if long:
                inside.set()
                for one in enough:
                    one.wait(60)
            return loss

        optimizer.step(closure)

    assert min(together(3, work)) >= 5


def held_up(until):
    """What three workers do of which the last is held up (nothing goes out, nothing comes in) for a while."""

    def work(place):
        model = net()
        attached, optimizer = worker(place, model, "adpsgd", heartbeat_s=HEARTBEAT_S)
        with attached:
            for _ in range(5):
                step(model, optimizer)
            if place.rank == 2:
                attached._agent.loop.call_soon_threadsafe(lambda: [one.wait(30) for one in until])
                for one in until:
                    one.wait(30)
        if place.rank < 2:
            until[place.rank].set()
        return attached.metrics(), torch.cat([one.flatten() for one in attached.consensus().parameters()])

    return work


def test_a_worker_that_is_held_up_is_in_the_answer(caplog):
    """It is alive, as a connection to its port shows: the others wait for it at the end."""

    class Seen:
        """Set once the others wait."""

        def wait(self, timeout_s):
            end_s = time.monotonic() + timeout_s
            while "its process is there; waiting" not in caplog.text and time.monotonic() < end_s:
                time.sleep(0.05)

        def set(self):
            """Nobody needs it."""

    found = outcomes(3, held_up([Seen(), Seen()]))
    assert [metrics["members"] for metrics, _ in found] == [[0, 1, 2]] * 3
    assert all(torch.equal(answer, found[0][1]) for _, answer in found)


def test_the_answer_says_who_is_not_in_it(caplog, monkeypatch):
    """After a while they end without it; it has another answer than they, and that is an error."""
    monkeypatch.setattr("freewheel.runtime.worker.agent.COMING_S", 0.0)
    found = outcomes(3, held_up([threading.Event(), threading.Event()]))
    assert [metrics["members"] for metrics, _ in found[:2]] == [[0, 1], [0, 1]]
    assert found[0][0]["windows"][1] == "host"
    assert "the answer is the mean of worker 0, 1; it lacks worker 2: it has been silent" in caplog.text
    assert isinstance(found[2], fw.WorkerLost)
    assert "the mean of worker 0, 1. What this worker has is not it" in str(found[2])


def test_no_exchange_begins_after_a_worker_s_loop_has_ended(monkeypatch):
    """adpsgd calls late in a step: after the last one the answer is being taken, one side after the other."""
    inner = ADPSGD.answer

    async def slow(strategy, node):
        if node.rank == 1:
            await asyncio.sleep(0.4)
        return await inner(strategy, node)

    monkeypatch.setattr(ADPSGD, "answer", slow)

    def work(place):
        model = nn.Linear(1000, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        attached, optimizer = worker(place, model, "adpsgd", lr=1.0)
        with attached:
            for _ in range(6):
                time.sleep(0.2)
                optimizer.zero_grad()
                (model.weight.sum() * (2.0 if place.rank else -1.0)).backward()
                optimizer.step()
        return attached.consensus().weight.detach()

    for answer in together(2, work):
        torch.testing.assert_close(answer, torch.full_like(answer, -3.0))
