"""Dealing samples to workers: each worker loads its own share of one shuffled order.

All workers shuffle in the same way, from the seed and the number of the pass, so no word is spoken about
who gets what. In a pass over n samples, worker k of w has the places k·n/w up to (k + 1)·n/w of the order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from freewheel.errors import ConfigError, at_least

DEALT_HERE = ("sampler", "batch_sampler")
"""Options of torch's DataLoader that would deal the samples in another way."""


class Shares(Sampler[list[int]]):
    """One worker's batches of each pass, as lists of indexes: a batch sampler for torch's DataLoader.

    Over all workers each sample comes once in a pass, and every worker has the same number of batches, none
    of them empty or above `batch_size`. Batches are full but for the last. Only where some shares are a
    multiple of `batch_size` and others have one sample more, all are cut into equal batches (but for one
    sample) instead, for else the rest would be a single sample here and nothing there.

    With `drop_last` all batches are full, and what is left over is not seen in this pass.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(batch_size, int):
            raise ConfigError(f"batch_size must be a whole number, not {batch_size!r}.")
        at_least("batch_size", batch_size, 1)
        at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"there is no worker {rank} among {world_size}, only 0 to {world_size - 1}.")
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.first = 0
        """Which batch a pass begins with: above 0 where a resumed run goes on in the middle of one."""
        self.sizes = self._sizes()

    def _sizes(self) -> list[int]:
        """How many samples each batch of this worker has."""
        full, workers = self.batch_size, self.world_size
        least, most = self.length // workers, -(-self.length // workers)
        if least == 0:
            raise ConfigError(
                f"{self.length} samples cannot be dealt to {workers} workers, for each needs one at least. "
                "Give more data or take fewer workers."
            )
        if self.drop_last:
            if least < full:
                raise ConfigError(
                    f"with drop_last nothing is left: a worker's share is {least} of {self.length} samples, "
                    f"less than a batch of {full}. Take a batch_size of {least} or less, or drop_last=False."
                )
            return [full] * (least // full)
        share, batches = self._place(self.rank + 1) - self._place(self.rank), -(-most // full)
        if batches > least:  # only with a batch_size of 1
            raise ConfigError(
                f"{self.length} samples in batches of 1 are not the same number of batches for each of "
                f"{workers} workers. Take a batch_size of 2 or more, or drop_last=True."
            )
        if -(-least // full) < batches:
            return [(k + 1) * share // batches - k * share // batches for k in range(batches)]
        return [full] * (batches - 1) + [share - full * (batches - 1)]

    def _place(self, rank: int) -> int:
        """Where in the order a worker's share begins, and the one before it ends."""
        return rank * self.length // self.world_size

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=seeded(f"order/{self.seed}/{self.epoch}"))
        at = self._place(self.rank) + sum(self.sizes[: self.first])
        for size in self.sizes[self.first :]:
            yield order[at : at + size].tolist()
            at += size


class Loader:
    """Passes over a worker's share of a dataset, by torch's DataLoader; iterate again for the next pass.

    `epoch` is the number of the pass under way, or of the first one; each new iteration adds one to it. The
    same seed and epoch give the same batches, and the same random numbers to the processes that DataLoader
    starts for the pass; those of other workers get others. When `stopped` says so, a pass ends after the
    batch in hand and no other one begins.

    `dataset` has a length and is read by index: a Dataset, a tensor, a list. The options are DataLoader's
    (`num_workers`, `collate_fn`, `pin_memory`, …).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        stopped: Callable[[], bool] | None = None,
        **options: Any,
    ) -> None:
        for name in DEALT_HERE:
            if name in options:
                raise ConfigError(
                    f"the loader deals the samples to the workers and takes no {name}. "
                    "Leave it out, or use torch's DataLoader and deal by worker.rank and worker.world_size."
                )
        self.shares = Shares(count(dataset), batch_size, rank, world_size, shuffle, seed, drop_last)
        self.stopped = stopped or (lambda: False)
        self.random = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self.random)
        self.batches: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.shares, **options)
        self.begun = False
        self.given = 0
        """How many batches of the pass the loop has been given."""

    @property
    def epoch(self) -> int:
        """The number of the pass under way, or of the first one."""
        return self.shares.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one."""
        at_least("epoch", epoch, 0)
        self.shares.epoch = epoch
        self.begun = False
        self.shares.first = 0

    def state_dict(self) -> dict[str, int]:
        """Where the loop is; a batch that was given counts as done."""
        return {
            "length": self.shares.length,
            "batch_size": self.shares.batch_size,
            "world_size": self.shares.world_size,
            "epoch": self.epoch,
            "given": self.given if self.begun else self.shares.first,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there; dealt to another number of workers, or in other batches, the pass begins anew."""
        if state["length"] != self.shares.length:
            raise ConfigError(
                f"cannot resume: the dataset has {self.shares.length} samples, the one of the checkpoint had "
                f"{state['length']}. Give the same dataset, or begin anew."
            )
        self.set_epoch(state["epoch"])
        mine = self.state_dict()
        if all(state[name] == mine[name] for name in ("batch_size", "world_size")):
            self.shares.first = state["given"]

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        if self.stopped():
            return
        if self.begun:
            self.shares.epoch += 1
            self.shares.first = 0
        self.begun, self.given = True, self.shares.first
        if self.random is not None:  # DataLoader seeds its processes from it
            shares = self.shares
            self.random.manual_seed(number(f"processes/{shares.seed}/{shares.epoch}/{shares.rank}"))
        for batch in self.batches:
            self.given += 1
            yield batch
            if self.stopped():
                return


def count(dataset: Any) -> int:
    """How many samples a dataset has; refuses one that cannot be read by index."""
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"a {type(dataset).__name__} has no length and no samples by index, so it cannot be dealt. "
            "Give a dataset with __len__ and __getitem__, or use torch's DataLoader and let each "
            "worker keep every world_size-th sample, from its rank on (worker.rank, worker.world_size)."
        ) from None


def number(name: str) -> int:
    """A seed by name, the same in every process."""
    return random.Random(name).getrandbits(62)


def seeded(name: str) -> torch.Generator:
    """A random generator seeded by name."""
    return torch.Generator().manual_seed(number(name))
