"""One worker's part in farewells, told word by word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from freewheel.fabric import farewell
from freewheel.fabric.base import Fabric, Message
from freewheel.fabric.calls import DROP, HAVE
from freewheel.fabric.farewell import CALL, Farewells


class Party:
    """A replica that is paused when the test lets it."""

    def __init__(self) -> None:
        self.free, self.resumed, self.corrected = asyncio.Event(), 0, 0
        self.free.set()

    async def pause(self) -> None:
        await self.free.wait()

    def resume(self) -> None:
        self.resumed += 1

    async def snapshot(self) -> torch.Tensor:
        return torch.ones(1)

    def correct(self, vector: torch.Tensor, own: bool = False) -> None:
        self.corrected += 1


class Desk:
    """Worker 0 with workers 1 and 2 within reach: what it says, and what it is told."""

    def __init__(self) -> None:
        self.box, self.party = Fabric(0), Party()
        self.said: list[tuple[Any, ...]] = []
        self.offences: list[int] = []
        self.tasks: list[asyncio.Task[Any]] = []
        for peer in (1, 2):
            self.box.gain(peer)
        self.box.post = lambda peer, tag, vector=None, note=(): self.said.append((peer, tag, note))
        self.farewells = Farewells(self.box, self.party, self.party, self.spawn, random.Random(0))
        self.farewells.serve()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def tell(self, peer: int, tag: tuple[Any, ...], *note: int) -> None:
        self.box.deliver(Message(peer, tag, None, note, lambda why: self.offences.append(peer)))
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def at_desk(act: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        desk = Desk()
        try:
            await act(desk)
        finally:
            for task in desk.tasks:
                task.cancel()

    asyncio.run(run())


def test_a_call_over_a_connection_that_has_broken_since_is_not_answered():
    async def act(desk: Desk) -> None:
        desk.party.free.clear()
        await desk.tell(1, CALL, 7, 0, 1)
        assert desk.farewells.calls.busy
        desk.box.lose(1, "cut")
        desk.box.gain(1)
        desk.party.free.set()
        await settle()
        assert not desk.said
        assert not desk.farewells.calls.busy
        assert desk.party.resumed == 1

    at_desk(act)


def test_an_answer_counts_once_and_for_who_gave_it():
    async def act(desk: Desk) -> None:
        leaving = desk.spawn(desk.farewells.hand_over())
        await settle()
        number = desk.farewells.calls.number
        for _ in range(2):
            await desk.tell(1, (*CALL, "have", 0, number), HAVE)
        assert desk.offences == [1]
        assert (2, (*CALL, 0, number), (DROP,)) in desk.said
        leaving.cancel()

    at_desk(act)


def test_a_farewell_that_does_not_end_is_left(monkeypatch):
    monkeypatch.setattr(farewell, "LONGEST_S", 0.01)

    async def act(desk: Desk) -> None:
        await desk.tell(1, CALL, 7, 0, 1)
        assert desk.farewells.calls.busy
        while desk.farewells.calls.busy:
            await asyncio.sleep(0.01)
        assert desk.offences == [1]
        assert (desk.party.resumed, desk.party.corrected) == (1, 0)

    at_desk(act)
