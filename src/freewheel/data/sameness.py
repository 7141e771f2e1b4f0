"""Whether workers have the same data: what a data set sums up to, and what to say of two that differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from freewheel.data.batches import Key

KINDS = ("in order", "shuffled", "by a sampler", "shuffled by blocks")
LOOKS = 64
"""How many samples are looked at, spread evenly: reading all could take as long as training."""


def fingerprint(dataset: Any) -> int:
    """What samples sum up to that can be looked at without loading any; 0: there are none such.

    Reading a data set of a user's own could draw random numbers, or take long.
    """
    parts = dataset.tensors if isinstance(dataset, TensorDataset) else [dataset]
    if not all(isinstance(one, torch.Tensor | list | tuple | range | str | bytes) for one in parts):
        return 0
    return summed([_plain(one[k]) for one in parts for k in range(0, len(one), max(1, len(one) // LOOKS))])


def _plain(value: Any) -> Any:
    """Of a tensor its numbers, wherever it lies, or their sum."""
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), zlib.crc32(raw.numpy().data)


def summed(values: Sequence[Any]) -> int:
    """A number that plain values have in common with equal ones; 0: they are not plain."""
    text = repr(values)
    return 0 if " at 0x" in text else zlib.crc32(text.encode()) or 1


def difference(rank: int, mine: Key, other: int, theirs: Key) -> str:
    """What to tell the user of a worker whose data are not those of another."""
    one, two = (
        f"{key.length} samples, {KINDS[key.kind % 4]} with seed {key.seed}"
        + (f", in {key.grid} batches" if key.grid else "")
        for key in (mine, theirs)
    )
    if one == two:
        return (
            f"worker {rank}'s loader gives another order than worker {other}'s. Let a sampler draw from its "
            "generator or from global random numbers; materialize a Ray dataset once."
        )
    return (
        f"worker {rank}'s loader has {one}; worker {other}'s has {two}. Give all the same; one worker's data "
        "need torch's DataLoader."
    )
