"""Merges on call: a worker calls some, who take part wherever they are; it counts for all or for none.

    who calls                       each member, the caller too
      call(number, members)  ---->    does it: a snapshot, a reduction, or stops and says how far it was
                             <----    has it; or not: it is busy, has lost another, moves, or is away
      commit, or drop        ---->    it counts, or does not

A member takes part in one call at a time. Of two callers the one of lower rank goes first, unless the member
has told the other that it has the result: then that one decides. So two reductions never wait for each other.
The gap that is left: a caller that is lost while it says "commit". Who has the result and hears no verdict
counts the merge as half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from freewheel.errors import PeerLost
from freewheel.fabric.base import Fabric, Message, Note, NotNow, Spawn, Tag, hear
from freewheel.fabric.lineage import View
from freewheel.fabric.merges import EVERYBODY, Merge

HAVE, BUSY, MOVING, AWAY = range(4)
DROP, COMMIT = range(2)
Conclude: TypeAlias = Callable[[dict[int, Message]], Note | None]
"""Makes of what all have said with "has it" what the caller says with "commit"; None: it drops it."""


class Refusal(NamedTuple):
    """Why a call came to nothing: who did not have the result, and why not."""

    who: int
    why: int


class Calls:
    """One worker's part in calls of one kind: its own, and the others'."""

    def __init__(
        self,
        fabric: Fabric,
        spawn: Spawn,
        tag: Tag,
        act: Callable[[Merge], Awaitable[Any]],
        decided: Callable[[Merge, str], None],
        longest_s: float | None = None,
    ) -> None:
        self.fabric, self.spawn, self.tag = fabric, spawn, tag
        self._act, self._decided, self._longest_s = act, decided, longest_s
        """What all do, which may raise PeerLost or NotNow; and who hears that it is done, dropped or half."""
        self.number = fabric.life << 20
        """Of this worker's last call: no life of it repeats another's."""
        self._under_way: Merge | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.away = False
        """Whether this worker takes part in nothing."""

    def serve(self) -> None:
        """Take part from now on."""
        self.spawn(hear(self.fabric, self.tag, self._called))

    @property
    def busy(self) -> bool:
        """Whether this worker is in a call."""
        return self._under_way is not None

    def _tags(self, caller: int, number: int) -> tuple[Tag, Tag]:
        """Of what the caller is told, and of what it says; all else of a call begins as the second does."""
        return (*self.tag, "have", caller, number), (*self.tag, caller, number)

    # -- who calls --

    async def call(self, members: Sequence[int], conclude: Conclude = lambda said: ()) -> Refusal | None:
        """Do it with some workers, this one included; None: it counts."""
        self.number += 1
        have, verdict = self._tags(self.fabric.rank, self.number)
        for peer in members:
            self.fabric.post(peer, self.tag, note=(self.number, *members))
        word: Note = (DROP,)
        said: dict[int, Message] = {}
        try:
            while len(said) < len(members):
                answer = await self.fabric.receive(have, among=members)
                why = answer.numbers(1)[0]
                if answer.sender in said:
                    raise answer.bad("an answer to nothing")
                if why != HAVE:
                    return Refusal(answer.sender, why)
                said[answer.sender] = answer
            if (more := conclude(said)) is None:
                return Refusal(self.fabric.rank, BUSY)
            word = (COMMIT, *more)
            return None
        except PeerLost:
            return Refusal(self.fabric.rank, BUSY)
        finally:
            self.fabric.forget(have)
            for peer in members:
                self.fabric.post(peer, verdict, note=word)

    # -- each member --

    def _called(self, call: Message) -> None:
        caller, (number, *members) = call.sender, call.numbers(2)
        if len(set(members)) < len(members) or not {caller, self.fabric.rank} <= set(members):
            raise call.bad("members that cannot be")
        have, tag = self._tags(caller, number)
        view, before = View(number, tuple(members)), self._under_way
        merge = Merge(self.fabric, view, (EVERYBODY, view.members), number, tag)
        merge.caller = caller
        if self.away or (before is not None and (before.done or before.caller <= caller)):
            self.fabric.post(caller, have, note=(AWAY if self.away else BUSY,))
            merge.forget()
            return
        if before is not None:
            self._end(before, "dropped")
            # Its task says so, too, but not where it has not begun.
            self.fabric.post(before.caller, self._tags(before.caller, before.number)[0], note=(BUSY,))
        self._under_way = merge
        self._tasks = [self.spawn(self._do(merge)), self.spawn(self._await_verdict(call, merge))]

    async def _do(self, merge: Merge) -> None:
        why, epoch = BUSY, self.fabric.epoch(merge.caller)
        try:
            merge.result = await self._act(merge)
            merge.done, why = True, HAVE
        except PeerLost:
            pass  # the caller tries again with those who are there
        except NotNow:
            why = MOVING
        finally:
            if epoch == self.fabric.epoch(merge.caller):
                have, _ = self._tags(merge.caller, merge.number)
                self.fabric.post(merge.caller, have, note=(why, *merge.says))

    async def _await_verdict(self, call: Message, merge: Merge) -> None:
        outcome = "dropped"
        try:
            async with asyncio.timeout(self._longest_s):
                merge.verdict = await self.fabric.receive(merge.tag, merge.caller)
            # Who calls well says "commit" only once this worker has told it that it has the result.
            if merge.verdict.numbers(1)[0] == COMMIT and merge.done:
                outcome = "done"
        except (PeerLost, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                call.offend("its call did not end")
            if merge.done:
                outcome = "half"  # the caller may have told others
        self._end(merge, outcome)

    def _end(self, merge: Merge, outcome: str) -> None:
        if self._under_way is merge:
            self._under_way = None
            for task in self._tasks:
                task.cancel()
            merge.forget()
            self._decided(merge, outcome)
