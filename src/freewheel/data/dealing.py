"""Dealing: samples handed to workers in leases, by whichever living worker has the lowest rank.

Every worker has a ledger of what it knows (data/ledger.py) and runs the same three services. Who wants
samples asks the dealer, the lowest rank within reach, and says with every question what it holds and what it
has finished since. The answer has a lease and all that is known to be finished, so that this is not lost with
the dealer. Before it deals, a dealer asks every worker that it has not heard since it came within reach: that
is how the role passes on, and how workers that were cut off bring in what they did meanwhile. A deputy is
told of every lease, so that the next dealer knows what had been dealt to a worker that died with this one.

How much each gets is in data/shares.py. Where all workers step together none can take more than another:
there each keeps to a part of its own, which follows from who is there (`Question.parts`).

A worker that reaches nobody deals to itself. It begins at a place of the order that its rank decides, so
parts of a run that cannot reach each other begin with different samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from freewheel.data.batches import Key
from freewheel.data.hand import DIFFERS, GIVEN, OVER, REFUSED, RETRY_S, SOON, WAIT, Hand, Stream
from freewheel.data.ledger import Lease, Ledger, Owner, reader, take
from freewheel.data.sameness import difference
from freewheel.data.spans import Span, Spans, common, first, minus, size, union
from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import RUNTIME, Fabric, Message, Tag
from freewheel.records.counters import Counters

ASK: Tag = (RUNTIME, "deal", "ask")
TELL: Tag = (RUNTIME, "deal", "tell")
DEALT: Tag = (RUNTIME, "deal", "dealt")
BACK: Tag = (RUNTIME, "deal", "back")
HEAR_S = 2.0
"""How long a dealer waits for a worker to tell what it knows."""
ANSWER_S = 3.0
"""How long a worker waits for a dealer that is within reach and does not answer."""
MOST_STREAMS = 64
"""How many data sets are kept that others have named and this worker does not use (yet)."""
REFUSALS = 3
"""After so many refusals a worker no longer believes that it will reach the dealer it is told to ask."""

log = logging.getLogger("freewheel")


class Question(NamedTuple):
    """What a worker wants and what it says of itself."""

    life: int
    number: int
    """The pass it is in."""
    since: int
    """The first pass of which it takes what is left over."""
    wants: bool
    last: bool
    """Whether no later pass will deal what is left over of this one."""
    insists: bool
    parts: bool
    """Whether every worker keeps to a part of its own, because all step together."""
    size: int
    """Its batch size."""
    order: int
    """What the order of the pass sums up to, where a sampler makes it; else 0."""
    content: int
    """What its samples sum up to; 0: that cannot be said."""
    rate: float
    """Samples it finishes in a second; 0: not known."""


class Dealing:
    """One worker's part in dealing, whether it asks, deals or is the deputy."""

    def __init__(
        self,
        fabric: Fabric,
        life: int,
        counters: Counters,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self.fabric, self.counters, self.spawn = fabric, counters, spawn
        self.me: Owner = (fabric.rank, life)
        self.streams: dict[int, Stream] = {}
        """By the mark of their keys."""
        self._serial = 0
        self._dealing = asyncio.Lock()
        spawn(self._each(ASK, self._answer))
        spawn(self._each(TELL, self._tell))
        spawn(self._each(DEALT, self._note))
        spawn(self._each(BACK, self._take_back))
        spawn(self._look_up())

    def stream(self, key: Key, by: int) -> Stream | None:
        """What is known of these data, nothing at first; None: somebody of lower rank has others there."""
        if key.mark not in self.streams and by != self.me[0]:
            self._make_room()
        known = self.streams.setdefault(key.mark, Stream(key, by))  # in one go: two threads come here
        if known.key != key and by < known.by:
            known = self.streams[key.mark] = Stream(key, by)
        if known.key != key:
            return None
        known.by = min(known.by, by)
        return known

    def _make_room(self) -> None:
        """Forget what others have named long ago: whoever uses it tells it again when it is needed."""
        foreign = [mark for mark, one in list(self.streams.items()) if one.hand is None]
        for mark in foreign[: len(foreign) - MOST_STREAMS + 1]:
            del self.streams[mark]

    def hand(
        self, key: Key, size: int = 1, parts: bool = False, drop: bool = False, content: int = 0
    ) -> Hand:
        """This worker's hand for these data, in batches of a size.

        `parts`: each worker is to keep to a part of its own. `drop`: batches that are short are left out.
        """
        stream = self.stream(key, self.me[0])
        if stream is None:
            known = self.streams[key.mark]
            raise ConfigError(difference(self.me[0], key, known.by, known.key))
        stream.hand = stream.hand or Hand(self, stream, size, parts, drop, content)
        self.streams.setdefault(key.mark, stream)  # it may have been forgotten in this very moment
        return stream.hand

    # -- leaving --

    async def give_back(self) -> None:
        """This worker leaves: what it has not used is anybody's, at once."""
        for stream in list(self.streams.values()):
            if stream.hand is not None:
                await stream.hand.settle()

    def part(self) -> None:
        """Tell everybody what this worker knows, and that it holds nothing: it may have been the dealer."""
        for stream in self.streams.values():
            if stream.hand is not None:
                stream.hand.collect()
            stream.ledger.hold(self.me, {})
            note = (self.me[1], *stream.key, *stream.ledger.encode())
            for peer in self.fabric.members:
                if peer != self.me[0]:
                    self.fabric.post(peer, BACK, note=note)

    async def _take_back(self, message: Message) -> None:
        """Somebody leaves."""
        read = reader(message.note)
        life, *key = take(read, 6)
        if key[0] and (stream := self.stream(Key(*key), message.sender)) is not None:
            theirs = Ledger.decode(stream.key.length, read)
            stream.ledger.room(theirs.entries())
            stream.ledger.merge(theirs)
            stream.ledger.hold((message.sender, life), {})

    # -- looking --

    async def known(self, stream: Stream) -> Ledger:
        """All that anybody within reach knows to be finished."""
        found = Ledger(stream.key.length)
        if stream.hand is not None:
            stream.hand.collect()
        found.merge(stream.ledger)
        self._serial += 1
        tag, others = (*TELL, self._serial), [peer for peer in self.fabric.members if peer != self.me[0]]
        for peer in others:
            self.fabric.post(peer, TELL, note=(self._serial, *stream.key))
        end_s = asyncio.get_running_loop().time() + HEAR_S
        for peer in others:
            with contextlib.suppress(PeerLost, TimeoutError, ValueError):
                async with asyncio.timeout_at(end_s):
                    read = reader((await self.fabric.receive(tag, peer)).note)
                take(read, 1)
                found.merge(Ledger.decode(stream.key.length, read))
        self.fabric.forget(tag)
        return found

    # -- asking --

    async def ask(self, hand: Hand, wants: bool, rate: float) -> Lease | int:
        """Tell the dealer what is finished, and get a lease or the reason why there is none."""
        stream = hand.stream
        silent: set[int] = set()
        refusals = 0
        while True:
            if (known := self.streams[stream.key.mark]) is not stream:
                raise ConfigError(difference(self.me[0], stream.key, known.by, known.key))
            dealer = next((peer for peer in self.fabric.members if peer not in silent), self.me[0])
            insists = bool(silent) or refusals >= REFUSALS
            question = Question(
                self.me[1],
                hand.number,
                hand.since,
                wants,
                hand.last,
                insists,
                hand.parts,
                hand.size,
                hand.order,
                hand.content,
                rate,
            )
            if dealer == self.me[0]:
                answer = await self._deal(stream, self.me, question, stream.news, {})
                if answer == DIFFERS:
                    other = stream.orders[hand.number][1]
                    raise ConfigError(difference(self.me[0], stream.key, other, stream.key))
                if answer != REFUSED:
                    if not insists:
                        stream.news = Ledger(stream.key.length)
                    return answer
                continue
            stream.heard.clear()  # another deals: should this worker have to, it must ask all again
            try:
                answer = await self._question(stream, dealer, question)
            except PeerLost:
                continue
            except ConfigError:
                raise
            except (TimeoutError, ValueError) as error:
                log.warning("worker %d does not deal as it should: %s", dealer, error or "no answer")
                silent.add(dealer)
                continue
            if answer != REFUSED:
                return answer
            refusals += 1
            await asyncio.sleep(RETRY_S)

    async def _question(self, stream: Stream, dealer: int, question: Question) -> Lease | int:
        self._serial += 1
        tag = (*ASK, self._serial)
        held = [(q, *span) for q, one in stream.ledger.passes.items() for span in one.held.get(self.me, [])]
        sent, stream.news = stream.news, Ledger(stream.key.length)
        *flags, rate = question
        note = [*stream.key, self._serial, *flags, int(rate * 1e6), len(held)]
        note += [number for row in held for number in row]
        confirmed = False
        try:
            self.fabric.post(dealer, ASK, note=(*note, *sent.encode()))
            async with asyncio.timeout(ANSWER_S):
                message = await self.fabric.receive(tag, dealer)
            read = reader(message.note)
            kind, number, start, stop, again = take(read, 5)
            if kind == REFUSED:
                return REFUSED
            if kind == DIFFERS:  # the dealer says whose, and what they are
                raise ConfigError(difference(self.me[0], stream.key, number, Key(*take(read, 5))))
            theirs = Ledger.decode(stream.key.length, read)
            stream.ledger.room(theirs.entries())
            confirmed = True
        finally:
            if not confirmed:
                self.fabric.forget(tag)
                stream.news.merge(sent)
        stream.ledger.merge(theirs)
        for q in theirs.passes.keys() & stream.ledger.passes.keys():
            stream.counted[q] = max(theirs.passes[q].excess(), stream.counted.get(q, 0))
        for q, one in stream.ledger.passes.items():
            mine = one.held.get(self.me, [])
            if kind == GIVEN and q == number:
                mine = union(mine, [(start, stop)])
            one.held = {**(theirs.passes[q].held if q in theirs.passes else {}), self.me: mine}
        if kind != GIVEN:
            return kind
        return Lease(number, start, stop, bool(again))

    # -- dealing --

    async def _deal(
        self, stream: Stream, owner: Owner, question: Question, news: Ledger, held: dict[int, Spans]
    ) -> Lease | int:
        """Deal from this worker's own ledger, once it has heard everybody."""
        async with self._dealing:
            ledger, peer = stream.ledger, owner[0]
            if peer in stream.mute:
                stream.mute.discard(peer)
                stream.heard.pop(peer, None)
            await self._hear_all(stream)
            if self.fabric.members[0] != self.me[0] and not question.insists:
                return REFUSED  # one of lower rank has come meanwhile
            if owner != self.me:
                if not self._heard(stream, peer):
                    return REFUSED  # it was lost meanwhile
                ledger.room(news.entries() + sum(2 + len(spans) for spans in held.values()) + 2)
                stream.lives[peer] = owner[1]
                late = (one for q, one in news.passes.items() if q < ledger.floor)
                self._count(sum(size(one.finished) for one in late))
                ledger.merge(news)
                ledger.hold(owner, held)
                if self.fabric.members[0] != self.me[0]:
                    stream.news.merge(news)  # the dealer has to hear of it
            self._release_lost(stream)
            self._look_for_doubles(stream)
            return self._lease(stream, owner, question, news)

    def _lease(self, stream: Stream, owner: Owner, question: Question, news: Ledger) -> Lease | int:
        ledger, shares, peer = stream.ledger, stream.shares, owner[0]
        if not self._alike(stream, peer, question):
            return DIFFERS
        now_s = asyncio.get_running_loop().time()
        shares.heard(peer, question.number, question.wants, question.rate, question.size, now_s)
        lease, most = None, question.size
        if question.wants:
            if not question.parts:
                most = shares.grant(ledger, peer, question.number, self.fabric.members, now_s)
            lease = ledger.deal(
                owner, question.number, self._cut(stream, peer, question, most), question.since
            )
            held = sum(size(one.held.get(owner, [])) for one in ledger.passes.values())
            shares.dealt(peer, held, now_s)
        self._tell_deputy(stream, owner, lease, news)
        if lease is None and not most and ledger.free(question.number):
            return SOON
        # Where all step together, nobody can finish what it holds while this one waits.
        waits = question.last and not question.parts and ledger.held(question.number, owner)
        ledger.tidy()
        return lease or (WAIT if waits else OVER)

    def _alike(self, stream: Stream, peer: int, question: Question) -> bool:
        """Whether a worker's order is that of the others; a word of warning if its samples are not."""
        others = stream.prints.items() if question.content and peer not in stream.prints else ()
        stream.prints[peer] = question.content
        other = next((one for one, content in others if content not in (0, question.content)), None)
        if other is not None:
            log.warning(
                "worker %d has other samples than worker %d, though as many: a sample of a pass is then not "
                "the same for all. Make the data alike, with one seed and files in one order",
                peer,
                other,
            )
        known, _ = stream.orders.get(question.number, (question.order, peer))
        if question.wants:
            stream.orders.setdefault(question.number, (question.order, peer))
        for old in [q for q in stream.orders if q < stream.ledger.floor]:
            del stream.orders[old]
        return known == question.order

    def _refuse(self, peer: int, serial: int, other: int, key: Key) -> None:
        self.fabric.post(peer, (*ASK, serial), note=(DIFFERS, other, 0, 0, 0, *key))

    def _cut(
        self, stream: Stream, peer: int, question: Question, most: int
    ) -> Callable[[int, Spans], Span | None]:
        """How much of what is left a worker is dealt, in whole batches of its own."""
        key, batch, members = stream.key, question.size, self.fabric.members
        begin = self.fabric.rank * key.length // self.fabric.world_size // batch * batch

        def anywhere(number: int, free: Spans) -> Span | None:
            here = number == question.number
            span = first(free, begin if here else 0, batch) if most or not here else None
            if span is None:
                return None
            start, stop = span
            count = min(stop - start, max(most, batch))
            return start, start + (count if count <= batch else count // batch * batch)

        def in_part(number: int, free: Spans) -> Span | None:
            # They follow from the members alone, so that a run in which nobody is lost is the same every
            # time, and go round from pass to pass.
            turn = (members.index(peer) + number) % len(members)
            span = first(common(free, [key.part(turn, len(members))]), 0)
            if span is None:
                return None
            batches = max(1, int(stream.shares.aim(peer, len(members))) // batch)
            return span[0], min(span[1], key.edge(key.at(span[0]) + batches))

        return in_part if question.parts else anywhere

    async def _hear_all(self, stream: Stream) -> None:
        """Let everybody who has not done so since it came within reach tell what it knows."""
        members = self.fabric.members
        asked = [peer for peer in members if peer != self.me[0] and not self._heard(stream, peer)]
        if not asked:
            return
        self._serial += 1
        tag = (*TELL, self._serial)
        epochs = {peer: self.fabric.epoch(peer) for peer in asked}
        for peer in asked:
            self.fabric.post(peer, TELL, note=(self._serial, *stream.key))
        told: dict[int, Ledger] = {}
        end_s = asyncio.get_running_loop().time() + HEAR_S
        for peer in asked:
            try:
                async with asyncio.timeout_at(end_s):
                    message = await self.fabric.receive(tag, peer)
                read = reader(message.note)
                (life,) = take(read, 1)
                theirs = Ledger.decode(stream.key.length, read)
                stream.ledger.room(theirs.entries())
                stream.ledger.merge(theirs)
                told[peer] = theirs
            except PeerLost:
                continue
            except (TimeoutError, ValueError) as error:
                log.debug("worker %d does not tell what it knows: %s", peer, str(error) or "no answer")
                stream.mute.add(peer)
            else:
                stream.lives[peer] = life
            stream.heard[peer] = epochs[peer]
        self.fabric.forget(tag)
        self._learn(stream, told)

    def _learn(self, stream: Stream, told: dict[int, Ledger]) -> None:
        ledger = stream.ledger
        for peer, theirs in told.items():
            owner = (peer, stream.lives[peer])
            ledger.hold(owner, {q: one.held.get(owner, []) for q, one in theirs.passes.items()})
        # What was dealt to those who cannot speak for themselves, as far as others know of it.
        for theirs in told.values():
            for q, other in theirs.passes.items():
                if (one := ledger.open(q)) is not None:
                    lost = [spans for owner, spans in other.held.items() if not self._lives(stream, owner)]
                    one.lost = minus(union(one.lost, *lost), one.finished)

    def _heard(self, stream: Stream, peer: int) -> bool:
        within = peer in self.fabric.members
        return within and stream.heard.get(peer) == self.fabric.epoch(peer)

    def _lives(self, stream: Stream, owner: Owner) -> bool:
        """Whether a worker is within reach and in the life in which it got what it holds."""
        peer, life = owner
        return owner == self.me or (self._heard(stream, peer) and stream.lives.get(peer) == life)

    def _release_lost(self, stream: Stream) -> None:
        owners = {owner for one in stream.ledger.passes.values() for owner in one.held}
        for owner in sorted(owners):
            if not self._lives(stream, owner):
                stream.ledger.lose(owner)

    def _look_for_doubles(self, stream: Stream) -> None:
        """Count samples that turn out to have been finished twice, as after a cut."""
        for old in stream.counted.keys() - stream.ledger.passes.keys():
            del stream.counted[old]
        for q, one in stream.ledger.passes.items():
            before = stream.counted.get(q, 0)
            if one.excess() > before:
                stream.counted[q] = one.excess()
                self._count(one.excess() - before)

    def _count(self, samples: int) -> None:
        self.counters.samples_again += samples

    # -- services --

    async def _each(self, tag: Tag, act: Callable[[Message], Coroutine[Any, Any, None]]) -> None:
        while True:
            message = await self.fabric.receive(tag)
            try:
                await act(message)
            except ValueError as error:
                log.warning("worker %d sent %s that cannot be read: %s", message.sender, tag[-1], error)

    async def _look_up(self) -> None:
        """Hear those who come at once, and what is left when a dealer is gone: nobody has to wait for it."""
        while True:
            await self.fabric.changed()
            if self.fabric.members[0] != self.me[0]:
                continue
            for stream in list(self.streams.values()):
                async with self._dealing:
                    await self._hear_all(stream)
                    self._look_for_doubles(stream)

    async def _answer(self, message: Message) -> None:
        """Somebody asks this worker to deal."""
        read = reader(message.note)
        key, (serial, *asked, rate, rows) = Key(*take(read, 5)), take(read, 13)
        life, number, since, wants, last, insists, parts, batch, order, content = asked
        if not (key.length and batch) or (parts and not key.grid):
            raise ValueError("there is nothing to deal")
        held: dict[int, Spans] = {}
        for _ in range(rows):
            q, start, stop = take(read, 3)
            held.setdefault(q, []).append((start, min(stop, key.length)))
        stream = self.stream(key, message.sender)
        if stream is None:
            known = self.streams[key.mark]
            self._refuse(message.sender, serial, known.by, known.key)
            return
        news = Ledger.decode(stream.key.length, read)
        question = Question(
            life,
            number,
            since,
            bool(wants),
            bool(last),
            bool(insists),
            bool(parts),
            batch,
            order,
            content,
            rate / 1e6,
        )
        answer: Lease | int = REFUSED
        if insists or self.fabric.members[0] == self.me[0]:
            answer = await self._deal(stream, (message.sender, life), question, news, held)
        if answer == DIFFERS:
            self._refuse(message.sender, serial, stream.orders[number][1], stream.key)
            return
        lease = answer if isinstance(answer, Lease) else Lease(0, 0, 0, False)
        kind = GIVEN if isinstance(answer, Lease) else answer
        note = (kind, *lease, *(stream.ledger.encode(held=True) if kind != REFUSED else ()))
        self.fabric.post(message.sender, (*ASK, serial), note=note)

    async def _tell(self, message: Message) -> None:
        """A new dealer asks what this worker knows."""
        serial, *key = take(reader(message.note), 6)
        if not key[0]:
            raise ValueError("there is nothing to deal")
        stream = self.stream(Key(*key), message.sender)
        if stream is None:  # other data: it knows nothing of those
            stream = Stream(Key(*key), message.sender)
        stream.heard.clear()
        if stream.hand is not None:
            stream.hand.collect()
        note = (self.me[1], *stream.ledger.encode(held=True))
        self.fabric.post(message.sender, (*TELL, serial), note=note)

    def _tell_deputy(self, stream: Stream, owner: Owner, lease: Lease | None, news: Ledger) -> None:
        deputy = next((peer for peer in self.fabric.members if peer not in (self.me[0], owner[0])), None)
        if deputy is not None and (lease or news.passes):
            note = (*stream.key, *owner, *(lease or Lease(0, 0, 0, False)), *news.encode())
            self.fabric.post(deputy, DEALT, note=note)

    async def _note(self, message: Message) -> None:
        """Be the deputy: remember what was dealt to whom."""
        read = reader(message.note)
        *key, rank, life, number, start, stop, _ = take(read, 11)
        stream = self.stream(Key(*key), message.sender)
        if stream is None or not stream.key.length:
            return
        theirs = Ledger.decode(stream.key.length, read)
        stream.ledger.room(theirs.entries() + 3)
        stream.ledger.merge(theirs)
        one = stream.ledger.open(number)
        if one is not None and start < stop:
            spans = minus([(start, min(stop, stream.key.length))], one.finished)
            one.held[rank, life] = union(one.held.get((rank, life), []), spans)
