"""Views: which workers go on together, agreed among themselves; no store is asked.

A view is a stamp and its members. All begin in view 0 with everybody. When a member is lost, or somebody
comes, the lowest rank within reach leads:

    leader                            the others
      propose(stamp, members)  ---->  stop what is done together, from now on nothing counts in the old view
                               <----  yes, with what has counted so far and in which view; or a refusal
      install(stamp, members)  ---->  go on in the new view, with the same record of what has counted

If one is lost meanwhile, or somebody's answer names more workers, the leader proposes again with a higher
stamp. A stamp is number × world size + leader, so no two leaders use the same.

Two sides of a cut each form a view and go on. When they meet again, the larger side (of equals the one with
the lowest rank) is the main line: its members keep their weights, the others copy one of theirs. To be on the
main line is to have been in the view it comes from, whether or not one has heard of the last install.

A worker may be asked by a leader while it still sees a lower rank, because it notices a loss a little later.
It answers when it sees the same leader, or refuses after a moment (GRACE_S). Of two members that cannot reach
each other, though the leader reaches both, one is left out; it goes on by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from freewheel.fabric.base import Fabric, Message, Note, Spawn, Tag, hear
from freewheel.fabric.lineage import PAIRS, RECORD, Record, View, check_stamp, donors, main_line, pairs, ranks
from freewheel.fabric.notes import pack, read_all

VIEW: Tag = ("view",)
SEE, PROPOSE, ANSWER, INSTALL, REFUSE, LEFT = range(6)
YES, LATE, ELSEWHERE, GONE = range(4)
NOTHING, BROKEN, HOMELESS = range(3)
GRACE_S = 0.5
"""How long workers may differ about who is there before it is believed."""


class Reach:
    """Who is there, takes part, and may be with this worker, by what each has said since it came."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.rank = fabric, fabric.rank
        self.heard, self.refused = fabric.by_peer(), fabric.by_peer()
        """Who takes part; who cannot be with this worker."""
        self.left = fabric.by_peer()
        """Whose loop has ended: in which line, after which merge of each group."""
        self.sees, self.told = fabric.by_peer(), fabric.by_peer()
        """Whom each reaches; what each was told last."""
        self._apart_since: dict[tuple[int, int], float] = {}

    def candidates(self) -> list[int]:
        """This worker and those within reach that take part and may be with it."""
        takes_part = self.heard.keys() - self.refused.keys() - self.left.keys() | {self.rank}
        return [peer for peer in self.fabric.members if peer in takes_part]

    def lead(self) -> int:
        """Who leads, as this worker sees it."""
        return self.candidates()[0]

    def tell(self, lead: int, news: Note) -> None:
        """Tell the leader what this worker sees, when that has changed; greet who is new."""
        for peer in self.fabric.others:
            if peer not in self.told or (peer == lead and self.told[peer] != news):
                self.told[peer] = news
                self.fabric.post(peer, VIEW, note=news)

    def choose(self, together: Sequence[int], look: Callable[[], None]) -> tuple[int, ...]:
        """Whom to propose as members: of two that cannot reach each other only one.

        Where both are `together` now, one of them may be lost, and this worker about to notice it: they get a
        moment, and `look` is called after it.
        """
        chosen = self.candidates()
        now, apart = asyncio.get_running_loop().time(), set()
        for peer in self.sees.keys() & set(chosen):
            apart |= {(min(peer, q), max(peer, q)) for q in chosen if q not in self.sees[peer]}
        self._apart_since = {pair: self._apart_since.get(pair, now) for pair in apart}
        for pair in list(apart):
            if set(pair) <= set(together) and now < self._apart_since[pair] + GRACE_S:
                apart.discard(pair)
                if self._apart_since[pair] == now:
                    asyncio.get_running_loop().call_later(GRACE_S, look)
        while apart:
            count = Counter(peer for pair in apart for peer in pair if peer != self.rank)
            out = max(count, key=lambda peer: (count[peer], peer))
            chosen.remove(out)
            apart = {pair for pair in apart if out not in pair}
        return tuple(chosen)


class Views:
    """One worker's part in the agreement. Everything happens in answer to a message or a change."""

    def __init__(self, fabric: Fabric, spawn: Spawn, donor: Callable[[int, Sequence[int]], int]) -> None:
        self.fabric, self.rank, self._spawn, self._donor = fabric, fabric.rank, spawn, donor
        self.reach = Reach(fabric)
        self.view = View(0, (self.rank,))
        self.record = Record(0, (), (self.rank,), (self.rank,), {})
        self.whole = True
        """Whether this worker has the main line's weights."""
        self.source = -1
        """Whose weights it copies, or has copied, to come into the present view."""
        self.owed: list[int] = []
        """Who waits for a copy of this worker's weights."""
        self.under_way: tuple[int, int, Sequence[int]] | None = None
        """What is being merged here: the group, its number, its members."""
        self.begun = self.gone = False
        self.coming = self.record
        """What this worker's record will be once it has copied."""
        self._number, self._promised = 0, 0
        self._epochs: dict[int, int] = {}
        """The members of the view that was promised last, each with the epoch it was in."""
        self._held: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._answers: dict[int, Record] | None = None
        """As leader: what the members of a view that is being formed have said so far."""
        self._wanted = False
        self._goodbye: Note = ()

    # -- for merges --

    def begin(self, members: Sequence[int], newborn: bool = False) -> None:
        """Take part, with those who begin together. A newborn has come into a run that went on without it."""
        if self.begun:
            return
        self.begun = True
        self.view = View(0, tuple(members))
        self.record = self.coming = Record(0, (), self.view.members, self.view.members, {})
        self._open = asyncio.Event()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the present view is over."""
        if newborn:
            self.record.line, self.record.heirs = -1, ()
            self.whole, self._promised = False, -1
            self.over.set_result(None)
        else:
            self._epochs = {peer: self.fabric.epoch(peer) for peer in self.view.members}
            self.reach.heard.update((peer, True) for peer in members if self.fabric.reaches(peer))
            self._open.set()
            self.reach.told.update(dict.fromkeys(self.fabric.members, self._news()))
        self._spawn(hear(self.fabric, VIEW, self._listen))
        self._spawn(self._watch())

    async def installed(self) -> None:
        """Wait for a view to go on in."""
        await self._open.wait()

    async def changed(self) -> None:
        """Wait for the view after the present one."""
        if self._open.is_set():
            await asyncio.shield(self.over)
        await self._open.wait()

    def leave(self, called: dict[int, int]) -> None:
        """Take part in no further view: this worker's loop has ended after so many merges of each group."""
        self.gone, self._answers = True, None
        self._goodbye = pack(LEFT, self.record.line, sorted(called.items()))
        for peer in self.fabric.others:
            self.fabric.post(peer, VIEW, note=self._goodbye)

    def look(self) -> None:
        """See who is there, and do what follows."""
        if not self.over.done() and not self.intact():
            self._halt()
        if self.gone:
            return
        lead = self.reach.lead()
        if lead in self._held:
            self._accept(lead, *self._held.pop(lead))
        if lead == self.rank:
            self._form()
        self.reach.tell(lead, self._news())

    def intact(self) -> bool:
        """Whether all who were promised a view together are there, and will do what is under way."""
        group, number, members = self.under_way or (0, 0, ())
        for peer, epoch in self._epochs.items():
            if peer not in self.fabric.members or self.fabric.epoch(peer) != epoch:
                return False
            if peer in self.reach.left:
                line, called = self.reach.left[peer]
                lacks = peer in members and (line != self.record.line or called.get(group, 0) < number)
                if lacks or (peer == self.source and not self.whole):
                    return False
        return True

    # -- who leads --

    def _form(self) -> None:
        """Propose a view, if one is due that is not being formed already."""
        known = self.reach.heard.keys() | self.reach.left.keys()
        if self.record.line < 0 and not known.issuperset(self.fabric.others):
            return  # a newborn leads nobody before it has heard who has weights
        want = self.reach.choose(self.view.members, self.look)
        epochs = {peer: self.fabric.epoch(peer) for peer in want}
        stays = set(self.view.members) - self.reach.left.keys() == set(want)
        if self._answers is not None:
            if self._epochs == epochs:
                return
        elif stays and not self.over.done() and not self._wanted:
            return
        self._wanted = False
        self._number += 1
        stamp = self._number * self.fabric.world_size + self.rank
        self._promise(stamp, want)
        self._answers = {self.rank: self.record}
        for peer in self.reach.candidates():
            if peer not in want:
                self.fabric.post(peer, VIEW, note=(REFUSE,))
            elif peer != self.rank:
                self.fabric.post(peer, VIEW, note=(PROPOSE, stamp, *want))
        self._decide()

    def _decide(self) -> None:
        """When all have said yes: who is on the main line, what has counted, who copies whom."""
        answers, members = self._answers, tuple(self._epochs)
        if answers is None or set(answers) != set(members):
            return
        self._answers = None
        heirs = main_line(answers)
        counted: Counter[int] = Counter()
        for peer in heirs:
            counted |= Counter(answers[peer].counted)
        parents = tuple(sorted({answers[peer].line for peer in heirs}))
        copies = {peer: self._donor(peer, heirs) for peer in members if peer not in heirs}
        new = Record(self._promised, parents, heirs, members, dict(counted))
        for peer in members:
            if peer != self.rank:
                note = (INSTALL, *new.pack(), *pack(sorted(copies.items())))
                self.fabric.post(peer, VIEW, note=note)
        self._install(new, copies)

    # -- what is said --

    def _listen(self, message: Message) -> None:
        try:
            kind, *words = message.numbers(1)
            self._hear(message.sender, kind, tuple(words))
        except (ValueError, IndexError):
            raise message.bad("what makes no sense") from None
        finally:
            self.look()

    def _hear(self, sender: int, kind: int, words: tuple[int, ...]) -> None:
        """What another says; ValueError or IndexError if it cannot be so."""
        world_size = self.fabric.world_size
        if kind == INSTALL:
            *record, copies = read_all((*RECORD, PAIRS), iter(words))
            new = Record.of(record, world_size)
            check_stamp(new.line, sender, world_size)
            self._install(new, donors(copies, new))
        elif kind == ANSWER:
            stamp, code, number, *record = read_all((int, int, int, *RECORD), iter(words))
            check_stamp(number * world_size + sender, sender, world_size)
            if code not in (YES, LATE, ELSEWHERE, GONE):
                raise ValueError(f"an answer {code}")
            self._answered(sender, stamp, code, number, Record.of(record, world_size))
        elif kind == SEE:
            need, promised, *reach = words
            self._seen(sender, need, promised, ranks(reach, world_size))
        elif kind == PROPOSE:
            check_stamp(words[0], sender, world_size)
            members = ranks(words[1:], world_size)
            if self.rank not in members or sender not in members:
                raise ValueError("a view without those who speak of it")
            self._proposed(sender, words[0], members)
        elif kind == REFUSE:
            if self.over.done() or sender not in self.view.members:
                self.reach.refused[sender] = True
        elif kind == LEFT:
            line, called = read_all((int, PAIRS), iter(words))
            self.reach.left[sender] = (line, pairs(called))
        else:
            raise ValueError(f"a word of kind {kind}")

    async def _watch(self) -> None:
        while True:
            self.look()
            await self.fabric.changed()
            for peer in self.reach.refused:  # whoever could not be with us may be able to now
                self.reach.told.pop(peer, None)
            self.reach.refused.clear()

    def _news(self) -> Note:
        over = self.over.done()
        broken = not self.intact() or (over and self.coming.line == self._promised)
        need = BROKEN if broken else HOMELESS if over else NOTHING
        return (SEE, need, self._promised, *self.fabric.members)

    def _seen(self, sender: int, need: int, promised: int, reach: tuple[int, ...]) -> None:
        self.reach.heard[sender], self.reach.sees[sender] = True, reach
        self.reach.refused.pop(sender, None)
        if self.gone:
            self.fabric.post(sender, VIEW, note=self._goodbye)
        elif need != NOTHING:
            epoch = self.fabric.epoch(sender)
            asyncio.get_running_loop().call_later(GRACE_S, self._send_off, sender, epoch)
            if need == BROKEN and promised == self._promised and set(self.reach.candidates()) <= set(reach):
                self._wanted = True  # else the view is about to change, or the two it names are apart

    def _send_off(self, peer: int, epoch: int) -> None:
        """Let a worker not wait for this one, unless they will be in one view."""
        apart = self.reach.lead() != self.rank or peer not in self.reach.choose(self.view.members, self.look)
        if apart and epoch == self.fabric.epoch(peer) and peer not in self._epochs:
            self.fabric.post(peer, VIEW, note=(REFUSE,))

    def _proposed(self, sender: int, stamp: int, members: tuple[int, ...]) -> None:
        self.reach.heard[sender] = True
        self.reach.refused.pop(sender, None)
        self._number = max(self._number, stamp // self.fabric.world_size)
        if self.gone:
            self._answer(sender, stamp, GONE)
        elif self.reach.lead() == sender:
            self._held.pop(sender, None)
            self._accept(sender, stamp, members)
        else:
            self._held[sender] = (stamp, members)
            asyncio.get_running_loop().call_later(GRACE_S, self._hold_no_longer, sender, stamp)

    def _hold_no_longer(self, sender: int, stamp: int) -> None:
        if self._held.get(sender, (None,))[0] == stamp:
            del self._held[sender]
            self._answer(sender, stamp, ELSEWHERE)

    def _accept(self, sender: int, stamp: int, members: tuple[int, ...]) -> None:
        if stamp <= self._promised:
            self._answer(sender, stamp, LATE)
            return
        self._promise(stamp, members)
        self._answer(sender, stamp, YES)

    def _answer(self, peer: int, stamp: int, code: int) -> None:
        note = (ANSWER, stamp, code, self._number, *self.record.pack())
        self.fabric.post(peer, VIEW, note=note)

    def _answered(self, sender: int, stamp: int, code: int, number: int, answer: Record) -> None:
        if self._answers is None or stamp != self._promised:
            return
        self._number = max(self._number, number)
        if code == YES:
            self._answers[sender] = answer
            for peer in answer.members:  # who was with it is asked too, but for one that has been lost
                if not self.fabric.epoch(peer):
                    self.reach.heard[peer] = True
            self._form()
            self._decide()
            return
        self._answers = None
        if code == ELSEWHERE:
            self.reach.refused[sender] = True
        elif code == GONE:
            self.reach.left[sender] = (-1, {})

    # -- from view to view --

    def _halt(self) -> None:
        """The present view is over."""
        self._open.clear()
        if not self.over.done():
            self.over.set_result(None)

    def _promise(self, stamp: int, members: Iterable[int]) -> None:
        """Let nothing more count in the old view."""
        self._promised, self._answers = stamp, None
        self._epochs = {peer: self.fabric.epoch(peer) for peer in members}
        self._halt()

    def _install(self, new: Record, copies: dict[int, int]) -> None:
        if self.rank not in new.members:
            raise ValueError("a view without who is told of it")
        if new.line != self._promised or self.gone:
            return
        self.view, self.coming = View(new.line, new.members), new
        self.record.members = new.members
        self.owed = [joiner for joiner, donor in copies.items() if donor == self.rank]
        self.whole = self.rank in new.heirs
        self.source = copies.get(self.rank, -1)
        if self.whole:
            self.record = self.coming
        self._wanted = False
        self.over = asyncio.get_running_loop().create_future()
        self._open.set()
        self.fabric.notice("view", None, str(self.view))
