"""A worker leaves, and what only it has learned stays with the others.

Of n workers with weights x the one that leaves is k. Each of the others adds

    c = 1/n · (x_k - the mean of the others' x)

so that the mean of those who stay is the mean that all had. It is a merge on call (fabric/calls.py): all do
it, or none. No member is in an exchange meanwhile, so no snapshot contains half of one. A worker that has
handed over, or joins and has no weights yet, is away and takes part in none. Last comes a goodbye that all
answer: whatever was sent before it has arrived.
"""

import asyncio
import random
from typing import Protocol

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import RUNTIME, Fabric, Message, Spawn, Tag, hear
from freewheel.fabric.calls import AWAY, Calls
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.merges import Merge

CALL: Tag = (RUNTIME, "farewell")
LEAVING: Tag = (RUNTIME, "leaving")
BYE: Tag = (RUNTIME, "goodbye")
RETRY_S = 0.01  # between two calls of a worker that leaves; a little longer each time
LONGEST_S = 600.0  # after so long those who stay give up a farewell and cut off the one that leaves


class Party(Protocol):
    """Whose replica takes part: a node."""

    async def snapshot(self) -> Tensor: ...

    def correct(self, vector: Tensor, own: bool = False) -> None: ...


class Farewells:
    """One worker's part in farewells: its own, and the others'."""

    def __init__(
        self, fabric: Fabric, party: Party, exchanges: Exchanges, spawn: Spawn, rng: random.Random
    ) -> None:
        self.fabric, self.party, self.exchanges, self.random = fabric, party, exchanges, rng
        self.calls = Calls(fabric, spawn, CALL, self._share, self._decided, LONGEST_S)
        self._leaving = fabric.by_peer()  # who has announced that it leaves

    def serve(self) -> None:
        self.calls.serve()
        for tag, act in ((LEAVING, self._note), (BYE, self._answer)):
            self.calls.spawn(hear(self.fabric, tag, act))

    # -- together --

    async def _share(self, merge: Merge) -> Tensor:
        await self.exchanges.pause()
        n, leaver = len(merge.members), merge.caller
        shares = {peer: 1 / n if peer == leaver else -1 / (n * (n - 1)) for peer in merge.members}
        return await merge.reduce(await self.party.snapshot(), shares)

    def _decided(self, merge: Merge, outcome: str) -> None:
        if outcome == "done" and merge.caller == self.fabric.rank:
            return  # nothing may change its weights any more
        if outcome == "done":
            self.party.correct(merge.result, own=True)
        elif outcome == "half":
            self.fabric.notice("half", merge.caller, "its last weights may have gone to some and not to all")
        self.exchanges.resume()

    # -- who leaves --

    def announce(self) -> None:
        """Say that this worker is about to leave: if all are, none has to hand anything over."""
        for peer in self.fabric.others:
            self.fabric.post(peer, LEAVING)

    def _note(self, message: Message) -> None:
        self._leaving[message.sender] = True

    async def hand_over(self) -> None:
        """Let the others' mean become the mean of all; try until it is done, or nobody stays."""
        tries, away = 0, set[int]()
        try:
            while not self._leaving.keys() >= set(self.fabric.others):
                members = [peer for peer in self.fabric.members if peer not in away]
                if len(members) > 1:
                    if (refusal := await self.calls.call(members)) is None:
                        return
                    if refusal.why == AWAY:
                        away.add(refusal.who)
                        continue
                tries, away = tries + 1, set()
                await asyncio.sleep(RETRY_S * min(tries, 10) * self.random.uniform(0.5, 1.5))
        finally:
            self.calls.away = True  # its weights do not count any more

    async def goodbye(self) -> None:
        """Wait until everybody has received all that this worker has sent."""
        goodbyes = [self.fabric.ask(peer, BYE) for peer in self.fabric.others]
        for said in await asyncio.gather(*goodbyes, return_exceptions=True):
            if isinstance(said, BaseException) and not isinstance(said, PeerLost):
                raise said

    def _answer(self, message: Message) -> None:
        (serial,) = message.numbers(1, 1)
        self.fabric.post(message.sender, (*BYE, serial))
