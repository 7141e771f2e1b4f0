"""The order of a pass by a seed or a user's sampler, and checks that it is the same on all workers."""

import itertools
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from freewheel.data.batches import Key
from freewheel.errors import ConfigError, at_least

KINDS = ("in order", "shuffled", "by a sampler", "shuffled by blocks")
MOST_DRAWS = 3 * 10**7  # of a sampler in a pass: a worker keeps up to three passes, each in some 1 GB
LOOKS = 64  # samples in a fingerprint, spread evenly: reading all could take as long as training


def check_batch_size(batch_size: Any) -> None:
    if not isinstance(batch_size, int):
        raise ConfigError(f"batch_size must be a whole number, not {batch_size!r}.")
    at_least("batch_size", batch_size, 1)


def order(length: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(number(f"order/{seed}/{epoch}")))


def number(name: str) -> int:
    """A seed by name, the same in every process."""
    return random.Random(name).getrandbits(62)


class Seeded:
    """Samples in order, or shuffled by the seed and the number of the pass."""

    batched = False

    def __init__(self, length: int, shuffle: bool, seed: int, blocks: Sequence[int] | None = None) -> None:
        self.length, self.shuffle, self.seed = length, shuffle, seed
        self.blocks = blocks if shuffle else None  # their sizes; shuffled as wholes, so that few are in use
        self.kind = int(shuffle) if self.blocks is None else 3

    def draw(self, epoch: int) -> torch.Tensor:
        if self.blocks is None:
            return order(self.length, self.shuffle, self.seed, epoch)
        generator = torch.Generator().manual_seed(number(f"blocks/{self.seed}/{epoch}"))
        starts = [0, *itertools.accumulate(self.blocks)]
        blocks = torch.randperm(len(self.blocks), generator=generator).tolist()
        inside = [torch.randperm(self.blocks[one], generator=generator) + starts[one] for one in blocks]
        return torch.cat([torch.arange(0), *inside])


class Sampled:
    """Samples, or whole batches, as a sampler gives them: all workers let it draw from the same seeds."""

    kind, shuffle = 2, True

    def __init__(self, sampler: Any, seed: int, batched: bool) -> None:
        self.sampler, self.seed, self.batched = sampler, seed, batched
        name = "batch_sampler" if batched else "sampler"
        if isinstance(getattr(sampler, "sampler", sampler), DistributedSampler):
            raise ConfigError(
                f"the {name} is a DistributedSampler, which deals by rank, and the loader deals itself. "
                "Leave it out; shuffle=True is enough."
            )
        try:
            self.length = len(sampler)
        except TypeError:
            raise ConfigError(
                f"the {name}, a {type(sampler).__name__}, has no length, so nobody could say when a pass is "
                "over. Give it __len__."
            ) from None
        except OverflowError:
            self.length = sys.maxsize
        if self.length > MOST_DRAWS:
            raise ConfigError(
                f"the {name} draws {self.length:,} times a pass, whose order is kept in memory: at most "
                f"{MOST_DRAWS:,}. Give it fewer draws, and the loader more epochs."
            )

    def draw(self, epoch: int) -> Sequence[Any]:
        """Draw with every generator seeded; the script's own random numbers stay as they are."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        seed = number(f"sampler/{self.seed}/{epoch}")
        for one in _generators(self.sampler, 3):
            if isinstance(one, torch.Generator):
                one.manual_seed(seed)
            elif isinstance(one, random.Random):
                one.seed(seed)
            else:
                one.bit_generator.state = type(one.bit_generator)(seed).state
        with torch.random.fork_rng(devices=[]):
            python, numpy = random.getstate(), np.random.get_state()
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            try:
                drawn = [list(one) if self.batched else int(one) for one in self.sampler]
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
        if len(drawn) != self.length:
            raise ConfigError(
                f"pass {epoch} of {type(self.sampler).__name__} has {len(drawn)} draws, and its len is "
                f"{self.length}. Let both be the same in every pass."
            )
        return drawn


def _generators(sampler: Any, deep: int) -> Iterator[Any]:
    """The random generators that a sampler, or one inside it, keeps."""
    for one in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(one, torch.Generator | random.Random) or hasattr(one, "bit_generator"):
            yield one
        elif deep and "sampler" in type(one).__name__.lower():
            yield from _generators(one, deep - 1)


def fingerprint(dataset: Any) -> int:
    """A checksum of some samples; 0: a dataset whose reading could draw random numbers, or take long."""
    parts = dataset.tensors if isinstance(dataset, TensorDataset) else [dataset]
    if not all(isinstance(one, torch.Tensor | list | tuple | range | str | bytes) for one in parts):
        return 0
    return summed([_plain(one[k]) for one in parts for k in range(0, len(one), max(1, len(one) // LOOKS))])


def _plain(value: Any) -> Any:
    """A tensor as its type, shape and checksum."""
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), zlib.crc32(raw.numpy().data)


def summed(values: Sequence[Any]) -> int:
    """A checksum of plain values; 0: they are not plain."""
    text = repr(values)
    return 0 if " at 0x" in text else zlib.crc32(text.encode()) or 1


def differs(rank: int, mine: Key, other: int, theirs: Key) -> ConfigError:
    one, two = (
        f"{key.length} samples, {KINDS[key.kind % 4]} with seed {key.seed}"
        + (f", in {key.grid} batches" if key.grid else "")
        for key in (mine, theirs)
    )
    if one == two:
        return ConfigError(
            f"worker {rank}'s loader gives another order than worker {other}'s. Let a sampler draw from its "
            "generator or from global random numbers; materialize a Ray dataset once."
        )
    return ConfigError(
        f"worker {rank}'s loader has {one}; worker {other}'s has {two}. Give all the same; one worker's data "
        "need torch's DataLoader."
    )
