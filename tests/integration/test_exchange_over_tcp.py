"""Exchanges over real connections that end at a bad moment: both sides correct alike, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from crew import cut
from freewheel.fabric import windows
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import TcpFabric
from freewheel.fabric.transfers import INLINE, LONG, PIECE, Landing, Transfers
from freewheel.fabric.transport import PlainTransport
from freewheel.records.counters import Counters

SIZE = 8 * PIECE
DEADLINE_S = 30.0


class Party:
    """A replica of equal numbers; `hook` is called at every piece."""

    def __init__(self, fabric: TcpFabric, value: float) -> None:
        self.fabric, self.value = fabric, value
        self.hook: Callable[[], None] = lambda: None
        self.ready = asyncio.Event()
        self.ready.set()
        self.moves = False
        self.outcomes: list[str] = []
        self.corrections: list[torch.Tensor] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.exchanges = Exchanges(fabric, self, self.spawn, random.Random(fabric.rank))

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def snapshot_soon(self) -> torch.Tensor | None:
        await self.ready.wait()
        if self.moves:
            return None
        return self.fabric.windows.make(self.fabric.me.longest, torch.float32).fill_(self.value)

    def meet(self, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        self.hook()
        return theirs.sub_(mine).mul_(0.5)

    def met(self, peer: int, correction: torch.Tensor) -> None:
        self.corrections.append(correction.clone())

    def unused(self, snapshot: torch.Tensor) -> None:
        """Nobody keeps it."""

    def count(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    async def leave(self) -> None:
        """As a worker does whose loop has raised."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.fabric.close("it left")


@contextlib.asynccontextmanager
async def pair(near: bool = False, size: int = SIZE) -> AsyncIterator[tuple[Party, Party]]:
    """Worker 0, which answers, and worker 1, which calls."""
    place = windows.place() if near else ""
    fabrics = [
        TcpFabric(Identity(bytes(16), rank, 2, 1, "test", "m", size, place=place), Counters())
        for rank in range(2)
    ]
    async with asyncio.timeout(DEADLINE_S):
        port = fabrics[0].open("127.0.0.1")
        fabrics[1].open("127.0.0.1")
        await fabrics[1].connect(0, "127.0.0.1", port)
        while 1 not in fabrics[0].members:
            await fabrics[0].changed()
        callee, caller = Party(fabrics[0], 10.0), Party(fabrics[1], 20.0)
        callee.spawn(callee.exchanges.serve())
        yield callee, caller
        for one in (callee, caller):
            await one.leave()


@pytest.mark.parametrize("near", [False, True], ids=["over TCP", "in shared memory"])
def test_who_leaves_in_the_middle_does_not_spoil_the_others_weights(near):
    """The one that leaves must not overwrite what is still being sent."""

    async def main() -> None:
        async with pair(near) as (callee, caller):
            middle, loop = asyncio.Event(), asyncio.get_running_loop()
            go_on, pieces = threading.Event(), iter(range(1000))

            def hold() -> None:
                if next(pieces) == 2:
                    loop.call_soon_threadsafe(middle.set)
                    go_on.wait(DEADLINE_S)

            caller.hook = hold
            call = asyncio.ensure_future(caller.exchanges.call(0))
            await middle.wait()
            leaving = asyncio.ensure_future(callee.leave())
            await asyncio.sleep(0.05)  # gives a wrong one time to do harm; a right one needs none
            go_on.set()
            await leaving
            await call
            for correction in caller.corrections:
                assert correction.unique().tolist() == [-5.0]

    asyncio.run(main())


@pytest.mark.parametrize("slow", ["callee", "caller"])
def test_a_connection_that_breaks_and_comes_back_while_a_side_is_not_ready(slow):
    """What was agreed over the old connection means nothing over the new one: the exchange ends."""

    async def main() -> None:
        async with pair() as (callee, caller):
            waits = callee if slow == "callee" else caller
            waits.ready.clear()
            call = asyncio.ensure_future(caller.exchanges.call(0))
            while waits.exchanges.partner is None or waits.exchanges.calling:
                await asyncio.sleep(0)
            cut(callee.fabric, 1)
            while caller.fabric.epoch(0) == 0 or 0 not in caller.fabric.members:
                await caller.fabric.changed()
            while callee.fabric.epoch(1) == 0 or 1 not in callee.fabric.members:
                await callee.fabric.changed()
            waits.ready.set()
            assert await call is False
            while callee.exchanges.partner is not None:
                await asyncio.sleep(0.01)
            assert await caller.exchanges.call(0) is True  # and the next one works

    asyncio.run(main())


@pytest.mark.parametrize("near", [False, True], ids=["over TCP", "in shared memory"])
def test_what_meet_raises_is_not_taken_for_a_broken_connection(near):
    async def main() -> None:
        async with pair(near) as (_, caller):

            def fail() -> None:
                raise ZeroDivisionError("the strategy's own")

            caller.hook = fail
            with pytest.raises(ZeroDivisionError, match="the strategy's own"):
                await caller.exchanges.call(0)

    asyncio.run(main())


def test_the_caller_combines_short_vectors_of_one_host_by_itself():
    async def main() -> None:
        async with pair(near=True, size=INLINE) as (callee, caller):
            before = [one.fabric.counters.messages_out for one in (caller, callee)]
            assert await caller.exchanges.call(0) is True
            while not callee.corrections:
                await asyncio.sleep(0)
            after = [one.fabric.counters.messages_out for one in (caller, callee)]
            assert [b - a for a, b in zip(before, after, strict=True)] == [2, 1]  # call and done; yes
            assert caller.corrections[0].unique().tolist() == [-5.0]
            assert callee.corrections[0].unique().tolist() == [5.0]

    asyncio.run(main())


@pytest.mark.parametrize("size", [INLINE, INLINE + 1], ids=["laid", "swapped"])
def test_a_callee_whose_caller_is_gone_corrects_nothing_and_says_what_may_have_happened(size):
    async def main() -> None:
        async with pair(near=True, size=size) as (callee, caller):
            withdrawn: list[int] = []
            callee.fabric.withdraw = lambda peer, vector: withdrawn.append(peer)
            caller.met = lambda peer, correction: cut(caller.fabric, 0)
            await caller.exchanges.call(0)
            while not callee.outcomes:
                await asyncio.sleep(0.001)
            assert callee.outcomes == ["half"]
            assert callee.corrections == []
            assert withdrawn == ([1] if size == INLINE else [])  # what it was shown is not used again

    asyncio.run(main())


@pytest.mark.parametrize("who", ["callee", "caller", "both"])
@pytest.mark.parametrize("size", [INLINE, SIZE], ids=["short", "long"])
@pytest.mark.parametrize("near", [False, True], ids=["over TCP", "in shared memory"])
def test_who_cannot_be_copied_says_so_and_both_are_free(near, size, who):
    async def main() -> None:
        async with pair(near, size) as (callee, caller):
            callee.moves, caller.moves = who != "caller", who != "callee"
            assert await caller.exchanges.call(0) is False
            while not callee.outcomes:
                await asyncio.sleep(0.001)
            assert caller.outcomes == callee.outcomes == ["busy"]
            assert caller.exchanges.partner is callee.exchanges.partner is None
            callee.moves = caller.moves = False
            assert await caller.exchanges.call(0) is True
            while not callee.corrections:
                await asyncio.sleep(0.001)
            assert caller.corrections[0].unique().tolist() == [-5.0]
            assert callee.corrections[0].unique().tolist() == [5.0]
            assert len(caller.corrections) == len(callee.corrections) == 1

    asyncio.run(main())


def test_the_memory_of_a_peer_that_is_gone_is_let_go():
    async def main() -> None:
        async with pair(near=True) as (callee, caller):
            assert await caller.exchanges.call(0) is True
            await callee.leave()
            while 0 in caller.fabric.members:
                await caller.fabric.changed()
            assert not caller.fabric.windows._peers

    asyncio.run(main())


@pytest.mark.parametrize("size", [8, 2 * LONG])  # in the event loop, in a thread
def test_what_a_peer_says_behind_a_vector_is_heard_though_nobody_wants_the_vector(size):
    """Else one that leaves in the middle of an exchange would be said to have died."""

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            theirs = socket.create_connection(door.getsockname())
            ours, _ = door.accept()
        transport, transfers = PlainTransport(ours), Transfers(Counters(), torch.float32, 2, None)
        mine = torch.ones(size)
        landing = Landing(size, mine)
        sender = threading.Thread(target=theirs.sendall, args=(bytes(4 * size) + b"bye",), daemon=True)
        sender.start()
        landing.cancel()
        await asyncio.wait_for(transfers.land(transport, torch.float32, size, landing), DEADLINE_S)
        rest = bytearray(3)
        await transport.read(memoryview(rest))
        assert bytes(rest) == b"bye"
        assert mine.eq(1.0).all()
        transport.close()
        theirs.close()
        sender.join(DEADLINE_S)
        transfers.close()

    asyncio.run(work())
