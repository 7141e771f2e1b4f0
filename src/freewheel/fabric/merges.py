"""A merge: what some workers make of their vectors together, and the collectives it is made with."""

import zlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from freewheel.fabric import collectives
from freewheel.fabric.base import Fabric, Message, Note, Tag, Weights

Group: TypeAlias = tuple[int, Sequence[int]]  # a number of its own, and the members of the view that merge
EVERYBODY = 0


@dataclass(frozen=True)
class View:
    """A numbered membership: no two views of a run share a number, not even on two sides of a partition."""

    number: int
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"view {self.number}: {', '.join(map(str, self.members))}"


class Merge:
    """One try at a merge, in one view. Its collectives run among its members, or `among` some of them."""

    verdict: Message  # what the caller says in the end, if somebody has called it (fabric/calls.py)

    def __init__(self, fabric: Fabric, view: View, group: Group, number: int, tag: Tag) -> None:
        self.view, self.members, self.number, self.tag = view, tuple(group[1]), number, tag
        self.group, self._fabric = group[0], fabric
        self.done = self.counts = False  # whether this worker has the result; whether it counts
        self.result: Any = None
        self.caller = -1  # who has called it, if somebody has
        self.says: Note = ()  # what the caller hears of this worker with "has it"
        self._reductions: Counter[Tag] = Counter()

    async def sum(self, vector: Tensor, among: Sequence[int] = ()) -> Tensor:
        """The sum of the members' vectors, each of which is used up."""
        return await self.reduce(vector, dict.fromkeys(among or self.members, 1.0))

    async def mean(self, vector: Tensor) -> Tensor:
        """The mean of the members' vectors, each of which is used up."""
        return await self.offset(vector, 0.0)

    async def offset(self, vector: Tensor, part: float = 1.0) -> Tensor:
        """How far the members' mean is from this vector, which is used up; or a part of it (0: the mean)."""
        return await self.reduce(vector, dict.fromkeys(self.members, 1 / len(self.members)), part)

    async def reduce(self, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """See Fabric.reduce. Every reduction of the same members gets the next tag."""
        tag = (*self.tag, zlib.crc32(repr(tuple(weights)).encode()))
        self._reductions[tag] += 1
        return await self._fabric.reduce((*tag, self._reductions[tag]), vector, weights, part)

    async def gather(self, note: Note) -> dict[int, Note]:
        return await collectives.gather(self._fabric, self.members, note, self.tag)

    async def broadcast(self, root: int, vector: Tensor | None, among: Sequence[int] = ()) -> Tensor:
        got = await collectives.broadcast(self._fabric, among or self.members, root, vector, self.tag)
        return got.payload

    async def swap(
        self, to: Sequence[int], sources: Sequence[int], vector: Tensor
    ) -> AsyncIterator[tuple[int, Tensor]]:
        """Send a vector to some members while receiving those of others, one after the other."""
        sending = [self._fabric.send(peer, self.tag, vector) for peer in to]
        try:
            for peer in sources:
                yield peer, (await self._fabric.receive(self.tag, peer)).payload
            for one in sending:
                await one
        finally:
            for one in sending:
                one.cancel()

    def forget(self) -> None:
        self._fabric.forget(self.tag)
