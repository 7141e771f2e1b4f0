"""Two replicas meet: both give a snapshot, both get a correction, or neither does.

    caller                      callee
      call      ------------->             "may I?"                      (a few bytes)
                <-------------   yes/busy  it is free and now taken / it is not
      snapshot  <------------>   snapshot  both directions at once; see Fabric.swap
      done      ------------->             the caller has both and corrects; on this the callee corrects

Short vectors of one host: the callee takes its snapshot first and says with its "yes" where it lies. The
caller combines both, whole, and says "done": three messages instead of seven.

Rules, and what they buy:
1. A replica takes part in one exchange at a time, so corrections cannot add up to more than was meant.
2. A callee that is in an exchange says "busy" at once; nobody waits for somebody else's exchange, so a
   slow link holds up only the two at its ends.
3. Two who call each other at once must not both hang up. A callee that itself waits for an answer lets a
   caller of higher rank wait, and says "busy" to one of lower rank. Only higher ranks wait for lower ones,
   so there is no deadlock on any graph. If the answer takes much longer than usual, its link is broken, and
   those who wait are sent away.
4. Workers in step call in the same order every time. To be fair, a caller that has been served clearly more
   often than one that was refused is itself refused every other time.
5. A worker whose weights move for long within a step (LBFGS) says so instead of giving a snapshot, and both
   are free again.
6. The caller's "done" follows its snapshot on the same path. If it never arrives, the callee drops the
   exchange and counts it as half: the caller may or may not have corrected. That is the only gap.
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import EXCHANGE, Fabric, Meet, Message, NotNow, Spawn, Tag, hear

CALL: Tag = ("call",)
YES, BUSY = (1.0,), (0.0,)


class Party(Protocol):
    """Whose replica takes part: a node."""

    async def snapshot_soon(self) -> Tensor | None:
        """The weights, with what is pending; None if they move for too long."""

    def unused(self, snapshot: Tensor) -> None:
        """Nothing came of a snapshot, and nobody has written over it."""

    @property
    def meet(self) -> Meet: ...

    def met(self, peer: int, correction: Tensor) -> None: ...

    def count(self, outcome: str) -> None:
        """Count an exchange as done, busy, half or failed."""


class Exchanges:
    """One worker's exchanges: `call` starts one, `serve` answers the others' calls."""

    def __init__(self, fabric: Fabric, party: Party, spawn: Spawn, rng: random.Random) -> None:
        self.fabric, self.party, self.spawn, self.random = fabric, party, spawn, rng
        self.partner: int | None = None
        self._freed = asyncio.Event()
        self.calling = False  # waiting for the answer to our own call: rule 3
        self.waiting: deque[tuple[int, Tag, int]] = deque()
        self.served: Counter[int] = Counter()
        self.refused: set[int] = set()
        self.answer_s = 0.05  # how long a quick answer takes; learned from every answer
        self.ended = False  # this worker's loop is over, so it begins no more exchanges
        self.paused = False  # no exchange begins, whoever calls
        self.took_s = 0.0  # from a call to the correction, a running mean; 0: there was none yet
        self.patience: asyncio.TimerHandle | None = None
        self.left = False  # whether a caller has all it needs, in the exchange under way
        self.shown = False  # whether the peer may write over the snapshot
        self._mine: Tensor | None = None  # this worker's snapshot in it
        self.serial = rng.randrange(2**40)  # begins anywhere, so that no life of a worker repeats another's

    async def call(self, peer: int) -> bool:
        """Try to exchange with a peer; False if it (or this replica) is busy, or gone."""
        if self.ended:
            return False
        if self.partner is not None or self.paused:
            self.party.count("busy")
            return False
        self.serial += 1
        self.partner, self.calling = peer, True
        return await self._meeting(peer, (EXCHANGE, self.fabric.rank, self.serial), self._call)

    async def _call(self, peer: int, tag: Tag) -> None:
        loop = asyncio.get_running_loop()
        called_s = loop.time()
        self.patience = loop.call_later(8 * self.answer_s + 1e-3, self._send_away)
        self.fabric.post(peer, CALL, None, (self.serial,))
        answer = await self.fabric.receive(tag, peer)
        self.answer_s = min(1.02 * self.answer_s, loop.time() - called_s)
        self.calling = False
        if answer.note == BUSY:
            raise NotNow
        if answer.note[:1] != YES:
            raise answer.bad("no answer")
        mine, where = await self._snapshot(peer, tag), answer.note[1:]
        if where:
            correction = await self.fabric.combine(peer, where, mine, self.party.meet)
        else:
            self.shown = True
            correction = await self.fabric.swap(peer, tag, mine, self.party.meet, lambda: None)
        self.party.met(peer, correction)
        self.fabric.post(peer, tag)
        took_s = loop.time() - called_s
        self.took_s += (took_s - self.took_s) * (0.1 if self.took_s else 1)

    def serve(self) -> Coroutine[Any, Any, None]:
        return hear(self.fabric, CALL, self._called)

    def _called(self, request: Message) -> None:
        peer, (serial,) = request.sender, request.numbers(1, 1)
        tag = (EXCHANGE, peer, serial)
        if not self.paused and self.partner is None and self._turn(peer):
            self._accept(peer, tag)
        elif not self.paused and self.calling and peer > self.fabric.rank:
            self.waiting = deque(one for one in self.waiting if one[0] != peer)  # of each the last call
            self.waiting.append((peer, tag, self.fabric.epoch(peer)))
        else:
            self._refuse(peer, tag)

    async def pause(self) -> None:
        """Take part in no further exchange; return when the one under way is over."""
        self.paused = True
        await self.over()

    def resume(self) -> None:
        self.paused = False

    async def over(self) -> None:
        while self.partner is not None:
            self._freed.clear()
            await self._freed.wait()

    def free(self) -> None:
        self.partner = None
        self._freed.set()

    def _turn(self, peer: int) -> bool:
        """Rule 4."""
        enough = self.served[peer] - 4
        if enough < 0:
            return True
        self.refused.intersection_update(self.fabric.members)
        starved = any(self.served[other] <= enough for other in self.refused)
        return not starved or self.random.random() < 0.5

    def _refuse(self, peer: int, tag: Tag) -> None:
        self.refused.add(peer)
        self.fabric.post(peer, tag, note=BUSY)

    def _accept(self, peer: int, tag: Tag) -> None:
        self.refused.discard(peer)
        self.served[peer] += 1
        self.partner = peer  # taken from this moment, before anything is awaited
        self.spawn(self._meeting(peer, tag, self._answer))

    async def _answer(self, peer: int, tag: Tag) -> None:
        where = await self.fabric.laid(peer, lambda: self._snapshot(peer, tag))
        self.left = self.shown = bool(where)
        self.fabric.post(peer, tag, note=(*YES, *where))
        mine = self._mine if self._mine is not None else await self._snapshot(peer, tag)
        if not where:
            self.shown = True
            mine = await self.fabric.swap(peer, tag, mine, self.party.meet, self._told)
        try:
            answer = await self.fabric.receive(tag, peer)
        except BaseException:
            if where:
                self.fabric.withdraw(peer, mine)
            raise
        if answer.note == BUSY:
            raise NotNow
        self.party.met(peer, mine)

    async def _meeting(self, peer: int, tag: Tag, act: Callable[[int, Tag], Awaitable[None]]) -> bool:
        """Do one side of an exchange, count its outcome, and be free again; whether it is done."""
        self.left = self.shown = False
        try:
            await act(peer, tag)
            self.party.count("done")
            return True
        except NotNow:
            self.party.count("busy")
            self.shown = False
        except PeerLost:
            # Only a caller that has all it needs can have corrected.
            self.party.count("half" if self.left else "failed")
            if self.left:
                self.fabric.notice("half", peer, "an exchange with it may have counted on its side only")
        except asyncio.CancelledError:
            self.waiting.clear()  # this life is over
            raise
        finally:
            unused = None if self.shown else self._mine  # nobody can write over it
            self.calling, self._mine = False, None
            self._release(tag)
        if unused is not None:
            self.party.unused(unused)
        return False

    async def _snapshot(self, peer: int, tag: Tag) -> Tensor:
        """This worker's weights; NotNow, on both sides, if they move for too long."""
        epoch = self.fabric.epoch(peer)
        self._mine = await self.party.snapshot_soon()
        self.fabric.need(peer, epoch)
        if self._mine is None:
            self.fabric.post(peer, tag, note=BUSY)
            raise NotNow
        return self._mine

    def _told(self) -> None:
        self.left = True

    def _send_away(self) -> None:
        """Refuse those who wait for the answer to our own call."""
        self.calling = False
        while self.waiting:
            self._refuse(*self.waiting.popleft()[:2])

    def _release(self, tag: Tag) -> None:
        self.fabric.forget(tag)
        self.free()
        if self.patience is not None:
            self.patience.cancel()
        if len(self.waiting) > 1:  # workers in step call in the same order every time: each gets its turn
            self.random.shuffle(self.waiting)
        while self.waiting:
            peer, waiting_tag, epoch = self.waiting.popleft()
            if epoch != self.fabric.epoch(peer):
                continue  # it called over a connection that has broken since
            if self.partner is not None or self.paused:
                self._refuse(peer, waiting_tag)
            else:
                self._accept(peer, waiting_tag)
