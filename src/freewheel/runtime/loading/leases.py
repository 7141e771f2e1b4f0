"""Leases as torch's DataLoader draws them: the training thread's side of dealing (data/dealing.py)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from freewheel.data.batches import Batch, Key
from freewheel.data.hand import RETRY_S, Hand
from freewheel.data.ledger import BEHIND, Ledger, reader
from freewheel.data.order import Blocked, Sampled, Seeded, check_batch_size, number
from freewheel.data.spans import Spans, size, union
from freewheel.errors import ConfigError

if TYPE_CHECKING:
    from freewheel.runtime.worker.agent import Agent

log = logging.getLogger("freewheel")
PAGE = 4096
"""How many samples of an order are looked up at once: one by one costs more than the rest of a batch."""
EARLIER = 0
"""As which life of a worker that counts which it did in earlier runs."""


class Leases(Sampler[list[int]]):
    """The batches that are dealt to one worker in each pass: a batch sampler for torch's DataLoader.

    Over all workers every sample of the order comes once in a pass. Which of them come here depends on the
    speeds, and how many come in a batch on this worker's batch size. Where all have the same only the last
    batch of the order may be short; with `drop_last` a short one is left out.

    With `parts`, for strategies in which all step together, each worker has a part of its own, and as many
    batches as any other: the order is cut into equal batches (but for one sample) instead. What a lost worker
    leaves of its part is dealt to the others.
    """

    def __init__(
        self,
        agent: Callable[[], Agent],
        source: Seeded | Sampled | Blocked,
        batch_size: int,
        world_size: int,
        drop_last: bool = False,
        epochs: int | None = None,
        check: Callable[[], None] = lambda: None,
        parts: bool = False,
        content: int = 0,
        first: bool = False,
    ) -> None:
        check_batch_size(batch_size)
        length = source.length
        together = batch_size * world_size if parts else batch_size
        batches = (length // together if drop_last else -(-length // together)) * (together // batch_size)
        if source.batched and parts:
            batches = length // world_size * world_size
        if batches < world_size or length < world_size:
            most = length // world_size if drop_last or parts else (length - 1) // max(1, world_size - 1)
            cure = f"take a batch_size of {most} or less, or fewer workers" if most else "take fewer workers"
            raise ConfigError(
                f"{length} samples in batches of {batch_size} are less than a batch for each of {world_size} "
                f"workers. Give more data, {cure}."
            )
        if batches > length:  # only with parts and a batch_size of 1
            raise ConfigError(
                f"{length} samples in batches of 1 are not the same number of batches for each of "
                f"{world_size} workers. Take a batch_size of 2 or more, or drop_last=True."
            )
        self.parts, self.source, self.content, self.first = parts, source, content, first
        self._agent, self.length, self.batch_size, self.world_size = agent, length, batch_size, world_size
        self.count = batches
        self.dealt = batches * batch_size if parts and (drop_last or source.batched) else length
        """Of how many samples a pass is over; of a batch sampler: batches."""
        self.drop_last, self.epochs = drop_last, epochs
        self.check = check
        self.epoch = 0
        self.drawn: deque[Batch] = deque()
        """Batches that DataLoader has been given and the loop has not finished."""
        self._asked: concurrent.futures.Future[None] | None = None
        self._orders: dict[int, Any] = {}
        self._page: tuple[int, int, list[int]] = (-1, 0, [])
        """A piece of a pass's order: the pass, where it begins, the samples."""
        self._sum: tuple[int, int | None] = (-1, None)
        """A pass, and what its order sums up to."""

    @functools.cached_property
    def agent(self) -> Agent:
        """The communication thread, from the first use on."""
        return self._agent()

    @functools.cached_property
    def hand(self) -> Hand:
        """What this worker holds. Loaders that are alike are told apart by the order of their first use."""
        return self.agent.dealing.hand(
            self.key, self.batch_size, self.parts, self.drop_last and not self.parts, self.content
        )

    @functools.cached_property
    def key(self) -> Key:
        """Which data these are, for all workers alike, from the first use on."""
        agent, source = self.agent, self.source
        alike = f"{self.length}/{source.kind}/{source.seed}/{source.batched}"
        turn = agent.loaders[alike] = agent.loaders.get(alike, 0) + 1
        if turn == 2 and source.shuffle and self.epoch == 0:
            log.warning(
                "a second loader of the same data begins with pass 0 again, in the same order as the first. "
                "For further passes make one loader and iterate it again"
            )
        # The first loader has the data that are trained on: all must have the same.
        mark = 0 if self.first else number(f"{alike}/{turn}") >> 14
        seed = source.seed if 0 <= source.seed < 1 << 48 else number(f"seed/{source.seed}") >> 14
        return Key(self.dealt, mark, source.kind, seed, self.count if self.parts else 0)

    def __len__(self) -> int:
        """Batches of this worker in a pass, if all were equally fast."""
        return -(-self.count // self.world_size)

    def begin(self, epoch: int) -> None:
        """Begin a pass."""
        self.epoch = epoch
        self._sum = epoch, self.source.sum(self._order(epoch)) if self.source.kind >= 2 else 0
        last = self.epochs is not None and epoch >= self.epochs - 1
        self.hand.begin(epoch, last, order=self._sum[1])

    def strange(self, state: dict[str, Any]) -> bool:
        """Whether a sampler gives another order of a pass than when its state was saved."""
        epoch, known = state["epoch"], state["order"]
        return known is not None and known != self.source.sum(self._order(epoch))

    def end(self, left: bool, in_hand: bool) -> None:
        """A pass has ended here: tell the others what is finished, give back the rest."""
        doubtful = self.drawn[0] if in_hand else None
        self.drawn.clear()
        for old in [q for q in self._orders if self.source.kind != 2 or q <= self.epoch - BEHIND]:
            del self._orders[old]
        self._page = (-1, 0, [])
        if not self.agent.alive:  # an exception ended the block, and nobody is there to be told
            return
        self._wait(self.agent.begin(self.hand.settle(left, doubtful)), patient=True)

    def more(self) -> bool:
        """In the last pass: wait for what others hold; whether some of it has come back to be dealt here."""
        while self.hand.waits and not self.agent.stopped:
            self._wait(self.agent.begin(self._again()))
        return bool(self.hand.ready) and not self.agent.stopped

    async def _again(self) -> None:
        await asyncio.sleep(RETRY_S)
        await self.hand.refill()

    def finish(self) -> int:
        """The oldest batch that was drawn has been used; how many samples it had."""
        batch = self.drawn.popleft()
        self.hand.finish(batch)
        if self.source.batched:
            return len(self._order(batch.number)[batch.place])
        return batch.stop - batch.place

    def progress(self) -> float:
        """Passes made by all workers together, as far as is known here."""
        return self.hand.progress() if "hand" in self.__dict__ else float(self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        hand = self.hand
        while not self.agent.stopped:
            over = hand.over  # before looking: nothing comes once it is over
            if not hand.ready:
                if over:
                    return
                with hand.waiting(time.monotonic):
                    self._wait(self._ask())
                continue
            batch = hand.ready.popleft()
            if hand.due():
                self._ask()
            self.drawn.append(batch)
            yield self._samples(batch)

    def _ask(self) -> concurrent.futures.Future[None]:
        if self._asked is None or self._asked.done():
            self._asked = self.agent.begin(self.hand.refill())
        return self._asked

    def _wait(self, asked: concurrent.futures.Future[None], patient: bool = False) -> None:
        """Wait for the communication thread, but not if it has failed, or the run was stopped."""
        while True:
            try:
                return asked.result(timeout=0.2)
            except concurrent.futures.TimeoutError:
                self.check()
                if self.agent.stopped and not patient:
                    return None

    def _samples(self, batch: Batch) -> list[int]:
        """Which samples a batch has."""
        start, stop = batch.place, batch.stop
        if self.source.batched:
            return list(self._order(batch.number)[start])
        number, first, page = self._page
        if number != batch.number or start < first or stop > first + len(page):
            drawn = self._order(batch.number)[start : max(stop, start + PAGE)]
            first, page = start, drawn if isinstance(drawn, list) else drawn.tolist()
            self._page = batch.number, first, page
        return page[start - first : stop - first]

    def next_samples(self) -> list[int]:
        """Those of the batch that is drawn next; nothing, where that is not known."""
        try:
            return self._samples(self.hand.ready[0])
        except IndexError:
            return []

    def _order(self, epoch: int) -> Any:
        if epoch not in self._orders:
            self._orders[epoch] = self.source.draw(epoch)
        return self._orders[epoch]

    def state(self, in_hand: bool) -> dict[str, Any]:
        """What this worker itself has finished, the batch in hand included.

        Not what it knows of the others: they may have finished it after their own last checkpoint. What they
        say themselves is given to `load` as "others".
        """
        return self.agent.call(self._state(self.hand, in_hand))

    async def _state(self, hand: Hand, in_hand: bool) -> dict[str, Any]:
        hand.collect()
        known = hand.stream.ledger
        ledger = Ledger(known.length)
        ledger.floor, ledger.past = known.floor, known.past
        own = dict(hand.own)
        if in_hand and self.drawn:
            number, place, stop, _ = self.drawn[0]
            own[number] = union(own.get(number, []), [(place, stop)])
        for number, spans in own.items():
            if (one := ledger.open(number)) is not None:
                one.finished, one.counts = spans, {(self.agent.dealing.me[0], EARLIER): size(spans)}
        order = self._sum[1] if self._sum[0] == self.epoch else None
        return {"epoch": self.epoch, "since": hand.since, "order": order, "ledger": [ledger.encode()]}

    def position(self, in_hand: bool) -> dict[str, Any]:
        """What all workers together have finished, as far as those within reach know."""
        return {**self.state(in_hand), "whole": True, "ledger": [self.agent.call(self._known(in_hand))]}

    async def _known(self, in_hand: bool) -> list[float]:
        return self.finished(await self.agent.dealing.known(self.hand.stream), int(in_hand))

    def finished(self, known: Ledger, drawn: int) -> list[float]:
        """What a ledger knows to be finished, and so many of the batches that were drawn; whoever did it."""
        used = dict[int, Spans]()
        for q, place, stop, _ in list(self.drawn)[:drawn]:
            used[q] = union(used.get(q, []), [(place, stop)])
        ledger = Ledger(known.length)
        ledger.floor, ledger.past = known.floor, known.past
        for q in sorted({*known.passes, *used}):
            if (one := ledger.open(q)) is not None:
                before = known.passes[q].finished if q in known.passes else []
                one.finished = union(before, used.get(q, []))
                one.counts = {(0, EARLIER): size(one.finished)}
        return ledger.encode()

    def load(self, state: dict[str, Any]) -> None:
        """Go on there: what is finished there is finished here."""
        self.epoch = state["epoch"]
        self.agent.call(self._load(self.hand, state))

    async def _load(self, hand: Hand, state: dict[str, Any]) -> None:
        stream, hand.since = hand.stream, state["since"]
        for numbers in [*state["ledger"], *(one for others in state.get("others", []) for one in others)]:
            known = Ledger.decode(stream.key.length, reader(numbers))
            stream.ledger.merge(known)
            stream.news.merge(known)
        # Of what all have done one keeps account: a checkpoint of each says what it has done itself.
        for numbers in (
            state["ledger"] if not state.get("whole") or self.agent.me.rank == min(self.agent.first) else ()
        ):
            for q, one in Ledger.decode(stream.key.length, reader(numbers)).passes.items():
                hand.own[q] = union(hand.own.get(q, []), one.finished)
        hand.collect()  # so that progress is known at once
