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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from freewheel.fabric.base import Fabric, Message, Note, Tag, hear
from freewheel.fabric.lineage import Record, View, flat, main_line, pack, pairs, unpack

VIEW: Tag = ("view",)
SEE, PROPOSE, ANSWER, INSTALL, REFUSE, LEFT = range(6)
YES, LATE, ELSEWHERE, GONE = range(4)
NOTHING, BROKEN, HOMELESS = range(3)
STAMPS, GROUPS = 2**40, 4096
"""Views of a run, and groups that merge, of which there are never so many."""
GRACE_S = 0.5
"""How long workers may differ about who is there before it is believed."""


@dataclass
class Forming:
    """A view that is being formed."""

    stamp: int
    members: tuple[int, ...]
    epochs: dict[int, int]
    answers: dict[int, Record] = field(default_factory=dict)


class Views:
    """One worker's part in the agreement. Everything happens in answer to a message or a change."""

    def __init__(
        self,
        fabric: Fabric,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        donor: Callable[[int, Sequence[int]], int],
    ) -> None:
        self.fabric, self.rank, self._spawn, self._donor = fabric, fabric.rank, spawn, donor
        self.view = View(0, (self.rank,))
        self.record = Record(0, (), (self.rank,), (self.rank,), {})
        self.whole = True
        """Whether this worker has the main line's weights."""
        self.source = -1
        """Whose weights it copies where it has not."""
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
        self._heard: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._left: dict[int, tuple[int, int, dict[int, int]]] = {}
        """Whose loop has ended: in which epoch, in which line, after which merge of each group."""
        self._sees: dict[int, tuple[int, frozenset[int]]] = {}
        self._told: dict[int, tuple[int, Note]] = {}
        self._held: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._apart_since: dict[tuple[int, int], float] = {}
        self._forming: Forming | None = None
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
            self._heard = {peer: epoch for peer, epoch in self._epochs.items() if peer in self.fabric.members}
            self._open.set()
            told = self._news()
            self._told = {peer: (self.fabric.epoch(peer), told) for peer in self.fabric.members}
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

    def adopt(self) -> None:
        """This worker has copied the main line's weights."""
        self.record, self.whole = self.coming, True

    def leave(self, called: dict[int, int]) -> None:
        """Take part in no further view: this worker's loop has ended after so many merges of each group."""
        self.gone, self._forming = True, None
        self._goodbye = (LEFT, self.record.line, *flat(called))
        for peer in self._others():
            self.fabric.post(peer, VIEW, note=self._goodbye)

    def look(self) -> None:
        """See who is there, and do what follows."""
        if not self.over.done() and not self.intact():
            self._halt()
        if self.gone:
            return
        lead = self._lead()
        if lead in self._held:
            self._accept(lead, *self._held.pop(lead))
        if lead == self.rank:
            self._form()
        self._tell(lead)

    def intact(self) -> bool:
        """Whether all who were promised a view together are there, and will do what is under way."""
        group, number, members = self.under_way or (0, 0, ())
        for peer, epoch in self._epochs.items():
            if peer not in self.fabric.members or self.fabric.epoch(peer) != epoch:
                return False
            if self._has_left(peer):
                _, line, called = self._left[peer]
                lacks = peer in members and (line != self.record.line or called.get(group, 0) < number)
                if lacks or (peer == self.source and not self.whole):
                    return False
        return True

    # -- who leads --

    def _others(self) -> list[int]:
        return [peer for peer in self.fabric.members if peer != self.rank]

    def _in_epoch(self, record: dict[int, int], peer: int) -> bool:
        return record.get(peer) == self.fabric.epoch(peer)

    def _has_left(self, peer: int) -> bool:
        return peer in self._left and self._left[peer][0] == self.fabric.epoch(peer)

    def _candidates(self) -> list[int]:
        """This worker and those within reach that take part and may be with it."""
        return [
            peer
            for peer in self.fabric.members
            if peer == self.rank
            or (
                self._in_epoch(self._heard, peer)
                and not self._in_epoch(self._refused, peer)
                and not self._has_left(peer)
            )
        ]

    def _lead(self) -> int:
        return self._candidates()[0]

    def _choose(self) -> tuple[int, ...]:
        """Whom to propose as members: of two that cannot reach each other only one."""
        chosen = self._candidates()
        now, apart = asyncio.get_running_loop().time(), set()
        for peer in chosen:
            epoch, sees = self._sees.get(peer, (-1, frozenset()))
            if epoch == self.fabric.epoch(peer):
                apart |= {(min(peer, q), max(peer, q)) for q in chosen if q not in sees}
        self._apart_since = {pair: self._apart_since.get(pair, now) for pair in apart}
        for pair in list(apart):
            if set(pair) <= set(self.view.members) and now < self._apart_since[pair] + GRACE_S:
                apart.discard(pair)  # one of them may be lost, and this worker about to notice it
                if self._apart_since[pair] == now:
                    asyncio.get_running_loop().call_later(GRACE_S, self.look)
        while apart:
            count = Counter(peer for pair in apart for peer in pair if peer != self.rank)
            out = max(count, key=lambda peer: (count[peer], peer))
            chosen.remove(out)
            apart = {pair for pair in apart if out not in pair}
        return tuple(chosen)

    def _form(self) -> None:
        """Propose a view, if one is due that is not being formed already."""
        unheard = [peer for peer in self._others() if peer not in self._heard and peer not in self._left]
        if self.record.line < 0 and unheard:
            return  # a newborn leads nobody before it has heard who has weights
        want = self._choose()
        epochs = {peer: self.fabric.epoch(peer) for peer in want}
        if self._forming is not None:
            if (self._forming.members, self._forming.epochs) == (want, epochs):
                return
        elif not self.over.done() and not self._wanted:
            stay = {peer for peer in self.view.members if not self._has_left(peer)}
            if stay == set(want):
                return
        self._wanted = False
        self._number += 1
        stamp = self._number * self.fabric.world_size + self.rank
        self._forming = Forming(stamp, want, epochs, {self.rank: self.record})
        self._promise(stamp, want)
        for peer in self._candidates():
            if peer not in want:
                self.fabric.post(peer, VIEW, note=(REFUSE,))
            elif peer != self.rank:
                self.fabric.post(peer, VIEW, note=(PROPOSE, stamp, *want))
        self._decide()

    def _decide(self) -> None:
        """When all have said yes: who is on the main line, what has counted, who copies whom."""
        forming = self._forming
        if forming is None or set(forming.answers) != set(forming.members):
            return
        self._forming, answers = None, forming.answers
        heirs = main_line(answers)
        counted: Counter[int] = Counter()
        for peer in heirs:
            counted |= Counter(answers[peer].counted)
        parents = sorted({answers[peer].line for peer in heirs})
        copies = [(peer, self._donor(peer, heirs)) for peer in forming.members if peer not in heirs]
        note = pack(forming.members, heirs, parents, flat(counted), [k for pair in copies for k in pair])
        for peer in forming.members:
            if peer != self.rank:
                self.fabric.post(peer, VIEW, note=(INSTALL, forming.stamp, *note))
        self._install(forming.stamp, note)

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
        if kind == INSTALL:
            self._check_stamp(words[0], sender)
            self._check_install(words[1:])
            self._install(words[0], words[1:])
        elif kind == ANSWER:
            stamp, code, number, *record = words
            self._check_stamp(number * self.fabric.world_size + sender, sender)
            self._check_record(tuple(record))
            if code not in (YES, LATE, ELSEWHERE, GONE):
                raise ValueError(f"an answer {code}")
            self._answered(sender, stamp, code, number, tuple(record))
        elif kind == SEE:
            need, promised, *reach = words
            self._seen(sender, need, promised, self._ranks(reach))
        elif kind == PROPOSE:
            self._check_stamp(words[0], sender)
            members = self._ranks(words[1:])
            if self.rank not in members or sender not in members:
                raise ValueError("a view without those who speak of it")
            self._proposed(sender, words[0], members)
        elif kind == REFUSE:
            self._sent_off(sender)
        elif kind == LEFT:
            self._left[sender] = (self.fabric.epoch(sender), words[0], pairs(words[1:]))
        else:
            raise ValueError(f"a word of kind {kind}")

    def _ranks(self, given: Sequence[int]) -> tuple[int, ...]:
        """Ranks of this run, in order and each once."""
        if list(given) != sorted(set(given)) or any(not 0 <= k < self.fabric.world_size for k in given):
            raise ValueError("workers that cannot be")
        return tuple(given)

    def _check_stamp(self, stamp: int, leader: int) -> None:
        number, whose = divmod(stamp, self.fabric.world_size)
        if whose != leader or not 0 <= number < STAMPS:
            raise ValueError("the stamp of another")

    def _check_record(self, note: Note) -> None:
        record = Record.unpack(note)
        self._ranks(record.heirs)
        self._ranks(record.members)
        if len(record.counted) > GROUPS:
            raise ValueError("more groups than there can be")

    def _check_install(self, note: Note) -> None:
        members, heirs, _, counted, copies = unpack(note)
        self._ranks(members)
        self._ranks(heirs)
        joiners = pairs(copies)
        if self.rank not in members or not set(heirs) <= set(members) or len(counted) > 2 * GROUPS:
            raise ValueError("a view that cannot be")
        if set(joiners) != set(members) - set(heirs) or not set(joiners.values()) <= set(heirs):
            raise ValueError("copies that nobody needs, or can give")

    async def _watch(self) -> None:
        while True:
            self.look()
            await self.fabric.changed()
            for peer in self._refused:  # whoever could not be with us may be able to now
                self._told.pop(peer, None)
            self._refused.clear()

    def _news(self) -> Note:
        over = self.over.done()
        broken = not self.intact() or (over and self.coming.line == self._promised)
        need = BROKEN if broken else HOMELESS if over else NOTHING
        return (SEE, need, self._promised, *self.fabric.members)

    def _tell(self, lead: int) -> None:
        """Tell the leader what this worker sees, when that has changed; greet who is new."""
        news = self._news()
        for peer in self._others():
            epoch, told = self._told.get(peer, (-1, ()))
            if epoch != self.fabric.epoch(peer) or (peer == lead and told != news):
                self._told[peer] = (self.fabric.epoch(peer), news)
                self.fabric.post(peer, VIEW, note=news)

    def _seen(self, sender: int, need: int, promised: int, reach: tuple[int, ...]) -> None:
        self._heard[sender] = epoch = self.fabric.epoch(sender)
        self._sees[sender] = (epoch, frozenset(reach))
        self._refused.pop(sender, None)
        if self.gone:
            self.fabric.post(sender, VIEW, note=self._goodbye)
        elif need != NOTHING:
            asyncio.get_running_loop().call_later(GRACE_S, self._send_off, sender, epoch)
            if need == BROKEN and promised == self._promised and set(self._candidates()) <= set(reach):
                self._wanted = True  # else the view is about to change, or the two it names are apart

    def _send_off(self, peer: int, epoch: int) -> None:
        """Let a worker not wait for this one, unless they will be in one view."""
        apart = self._lead() != self.rank or peer not in self._choose()
        if apart and epoch == self.fabric.epoch(peer) and peer not in self._epochs:
            self.fabric.post(peer, VIEW, note=(REFUSE,))

    def _sent_off(self, sender: int) -> None:
        if self.over.done() or sender not in self.view.members:
            self._refused[sender] = self.fabric.epoch(sender)

    def _proposed(self, sender: int, stamp: int, members: tuple[int, ...]) -> None:
        self._heard[sender] = self.fabric.epoch(sender)
        self._refused.pop(sender, None)
        self._number = max(self._number, stamp // self.fabric.world_size)
        if self.gone:
            self._answer(sender, stamp, GONE)
        elif self._lead() == sender:
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
        self._forming = None
        self._promise(stamp, members)
        self._answer(sender, stamp, YES)

    def _answer(self, peer: int, stamp: int, code: int) -> None:
        note = (ANSWER, stamp, code, self._number, *self.record.pack())
        self.fabric.post(peer, VIEW, note=note)

    def _answered(self, sender: int, stamp: int, code: int, number: int, record: Note) -> None:
        if self._forming is None or self._forming.stamp != stamp:
            return
        self._number = max(self._number, number)
        if code == YES:
            answer = self._forming.answers[sender] = Record.unpack(record)
            for peer in answer.members:  # who was with it is asked too
                self._heard.setdefault(peer, self.fabric.epoch(peer))
            self._form()
            self._decide()
            return
        self._forming = None
        if code == ELSEWHERE:
            self._refused[sender] = self.fabric.epoch(sender)
        elif code == GONE:
            self._left[sender] = (self.fabric.epoch(sender), -1, {})

    # -- from view to view --

    def _halt(self) -> None:
        """The present view is over."""
        self._open.clear()
        if not self.over.done():
            self.over.set_result(None)

    def _promise(self, stamp: int, members: Iterable[int]) -> None:
        """Let nothing more count in the old view."""
        self._promised = stamp
        self._epochs = {peer: self.fabric.epoch(peer) for peer in members}
        self._halt()

    def _install(self, stamp: int, note: Note) -> None:
        if stamp != self._promised or self.gone:
            return
        members, heirs, parents, counted, copies = unpack(note)
        self.view = View(stamp, members)
        self.coming = Record(stamp, parents, heirs, members, pairs(counted))
        self.record.members = members
        self.owed = [joiner for joiner, donor in pairs(copies).items() if donor == self.rank]
        self.whole = self.rank in heirs
        if self.whole:
            self.record = self.coming
        else:
            self.source = pairs(copies)[self.rank]
        self._wanted = False
        self.over = asyncio.get_running_loop().create_future()
        self._open.set()
        who = ", ".join(map(str, members)) if len(members) <= 16 else f"{len(members)} workers"
        self.fabric.notice("view", None, f"view {self.view.number}: {who}")
