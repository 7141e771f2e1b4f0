"""What a worker knows of one set of data, what it has finished of it, and how it deals from it."""

import logging
from collections import deque
from functools import partial
from typing import NamedTuple

from freewheel.data.batches import Batch, Key, Lease, Span, Spans, common, first, minus, size, union
from freewheel.data.ledger import Ledger, Owner
from freewheel.data.shares import Shares
from freewheel.fabric.base import Fabric
from freewheel.records.counters import Counters

GIVEN, OVER, WAIT, REFUSED, SOON, DIFFERS = range(6)
"""A dealer's answers. SOON: what is left is kept for others; ask again. DIFFERS: these are other data."""

log = logging.getLogger("freewheel")


class Question(NamedTuple):
    """What a worker asks a dealer for and says of itself: whole numbers; 0: not known."""

    life: int
    number: int  # the pass it is in
    since: int  # it takes what is left over of passes from this one on
    wants: bool
    last: bool  # whether no later pass will deal what is left
    insists: bool
    parts: bool  # whether every worker keeps to a part of its own, because all step together
    size: int  # of its batches
    order: int  # a checksum of the pass's order, where a sampler makes it
    content: int  # a checksum of its samples
    rate: int  # samples in a million seconds


class DatasetLedger:
    """What a worker knows of one set of data; used in the fabric's thread unless a method says otherwise."""

    def __init__(self, key: Key, by: int, me: Owner, fabric: Fabric, counters: Counters) -> None:
        self.key, self.ledger, self.shares = key, Ledger(key.length), Shares()
        self.news = Ledger(key.length)  # what was finished and no dealer has confirmed yet
        self.by = by  # the lowest rank that has named these data
        self.in_use = False  # whether this worker uses them, or has only heard of them
        self.finished = 0  # samples that this worker has finished, or left out, and entered into the ledger
        # Finished by itself in each pass, in earlier runs too: for checkpoints.
        self.own: dict[int, Spans] = {}
        self.orders: dict[int, tuple[int, int]] = {}  # checksums of passes' orders, and whose they are
        self.heard: dict[int, int] = {}  # who has told all it knows, and in which epoch of its connection
        self.mute: set[int] = set()  # who was asked for it and did not answer in time
        self.lives: dict[int, int] = {}
        self.counted: dict[int, int] = {}  # how many doubles of each pass have been counted
        self._prints: dict[int, int] = {}  # checksums of workers' samples, where there are any
        self._me, self._fabric, self._counters = me, fabric, counters
        self._done: deque[Batch] = deque()
        self._used = self._left_out = 0  # two counts, since two threads count
        self._made = (0.0, 0)

    # -- this worker's own part --

    def finish(self, batch: Batch) -> None:
        """Count a batch that was used; for any one thread."""
        self._done.append(batch)
        self._used += batch.stop - batch.place

    def drop(self, short: list[Batch]) -> None:
        """Batches that nobody is to use count as finished."""
        self._done.extend(batch._replace(again=False) for batch in short)
        self._left_out += sum(batch.stop - batch.place for batch in short)

    def collect(self) -> None:
        """Enter what has been finished into the ledger."""
        ledger, news, me = self.ledger, self.news, self._me
        while self._done:
            number, start, stop, again = self._done.popleft()
            while self._done and self._done[0][:2] == (number, stop) and self._done[0].again == again:
                stop = self._done.popleft().stop
            self.finished += stop - start
            if again or number < ledger.floor:
                self._counters.samples_again += stop - start
            self.own[number] = union(self.own.get(number, []), [(start, stop)])
            if number >= ledger.floor:
                ledger.finish(me, number, start, stop)
                news.finish(me, number, start, stop)
                news.passes[number].counts[me] = ledger.passes[number].counts[me]
        self.own = {q: spans for q, spans in self.own.items() if q >= ledger.floor}
        self.note_progress()

    def note_progress(self) -> None:
        self._made = (self.ledger.progress(), self.finished)

    def progress(self) -> float:
        """Passes all made, as far as is known: others' work is heard of with a lease. For any thread."""
        made, collected = self._made
        return made + (self._used + self._left_out - collected) / self.key.length

    def confirm(self, theirs: Ledger, lease: Lease | None) -> None:
        """Take over what a dealer answered: its ledger, and the lease if there is one."""
        self.ledger.merge(theirs)
        for q, one in self.ledger.passes.items():
            mine = one.held.get(self._me, [])
            if lease is not None and q == lease.number:
                mine = union(mine, [(lease.place, lease.stop)])
            one.held = {self._me: mine}
            if (known := theirs.passes.get(q)) is not None:
                self.counted[q] = max(known.excess(), self.counted.get(q, 0))
                one.held = {**known.held, **one.held}

    # -- what others say --

    def learn_from_all(self, told: dict[int, Ledger]) -> None:
        for peer, theirs in told.items():
            owner = (peer, self.lives[peer])
            self.ledger.hold(owner, theirs.held_by(owner))
        # What others know to have been dealt to workers that are gone counts as lost.
        for theirs in told.values():
            for q, other in theirs.passes.items():
                if (one := self.ledger.open(q)) is not None:
                    lost = [spans for owner, spans in other.held.items() if not self._alive(owner)]
                    one.lost = minus(union(one.lost, *lost), one.finished)

    def hears(self, peer: int) -> bool:
        """Whether a worker has told what it knows since it came within reach."""
        return peer in self._fabric.members and self.heard.get(peer) == self._fabric.epoch(peer)

    def _alive(self, owner: Owner) -> bool:
        """Whether it is within reach, and in the life in which it got what it holds."""
        peer, life = owner
        return owner == self._me or (self.hears(peer) and self.lives.get(peer) == life)

    def count_doubles(self) -> None:
        """Count samples that were finished twice, as after a network partition."""
        excess = {q: max(one.excess(), self.counted.get(q, 0)) for q, one in self.ledger.passes.items()}
        self._counters.samples_again += sum(many - self.counted.get(q, 0) for q, many in excess.items())
        self.counted = excess

    def tell(self, owner: Owner, news: Ledger) -> None:
        """A worker reports what it has finished, and all that it holds."""
        late = sum(size(one.finished) for q, one in news.passes.items() if q < self.ledger.floor)
        self.ledger.merge(news)
        self.lives[owner[0]] = owner[1]
        self._counters.samples_again += late
        self.ledger.hold(owner, news.held_by(owner))
        self.note_progress()

    # -- dealing --

    def lease(self, owner: Owner, question: Question, now_s: float) -> Lease | int:
        """Deal, also what lost workers held; or return why not."""
        ledger, shares, peer, number = self.ledger, self.shares, owner[0], question.number
        lost = {who for one in ledger.passes.values() for who in one.held if not self._alive(who)}
        for one in ledger.passes.values() if lost else ():
            one.lost = minus(union(one.lost, *(one.held.pop(who, []) for who in lost)), one.finished)
        self.count_doubles()
        if not self._alike(peer, question):
            return DIFFERS
        rate = question.rate / 1e6
        shares.heard(peer, number, question.wants, rate, question.size, now_s)
        lease, most, cut = None, question.size, self._part
        if question.wants:
            if not question.parts:
                cut = self._anywhere
                most = shares.grant(ledger, peer, number, self._fabric.members, now_s)
            lease = ledger.deal(owner, number, partial(cut, peer, question, most), question.since)
            if rate:
                shares.askers[peer].due_s = now_s + sum(map(size, ledger.held_by(owner).values())) / rate
        if lease is None and not most and ledger.free(number):
            return SOON
        # Where all step together, nobody can finish what it holds while this one waits.
        waits = question.last and not question.parts and ledger.held(number, owner)
        ledger.tidy()
        return lease or (WAIT if waits else OVER)

    def _alike(self, peer: int, question: Question) -> bool:
        """Whether a worker's order is that of the others; warns if its samples are not."""
        if question.content and peer not in self._prints:
            other = next((one for one, said in self._prints.items() if said != question.content), None)
            if other is not None:
                log.warning(
                    "worker %d has other samples than worker %d, though as many: a sample of a pass is then "
                    "not the same for all. Make the data alike, with files in one order",
                    peer,
                    other,
                )
            self._prints[peer] = question.content
        known, _ = self.orders.get(question.number, (question.order, peer))
        if question.wants:
            self.orders.setdefault(question.number, (question.order, peer))
        self.orders = {q: order for q, order in self.orders.items() if q >= self.ledger.floor}
        return known == question.order

    def _anywhere(self, peer: int, question: Question, most: int, number: int, free: Spans) -> Span | None:
        """What a worker is dealt of a pass's free samples, in whole batches of its own."""
        # Each dealer begins at a place of its own: the sides of a partition are to deal different samples.
        key, batch, here = self.key, question.size, number == question.number
        begin = self._me[0] * key.length // self._fabric.world_size // batch * batch
        span = first(free, begin if here else 0, batch) if most or not here else None
        if span is None:
            return None
        start, stop = span
        count = min(stop - start, max(most, batch))
        return start, start + (count // batch * batch or count)

    def _part(self, peer: int, question: Question, most: int, number: int, free: Spans) -> Span | None:
        """The same from its part, which rotates from pass to pass; then from parts whose workers left."""
        # Parts follow from the members alone: a run in which nobody is lost is the same every time.
        key, members = self.key, self._fabric.members
        parts = {one: key.part((k + number) % len(members), len(members)) for k, one in enumerate(members)}
        left = [parts[one] for one in members if number == question.number < self.shares.askers[one].number]
        span = first(common(free, [parts[peer]]), 0) or first(common(free, union(left)), 0)
        if span is None:
            return None
        batches = max(1, int(self.shares.aim(peer, len(members))) // question.size)
        return span[0], min(span[1], key.edge(key.at(span[0]) + batches))
