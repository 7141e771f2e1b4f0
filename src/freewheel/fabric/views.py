"""Views: which workers go on together, agreed among themselves; no store is asked.

A view is a number and its members. All begin in view 0 with everybody. When a member is lost, or somebody
comes, the lowest rank within reach leads and calls those who are to go on together (fabric/calls.py):

    leader                     the others
      call         ---->       stop what is done together, from now on nothing counts in the old view
                   <----       what has counted so far, and in which view
      commit       ---->       go on in the new view, with the same record of what has counted

A call that fails is repeated with those who are there by then. A view's number is that of the call × world
size + leader, so no two leaders use the same.

Both sides of a partition form a view and go on. When they meet again, the larger side (of equals the one with
the lowest rank) is the main line: its members keep their weights, the others copy one of theirs. A worker is
on the main line if it was called into the view that line comes from, even if it never heard that it began.

A worker that notices a loss late still sees another leader than the one that calls it. It refuses until both
see the same; if it refuses for longer than GRACE_S, it is not called any more. Of two members that cannot
reach each other, though the leader reaches both, one is left out and goes on by itself.

Merges in views: what the members of a view do together counts for all of them or for none.

    every member    does it: a ring, a tree, whatever; then tells the first member "have"
    first member    when all have it: "commit" to all
    every member    on "commit" it counts

If a member is lost before, nothing more counts in this view, and all do it again in the next. If the first
one is lost while it says "commit", some may have heard it: when the next view is formed each says what has
counted, and it counts for the others too. All have the result, for "commit" is said only then.

So a merge costs one round of short messages, and no worker has to keep a vector for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import Fabric, Message, Note, NotNow, Spawn, Tag, hear
from freewheel.fabric.calls import AWAY, GRACE_S, MOVING, Act, Calls, Reach
from freewheel.fabric.merges import EVERYBODY, Group, Merge, View
from freewheel.fabric.notes import pack, read_all

T = TypeVar("T")
VIEW: Tag = ("view",)
COPY: Tag = ("view", "copy")
SEE, REFUSE, LEFT = range(3)
RETRY_S = 0.01  # after about so long a leader calls again
PAIRS = [(int, int)]
RECORD = (int, [int], [int], PAIRS)  # what a record is as numbers
STAMPS, GROUPS = 2**40, 4096  # views of a run, and groups that merge, of which there are never so many


@dataclass
class Record:
    """What a worker says of its present view when it is called into another, and a leader of the new one."""

    line: int  # the number of the last view in which it had the main line's weights; -1: it has none
    parents: tuple[int, ...]  # the lines that view came from
    heirs: tuple[int, ...]  # who came into that view with the main line's weights
    counted: dict[int, int]  # how many merges of each group have counted

    @classmethod
    def of(cls, size: int, words: Sequence[Any]) -> Record:
        """A record from the end of a note, in a run of this size; ValueError if it cannot be one."""
        line, parents, heirs, counted = words[-4:]
        return cls(line, tuple(parents), ranks(heirs, size), pairs(counted))


def main_line(answers: dict[int, Record]) -> tuple[int, ...]:
    """Whose weights go on: the most workers that come from one view; of equals those with the lowest rank.

    From a view come those whose line it is, and its heirs that have not heard that it began and are still in
    one of its parents: nothing can have counted in it without them.
    """
    best: list[int] = []
    for record in sorted(answers.values(), key=lambda record: -record.line):
        if record.line < 0:
            continue
        kin = [
            peer
            for peer, other in sorted(answers.items())
            if other.line == record.line or (other.line in record.parents and peer in record.heirs)
        ]
        best = max(best, kin, key=lambda ranks: (len(ranks), -min(ranks, default=0)))
    return tuple(best) or (min(answers),)


def pairs(given: Sequence[tuple[int, int]]) -> dict[int, int]:
    if len(given) > GROUPS:
        raise ValueError("more groups than there can be")
    return dict(given)


def ranks(given: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Check that ranks are of this run, in order and each once; ValueError if not."""
    if list(given) != sorted(set(given)) or any(not 0 <= k < world_size for k in given):
        raise ValueError("workers that cannot be")
    return tuple(given)


class Views:
    """One worker's part in agreeing on views."""

    def __init__(self, fabric: Fabric, spawn: Spawn, donor: Callable[[int, Sequence[int]], int]) -> None:
        self.fabric, self.rank, self._spawn, self._donor = fabric, fabric.rank, spawn, donor
        self._calls = Calls(fabric, spawn, (*VIEW, "call"), self._stop, self._decided)
        self._calls.number = 0  # people read it
        self._reach = Reach(fabric, VIEW)
        self._refused = fabric.by_peer()  # who cannot be with this worker
        self._left = fabric.by_peer()  # who has left: in which line, after which merges of each group
        self._unwilling = fabric.by_peer()  # who sees another leader, and since when
        self.view = View(0, (self.rank,))
        # What this worker is, and will be once it has copied.
        self.record = self.coming = Record(0, (), (self.rank,), {})
        self.whole = True  # whether this worker has the main line's weights
        self.source = -1  # whose weights it copies, or has copied, to come into the present view
        self.owed: list[int] = []  # who waits for a copy of this worker's weights
        self.under_way: tuple[int, int, Sequence[int]] | None = None  # the group, its number, its members
        self.begun = self._wanted = False
        self._epochs: dict[int, int] = {}  # the members it has promised to go on with, and their epochs
        self._goodbye: Note = ()

    # -- for merges --

    def begin(self, members: Sequence[int], newborn: bool = False) -> None:
        """Take part, with those who begin together; a newborn joins a run that is under way."""
        if self.begun:
            return
        self.begun = True
        self.view, self.whole = View(0, tuple(members)), not newborn
        self.record = Record(-1, (), (), {}) if newborn else Record(0, (), self.view.members, {})
        self.open, self._woken = asyncio.Event(), asyncio.Event()
        self.over = asyncio.get_running_loop().create_future()  # done when the present view is over
        if newborn:
            self.over.set_result(None)
        else:
            self._epochs = {peer: self.fabric.epoch(peer) for peer in members}
            reached = [peer for peer in members if self.fabric.reaches(peer)]
            self._reach.sees.update(dict.fromkeys(reached, range(self.fabric.world_size)))
            self.open.set()
            self._reach.told.update(dict.fromkeys(self.fabric.members, self._news()))
        self._calls.serve()
        self._spawn(hear(self.fabric, VIEW, self._listen))
        self._spawn(self._lead())
        self._spawn(self._watch())

    async def changed(self) -> None:
        """Wait for the view after the present one."""
        if self.open.is_set():
            await asyncio.shield(self.over)
        await self.open.wait()

    @property
    def joined(self) -> bool:
        """Whether somebody has come into this view who needs weights of another."""
        return self.view.number > 0 and set(self.view.members) != set(self.coming.heirs)

    def leave(self, called: dict[int, int]) -> None:
        """Take part in no further view: this worker's loop has ended after so many merges of each group."""
        self._calls.away = True
        self._goodbye = pack(LEFT, self.record.line, sorted(called.items()))
        for peer in self.fabric.others:
            self.fabric.post(peer, VIEW, note=self._goodbye)

    def look(self) -> None:
        """Act on who is there now."""
        if not self.over.done() and not self.intact():
            self._halt()
        if not self._calls.away:
            self._reach.tell(self._leader(), self._news())
            self._woken.set()

    def intact(self) -> bool:
        """Whether all members of the present view are there, and will do the merge under way."""
        group, number, members = self.under_way or (0, 0, ())
        for peer, epoch in self._epochs.items():
            if not self.fabric.reaches(peer) or self.fabric.epoch(peer) != epoch:
                return False
            if peer in self._left:
                line, called = self._left[peer]
                lacks = peer in members and (line != self.record.line or called.get(group, 0) < number)
                if lacks or (peer == self.source and not self.whole):
                    return False
        return True

    # -- who leads --

    def _candidates(self) -> list[int]:
        takes_part = self._reach.sees.keys() - self._refused.keys() - self._left.keys() | {self.rank}
        return [peer for peer in self.fabric.members if peer in takes_part]

    def _leader(self) -> int:
        return self._candidates()[0]

    def _chosen(self) -> tuple[int, ...]:
        return self._reach.choose(self._candidates(), self.view.members, self.look)

    def _due(self) -> tuple[int, ...]:
        """Whom to call; nobody, if another leads, or the view is as it should be."""
        if self._calls.away or self._leader() != self.rank:
            return ()
        known = self._reach.sees.keys() | self._left.keys()
        if self.record.line < 0 and not known.issuperset(self.fabric.others):
            return ()  # a newborn leads nobody before it has heard who has weights
        want = self._chosen()
        stays = set(self.view.members) - self._left.keys() == set(want)
        return () if stays and not self.over.done() and not self._wanted else want

    async def _lead(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while not self._calls.busy and (members := self._due()):
                for peer in set(self._candidates()) - set(members):
                    self.fabric.post(peer, VIEW, note=(REFUSE,))
                refusal = await self._calls.call(members, self._conclude)
                if refusal is None:
                    self._unwilling.clear()
                    break
                now_s = asyncio.get_running_loop().time()
                if refusal.why == MOVING and now_s > self._unwilling.setdefault(refusal.who, now_s) + GRACE_S:
                    self._refused[refusal.who] = True
                elif refusal.why == AWAY:
                    self._left[refusal.who] = (-1, {})
                await asyncio.sleep(RETRY_S * (1 + self.rank / self.fabric.world_size))

    def _conclude(self, said: dict[int, Message]) -> Note | None:
        """Make the record of the new view of what all have said, and who copies whose weights in it."""
        if set(self._due()) != set(said):
            return None  # others have come meanwhile
        read = partial(Record.of, self.fabric.world_size)
        answers = {peer: answer.read((int, *RECORD), read) for peer, answer in said.items()}
        heirs = main_line(answers)
        counted: Counter[int] = Counter()
        for peer in heirs:
            counted |= Counter(answers[peer].counted)
        parents = sorted({answers[peer].line for peer in heirs})
        copies = [(peer, self._donor(peer, heirs)) for peer in sorted(said) if peer not in heirs]
        return pack(parents, list(heirs), sorted(counted.items()), copies)

    # -- each member --

    async def _stop(self, merge: Merge) -> None:
        """Let nothing more count in the old view, and say what has."""
        self._refused.pop(merge.caller, None)
        self._reach.sees.setdefault(merge.caller, range(self.fabric.world_size))
        if self._leader() != merge.caller or merge.number >= STAMPS:
            raise NotNow
        for peer in merge.members:
            self.fabric.need(peer)
        self._calls.number = max(self._calls.number, merge.number)
        self._epochs = {peer: self.fabric.epoch(peer) for peer in merge.members}
        self._halt()
        now = self.record
        merge.says = pack(now.line, list(now.parents), list(now.heirs), sorted(now.counted.items()))

    def _halt(self) -> None:
        self.open.clear()
        if not self.over.done():
            self.over.set_result(None)

    def _decided(self, merge: Merge, outcome: str) -> None:
        if outcome == "done" and not self._calls.away:
            with contextlib.suppress(PeerLost):
                self._install(merge, *merge.verdict.read((*RECORD, PAIRS), partial(self._new, merge)))
        self.look()

    def _new(self, merge: Merge, words: Sequence[Any]) -> tuple[Record, dict[int, int]]:
        """The record of a new view, and who copies whose weights in it; ValueError if that cannot be."""
        _, *record, copies = words
        size, copied = self.fabric.world_size, pairs(copies)
        new = Record.of(size, (merge.number * size + merge.caller, *record))
        members, heirs = set(merge.members), set(new.heirs)
        if not heirs <= members or copied.keys() != members - heirs or not heirs.issuperset(copied.values()):
            raise ValueError("copies that nobody needs, or can give")
        return new, copied

    def _install(self, merge: Merge, new: Record, copies: dict[int, int]) -> None:
        self.view, self.coming = View(new.line, merge.members), new
        self.owed = [joiner for joiner, donor in copies.items() if donor == self.rank]
        self.whole = self.rank in new.heirs
        self.source = copies.get(self.rank, -1)
        if self.whole:
            self.record = new
        self._wanted = False
        self.over = asyncio.get_running_loop().create_future()
        self.open.set()
        self.fabric.notice("view", None, str(self.view))

    # -- what is said --

    async def _watch(self) -> None:
        while True:
            self.look()
            await self.fabric.changed()
            for peer in self._refused:  # whoever could not be with us may be able to now
                self._reach.told.pop(peer, None)
            self._refused.clear()

    def _news(self) -> Note:
        lacks_view = self.over.done() and not self._calls.busy
        return (SEE, lacks_view, self.view.number, *self.fabric.members)

    def _listen(self, message: Message) -> None:
        try:
            self._hear(message.sender, *message.numbers(1))
        except ValueError:
            raise message.bad("what makes no sense") from None
        finally:
            self.look()

    def _hear(self, sender: int, kind: int, *words: int) -> None:
        """Take in what another says; ValueError if it cannot be so."""
        size = self.fabric.world_size
        if kind == SEE:
            lacks_view, number, *reach = words
            self._reach.sees[sender] = ranks(reach, size)
            self._refused.pop(sender, None)
            self._calls.number = max(self._calls.number, min(number // size, STAMPS))
            if self._calls.away:
                self.fabric.post(sender, VIEW, note=self._goodbye)
            elif lacks_view:
                epoch = self.fabric.epoch(sender)
                asyncio.get_running_loop().call_later(GRACE_S, self._send_off, sender, epoch)
                self._wanted |= number == self.view.number and sender in self.view.members
        elif kind == REFUSE:
            if self.over.done() or sender not in self.view.members:
                self._refused[sender] = True
        elif kind == LEFT:
            line, called = read_all((int, PAIRS), iter(words))
            self._left[sender] = (line, pairs(called))
        else:
            raise ValueError(f"a word of kind {kind}")

    def _send_off(self, peer: int, epoch: int) -> None:
        """Tell a worker not to wait for this one, unless they will be in one view."""
        apart = self._leader() != self.rank or peer not in self._chosen()
        if apart and epoch == self.fabric.epoch(peer) and peer not in self._epochs:
            self.fabric.post(peer, VIEW, note=(REFUSE,))


@dataclass(eq=False)
class Merges:
    """One worker's merges, one at a time, from view to view."""

    views: Views
    give: Callable[[], Awaitable[tuple[Tensor, Note]]]
    take: Callable[[Message], Awaitable[None]]
    count: Callable[[str, Sequence[int]], None]
    _called: dict[int, int] = field(default_factory=dict)  # see `called`, of the view of this line
    _line: int = 0

    @property
    def called(self) -> dict[int, int]:
        """The last merge of each group that was begun in the present view."""
        return self._called if self._line == self.views.record.line else {}

    async def merge(
        self, act: Callable[[Merge], Awaitable[T]], group: Callable[[View], Group] | None = None
    ) -> T:
        """Do something with all members of the view, or of a group of it, as often as it takes to count."""
        while True:
            merge = await self.attempt(act, group)
            if merge is not None and merge.counts:
                result: T = merge.result
                return result

    async def attempt(self, act: Act, group: Callable[[View], Group | None] | None = None) -> Merge | None:
        """Try once; None, if `group` finds nobody to do it with."""
        views = self.views
        views.begin(range(self.views.fabric.world_size))
        await self.enter()
        whose = group(views.view) if group else (EVERYBODY, views.view.members)
        if whose is None:
            return None
        number = views.record.counted.get(whose[0], 0) + 1
        tag: Tag = ("merge", views.record.line, whose[0], number)
        merge = Merge(views.fabric, views.view, whose, number, tag)
        self._called, self._line = {**self.called, merge.group: number}, views.record.line
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
        self.count("done" if merge.counts else "dropped", merge.members)
        return merge

    async def enter(self) -> None:
        """Wait for a view; get the weights to begin it with, or hand them out."""
        views = self.views
        while True:
            await views.open.wait()
            if views.whole or await self._unless_over(views.over, self._copy(views.source, views.coming)):
                break
        while views.owed:
            vector, note = await self.give()
            views.fabric.post(views.owed.pop(), (*COPY, views.record.line), vector, note)

    async def _copy(self, source: int, coming: Record) -> bool:
        tag: Tag = (*COPY, coming.line)
        try:
            message = await self.views.fabric.receive(tag, source)
        finally:
            self.views.fabric.forget(tag)
        await self.take(message)
        self.views.record, self.views.whole = self.views.coming, True
        return True

    async def _try(self, act: Act, merge: Merge, over: asyncio.Future[None]) -> bool:
        merge.result = await act(merge)
        merge.done, fabric = True, self.views.fabric
        have, commit = (*merge.tag, "have"), (*merge.tag, "commit")
        first, *others = merge.members
        if fabric.rank == first:
            for peer in others:
                await fabric.receive(have, peer)
        else:
            fabric.post(first, have)
            await fabric.receive(commit, first)
        if over.done():  # another view was promised in the same moment
            return False
        if fabric.rank == first:
            for peer in others:
                fabric.post(peer, commit)
        self.views.record.counted[merge.group] = merge.number
        return True

    async def _unless_over(self, over: asyncio.Future[None], work: Coroutine[Any, Any, bool]) -> bool:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not isinstance(task.exception(), PeerLost):
                return task.result()
            await asyncio.wait((over,))  # a peer was lost, so the view will end
            return False
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
