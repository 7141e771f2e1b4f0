"""Leases as torch's DataLoader draws them: the training thread's side of dealing (data/leases.py)."""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from freewheel.data.batches import Batch, Key, Spans, size, union
from freewheel.data.leases import LeaseQueue
from freewheel.data.ledger import BEHIND, Ledger
from freewheel.data.order import Sampled, Seeded, check_batch_size, number, summed
from freewheel.errors import ConfigError
from freewheel.fabric.notes import whole
from freewheel.runtime.worker.agent import Agent

log = logging.getLogger("freewheel")
EARLIER = 0  # the life of a worker to which its work in earlier runs is attributed


@dataclass(frozen=True)
class Side:
    """What a loader knows of its worker."""

    agent: Callable[[], Agent]  # the communication thread; raises where there is none
    rank: int = 0
    world_size: int = 1
    parts: bool = False  # all workers step together and need as many batches each
    first: bool = False  # it is the worker's first loader, of the data that are trained on
    stopped: Callable[[], bool] = lambda: False  # asked before each batch: whether to end the pass


class LeaseSampler(Sampler[list[int]]):
    """The batches that are dealt to one worker in each pass: a batch sampler for torch's DataLoader.

    Over all workers every sample of the order comes once in a pass. Which of them come here depends on the
    speeds. If all have the same batch size, only the last batch of the order may be short; `drop_last` leaves
    short ones out.

    With `side.parts`, for strategies in which all step together, the order is cut into equal batches (up to
    one sample), and each worker has as many, a part of its own. A lost worker's part is dealt to the others.
    """

    def __init__(
        self, side: Side, source: Seeded | Sampled, batch_size: int, drop_last: bool = False, content: int = 0
    ) -> None:
        check_batch_size(batch_size)
        self.side, self.source, self.content, self.length = side, source, content, source.length
        self.batch_size, self.drop_last = batch_size, drop_last
        length, workers, turns = self.length, side.world_size, side.world_size if side.parts else 1
        samples, equal = batch_size * turns, side.parts and (drop_last or source.batched)
        # All workers' batches in a pass, and how many samples (of a batch sampler: batches) they have.
        self.count = (length // samples if drop_last or equal else -(-length // samples)) * turns
        self.dealt = self.count * batch_size if equal else length
        if self.count < workers or length < workers:
            raise ConfigError(
                f"{length} samples in batches of {batch_size} are less than a batch for each of {workers} "
                "workers. Give more data, take a smaller batch_size or fewer workers."
            )
        if self.count > length:  # only with parts and a batch_size of 1
            raise ConfigError(
                f"{length} samples in batches of 1 are not the same number of batches for each of {workers} "
                "workers. Take a batch_size of 2 or more, or drop_last=True."
            )
        self.epoch = 0
        self.drawn: deque[Batch] = deque()  # given to DataLoader, and not finished by the loop
        self._order: Callable[[int], Any] = functools.lru_cache(maxsize=BEHIND)(source.draw)
        self.order_sum = functools.lru_cache(maxsize=2)(self._order_sum)
        # Where all step together:
        self._made = self._parts = (
            0  # batches finished of a pass, and its number of parts (0: they are not alike)
        )
        self._part_of = self._loaded = -1  # which pass that is; in which one a state was loaded
        self._used = False  # whether this worker has finished any batch

    def _order_sum(self, epoch: int) -> int:
        """A checksum of what must be the same on all workers: the blocks, or what the sampler draws."""
        common = self.source.blocks if isinstance(self.source, Seeded) else self._order(epoch)
        return summed(common) if common is not None else 0

    @functools.cached_property
    def agent(self) -> Agent:
        return self.side.agent()

    @functools.cached_property
    def queue(self) -> LeaseQueue:
        """Made at first use: loaders that are alike are told apart by the order of their first uses."""
        agent, source, parts = self.agent, self.source, self.side.parts
        alike = f"{self.length}/{source.kind}/{source.seed}/{source.batched}"
        turn = agent.loaders[alike] = agent.loaders.get(alike, 0) + 1
        if turn == 2 and source.shuffle and self.epoch == 0:
            log.warning(
                "a second loader of the same data begins with pass 0 again, in the same order as the first. "
                "For further passes make one loader and iterate it again"
            )
        # The first loader has the data that are trained on: all must have the same.
        mark = 0 if self.side.first else number(f"{alike}/{turn}") >> 14
        seed = source.seed if 0 <= source.seed < 1 << 48 else number(f"seed/{source.seed}") >> 14
        key = Key(self.dealt, mark, source.kind, seed, self.count if parts else 0)
        return LeaseQueue(agent.dealing, key, self.batch_size, parts, self.drop_last and not parts)

    def __len__(self) -> int:
        """Batches of this worker in a pass, if all were equally fast."""
        return -(-self.count // self.side.world_size)

    def begin(self, epoch: int, last: bool) -> None:
        self.epoch = epoch
        self.queue.begin(epoch, last, self.order_sum(epoch), self.content)
        if not self.side.parts:
            return
        # Each makes as much of a pass as any other, if it makes all of its part.
        members, own = len(self.agent.fabric.members), size(self.queue.data.own.get(epoch, []))
        even = not self.agent.late or self._used
        if own or self._loaded == epoch:
            even = own * members == round((self.queue.progress() - epoch) * self.dealt)
        self._parts, self._part_of = members if even else 0, epoch
        self._made = round(own * self.count / self.dealt)

    def __iter__(self) -> Iterator[list[int]]:
        queue = self.queue
        while not self.agent.stopped and (queue.ready or self._filled(patient=False)):
            batch = queue.ready.popleft()
            if queue.due():
                self.agent.begin(queue.refill())
            self.drawn.append(batch)
            yield self._samples(batch)

    def finish(self) -> int:
        """Count the oldest drawn batch as used; return how many samples it had."""
        batch = self.drawn.popleft()
        self.queue.finish(batch)
        self._made += batch.number == self._part_of
        self._used = True
        return len(self._samples(batch)) if self.source.batched else batch.stop - batch.place

    def more(self) -> bool:
        """In the last pass wait for what others hold; whether some of it was dealt to this worker."""
        return self._filled(patient=True) and not self.agent.stopped

    def _filled(self, patient: bool) -> bool:
        self.agent.wait(self.queue.fill(patient), lambda: self.agent.stopped)
        return bool(self.queue.ready)

    def end(self, left: bool, in_hand: bool) -> None:
        """End a pass: report what is finished, give back the rest."""
        doubtful = self.drawn[0] if in_hand else None
        self.drawn.clear()
        if self.agent.alive:  # else an exception ended the block, and nobody is there to be told
            self.agent.wait(self.queue.settle(left, doubtful))

    def progress(self, before: float) -> float:
        """Passes made by all workers together, as far as is known; `before`, until one has begun."""
        if self._parts:
            return self._part_of + min(1.0, self._made * self._parts / self.count)
        return self.queue.progress() if "queue" in self.__dict__ else float(before)

    def next_samples(self) -> list[int]:
        """Those of the next batch, where it is known."""
        return self._samples(self.queue.ready[0]) if self.queue.ready else []

    def _samples(self, batch: Batch) -> list[int]:
        order = self._order(batch.number)
        drawn = order[batch.place] if self.source.batched else order[batch.place : batch.stop]
        return drawn.tolist() if isinstance(drawn, Tensor) else list(drawn)

    def state(self, epoch: int, used: int, whole: bool) -> dict[str, Any]:
        """What this worker, or all (`whole`), have finished; `used` of the drawn batches count, too."""

        async def finished() -> list[float]:
            data = self.queue.data
            if whole:
                return self.finished(await self.agent.dealing.known(data), used)
            # Without what it knows of others: they may have finished that after their own last checkpoint.
            # `load` gets what they say themselves, as "others".
            data.collect()
            return self.finished(data.ledger, used, data.own)

        ledger, order = self.agent.call(finished()), self.order_sum(epoch)
        return {"since": self.queue.since, "order": order, "ledger": [ledger], "whole": whole}

    def finished(self, known: Ledger, used: int, own: Mapping[int, Spans] | None = None) -> list[float]:
        """What is finished by a ledger, or by `own`, and the first `used` of the drawn batches."""
        found = {q: one.finished for q, one in known.passes.items()} if own is None else dict(own)
        for q, place, stop, _ in list(self.drawn)[:used]:
            found[q] = union(found.get(q, []), [(place, stop)])
        return known.account((0 if own is None else self.side.rank, EARLIER), found)

    def load(self, state: dict[str, Any]) -> None:
        data, self.queue.since = self.queue.data, state["since"]
        self._loaded, self._parts = state["epoch"], 0
        # A state of all workers is entered as the own work of one of them only.
        mine = not state["whole"] or self.agent.me.rank == min(self.agent.first)
        told = [(numbers, mine) for numbers in state["ledger"]]
        told += [(numbers, False) for others in state.get("others", []) for numbers in others]

        async def take_up() -> None:
            for numbers, own in told:
                known = Ledger.decode(data.key.length, whole(numbers))
                data.ledger.merge(known)
                data.news.merge(known)
                for q, one in known.passes.items() if own else ():
                    data.own[q] = union(data.own.get(q, []), one.finished)
            data.collect()  # so that progress is known at once

        self.agent.call(take_up())
