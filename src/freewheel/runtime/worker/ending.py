"""The end of a run: all take one mean and leave together, whoever is lost meanwhile.

The lowest rank within reach leads. When all have said that their loops have ended, it calls an attempt, with
who takes part:

    leader                        the others
      call(number, members) --->  together: does anybody have the mean already? Then it hands it round. Else
                                  wait until every message that was sent has arrived, and take the mean
                            <---  have it; or: failed, a member is gone
      bye                   --->  leave

A worker does what the newest call says and nothing else, so after a loss all are in the same attempt again.
Two that do not reach each other while others reach both get a moment (GRACE_S) to find each other again.
Whoever has the mean keeps it: if the leader is lost before it said bye, the next one hands round the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import RUNTIME, Fabric, Message, Note, Tag
from freewheel.runtime.worker import tensor_codec

Answer: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""The mean weights, and the mean buffers."""
END: Tag = (RUNTIME, "end")
CALL, FAILED, ENDED = range(3)
POLL_S = 0.05
DRAIN_S = 10.0
"""How long messages that are still under way are waited for."""
GRACE_S = 3.0
"""How long a leader waits for a worker that others reach and it does not."""
TRY_S = 20.0
"""How long a leader tries before it takes the mean of what it can get by itself."""


class Ending:
    """One worker's part in the end of a run."""

    def __init__(
        self,
        fabric: Fabric,
        life: int,
        under_way: Callable[[], Note],
        mean: Callable[[Sequence[int], Tag], Awaitable[Answer]],
        size: int,
    ) -> None:
        self.fabric, self._size = fabric, size
        self._under_way, self._mean = under_way, mean
        """Whether this worker is idle (1 or 0), messages it sent and got; the mean of some workers."""
        self.answer: Answer | None = None
        self.members: tuple[int, ...] = ()
        """Whose mean the answer is."""
        self._ended: dict[int, tuple[int, frozenset[int]]] = {}
        """Whose loop has ended: in which epoch it said so, and whom it reached then."""
        self._apart_since_s: float | None = None
        self._call: Message | None = None
        self._news = asyncio.Event()
        self._number = life << 20
        """Of the last attempt this worker called: what an earlier life of it called has other numbers."""
        self._over = False

    def has_ended(self, peer: int) -> bool:
        """Whether a worker has said that its loop has ended."""
        return peer in self._ended and self._ended[peer][0] == self.fabric.epoch(peer)

    async def listen(self) -> None:
        """Hear the others, from the beginning of the run on."""
        while True:
            message = await self.fabric.receive(END)
            with contextlib.suppress(PeerLost):  # it said what makes no sense, and is cut off
                self._hear(message, *message.numbers(2))

    def _hear(self, message: Message, kind: int, number: int, *members: int) -> None:
        sender = message.sender
        if kind == ENDED:
            self._ended[sender] = self.fabric.epoch(sender), frozenset((number, *members))
        elif kind == CALL and {sender, self.fabric.rank} <= set(members):
            if sender < self.fabric.rank:
                self._call = message
                self._news.set()
        elif kind != FAILED:
            raise message.bad("what makes no sense")
        elif number == self._number:
            self._news.set()

    async def run(self, somebody_comes: Callable[[], Awaitable[bool]]) -> Answer | None:
        """This worker's loop has ended: the mean of all, when all have it; None: they do not get together.

        A worker of which `somebody_comes` knows is waited for.
        """
        loop, end_s = asyncio.get_running_loop(), math.inf
        while loop.time() < end_s:
            for peer in self.fabric.members:
                if peer != self.fabric.rank:
                    self.fabric.post(peer, END, note=(ENDED, *self.fabric.members))
            self._news.clear()
            call, self._call = self._call, None
            if call is not None and call.sender == self.fabric.members[0]:
                await self._unless_news(self._follow(call))
            elif self.fabric.members[0] != self.fabric.rank:
                await self._unless_news(self.fabric.changed())
            elif self._all_there() and not await somebody_comes():
                await self._unless_news(self._lead())
                end_s = min(end_s, loop.time() + TRY_S)
            if self._over:
                return self.answer
            with contextlib.suppress(TimeoutError):  # who came back must be told again
                await asyncio.wait_for(self._news.wait(), POLL_S)
        return self.answer

    def _all_there(self) -> bool:
        """Whether the loops of all have ended, and all whom they reach are within reach."""
        others = self.fabric.members[1:]
        if not all(self.has_ended(peer) for peer in others):
            return False
        reached = frozenset[int]().union(*(self._ended[peer][1] for peer in others))
        if reached <= set(self.fabric.members):
            self._apart_since_s = None
            return True
        now_s = asyncio.get_running_loop().time()
        self._apart_since_s = self._apart_since_s or now_s
        return now_s > self._apart_since_s + GRACE_S

    async def _unless_news(self, work: Awaitable[None]) -> None:
        """Do it unless there is something newer to do; a failure means that there will be."""
        doing, news = asyncio.ensure_future(work), asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait({doing, news}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                with contextlib.suppress(PeerLost, TimeoutError):
                    doing.result()
        finally:
            for task in (doing, news):
                task.cancel()
            await asyncio.gather(doing, news, return_exceptions=True)

    async def _while_all_are_there(self, members: Sequence[int], work: Awaitable[None]) -> None:
        """Do it; PeerLost as soon as one of them is lost, also if this worker waits for another one."""
        epochs = {peer: self.fabric.epoch(peer) for peer in members if peer != self.fabric.rank}

        async def one_is_lost() -> None:
            while True:
                for peer, epoch in epochs.items():
                    if peer not in self.fabric.members or self.fabric.epoch(peer) != epoch:
                        raise PeerLost(peer, "it was lost while the run ended")
                await self.fabric.changed()

        tasks = [asyncio.ensure_future(one) for one in (work, one_is_lost())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            next(task for task in tasks if task.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lead(self) -> None:
        members = self.fabric.members
        self._number += 1
        attempt = (*END, self.fabric.rank, self._number)
        for peer in members[1:]:
            self.fabric.post(peer, END, note=(CALL, self._number, *members))
        await self._while_all_are_there(members, self._agree(members, attempt))
        for peer in members[1:]:
            with contextlib.suppress(PeerLost):
                await self.fabric.receive((*attempt, "have"), peer)
        self._over = True
        for peer in members[1:]:
            with contextlib.suppress(PeerLost):
                await self.fabric.send(peer, (*attempt, "bye"))

    async def _follow(self, call: Message) -> None:
        leader, (_, number, *members) = call.sender, map(int, call.note)
        attempt = (*END, leader, number)
        try:
            await self._while_all_are_there(members, self._agree(tuple(members), attempt))
        except (PeerLost, TimeoutError):
            self.fabric.post(leader, END, note=(FAILED, number))
            raise
        self.fabric.post(leader, (*attempt, "have"))
        await self.fabric.receive((*attempt, "bye"), leader)
        self._over = True

    async def _agree(self, members: tuple[int, ...], attempt: Tag) -> None:
        mine = (float(self.answer is not None),)
        who = collectives.gather(self.fabric, members, mine, (*attempt, "who"))
        have = [peer for peer, note in (await asyncio.wait_for(who, DRAIN_S)).items() if note[0]]
        if not have:
            await self._drain(members, attempt)
            self.answer, self.members = await self._mean(members, attempt), members
        elif self.answer is None:
            weights = await self.fabric.receive((*attempt, "weights"), have[0])
            buffers = await tensor_codec.receive(self.fabric, have[0], (*attempt, "buffers"))
            self.answer, self.members = (weights.of(self._size), buffers), members
        elif have[0] == self.fabric.rank:
            for peer in set(members) - set(have):
                self.fabric.post(peer, (*attempt, "weights"), self.answer[0].clone())
                tensor_codec.post(self.fabric, peer, (*attempt, "buffers"), tensor_codec.pack(self.answer[1]))

    async def _drain(self, members: tuple[int, ...], attempt: Tag) -> None:
        """Wait until every message that was sent has been received, twice in a row."""
        loop = asyncio.get_running_loop()
        end_s, before, k = loop.time() + DRAIN_S, None, 0
        while True:
            k += 1
            mine = (*self._under_way(), float(loop.time() > end_s))
            all_said = collectives.gather(self.fabric, members, mine, (*attempt, "drain", k))
            notes = await asyncio.wait_for(all_said, DRAIN_S)
            idle, sent, got, late = (sum(column) for column in zip(*notes.values(), strict=True))
            if late or (notes == before and idle == len(notes) and sent == got):
                return  # all see the same notes, so all leave in the same round
            before = notes
            await asyncio.sleep(0.002)
