"""Streams: data that come one after the other and cannot be dealt: nobody can ask for a place in them.

Every worker reads the stream and keeps its own samples of it: of each n that follow each other one, by rank.
So each sample is used once, as long as the stream is the same on all workers and nobody is lost. What a lost
worker had left is not seen, and fast workers get no more than slow ones.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from freewheel.data.order import check_batch_size
from freewheel.errors import ConfigError, at_least
from freewheel.runtime.loading.base import END, BaseLoader, Side

log = logging.getLogger("freewheel")


class Every(IterableDataset[Any]):
    """Of each `count` samples that follow each other the one at `place`; of the last few only if `rest`."""

    def __init__(self, stream: Any, place: int, count: int, rest: bool) -> None:
        self.stream, self.place, self.count, self.rest = stream, place, count, rest

    def __iter__(self) -> Iterator[Any]:
        if self.rest:
            return itertools.islice(self.stream, self.place, None, self.count)
        return (group[self.place] for group in zip(*[iter(self.stream)] * self.count, strict=False))


class StreamLoader(BaseLoader):
    """Passes over a stream. A dataset that has `set_epoch` is told which one begins."""

    step = 1.0  # which part of a pass one step of every worker is; as if it were a whole one

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        side: Side,
        *,
        sharded: bool = False,
        drop_last: bool = False,
        epochs: int | None = None,
        **options: Any,
    ) -> None:
        check_batch_size(batch_size)
        at_least("epochs", epochs, 1)
        super().__init__(side)
        rank, world_size = side.rank, side.world_size
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
        self._every = 1 if sharded else world_size
        kept = dataset if self._every == 1 else Every(dataset, rank, world_size, rest=not side.parts)
        self.dataset, self.batch_size, self.drop_last, self.epochs = dataset, batch_size, drop_last, epochs
        self.batches = DataLoader(kept, batch_size, drop_last=drop_last, **options)
        self.samples = 0

    def __len__(self) -> int:
        each = -(-len(self.dataset) // self._every)  # TypeError as torch's, where a stream has no length
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    @property
    def progress(self) -> float:
        """Passes that this worker has made: how long one is nobody knows before it is over."""
        return float(self.epoch + (self.begun and not self.under_way))

    def goes_on(self, first: Any) -> bool:
        """Whether this is another one's next pass."""
        return self.begun and isinstance(first, StreamLoader) and first.dataset is self.dataset

    def __iter__(self) -> Iterator[Any]:
        if self.side.stopped():
            return
        skip, self.given = 0 if self.begun else self.given, 0  # used before the checkpoint
        self.epoch += self.begun
        self.begun = self.under_way = True
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        self._counters = self.side.agent().counters
        batches, self.left = iter(self.batches), True
        try:
            while (batch := self._timed(next, batches, END)) is not END:
                self.given += 1
                if self.given <= skip:
                    continue
                yield batch
                # The last one may be short.
                parts = [
                    one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim
                ]
                count = min(self.batch_size, len(parts[0]) if parts else self.batch_size)
                self._counters.samples += count
                self.samples += count
                if self.side.stopped():
                    return
            self.left = False
        finally:
            self.under_way = False

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: how many batches of it were given. Nobody knows of the others' streams."""
        return {**self._where(), "ledger": []}

    own_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there: what was given before is read again and left out."""
        self.set_epoch(state["epoch"] + (state["begun"] and not state["under_way"]))
        self.given = state["given"] if state["under_way"] else 0
