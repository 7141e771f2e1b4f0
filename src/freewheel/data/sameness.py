"""Whether workers have the same data: what a data set sums up to, and what to say of two that differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from freewheel.data.batches import Key

LOOKS = 64
"""How many samples are looked at, spread evenly: reading all could take as long as training."""


def fingerprint(dataset: Any) -> int:
    """What samples sum up to that can be looked at without loading any; 0: there are none such.

    Reading a data set of a user's own could draw random numbers, or take long.
    """
    if isinstance(dataset, TensorDataset):
        return summed(tuple(_looks(one) for one in dataset.tensors))
    if isinstance(dataset, torch.Tensor | list | tuple | range | str | bytes):
        return summed(_looks(dataset))
    return 0


def _looks(values: Any) -> list[Any]:
    step = max(1, len(values) // LOOKS)
    found = [values[k] for k in range(0, len(values), step)]
    return [_plain(one) for one in found]


def _plain(value: Any) -> Any:
    """Of a tensor its numbers, wherever it lies; of a long one their sum."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() <= LOOKS:
        return value.tolist()
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(value.dtype), tuple(value.shape), zlib.crc32(raw.numpy().data)


def summed(values: Sequence[Any]) -> int:
    """A number that plain values have in common with equal ones; 0: they are not plain."""
    text = repr(values)
    return 0 if " at 0x" in text else zlib.crc32(text.encode()) or 1


def difference(rank: int, mine: Key, other: int, theirs: Key) -> str:
    """What to tell the user of a worker whose data are not those of another."""
    if mine.length != theirs.length:
        return (
            f"the data of worker {rank}'s loader have {mine.length} samples, those of worker {other}'s "
            f"{theirs.length}. Give all the same data; for data of one worker use torch's DataLoader."
        )
    if (mine.kind, mine.seed) != (theirs.kind, theirs.seed):
        return (
            f"worker {rank}'s loader is {_order(mine)}, worker {other}'s is {_order(theirs)}. "
            "Give all the same shuffle, seed and sampler."
        )
    if mine.grid != theirs.grid:
        return (
            f"worker {rank} cuts a pass into {mine.grid} batches, worker {other} into {theirs.grid}. "
            "This strategy lets all step together: give all the same batch_size."
        )
    if mine.kind == 3:
        return (
            f"worker {rank}'s blocks are not worker {other}'s. Materialize the dataset once, before the "
            "workers begin, and give all the same one."
        )
    return (
        f"worker {rank}'s sampler gives another order than worker {other}'s. Let it draw from its generator, "
        "or from torch's, NumPy's or Python's global random numbers."
    )


def _order(key: Key) -> str:
    kind = ("in order", "shuffled", "by a sampler", "shuffled by blocks")[min(key.kind, 3)]
    return f"{kind} with seed {key.seed}" if key.kind else kind
