"""Merges on call: a worker calls some, who take part wherever they are; it counts for all or for none.

    who calls                       each member, the caller too
      call(number, members)  ---->    does it: a snapshot, a reduction, or stops and says how far it was
                             <----    has it; or not: it is busy, has lost another, moves, or is away
      commit, or drop        ---->    it counts, or does not

A member takes part in one call at a time. Of two callers the one of lower rank goes first, unless the member
has told the other that it has the result: then that one decides. So two reductions never wait for each other.
The gap that is left: a caller that is lost while it says "commit". Who has the result and hears no verdict
counts the merge as half.

Free merges run at any time: any worker asks for one, and all take part wherever they are in their step.

    who has something to merge         the worker of lowest rank
      want(last merge it knows)   --->   calls all, unless there was a merge since
                                  <---   over: the number of the last one, and whether who asked was in it

Of two workers that do not reach each other only one is called; nor is one whose weights were found moving for
long, until it asks again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from freewheel.errors import PeerLost
from freewheel.fabric.base import Fabric, Message, Note, NotNow, Spawn, Tag, hear
from freewheel.fabric.merges import EVERYBODY, Merge, View

HAVE, BUSY, MOVING, AWAY = range(4)
DROP, COMMIT = range(2)
WANT: Tag = ("merge", "want")
REACH: Tag = ("merge", "reach")
GRACE_S = 0.5  # how long workers may differ about who is within reach
Act: TypeAlias = Callable[[Merge], Awaitable[Any]]  # what all do; it may raise PeerLost or NotNow
Decided: TypeAlias = Callable[[Merge, str], None]  # hears that it is done, dropped or half
# Makes of what all have said with "has it" what the caller says with "commit"; None: it drops it.
Conclude: TypeAlias = Callable[[dict[int, Message]], Note | None]


class Refusal(NamedTuple):
    """Why a call came to nothing: who did not have the result, and why not."""

    who: int
    why: int


class Calls:
    """One worker's part in calls of one kind: its own, and the others'."""

    def __init__(
        self, fabric: Fabric, spawn: Spawn, tag: Tag, act: Act, decided: Decided, most_s: float | None = None
    ) -> None:
        self.fabric, self.spawn, self.tag = fabric, spawn, tag
        self._act, self._decided, self._most_s = act, decided, most_s
        self.number = fabric.life << 20  # of this worker's last call: no life of it repeats another's
        self._under_way: Merge | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.away = False  # whether this worker takes part in nothing

    def serve(self) -> None:
        self.spawn(hear(self.fabric, self.tag, self._called))

    @property
    def busy(self) -> bool:
        return self._under_way is not None

    def _tags(self, caller: int, number: int) -> tuple[Tag, Tag]:
        """Of the answers to the caller; and of its verdict, with which all other tags of the call begin."""
        return (*self.tag, "have", caller, number), (*self.tag, caller, number)

    # -- who calls --

    async def call(self, members: Sequence[int], conclude: Conclude = lambda said: ()) -> Refusal | None:
        """Call some workers, this one included; None: it counts."""
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
        merge = Merge(self.fabric, View(number, tuple(members)), (EVERYBODY, members), number, tag)
        merge.caller, before = caller, self._under_way
        if self.away or (before is not None and (before.done or before.caller <= caller)):
            self.fabric.post(caller, have, note=(AWAY if self.away else BUSY,))
            merge.forget()
            return
        if before is not None:
            self._end(before, "dropped")
            # Its task says so, too, but not where it has not begun.
            self.fabric.post(before.caller, self._tags(before.caller, before.number)[0], note=(BUSY,))
        self._under_way = merge
        self._tasks = [self.spawn(self._do(merge, have)), self.spawn(self._await_verdict(call, merge))]

    async def _do(self, merge: Merge, have: Tag) -> None:
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
                self.fabric.post(merge.caller, have, note=(why, *merge.says))

    async def _await_verdict(self, call: Message, merge: Merge) -> None:
        outcome = "dropped"
        try:
            async with asyncio.timeout(self._most_s):
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


class Reach:
    """Who reaches whom: each worker tells the leader whom it reaches, and the leader chooses whom to call."""

    def __init__(self, fabric: Fabric, tag: Tag) -> None:
        self.fabric, self._tag = fabric, tag
        self.sees = fabric.by_peer()  # whom each reaches
        self.told = fabric.by_peer()  # what each was told last
        self._apart_since: dict[tuple[int, int], float] = {}

    def tell(self, lead: int, news: Note) -> None:
        """Tell the leader what has changed, and newcomers everything."""
        for peer in self.fabric.others:
            if peer not in self.told or (peer == lead and self.told[peer] != news):
                self.told[peer] = news
                self.fabric.post(peer, self._tag, note=news)

    def choose(
        self, among: Sequence[int], together: Sequence[int] = (), look: Callable[[], None] = lambda: None
    ) -> tuple[int, ...]:
        """Whom to call: of two that cannot reach each other only one.

        If both are in `together`, one may just have been lost, unnoticed here: for GRACE_S neither is left
        out, and then `look` is called.
        """
        chosen, loop = list(among), asyncio.get_running_loop()
        now_s = loop.time()
        unseen = {p: set(chosen).difference(self.sees.get(p, among)) for p in chosen}
        apart = {(min(p, q), max(p, q)) for p in chosen for q in unseen[p]}
        self._apart_since = {pair: self._apart_since.get(pair, now_s) for pair in apart}
        for pair, since_s in self._apart_since.items():
            if set(pair) <= set(together) and now_s < since_s + GRACE_S:
                apart.discard(pair)
                if since_s == now_s:
                    loop.call_later(GRACE_S, look)
        while apart:
            count = Counter(peer for pair in apart for peer in pair if peer != self.fabric.rank)
            out = max(count, key=lambda peer: (count[peer], peer))
            chosen.remove(out)
            apart = {pair for pair in apart if out not in pair}
        return tuple(chosen)


class FreeMerges(Calls):
    """One worker's part in merges that anybody may ask for."""

    def __init__(self, fabric: Fabric, spawn: Spawn, act: Act, decided: Decided) -> None:
        super().__init__(fabric, spawn, ("merge", "call"), act, self._over)
        self._tell, self._known = decided, self.number
        self._news = asyncio.Event()  # a merge counted here, or a worker came or went
        self._reach = Reach(fabric, REACH)
        self._moving: set[int] = set()  # as leader: whose weights were found moving, until they ask again

    def serve(self) -> None:
        super().serve()
        self.spawn(hear(self.fabric, WANT, self._wanted))
        self.spawn(hear(self.fabric, REACH, self._reached))
        self.spawn(self._watch())

    async def ask(self) -> bool:
        """Ask for a merge after the last one known here; return when it is over.

        False: this worker was not in it, and will be in none until workers come or go.
        """
        try:
            answer = await self.fabric.ask(self.fabric.members[0], WANT, note=(self._known,))
            self._known, useful = answer.numbers(2, 2)
        except PeerLost:
            return True  # there is another leader to ask
        return bool(useful)

    async def ask_until(self, enough: Callable[[], bool]) -> None:
        """Ask until `enough`; where asking again changes nothing, wait for news first."""
        while not enough():
            self._news.clear()
            if not await self.ask() and not enough():
                await self._news.wait()

    def _over(self, merge: Merge, outcome: str) -> None:
        self._tell(merge, outcome)
        if outcome == "done":
            self._news.set()

    def _reached(self, news: Message) -> None:
        self._reach.sees[news.sender] = news.numbers(1)

    async def _watch(self) -> None:
        if len(self.fabric.members) == self.fabric.world_size:  # all know it already
            self._reach.told.update(dict.fromkeys(self.fabric.members, self.fabric.members))
        while True:
            self._reach.tell(self.fabric.members[0], self.fabric.members)
            await self.fabric.changed()
            self._news.set()

    async def _wanted(self, want: Message) -> None:
        asked, known = want.numbers(2, 2)
        self._moving.discard(want.sender)
        useful = leads = self.fabric.members[0] == self.fabric.rank
        # Who asks without knowing of the last merge may be in it: it looks again first.
        if leads and known == self.number:
            members = self._reach.choose([peer for peer in self.fabric.members if peer not in self._moving])
            useful = want.sender in members
            refusal = await self.call(members)
            if refusal is not None and refusal.why == MOVING:
                self._moving.add(refusal.who)
        self.fabric.post(want.sender, (*WANT, asked), note=(self.number, useful))
