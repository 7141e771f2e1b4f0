"""A model's buffers, and what those of all workers come to.

BatchNorm's statistics are averages; masks, counters and tables are not. What all have alike stays as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from freewheel.fabric import collectives
from freewheel.fabric.base import Fabric, Tag
from freewheel.runtime import states


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm's statistics, masks, counters: by name, those that lie in memory."""
    return {name: one for name, one in model.named_buffers() if in_memory(one)}


@torch.no_grad()
def set_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Overwrite those that differ."""
    for name, one in buffers_of(model).items():
        if name not in buffers or alike([one, buffers[name]]):
            continue
        if one.shape == buffers[name].shape and one.dtype == buffers[name].dtype:
            one.copy_(buffers[name])
        else:  # it has grown on its way
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffers[name].to(one.device))


def mean_buffers(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What all workers' buffers come to: what they have alike stays as it is, to the bit; of floating numbers
    that are finite the mean is taken; of masks, counters and whatever else, the first one's."""
    found = {}
    for name, first in parts[0].items():
        all_of = [part[name] for part in parts if name in part and part[name].shape == first.shape]
        found[name] = first
        if first.is_floating_point() and not alike(all_of) and all(one.isfinite().all() for one in all_of):
            total = sum((one.double() for one in all_of[1:]), all_of[0].double())
            found[name] = (total / len(all_of)).to(first.dtype)
    return found


def in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has bytes that can be sent."""
    return tensor.layout == torch.strided and not tensor.is_meta


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are the same to the bit."""
    first = states.raw(tensors[0])
    return all(
        one.dtype == tensors[0].dtype
        and one.shape == tensors[0].shape
        and torch.equal(states.raw(one), first)
        for one in tensors[1:]
    )


async def agree(
    fabric: Fabric, members: Sequence[int], tag: Tag, mine: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same buffers for all members, made by the first one of those in which they differ."""
    first, *others = members
    digests = tuple(float(zlib.crc32(states.raw(one).numpy().data)) for one in mine.values())
    notes = await collectives.gather(fabric, members, digests, (*tag, "alike"))
    names = [name for k, name in enumerate(mine) if len({note[k : k + 1] for note in notes.values()}) > 1]
    if not names:
        return mine
    differ = {name: mine[name] for name in names}
    if fabric.rank != first:
        states.post(fabric, first, tag, states.pack(differ))
        return mine | await states.receive(fabric, first, tag)
    parts = [differ, *[await states.receive(fabric, peer, tag) for peer in others]]
    mean = mean_buffers(parts)
    for peer in others:
        states.post(fabric, peer, tag, states.pack(mean))
    return mine | mean
