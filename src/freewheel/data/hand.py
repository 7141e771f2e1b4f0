"""A worker's hand: the batches it holds of one set of data, and what it knows of the others' part in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from freewheel.data.ledger import Lease, Ledger
from freewheel.data.spans import Spans, union
from freewheel.errors import PeerLost

if TYPE_CHECKING:
    from freewheel.data.dealing import Dealing

RETRY_S = 0.05
"""After which a worker that was told to wait, or to ask another, asks again."""
LEASE_S = 1.0
"""How long a lease should last."""
STOCK = 1.75
"""A worker's batches last for so many times the silence after which a dealer counts as lost: that is noticed
late, and the next dealer has to ask around."""
RATE_S = 0.2
"""Over how long at least a worker's rate is measured."""
GIVEN, OVER, WAIT, REFUSED = range(4)
"""What a dealer may answer."""


class Key(NamedTuple):
    """Which data: all workers that deal it in the same way have the same key."""

    batches: int
    batch_size: int
    mark: int


class Batch(NamedTuple):
    """A batch in a worker's hand."""

    number: int
    place: int
    again: bool


class Stream:
    """What a worker knows of one set of data, and of the others' part in it."""

    def __init__(self, key: Key) -> None:
        self.key, self.ledger = key, Ledger(key.batches)
        self.news = Ledger(key.batches)
        """What was finished and no dealer has confirmed yet."""
        self.rates: dict[int, float] = {}
        self.heard: dict[int, int] = {}
        """Who has told all it knows, each with the epoch in which it did."""
        self.mute: set[int] = set()
        """Who was asked for it and did not answer in time."""
        self.lives: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        """Of each pass, how many batches that were finished twice have been counted."""
        self.hand: Hand | None = None


class Hand:
    """The batches this worker holds of one set of data, in the order in which to use them.

    `ready` and `finish` may be used from another thread; coroutines and `collect` belong to the fabric's.
    """

    def __init__(self, dealing: Dealing, stream: Stream, parts: bool) -> None:
        self.dealing, self.stream, self.parts = dealing, stream, parts
        self.number, self.last = 0, False
        self.since = 0
        """What is left over of earlier passes is not wanted: this worker has broken one off."""
        self.ready: deque[Batch] = deque()
        self.over = False
        """Whether nothing more comes in this pass."""
        self.waits = False
        """Whether that may change: others hold batches that may yet come back."""
        self._done: deque[Batch] = deque()
        self._finished = self._used = 0
        """Entered into the ledger, and all."""
        self._made = (0.0, 0)
        self._few = 0
        """When so few are left, it is time to ask for more."""
        self._asking: asyncio.Task[None] | None = None
        self._rate = 0.0
        self._since_s, self._since = 0.0, 0
        self.own: dict[int, Spans] = {}
        """What this worker itself has finished in each pass, in earlier runs too: what a checkpoint keeps."""

    def begin(self, number: int, last: bool = False) -> None:
        """Begin a pass; `last`: wait for what others hold before it is over."""
        self.number, self.last = number, last
        self.over = self.waits = False
        self._since_s = 0.0

    def progress(self) -> float:
        """Passes made by all workers together, as far as is known: what others do is heard with a lease."""
        made, collected = self._made
        return made + (self._used - collected) / self.stream.key.batches

    def due(self) -> bool:
        """Whether it is time to `refill`."""
        return not self.over and self._asking is None and len(self.ready) <= self._few

    async def refill(self) -> None:
        """Get more batches, or learn that there are none; two who call share one question."""
        if self._asking is None:
            if self.over and not self.waits:
                return
            self._asking = self.dealing.spawn(self._ask())
            self._asking.add_done_callback(self._asked)
        await asyncio.shield(self._asking)

    async def draw(self) -> Batch | None:
        """The next batch, once all before it are finished; None: the pass is over."""
        while not self.ready:
            if self.over:
                if not self.waits:
                    return None
                await asyncio.sleep(RETRY_S)
            await self.refill()
        batch = self.ready.popleft()
        if self.due():
            self.dealing.spawn(self.refill())
        return batch

    def _asked(self, _: asyncio.Task[None]) -> None:
        self._asking = None

    async def _ask(self) -> None:
        answer = await self._say(wants=True)
        self._look()
        if isinstance(answer, Lease):
            number, start, stop, again = answer
            self._few = self._enough(stop - start)
            self.ready.extend(Batch(number, place, again) for place in range(start, stop))
            self.over = self.waits = False
        else:
            self.over, self.waits = True, answer == WAIT

    def _enough(self, leased: int) -> int:
        """How many batches to hold at least, after a lease of so many.

        A whole lease says that there is plenty: then they are to last until a dealer that falls silent is
        replaced. Towards the end of a pass leases shrink, and so does what a worker keeps others from.
        """
        if leased < int(self._rate * LEASE_S):
            return leased // 2
        return max(leased // 2, int(self._rate * STOCK * self.dealing.fabric.silence_s))

    async def _say(self, wants: bool) -> Lease | int:
        self.collect()
        now_s, new = asyncio.get_running_loop().time(), self._finished - self._since
        long = now_s - self._since_s >= (RATE_S if self._rate else 1e-9)
        if self._since_s and new and long:
            self._rate = new / (now_s - self._since_s)
        if not self._since_s or long:
            self._since_s, self._since = now_s, self._finished
        return await self.dealing.ask(self, wants, self._rate)

    def finish(self, batch: Batch) -> None:
        """A batch has been used."""
        self._done.append(batch)
        self._used += 1

    def collect(self) -> None:
        """Enter what has been finished into the ledger."""
        ledger, news, me = self.stream.ledger, self.stream.news, self.dealing.me
        while self._done:
            number, start, again = self._done.popleft()
            stop = start + 1
            while self._done and self._done[0] == (number, stop, again):
                self._done.popleft()
                stop += 1
            self._finished += stop - start
            if again or number < ledger.floor:
                self.dealing.counters.samples_again += (stop - start) * self.stream.key.batch_size
            self.own[number] = union(self.own.get(number, []), [(start, stop)])
            if number >= ledger.floor:
                ledger.finish(me, number, start, stop)
                news.finish(me, number, start, stop)
                news.passes[number].counts[me] = ledger.passes[number].counts[me]
        for number in [q for q in self.own if q < ledger.floor]:
            del self.own[number]
        self._look()

    def _look(self) -> None:
        self._made = (self.stream.ledger.progress(), self._finished)

    async def settle(self, left: bool = False, doubtful: Batch | None = None) -> None:
        """The pass has ended here: say what is finished and give back the rest.

        `left`: it was broken off, with a `doubtful` batch in hand that may have been used.
        """
        if self._asking is not None:
            with contextlib.suppress(PeerLost):
                await asyncio.shield(self._asking)
        self.collect()
        self.ready.clear()
        self.stream.ledger.hold(self.dealing.me, {})
        if left:
            self.since = self.number + 1
        for ledger in (self.stream.ledger, self.stream.news) if left else ():
            ledger.leave(self.number)
            if doubtful is not None and (one := ledger.open(doubtful.number)) is not None:
                one.lost = union(one.lost, [(doubtful.place, doubtful.place + 1)])
        await self._say(wants=False)
