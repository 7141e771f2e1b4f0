"""A worker's leases of one set of data, as batches in the order in which to use them."""

import asyncio
import contextlib
from collections import deque

from freewheel.data.batches import Batch, Key, Lease, union
from freewheel.data.dataset import GIVEN, OVER, SOON, WAIT, Question
from freewheel.data.dealing import RETRY_S, Dealing
from freewheel.data.shares import LEASE_S
from freewheel.errors import PeerLost

SOON_S, RARELY_S = 0.002, 0.05  # the first and the longest pause before a worker told SOON asks again
# A stock of batches lasts this many times the silence after which a dealer counts as lost: that is noticed
# late, and the next dealer has to ask around.
STOCK = 1.75
RATE_S = 0.2  # the shortest time over which a rate is measured, except for the first steps


class LeaseQueue:
    """The batches this worker holds of one set of data; coroutines belong to the fabric's thread."""

    def __init__(
        self, dealing: Dealing, key: Key, size: int = 1, parts: bool = False, drop: bool = False
    ) -> None:
        self.dealing, self.data = dealing, dealing.use(key)
        self.finish, self.progress = self.data.finish, self.data.progress
        self.size, self.number = size, 0
        self.drop = drop  # leave out batches that are short
        self._question = Question(dealing.me[1], 0, 0, True, False, False, parts, size, 0, 0, rate=0)
        self.since = 0  # takes left-overs from this pass on: earlier ones it has broken off itself
        self.ready: deque[Batch] = deque()
        self._said = GIVEN  # the dealer's last answer: OVER, the pass has no more; WAIT, others hold the rest
        self._early = False  # in parts: OVER was said before all was used, and others may leave theirs since
        self._few = 0  # when so few are left, it is time to ask for more
        self._asking: asyncio.Task[None] | None = None
        self._rate = 0.0  # samples a second of working time
        self._since_s: float | None = None  # working since then; None: waiting, or between two passes
        self._worked_s, self._counted = 0.0, 0  # since the rate was measured, and what was finished by then
        dealing.settling.append(self.settle)

    def begin(self, number: int, last: bool = False, order: int = 0, content: int = 0) -> None:
        """Begin a pass; `last`: wait for what others hold before it is over. See `Question`."""
        self.number = number
        self._question = self._question._replace(number=number, last=last, order=order, content=content)
        self._said = GIVEN

    def due(self) -> bool:
        return self._said == GIVEN and self._asking is None and len(self.ready) <= self._few

    async def refill(self) -> None:
        """Ask for more batches; concurrent callers share one question."""
        if self._asking is None:
            if self._said == OVER:
                return
            self._asking = self.dealing.spawn(self._ask())
        await asyncio.shield(self._asking)

    async def fill(self, patient: bool) -> None:
        """Wait for a batch; `patient`, when all before it are finished, also for what others hold."""
        self._pause()
        if self._said == OVER and self._early:
            self._said = GIVEN
        while not self.ready and (self._said == GIVEN or (self._said == WAIT and patient)):
            if self._said == WAIT:
                await asyncio.sleep(RETRY_S)
            await self.refill()
        self._since_s = asyncio.get_running_loop().time()

    def _pause(self) -> None:
        since_s, self._since_s = self._since_s, None
        if since_s is not None:
            self._worked_s += asyncio.get_running_loop().time() - since_s

    async def draw(self) -> Batch | None:
        """The next batch, once all before it are finished; None: the pass is over."""
        await self.fill(patient=True)
        if not self.ready:
            return None
        batch = self.ready.popleft()
        if self.due():
            self.dealing.spawn(self.refill())
        return batch

    async def _ask(self) -> None:
        try:
            pause_s, self._early = SOON_S, self._question.parts and bool(self.ready)
            while (answer := await self._say(wants=True)) == SOON:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RARELY_S)
            self.data.note_progress()
            if isinstance(answer, Lease):
                spans = self.data.key.cut(answer.place, answer.stop, self.size)
                cut = [answer._replace(place=start, stop=stop) for start, stop in spans]
                # A full lease means plenty is left: keep a stock that outlasts a lost dealer's replacement.
                # Towards the end of a pass leases shrink, and a stock would keep others waiting.
                rate, plenty = self._rate / self.size, 0
                if len(cut) >= int(rate * LEASE_S):
                    plenty = int(rate * STOCK * self.dealing.fabric.silence_s)
                self._few = max(len(cut) // 2, plenty)
                short = [one for one in cut if self.drop and one.stop - one.place < self.size]
                self.data.drop(short)
                self.ready.extend(one for one in cut if one not in short)
                self._said = GIVEN
            else:
                self._said = WAIT if answer == WAIT else OVER
        finally:
            self._asking = None  # at once: nobody may wait for a question that is over

    async def _say(self, wants: bool) -> Lease | int:
        self.data.collect()
        working_s = asyncio.get_running_loop().time() - self._since_s if self._since_s is not None else 0.0
        worked_s, finished = self._worked_s + working_s, self.data.finished - self._counted
        if finished and worked_s > (RATE_S if self._rate else 0.0):
            self._rate = finished / worked_s
            self._worked_s -= worked_s
            self._counted += finished
        question = self._question._replace(since=self.since, wants=wants, rate=int(self._rate * 1e6))
        return await self.dealing.ask(self.data, question)

    async def settle(self, left: bool = False, doubtful: Batch | None = None) -> None:
        """End the pass, or leave it (`left`), with a `doubtful` batch in hand that may have been used."""
        if self._asking is not None:
            with contextlib.suppress(PeerLost):
                await asyncio.shield(self._asking)
        data = self.data
        data.collect()
        self.ready.clear()
        data.ledger.hold(self.dealing.me, {})
        if left:
            self.since = self.number + 1
        for ledger in (data.ledger, data.news) if left else ():
            ledger.leave(self.number)
            if doubtful is not None and (one := ledger.open(doubtful.number)) is not None:
                one.lost = union(one.lost, [(doubtful.place, doubtful.stop)])
        self._pause()
        await self._say(wants=False)  # what is finished, and that the rest is anybody's
