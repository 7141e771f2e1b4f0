"""Merges that run freely: any worker asks for one, and all take part wherever they are in their step.

    who has something to merge         the worker of lowest rank
      want(last merge it knows)   --->   calls all (fabric/calls.py), unless there was a merge since
                                  <---   over: the number of the last one, and whether who asked was in it

Of two workers that do not reach each other only one is called (fabric/reach.py); nor is one whose weights
were found moving for long, until it asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from freewheel.errors import PeerLost
from freewheel.fabric.base import Fabric, Message, Spawn, Tag, hear
from freewheel.fabric.calls import MOVING, Calls
from freewheel.fabric.merges import Merge
from freewheel.fabric.reach import Reach

WANT: Tag = ("merge", "want")
REACH: Tag = ("merge", "reach")


class FreeMerges:
    """One worker's part in merges that anybody may ask for."""

    def __init__(
        self,
        fabric: Fabric,
        spawn: Spawn,
        act: Callable[[Merge], Awaitable[Any]],
        decided: Callable[[Merge, str], None],
    ) -> None:
        self.fabric, self._spawn, self._tell = fabric, spawn, decided
        self._calls = Calls(fabric, spawn, ("merge", "call"), act, self._decided)
        self._known = self._calls.number
        self._news = asyncio.Event()
        """A merge counted here, or a worker came or went."""
        self._reach = Reach(fabric, REACH)
        self._moving: set[int] = set()
        """As leader: workers whose weights were found moving for long, until they ask again."""

    def serve(self) -> None:
        """Take part from now on, and lead where this worker has the lowest rank."""
        self._calls.serve()
        self._spawn(hear(self.fabric, WANT, self._wanted))
        self._spawn(hear(self.fabric, REACH, self._reached))
        self._spawn(self._watch())

    @property
    def busy(self) -> bool:
        """Whether this worker is in a merge."""
        return self._calls.busy

    async def ask(self) -> bool:
        """Ask for a merge after the last one known here; return when it is over.

        False: there was none with this worker in it, and will be none until workers come or go.
        """
        try:
            answer = await self.fabric.ask(self.fabric.members[0], WANT, note=(self._known,))
            self._known, useful = answer.numbers(2, 2)
        except PeerLost:
            return True  # there is another leader to ask
        return bool(useful)

    async def ask_until(self, enough: Callable[[], bool]) -> None:
        """Ask until that is so; where asking again changes nothing, wait for news first."""
        while not enough():
            self._news.clear()
            if not await self.ask() and not enough():
                await self._news.wait()

    def _decided(self, merge: Merge, outcome: str) -> None:
        self._tell(merge, outcome)
        if outcome == "done":
            self._news.set()

    async def _watch(self) -> None:
        if len(self.fabric.members) == self.fabric.world_size:  # nobody has to be told
            self._reach.told.update(dict.fromkeys(self.fabric.members, self.fabric.members))
        while True:
            self._reach.tell(self.fabric.members[0], self.fabric.members)
            await self.fabric.changed()
            self._news.set()

    # -- as the worker of lowest rank --

    async def _wanted(self, want: Message) -> None:
        asked, known = want.numbers(2, 2)
        self._moving.discard(want.sender)
        useful = leads = self.fabric.members[0] == self.fabric.rank
        # Who asks without knowing of the last merge may be in it: it looks again first.
        if leads and known == self._calls.number:
            members = self._reach.choose([peer for peer in self.fabric.members if peer not in self._moving])
            useful = want.sender in members
            refusal = await self._calls.call(members)
            if refusal is not None and refusal.why == MOVING:
                self._moving.add(refusal.who)
        self.fabric.post(want.sender, (*WANT, asked), note=(self._calls.number, useful))

    def _reached(self, news: Message) -> None:
        self._reach.sees[news.sender] = news.numbers(1)
