"""Dealing: samples handed to workers in leases, by whichever living worker has the lowest rank.

Every worker keeps a ledger (data/ledger.py) and runs the same three services. A worker asks the dealer, the
lowest rank within reach, and reports with every question what it holds and what it has finished. The answer
is a lease and the dealer's ledger, so that this is not lost with the dealer. A dealer first asks every worker
that it has not heard since it came within reach: so a new dealer takes over, and workers that were cut off
report what they did meanwhile. A deputy is told of every lease: if the dealer dies together with another
worker, the next dealer still knows what that worker held.

data/shares.py decides how much each gets. Where all workers step together, each keeps to a part of its own,
which follows from who is there (`Question.parts`). A worker that reaches nobody deals to itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from freewheel.data.batches import Key, Lease
from freewheel.data.dataset import DIFFERS, GIVEN, REFUSED, DatasetLedger, Question
from freewheel.data.ledger import Ledger, Owner
from freewheel.data.order import differs
from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import RUNTIME, Fabric, Message, Note, Spawn, Tag, hear
from freewheel.fabric.notes import read, whole
from freewheel.records.counters import Counters

ASK: Tag = (RUNTIME, "deal", "ask")  # to the dealer: a question, and what the asker has finished and holds
TELL: Tag = (RUNTIME, "deal", "tell")  # from a dealer: tell me all you know
NOTE: Tag = (RUNTIME, "deal", "note")  # to the deputy, or to all: what a worker has finished and holds
HEAR_S = 2.0  # how long a dealer waits for a worker to tell what it knows
ANSWER_S = 3.0  # how long a worker waits for a dealer that is within reach and does not answer
RETRY_S = 0.05  # before a worker that was told to wait, or to ask another, asks again
MOST_DATASETS = 64  # that others have named, and this worker does not use (yet)
REFUSALS = 3  # after so many a worker that cannot reach the rightful dealer insists

KEY = (int,) * len(Key._fields)  # names the data in each of these messages, after the question's number

log = logging.getLogger("freewheel")


class Dealing:
    """One worker's part in dealing: it asks, deals or is the deputy."""

    def __init__(self, fabric: Fabric, life: int, counters: Counters, spawn: Spawn) -> None:
        self.fabric, self.counters, self.spawn = fabric, counters, spawn
        self.me: Owner = (fabric.rank, life)
        self.datasets: dict[int, DatasetLedger] = {}  # by the mark of their keys
        self.settling: list[Callable[[], Awaitable[None]]] = []  # each gives back what one queue holds
        self._dealing = asyncio.Lock()
        for tag, act in ((ASK, self._answer), (TELL, self._tell), (NOTE, self._note)):
            spawn(hear(fabric, tag, partial(self._served, act)))
        spawn(self._look_up())

    def use(self, key: Key) -> DatasetLedger:
        """Begin to use data; ConfigError if others have other data there."""
        data = self._known(key, self.me[0])
        if data.key != key:
            raise differs(self.me[0], key, data.by, data.key)
        data.in_use = True
        self.datasets.setdefault(key.mark, data)  # it may have been forgotten in this very moment
        return data

    def _known(self, key: Key, by: int) -> DatasetLedger:
        """Its ledger, made if need be; where workers differ, that of the lowest rank's data."""
        if key.mark not in self.datasets and by != self.me[0]:
            foreign = [mark for mark, one in list(self.datasets.items()) if not one.in_use]
            for mark in foreign[: len(foreign) - MOST_DATASETS + 1]:  # who uses it tells it again
                del self.datasets[mark]
        made = DatasetLedger(key, by, self.me, self.fabric, self.counters)
        known = self.datasets.setdefault(key.mark, made)  # in one go: two threads come here
        if known.key != key and by < known.by:
            known = self.datasets[key.mark] = made
        if known.key == key:
            known.by = min(known.by, by)
        return known

    # -- leaving --

    async def give_back(self) -> None:
        for settle in self.settling:
            await settle()

    def part(self) -> None:
        """Tell everybody what this worker knows before it leaves: it may have been the dealer."""
        for data in self.datasets.values():
            data.collect()
            data.ledger.hold(self.me, {})
            for peer in self.fabric.others:
                self.fabric.post(peer, NOTE, note=(0, *data.key, *self.me, *data.ledger.encode(held=False)))

    # -- asking --

    async def ask(self, data: DatasetLedger, question: Question) -> Lease | int:
        """Report to the dealer what is finished, and get a lease or the reason why there is none."""
        silent, refusals = set[int](), 0
        while True:
            if (known := self.datasets[data.key.mark]) is not data:
                raise differs(self.me[0], data.key, known.by, known.key)
            dealer = next((peer for peer in self.fabric.members if peer not in silent), self.me[0])
            question = question._replace(insists=bool(silent) or refusals >= REFUSALS)
            if dealer == self.me[0]:
                answer = await self._deal(data, self.me, question, data.news)
                if answer == DIFFERS:
                    raise differs(dealer, data.key, data.orders[question.number][1], data.key)
                if answer != REFUSED:
                    if not question.insists:
                        data.news = Ledger(data.key.length)
                    return answer
                continue
            data.heard.clear()  # another deals: should this worker have to, it must ask all again
            try:
                answer = await self._ask(data, dealer, question)
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

    async def _ask(self, data: DatasetLedger, dealer: int, question: Question) -> Lease | int:
        sent, data.news = data.news, Ledger(data.key.length)
        confirmed = False
        try:
            note = (*data.key, *question, *sent.holding(self.me, data.ledger).encode())
            told = await self._told(dealer, ASK, note, ANSWER_S)
            kind, *given = read((int,) * 5, told)
            if kind == REFUSED:
                return REFUSED
            if kind == DIFFERS:  # the dealer says whose, and what they are
                raise differs(self.me[0], data.key, given[0], Key(*read(KEY, told)))
            lease = Lease(*given) if kind == GIVEN else None
            data.confirm(Ledger.decode(data.key.length, told), lease)
            confirmed = True
        finally:
            if not confirmed:
                data.news.merge(sent)
        return lease or kind

    async def _told(self, peer: int, tag: Tag, note: Note, within_s: float) -> Iterator[int]:
        async with asyncio.timeout(within_s):
            return whole((await self.fabric.ask(peer, tag, note=note)).note)

    # -- dealing --

    async def _deal(self, data: DatasetLedger, owner: Owner, question: Question, news: Ledger) -> Lease | int:
        """Deal from this worker's own ledger, once it has heard everybody."""
        async with self._dealing:
            peer = owner[0]
            if peer in data.mute:
                data.mute.discard(peer)
                data.heard.pop(peer, None)
            await self._hear_all(data)
            if self.fabric.members[0] != self.me[0] and not question.insists:
                return REFUSED  # one of lower rank has come meanwhile
            if owner != self.me:
                if not data.hears(peer):
                    return REFUSED  # it was lost meanwhile
                data.tell(owner, news)
                if self.fabric.members[0] != self.me[0]:
                    data.news.merge(news)  # the dealer has to hear of it
            answer = data.lease(owner, question, asyncio.get_running_loop().time())
            deputy = next((one for one in self.fabric.others if one != peer), None)
            if deputy is not None and (isinstance(answer, Lease) or news.passes):
                held = news.holding(owner, data.ledger)
                self.fabric.post(deputy, NOTE, note=(0, *data.key, *owner, *held.encode()))
            return answer

    async def _hear_all(self, data: DatasetLedger) -> None:
        """Ask everybody who has not been heard since it came within reach."""
        asked = [peer for peer in self.fabric.others if not data.hears(peer)]
        epochs = {peer: self.fabric.epoch(peer) for peer in asked}
        told: dict[int, Ledger] = {}
        for peer, said in (await self._hear(data.ledger, data.key, asked)).items():
            data.heard[peer] = epochs[peer]
            if said is None:
                data.mute.add(peer)
            else:
                data.lives[peer], told[peer] = said
        data.learn_from_all(told)

    async def _hear(
        self, ledger: Ledger, key: Key, peers: Sequence[int]
    ) -> dict[int, tuple[int, Ledger] | None]:
        """Merge what peers tell of these data into a ledger; return each one's life, and what it told."""
        found: dict[int, tuple[int, Ledger] | None] = {}  # None: not in time, or more than workers make

        async def hear_one(peer: int) -> None:
            try:
                told = await self._told(peer, TELL, key, HEAR_S)
                life, theirs = read(int, told), Ledger.decode(key.length, told)
                ledger.merge(theirs)
                found[peer] = life, theirs
            except (TimeoutError, ValueError):
                found[peer] = None
            except PeerLost:
                pass

        await asyncio.gather(*map(hear_one, peers))
        return found

    async def known(self, data: DatasetLedger) -> Ledger:
        """What anybody within reach knows to be finished."""
        data.collect()
        found = data.ledger.holding(self.me, data.ledger)
        await self._hear(found, data.key, self.fabric.others)
        return found

    # -- services --

    async def _served(self, act: Callable[..., Awaitable[Note | None]], message: Message) -> None:
        """Decode a message, let a service act on it, send its answer if there is one."""
        try:
            told = whole(message.note)
            number, *key = read((int, *KEY), told)
            if not key[0]:
                raise ValueError("there is nothing to deal")
            if answer := await act(message.sender, Key(*key), told):
                self.fabric.post(message.sender, (*message.tag, number), note=answer)
        except ValueError as error:
            log.warning("worker %d sent %s that cannot be read: %s", message.sender, message.tag[-1], error)

    async def _look_up(self) -> None:
        """As the dealer, hear everybody as soon as members change: no question is to wait for it."""
        while True:
            await self.fabric.changed()
            for data in list(self.datasets.values()) if self.fabric.members[0] == self.me[0] else ():
                async with self._dealing:
                    await self._hear_all(data)
                    data.count_doubles()

    async def _answer(self, peer: int, key: Key, told: Iterator[int]) -> Note:
        question = Question._make(read((int,) * len(Question._fields), told))
        news = Ledger.decode(key.length, told)
        if not question.size or (question.parts and not key.grid):
            raise ValueError("there is nothing to deal")
        data = self._known(key, peer)
        if data.key != key:
            return (DIFFERS, data.by, 0, 0, 0, *data.key)
        answer: Lease | int = REFUSED
        if question.insists or self.fabric.members[0] == self.me[0]:
            answer = await self._deal(data, (peer, question.life), question, news)
        if answer == DIFFERS:
            return (DIFFERS, data.orders[question.number][1], 0, 0, 0, *data.key)
        given = (GIVEN, *answer) if isinstance(answer, Lease) else (answer, 0, 0, 0, 0)
        return (*given, *data.ledger.encode())

    async def _tell(self, peer: int, key: Key, _: Iterator[int]) -> Note:
        data, known = self._known(key, peer), Ledger(key.length)  # of other data it knows nothing
        if data.key == key:
            data.heard.clear()
            data.collect()
            known = data.ledger
        return (self.me[1], *known.encode())

    async def _note(self, peer: int, key: Key, told: Iterator[int]) -> None:
        owner, theirs = read((int, int), told), Ledger.decode(key.length, told)
        if (data := self._known(key, peer)).key == key:
            data.ledger.merge(theirs)
            data.ledger.hold(owner, theirs.held_by(owner))
