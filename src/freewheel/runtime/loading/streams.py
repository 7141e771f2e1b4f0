"""Streams: data that come one after the other and cannot be dealt: nobody can ask for a place in them.

Every worker reads the stream and keeps its own samples of it: of each n that follow each other one, by rank.
So each sample is used once, as long as the stream is the same on all workers and nobody is lost. What a lost
worker had left is not seen, and fast workers get no more than slow ones.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from freewheel.data.order import check_batch_size
from freewheel.errors import ConfigError, at_least

if TYPE_CHECKING:
    from freewheel.runtime.worker.agent import Agent

log = logging.getLogger("freewheel")
END = object()


class Every(IterableDataset[Any]):
    """Of each `count` samples that follow each other the one at `place`; of the last few only if `rest`."""

    def __init__(self, stream: Any, place: int, count: int, rest: bool) -> None:
        self.stream, self.place, self.count, self.rest = stream, place, count, rest

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while len(group := list(itertools.islice(samples, self.count))) == self.count:
            yield group[self.place]
        if self.rest and self.place < len(group):
            yield group[self.place]


class StreamLoader:
    """Passes over a stream, by torch's DataLoader; iterate again for the next pass.

    `epoch` is the number of the pass under way, or of the first one. A dataset that has `set_epoch` is told.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        agent: Callable[[], Agent],
        rank: int,
        world_size: int,
        *,
        sharded: bool = False,
        drop_last: bool = False,
        epochs: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        parts: bool = False,
        shown: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        check_batch_size(batch_size)
        at_least("epochs", epochs, 1)
        if rank >= world_size and not sharded:
            raise ConfigError(
                f"worker {rank} has joined, and a stream is split among the {world_size} workers that began. "
                "Give sharded=True and a stream of its own, or a dataset with a length."
            )
        if world_size > 1 and not sharded and rank == 0:
            log.warning(
                "a stream cannot be dealt: each of %d workers keeps one of as many samples. What a lost one "
                "had left is not seen. If streams differ by worker, give sharded=True",
                world_size,
            )
        kept = dataset if sharded or world_size == 1 else Every(dataset, rank, world_size, rest=not parts)
        self.dataset, self.batch_size, self.drop_last, self.epochs = dataset, batch_size, drop_last, epochs
        self.world_size, self.sharded = world_size, sharded
        self.agent, self.stopped, self.shown = agent, stopped, shown
        self.batches: DataLoader[Any] = DataLoader(kept, batch_size, drop_last=drop_last, **options)
        self.epoch, self.begun, self.given, self.skip = 0, False, 0, 0
        self.under_way = False
        self.samples = 0
        """Given by this worker's stream."""

    def __getattr__(self, name: str) -> Any:
        """What else torch's DataLoader shows."""
        if name in self.__dict__.get("shown", ()):
            return getattr(self.batches, name)
        raise AttributeError(f"a worker's loader has no attribute {name!r}")

    def __len__(self) -> int:
        share = self.world_size if not self.sharded else 1
        each = -(-len(self.dataset) // share)  # TypeError as torch's, where a stream has no length
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    @property
    def progress(self) -> float:
        """Passes that this worker has made: how long one is nobody knows before it is over."""
        return float(self.epoch + (self.begun and not self.under_way))

    @property
    def step(self) -> float:
        """Which part of a pass one step of every worker is; as if it were a whole one."""
        return 1.0

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one."""
        at_least("epoch", epoch, 0)
        self.epoch, self.begun, self.skip = epoch, False, 0

    def goes_on(self, first: Any) -> bool:
        """Whether this is another one's next pass."""
        return self.begun and isinstance(first, StreamLoader) and first.dataset is self.dataset

    def __iter__(self) -> Iterator[Any]:
        if self.stopped():
            return
        self.epoch += self.begun
        self.begun = self.under_way = True
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        counters, skip = self.agent().counters, self.skip
        self.given, self.skip = 0, 0
        batches = iter(self.batches)
        try:
            while True:
                counters.wait("data", time.perf_counter())
                try:
                    batch = next(batches, END)
                finally:
                    counters.go_on(time.perf_counter())
                if batch is END:
                    return
                self.given += 1
                if self.given <= skip:  # used before the checkpoint
                    continue
                yield batch
                count = min(self.batch_size, _samples(batch, self.batch_size))
                counters.samples += count
                self.samples += count
                if self.stopped():
                    return
        finally:
            self.under_way = False

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: how many batches of it were given."""
        return {
            "epoch": self.epoch,
            "begun": self.begun,
            "under_way": self.under_way,
            "given": self.given,
            "ledger": [],
        }

    def own_state(self) -> dict[str, Any]:
        """The same: nobody knows of the others' streams."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there: what was given before is read again and left out."""
        self.epoch, self.begun = state["epoch"] + (state["begun"] and not state["under_way"]), False
        self.skip = state["given"] if state["under_way"] else 0


def _samples(batch: Any, usual: int) -> int:
    """How many samples a batch has: the last one may be short."""
    leaves = pytree.tree_leaves(batch)
    return next((len(one) for one in leaves if isinstance(one, torch.Tensor) and one.ndim), usual)
