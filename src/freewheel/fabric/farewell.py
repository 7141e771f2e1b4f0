"""A worker leaves, and what only it has learned stays with the others.

Of n workers with weights x the one that leaves is k. Each of the others adds

    c = 1/n · (x_k - the mean of the others' x)

so that the mean of those who stay is the mean that all had. They do it together, or not at all:

    who leaves                       each of the others
      call                      ---->  takes part in no exchange from now on
                                <----  ready; or not now, another farewell has it; or away
      begin, with those ready   ---->  snapshot; all reduce theirs to the same c
                                <----  has it, or has lost somebody
      commit, or drop           ---->  corrects, or does not; is free again

A replica takes part in one exchange or farewell at a time, so snapshots are of a moment in which nothing is
half exchanged. Two who leave at once take turns. Who has handed over is away, though it is still there for a
while, and so is who joins and has no weights yet. The gap that is left: one that dies while it says "commit".
Last comes a goodbye that is answered: what was sent before it has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import REDUCTION, RUNTIME, Fabric, Message, Tag

CALL: Tag = (RUNTIME, "farewell")
LEAVING: Tag = (RUNTIME, "leaving")
BYE: Tag = (RUNTIME, "goodbye")
DROP, BEGIN, COMMIT = range(3)
NO, YES, AWAY = range(3)
RETRY_S = 0.01
"""After about so long a worker calls again that was told "not now"; each time a little longer."""
LONGEST_S = 600.0
"""After so long a farewell is over for those who stay, and the one that leaves is cut off."""


class Party(Protocol):
    """Whose replica takes part."""

    async def pause(self) -> None:
        """Take part in no exchange any more; return when none is under way."""

    def resume(self) -> None:
        """Be free again."""

    async def snapshot(self) -> Tensor:
        """The weights, with what is pending."""

    def correct(self, vector: Tensor, own: bool = False) -> None:
        """Add a vector at the next boundary."""


class Farewells:
    """One worker's part in farewells: its own, and the others'."""

    def __init__(
        self,
        fabric: Fabric,
        party: Party,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        rng: random.Random,
    ) -> None:
        self.fabric, self.party, self.spawn, self.random = fabric, party, spawn, rng
        self.in_farewell = False
        """Whether this worker is in a farewell."""
        self.away = False
        """Whether it has no part in any: it has handed over, or has no weights yet."""
        self._leaving: dict[int, int] = {}
        """Who has said that it leaves, each with the epoch in which it did."""
        self._serial: int | None = None

    def serve(self) -> None:
        """Take part in the others' farewells, from now on."""
        for tag, act in ((CALL, self._called), (LEAVING, self._note), (BYE, self._answer)):
            self.spawn(self._each(tag, act))

    async def _each(self, tag: Tag, act: Callable[[Message], None]) -> None:
        while True:
            message = await self.fabric.receive(tag)
            with contextlib.suppress(PeerLost):  # it said what makes no sense, and is cut off
                act(message)

    def _others(self) -> list[int]:
        return [peer for peer in self.fabric.members if peer != self.fabric.rank]

    # -- who leaves --

    def announce(self) -> None:
        """Say that this worker is about to leave: where all do, none has to hand anything over."""
        for peer in self._others():
            self.fabric.post(peer, LEAVING)

    def _note(self, message: Message) -> None:
        self._leaving[message.sender] = self.fabric.epoch(message.sender)

    def somebody_stays(self) -> bool:
        """Whether there is a worker that has not said that it leaves."""
        return any(self._leaving.get(peer) != self.fabric.epoch(peer) for peer in self._others())

    async def hand_over(self) -> None:
        """Let the others' mean become the mean of all; tries until it is done, or nobody stays."""
        tries = 0
        try:
            while self.somebody_stays():
                if not self.in_farewell and await self._attempt():
                    return
                tries += 1
                await asyncio.sleep(RETRY_S * min(tries, 10) * self.random.uniform(0.5, 1.5))
        finally:
            self.away = True  # its weights do not count any more

    def _next(self) -> int:
        """A number for a farewell; they begin anywhere, so that no life of a worker repeats another's."""
        self._serial = (self.random.randrange(2**40) if self._serial is None else self._serial) + 1
        return self._serial

    async def _attempt(self) -> bool:
        serial, me, called = self._next(), self.fabric.rank, self._others()
        tag, word = (*CALL, me, serial), DROP
        self.in_farewell, reducing = True, None
        try:
            for peer in called:
                self.fabric.post(peer, CALL, note=(serial,))
            await self.party.pause()
            others = await self._who_say((*tag, "ready"), called)
            if not others:
                return False
            members = tuple(sorted((me, *others)))
            self._tell(others, tag, BEGIN, *members)
            reducing = self.spawn(self._reduce(tag, me, members))
            if len(await self._who_say((*tag, "have"), others)) < len(others):
                return False
            word = COMMIT
            return True
        except PeerLost:
            return False
        finally:
            if reducing is not None:
                reducing.cancel()
            self._tell(called, tag, word)
            self._forget(tag)
            self.in_farewell = False
            if word == DROP:
                self.party.resume()

    async def _who_say(self, tag: Tag, asked: list[int]) -> list[int]:
        """Who of those that were asked says yes, once each has answered; nobody, where one says no."""
        silent, there = set(asked), list(asked)
        while silent:
            answer = await self.fabric.receive(tag, among=there)
            (word,) = answer.numbers(1, 1)
            if answer.sender not in silent:
                raise answer.bad("an answer to nothing")
            if word == NO:
                return []
            silent.remove(answer.sender)
            if word == AWAY:
                there.remove(answer.sender)
        return there

    def _tell(self, others: list[int], tag: Tag, *words: int) -> None:
        for peer in others:
            self.fabric.post(peer, tag, note=words)

    async def goodbye(self) -> None:
        """Wait until everybody has got all that this worker has sent."""
        serial, others = self._next(), self._others()
        for peer in others:
            self.fabric.post(peer, BYE, note=(serial,))
        for peer in others:
            with contextlib.suppress(PeerLost):
                await self.fabric.receive((*BYE, serial), peer)

    def _answer(self, message: Message) -> None:
        (serial,) = message.numbers(1, 1)
        self.fabric.post(message.sender, (*BYE, serial))

    # -- the others --

    def _called(self, message: Message) -> None:
        (serial,) = message.numbers(1, 1)
        tag: Tag = (*CALL, message.sender, serial)
        if self.away or self.in_farewell:
            self.fabric.post(message.sender, (*tag, "ready"), note=(AWAY if self.away else NO,))
            self.fabric.forget(tag)
            return
        self.in_farewell = True  # from this moment on, before anything is awaited
        self.spawn(self._take_part(message, tag, self.fabric.epoch(message.sender)))

    async def _take_part(self, call: Message, tag: Tag, epoch: int) -> None:
        leaver, reducing = call.sender, None
        try:
            async with asyncio.timeout(LONGEST_S):
                await self.party.pause()
                if epoch != self.fabric.epoch(leaver):
                    return  # it called over a connection that has broken since
                self.fabric.post(leaver, (*tag, "ready"), note=(YES,))
                word, *members = await self._words(tag, leaver)
                if word == BEGIN:
                    reducing = self.spawn(self._reduce(tag, leaver, tuple(members)))
                    word, *_ = await self._words(tag, leaver)
            # Who leaves says "commit" only once this worker has told it that it has the correction.
            if word == COMMIT and reducing is not None and reducing.done():
                correction = reducing.result()
                if correction is not None:
                    self.party.correct(correction, own=True)
        except (PeerLost, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                call.offend("its farewell did not end")
            if reducing is not None and reducing.done() and reducing.result() is not None:
                self.fabric.notice("half", leaver, "its last weights may have gone to some and not to all")
        finally:
            if reducing is not None:
                reducing.cancel()
            self._forget(tag)
            self.in_farewell = False
            self.party.resume()

    async def _words(self, tag: Tag, leaver: int) -> tuple[int, ...]:
        message = await self.fabric.receive(tag, leaver)
        word, *members = words = message.numbers(1)
        apart = len(set(members)) == len(members) and {leaver, self.fabric.rank} <= set(members)
        if word == BEGIN and not apart:
            raise message.bad("members that cannot be")
        return words

    async def _reduce(self, tag: Tag, leaver: int, members: tuple[int, ...]) -> Tensor | None:
        """What each of the others has to add; None: somebody was lost."""
        n, correction = len(members), None
        shares = [1 / n if peer == leaver else -1 / (n * (n - 1)) for peer in members]
        try:
            mine = await self.party.snapshot()
            correction = await self.fabric.reduce(members, (*tag, "sum"), mine, shares)
        except PeerLost:
            pass
        finally:
            if leaver != self.fabric.rank:
                self.fabric.post(leaver, (*tag, "have"), note=(YES if correction is not None else NO,))
        return correction

    def _forget(self, tag: Tag) -> None:
        for end in ((), ("ready",), ("have",), *(("sum", *end) for end in REDUCTION)):
            self.fabric.forget((*tag, *end))
