"""The end of a run: all take one mean and leave together, whoever is lost meanwhile.

The lowest rank within reach leads. When all have said that their loops have ended, it calls them all
(fabric/calls.py). If one has the mean already, it hands it round, so that a lost leader changes nothing;
else they wait until every message that was sent has arrived, and take the mean. When all have it, all leave.
Two that do not reach each other while others reach both get GRACE_S to find each other again.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import RUNTIME, Fabric, Message, Note, NotNow, Spawn, Tag, hear
from freewheel.fabric.calls import Calls
from freewheel.fabric.merges import Merge
from freewheel.runtime.worker import tensor_codec

Answer: TypeAlias = tuple[Tensor, dict[str, Tensor]]  # the mean weights, and the mean buffers
END: Tag = (RUNTIME, "end")
POLL_S = 0.05
DRAIN_S = 10.0  # how long to wait for messages that are still under way
GRACE_S = 3.0  # how long a leader waits for a worker that others reach and it does not
TRY_S = 20.0  # how long a leader tries before it collects the mean by itself


class Ending:
    """One worker's part in the end of a run."""

    def __init__(
        self,
        fabric: Fabric,
        spawn: Spawn,
        under_way: Callable[[], Note],
        mean: Callable[[Sequence[int], Tag], Awaitable[Answer]],
        size: int,
    ) -> None:
        self.fabric, self._size = fabric, size
        # Whether this worker is idle (1 or 0), messages it sent and got; the mean of some workers.
        self._under_way, self._mean = under_way, mean
        self.answer: Answer | None = None
        self.members: tuple[int, ...] = ()  # whose mean it is
        self._ended: dict[int, frozenset[int]] = fabric.by_peer()  # loops that have, and whom each reached
        self._apart_since_s: float | None = None
        self._calls = Calls(fabric, spawn, (*END, "call"), self._agree, self._decided)
        # From the end of this worker's loop on; done when all have the answer, or fails with why not.
        self._over: asyncio.Future[None] | None = None
        spawn(hear(fabric, END, self._hear))
        self._calls.serve()

    def has_ended(self, peer: int) -> bool:
        return peer in self._ended

    def _hear(self, message: Message) -> None:
        reached = frozenset(message.numbers(1))
        if not reached <= set(range(self.fabric.world_size)):
            raise message.bad("what makes no sense")
        self._ended[message.sender] = reached

    async def run(self, somebody_comes: Callable[[], Awaitable[bool]]) -> Answer | None:
        """When this worker's loop has ended: the mean that all have; None if they do not get together."""
        loop, end_s = asyncio.get_running_loop(), math.inf
        self._over = loop.create_future()
        while not self._over.done() and loop.time() < end_s:
            for peer in self.fabric.others:
                self.fabric.post(peer, END, note=self.fabric.members)
            leads = self.fabric.members[0] == self.fabric.rank
            if leads and self._all_there() and not await somebody_comes():
                await self._calls.call(self.fabric.members)
                end_s = min(end_s, loop.time() + TRY_S)
            with contextlib.suppress(TimeoutError):  # who came back must be told again
                await asyncio.wait_for(asyncio.shield(self._over), POLL_S)
        if self._over.done():
            self._over.result()
        return self.answer

    def _all_there(self) -> bool:
        """Whether all loops have ended, and everybody whom those workers reach is within reach."""
        others = self.fabric.members[1:]
        if not all(self.has_ended(peer) for peer in others):
            return False
        reached = frozenset[int]().union(*(self._ended[peer] for peer in others))
        if reached <= set(self.fabric.members):
            self._apart_since_s = None
            return True
        now_s = asyncio.get_running_loop().time()
        self._apart_since_s = self._apart_since_s or now_s
        return now_s > self._apart_since_s + GRACE_S

    def _decided(self, merge: Merge, outcome: str) -> None:
        if outcome == "done" and self._over is not None and not self._over.done():
            self._over.set_result(None)

    async def _agree(self, merge: Merge) -> None:
        if self._over is None:
            raise NotNow  # it has not ended: the caller takes it for an earlier life
        try:
            await self._take_answer(merge.members, merge.tag)
        except PeerLost:
            raise
        except Exception as error:
            if not isinstance(error, TimeoutError) and not self._over.done():
                self._over.set_exception(error)
            raise NotNow from None

    async def _take_answer(self, members: tuple[int, ...], attempt: Tag) -> None:
        has = (float(self.answer is not None),)
        who = collectives.gather(self.fabric, members, has, (*attempt, "who"))
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
        loop, before = asyncio.get_running_loop(), None
        end_s = loop.time() + DRAIN_S
        for k in itertools.count():
            mine = (*self._under_way(), float(loop.time() > end_s))
            all_said = collectives.gather(self.fabric, members, mine, (*attempt, "drain", k))
            notes = await asyncio.wait_for(all_said, DRAIN_S)
            idle, sent, got, late = (sum(column) for column in zip(*notes.values(), strict=True))
            if late or (notes == before and idle == len(notes) and sent == got):
                return  # all see the same notes, so all leave in the same round
            before = notes
            await asyncio.sleep(0.002)
