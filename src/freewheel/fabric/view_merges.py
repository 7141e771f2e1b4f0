"""Merges in views: what the members of a view do together counts for all of them or for none.

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import Message, Note, Tag
from freewheel.fabric.merges import EVERYBODY, Group, Merge, View
from freewheel.fabric.views import Views

T = TypeVar("T")


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
        self.called: dict[int, int] = {}  # the last merge of each group that was begun in the present view
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
            await views.open.wait()
            merge.forget()
            counted = views.record.counted.get(merge.group, 0) >= number
            merge.counts = merge.done and views.whole and counted
        self._count("done" if merge.counts else "dropped", merge.members)
        return merge

    async def enter(self) -> None:
        """Wait for a view; get the weights to begin it with, or hand them out."""
        views = self.views
        while True:
            await views.open.wait()
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
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not isinstance(task.exception(), PeerLost):
                return task.result()
            await asyncio.wait((over,))  # who has lost a peer waits for the view to end
            return False
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
