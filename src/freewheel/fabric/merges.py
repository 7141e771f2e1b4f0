"""Merges: what the members of a view do together counts for all of them or for none.

    every member    does it: a ring, a tree, whatever; then tells the first member "have"
    first member    when all have it: "commit" to all
    every member    on "commit" it counts

If a member is lost before, nothing more counts in this view, and all do it again in the next. If the first
one is lost while it says "commit", some have heard it: in forming the next view each says what has counted,
and whoever has the result lets it count too. All of them have it, for "commit" is said only then.

So a merge costs one round of short messages, and no worker has to keep a vector for it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import Fabric, Message, Note, Tag, Weights
from freewheel.fabric.lineage import View
from freewheel.fabric.views import Views

T = TypeVar("T")
Group: TypeAlias = tuple[int, Sequence[int]]
"""A number of its own, and the members of the view that merge."""
EVERYBODY = 0


class Merge:
    """One try at a merge, in one view. Its collectives run among its members, or `among` some of them."""

    def __init__(self, fabric: Fabric, view: View, group: Group, number: int, tag: Tag) -> None:
        self.view, self.members, self.number, self.tag = view, tuple(group[1]), number, tag
        self.group, self._fabric = group[0], fabric
        self.done = self.counts = False
        """Whether this worker has the result; whether it counts."""
        self.result: Any = None
        self.caller = -1
        """Who has called it, if somebody has."""
        self._reductions: Counter[Tag] = Counter()

    async def sum(self, vector: Tensor, among: Sequence[int] = ()) -> Tensor:
        """The sum of the members' vectors, each of which is used up."""
        return await self.reduce(vector, dict.fromkeys(among or self.members, 1.0))

    async def mean(self, vector: Tensor) -> Tensor:
        """The mean of the members' vectors, each of which is used up."""
        return await self.reduce(vector, self._alike())

    async def offset(self, vector: Tensor, part: float = 1.0) -> Tensor:
        """How far the mean of the members' vectors is from this one, which is used up; or a part of it."""
        return await self.reduce(vector, self._alike(), part)

    def _alike(self) -> Weights:
        return dict.fromkeys(self.members, 1 / len(self.members))

    async def reduce(self, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """See Fabric.reduce; each has a tag of its own, counted among those of the same members."""
        tag = (*self.tag, zlib.crc32(repr(tuple(weights)).encode()))
        self._reductions[tag] += 1
        return await self._fabric.reduce((*tag, self._reductions[tag]), vector, weights, part)

    async def gather(self, note: Note) -> dict[int, Note]:
        """Every member's note, known to every member."""
        return await collectives.gather(self._fabric, self.members, note, self.tag)

    async def broadcast(self, root: int, vector: Tensor | None, among: Sequence[int] = ()) -> Tensor:
        """The root's vector, handed to all members."""
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
        """Drop what still arrives."""
        self._fabric.forget(self.tag)


class Merges:
    """One worker's merges, one at a time, from view to view."""

    def __init__(
        self,
        views: Views,
        give: Callable[[], Awaitable[tuple[Tensor, Note]]],
        take: Callable[[Message], Awaitable[None]],
        count: Callable[[str, Sequence[int]], None],
    ) -> None:
        self.views, self.fabric = views, views.fabric
        self._give, self._take, self._count = give, take, count
        self.called: dict[int, int] = {}
        """The last merge of each group that this worker has begun in the present view."""
        self._line = 0

    async def merge(
        self, act: Callable[[Merge], Awaitable[T]], group: Callable[[View], Group] | None = None
    ) -> T:
        """Do something with all members of the view, or of a group of it, as often as it takes to count."""
        while True:
            merge = await self.attempt(act, group)
            if merge is not None and merge.counts:
                result: T = merge.result
                return result

    async def attempt(
        self, act: Callable[[Merge], Awaitable[Any]], group: Callable[[View], Group | None] | None = None
    ) -> Merge | None:
        """Do it once; not at all, if `group` finds nobody to do it with."""
        views = self.views
        views.begin(range(self.fabric.world_size))
        await self.enter()
        whose = group(views.view) if group else (EVERYBODY, views.view.members)
        if whose is None:
            return None
        number = views.record.counted.get(whose[0], 0) + 1
        tag: Tag = ("merge", views.record.line, whose[0], number)
        merge = Merge(self.fabric, views.view, whose, number, tag)
        if self._line != views.record.line:
            self._line, self.called = views.record.line, {}
        self.called[merge.group] = number
        views.under_way = (merge.group, number, merge.members)
        over = views.over
        if not views.intact():
            views.look()  # a member has left; if nobody else is there, the next view begins at once
        try:
            merge.counts = await self._unless_over(over, self._try(act, merge, over))
        finally:
            views.under_way = None
        if not merge.counts:
            await views.installed()
            merge.forget()
            counted = views.record.counted.get(merge.group, 0) >= number
            merge.counts = merge.done and views.whole and counted
        self._count("done" if merge.counts else "dropped", merge.members)
        return merge

    async def enter(self) -> None:
        """Wait for a view; get the weights to begin it with, or hand them out."""
        views = self.views
        while True:
            await views.installed()
            if views.whole or await self._unless_over(
                views.over, self._copy(views.source, views.coming.line)
            ):
                break
        while views.owed:
            vector, note = await self._give()
            self.fabric.post(views.owed.pop(), ("view", "copy", views.record.line), vector, note)

    async def _copy(self, source: int, stamp: int) -> bool:
        tag: Tag = ("view", "copy", stamp)
        try:
            message = await self.fabric.receive(tag, source)
        finally:
            self.fabric.forget(tag)
        await self._take(message)
        self.views.record, self.views.whole = self.views.coming, True
        return True

    async def _try(
        self, act: Callable[[Merge], Awaitable[Any]], merge: Merge, over: asyncio.Future[None]
    ) -> bool:
        merge.result = await act(merge)
        merge.done, rank = True, self.fabric.rank
        first, *others = merge.members
        if rank == first:
            for peer in others:
                await self.fabric.receive((*merge.tag, "have"), peer)
        else:
            self.fabric.post(first, (*merge.tag, "have"))
            await self.fabric.receive((*merge.tag, "commit"), first)
        if over.done():  # another view was promised in the same moment
            return False
        if rank == first:
            for peer in others:
                self.fabric.post(peer, (*merge.tag, "commit"))
        self.views.record.counted[merge.group] = merge.number
        return True

    async def _unless_over(self, over: asyncio.Future[None], work: Coroutine[Any, Any, bool]) -> bool:
        """Whether the work was done before the view was over."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(_heard)
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not isinstance(task.exception(), PeerLost):
                return task.result()
            await asyncio.wait((over,))  # who has lost a peer waits for the view to end
            task.cancel()
            await asyncio.wait((task,))
            return False
        finally:
            task.cancel()


def _heard(task: asyncio.Task[bool]) -> None:
    """A failure after the view was over is of no interest."""
    if not task.cancelled():
        task.exception()
