"""The order of the samples in a pass, the same on all workers."""

from __future__ import annotations

import random
from typing import Any

import torch

from freewheel.errors import ConfigError, at_least


def check_batch_size(batch_size: Any) -> None:
    """Refuse what is no batch size."""
    if not isinstance(batch_size, int):
        raise ConfigError(f"batch_size must be a whole number, not {batch_size!r}.")
    at_least("batch_size", batch_size, 1)


def order(length: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """The order of a pass, the same on all workers."""
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=seeded(f"order/{seed}/{epoch}"))


def number(name: str) -> int:
    """A seed by name, the same in every process."""
    return random.Random(name).getrandbits(62)


def seeded(name: str) -> torch.Generator:
    """A random generator seeded by name."""
    return torch.Generator().manual_seed(number(name))
