"""A model's buffers, and what those of all workers come to.

BatchNorm's statistics are averages; masks, counters and tables are not. What all have alike stays as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from freewheel.fabric import collectives
from freewheel.fabric.base import Fabric, Tag
from freewheel.runtime.worker import tensor_codec


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's statistics, masks, counters: by name, those that lie in memory."""
    return {name: one for name, one in model.named_buffers() if in_memory(one)}


@torch.no_grad()
def set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Overwrite those that differ."""
    for name, one in buffers_of(model).items():
        new = buffers.get(name, one)
        if (one.shape, one.dtype) != (new.shape, new.dtype):  # it has grown on its way
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, new.to(one.device))
        elif not alike(one, new):
            one.copy_(new)


class TensorMean:
    """What all workers' tensors come to, by name, one worker's after the other: the mean.

    What they have alike stays as it is, to the bit. Of `buffers` only floating numbers have a mean, if all
    are finite; of masks, counters and whatever else, the first worker's are taken.
    """

    def __init__(self, buffers: bool = False) -> None:
        self._first: dict[str, Tensor] = {}
        self._count, self._buffers = 0, buffers
        self._totals: dict[str, Tensor | None] = {}  # of those that differ; None: there is no mean

    def add(self, part: Mapping[str, Tensor]) -> None:
        """One more."""
        self._count += 1
        if self._count == 1:
            self._first = dict(part)
            return
        for name, first in self._first.items():
            other = part.get(name, torch.empty(0))
            total = self._totals.get(name)
            other_kind = (other.shape, other.dtype) != (first.shape, first.dtype)
            if self._buffers and (other_kind or not first.is_floating_point()):
                self._totals[name] = None
            elif total is not None:
                self._totals[name] = total + other
            elif name not in self._totals and not alike(first, other):
                wide = torch.promote_types(first.dtype, torch.float64)
                self._totals[name] = first.to(wide) * (self._count - 1) + other

    def result(self) -> dict[str, Tensor]:
        """What there is by now."""
        found = dict(self._first)
        for name, total in self._totals.items():
            if total is not None and (not self._buffers or total.isfinite().all()):
                found[name] = (total / self._count).to(found[name].dtype)
        return found


def mean_buffers(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What all workers' buffers come to."""
    mean = TensorMean(buffers=True)
    for part in parts:
        mean.add(part)
    return mean.result()


def in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has bytes that can be sent."""
    return tensor.layout == torch.strided and not tensor.is_meta


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(tensor_codec.raw(one), tensor_codec.raw(other))


async def agree(
    fabric: Fabric, members: Sequence[int], tag: Tag, mine: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same buffers for all members, made by the first one where they differ."""
    (first, *others), packed = members, tensor_codec.pack(mine)
    digest = float(zlib.crc32(packed.numpy().data))
    notes = await collectives.gather(fabric, members, (digest,), (*tag, "alike"))
    if len(set(notes.values())) == 1:
        return mine
    if fabric.rank != first:
        tensor_codec.post(fabric, first, tag, packed)
        return await tensor_codec.receive(fabric, first, tag)
    mean = mean_buffers([mine, *[await tensor_codec.receive(fabric, peer, tag) for peer in others]])
    for peer in others:
        tensor_codec.post(fabric, peer, tag, tensor_codec.pack(mean))
    return mean
