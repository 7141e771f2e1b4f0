"""Shares: an order cut into as many parts as there are workers, with the same number of batches in each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from freewheel.data.order import check_batch_size, order
from freewheel.errors import ConfigError, at_least


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
        check_batch_size(batch_size)
        at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"there is no worker {rank} among {world_size}, only 0 to {world_size - 1}.")
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.drawn = self.skipped = 0
        """Batches of this pass that were drawn, and those before them that an earlier run has used."""
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

    def begin(self, epoch: int) -> None:
        """Begin a pass."""
        if epoch != self.epoch:
            self.skipped = 0
        self.epoch, self.drawn = epoch, self.skipped

    def end(self, left: bool, in_hand: bool) -> None:
        """A pass has ended here, or was broken off."""
        self.skipped = 0

    def more(self) -> bool:
        """Whether there are batches of this pass after all: never."""
        return False

    def finish(self) -> int:
        """The oldest batch that was drawn has been used; how many samples it had."""
        self.drawn += 1
        return self.sizes[self.drawn - 1]

    def progress(self) -> float:
        """Passes made, all workers alike."""
        return self.epoch + self.drawn / len(self.sizes)

    def state(self, in_hand: bool) -> dict[str, Any]:
        """Where this worker is, the batch in hand counted as used."""
        return {"epoch": self.epoch, "drawn": self.drawn + in_hand}

    def load(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self.epoch, self.skipped = state["epoch"], state["drawn"]
        self.drawn = self.skipped

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = order(self.length, self.shuffle, self.seed, self.epoch)
        at = self._place(self.rank)
        for k, size in enumerate(self.sizes):
            if k >= self.skipped:
                yield shuffled[at : at + size].tolist()
            at += size
