"""A worker's hand: the batches it holds of one set of data, and what it knows of the others' part in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from freewheel.data.batches import Batch, Key
from freewheel.data.ledger import Lease, Ledger
from freewheel.data.shares import LEASE_S, Shares
from freewheel.data.spans import Spans, union
from freewheel.errors import PeerLost

if TYPE_CHECKING:
    from freewheel.data.dealing import Dealing

RETRY_S = 0.05
"""After which a worker that was told to wait, or to ask another, asks again."""
SOON_S, RARELY_S = 0.002, 0.05
"""After which one asks again that is to wait for the others' turn: at first, and at most."""
STOCK = 1.75
"""A worker's batches last for so many times the silence after which a dealer counts as lost: that is noticed
late, and the next dealer has to ask around."""
RATE_S = 0.2
"""Over how long at least a worker's rate is measured."""
GIVEN, OVER, WAIT, REFUSED, SOON, DIFFERS = range(6)
"""What a dealer may answer. SOON: what is left is others' turn. DIFFERS: these are other data."""


class Stream:
    """What a worker knows of one set of data, and of the others' part in it."""

    def __init__(self, key: Key, by: int) -> None:
        self.key, self.ledger = key, Ledger(key.length)
        self.news = Ledger(key.length)
        """What was finished and no dealer has confirmed yet."""
        self.shares = Shares()
        self.by = by
        """The lowest rank that has named these data."""
        self.orders: dict[int, tuple[int, int]] = {}
        """Of the passes by a sampler: what its order sums up to, and who said so."""
        self.prints: dict[int, int] = {}
        """What each worker's samples sum up to, where that can be said."""
        self.heard: dict[int, int] = {}
        """Who has told all it knows, each with the epoch in which it did."""
        self.mute: set[int] = set()
        """Who was asked for it and did not answer in time."""
        self.lives: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        """Of each pass, how many samples that were finished twice have been counted."""
        self.hand: Hand | None = None


class Hand:
    """The batches this worker holds of one set of data, in the order in which to use them.

    `ready` and `finish` may be used from another thread; coroutines and `collect` belong to the fabric's.
    """

    def __init__(
        self, dealing: Dealing, stream: Stream, size: int, parts: bool, drop: bool, content: int
    ) -> None:
        self.dealing, self.stream, self.size, self.parts, self.drop = dealing, stream, size, parts, drop
        self.content = content
        """What this worker's samples sum up to; 0: that cannot be said."""
        self.order = 0
        """The same of the order of this pass, where a sampler makes it."""
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
        """Samples entered into the ledger, and all."""
        self._made = (0.0, 0)
        self._few = 0
        """When so few are left, it is time to ask for more."""
        self._asking: asyncio.Task[None] | None = None
        self._rate, self._rated = 0.0, 0
        """Samples a second, and how often that was measured."""
        self._since_s, self._since = 0.0, 0
        self._worked_s, self._worked, self._before_s = 0.0, 0, 0.0
        self._waited_s, self._waits_since_s = 0.0, 0.0
        """How long batches were waited for, and since when one is: that is not the worker's speed."""
        self._dropped = 0
        """Samples of batches that were too short."""
        self.own: dict[int, Spans] = {}
        """What this worker itself has finished in each pass, in earlier runs too: what a checkpoint keeps."""

    def begin(self, number: int, last: bool = False, order: int = 0) -> None:
        """Begin a pass; `last`: wait for what others hold before it is over."""
        self.number, self.last, self.order = number, last, order
        self.over = self.waits = False
        self._since_s = 0.0

    def progress(self) -> float:
        """Passes made by all workers together, as far as is known: what others do is heard with a lease."""
        made, collected = self._made
        return made + (self._used + self._dropped - collected) / self.stream.key.length

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
        clock = asyncio.get_running_loop().time
        while not self.ready:
            if self.over:
                if not self.waits:
                    return None
                await asyncio.sleep(RETRY_S)
            with self.waiting(clock):
                await self.refill()
        batch = self.ready.popleft()
        if self.due():
            self.dealing.spawn(self.refill())
        return batch

    @contextlib.contextmanager
    def waiting(self, clock: Callable[[], float]) -> Iterator[None]:
        """Training waits for batches."""
        self._waits_since_s = clock()
        try:
            yield
        finally:
            since_s, self._waits_since_s = self._waits_since_s, 0.0
            self._waited_s += clock() - since_s

    def _asked(self, _: asyncio.Task[None]) -> None:
        self._asking = None

    async def _ask(self) -> None:
        pause_s = SOON_S
        while (answer := await self._say(wants=True)) == SOON:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RARELY_S)
        self._look()
        if isinstance(answer, Lease):
            number, start, stop, again = answer
            cut = [Batch(number, *span, again) for span in self.stream.key.cut(start, stop, self.size)]
            self._few = self._enough(len(cut))
            if self.drop:
                cut = self._full(cut)
            self.ready.extend(cut)
            self.over = self.waits = False
        else:
            self.over, self.waits = True, answer == WAIT

    def _full(self, batches: list[Batch]) -> list[Batch]:
        """Those that are not short; the others count as finished: nobody is to use them."""
        short = [batch for batch in batches if batch.stop - batch.place < self.size]
        self._done.extend(batch._replace(again=False) for batch in short)
        self._dropped += sum(batch.stop - batch.place for batch in short)
        return [batch for batch in batches if batch not in short]

    def _enough(self, leased: int) -> int:
        """How many batches to hold at least, after a lease of so many.

        A whole lease says that there is plenty: then they are to last until a dealer that falls silent is
        replaced. Towards the end of a pass leases shrink, and so does what a worker keeps others from.
        """
        rate = self._rate / self.size
        if leased < int(rate * LEASE_S):
            return leased // 2
        return max(leased // 2, int(rate * STOCK * self.dealing.fabric.silence_s))

    async def _say(self, wants: bool) -> Lease | int:
        self.collect()
        self._measure(asyncio.get_running_loop().time())
        return await self.dealing.ask(self, wants, self._rate)

    def _measure(self, now_s: float) -> None:
        """How fast this worker is, by what it has finished and the time it did not wait.

        The first measurement, of first steps, is replaced by the next one; then it takes a while.
        """
        waited_s = self._waited_s + (now_s - since_s if (since_s := self._waits_since_s) else 0.0)
        if self._since_s:
            self._worked_s += max(0.0, now_s - self._since_s - (waited_s - self._before_s))
            self._worked += self._finished - self._since
        self._since_s, self._since, self._before_s = now_s, self._finished, waited_s
        if self._worked and self._worked_s > (RATE_S if self._rated > 1 else 0.0):
            self._rate, self._rated = self._worked / self._worked_s, self._rated + 1
            self._worked_s, self._worked = 0.0, 0

    def finish(self, batch: Batch) -> None:
        """A batch has been used."""
        self._done.append(batch)
        self._used += batch.stop - batch.place

    def collect(self) -> None:
        """Enter what has been finished into the ledger."""
        ledger, news, me = self.stream.ledger, self.stream.news, self.dealing.me
        while self._done:
            number, start, stop, again = self._done.popleft()
            while self._done and (self._done[0].number, self._done[0].place, self._done[0].again) == (
                number,
                stop,
                again,
            ):
                stop = self._done.popleft().stop
            self._finished += stop - start
            if again or number < ledger.floor:
                self.dealing.counters.samples_again += stop - start
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
                one.lost = union(one.lost, [(doubtful.place, doubtful.stop)])
        await self._say(wants=False)
