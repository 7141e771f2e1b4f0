"""One state_dict out of the shards of a checkpoint: the answer the workers would have given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.records.files import check_writable
from freewheel.replica import view
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Damaged, Manifest
from freewheel.runtime.worker.buffers import TensorMean

CENTRE = "centre"
"""The vector that a strategy with a server keeps: its model, which is the answer."""


def export(folder: Path, out: Path, step: int | None = None, force: bool = False) -> str:
    """Write the state_dict of a checkpoint folder to a file; what was written, in words."""
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already: give another file, or --force.")
    check_writable(out)
    parts = chosen(folder, step)
    state = state_dict(parts)
    temporary = out.with_name(f"{out.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, out)
    steps = sorted({one.step for one in parts})
    made = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"Wrote {out}: {len(state)} tensors of {len(parts)} worker{'s' * (len(parts) > 1)} at {made}."


def chosen(home: Path, step: int | None = None) -> list[Manifest]:
    """The shards of the newest training in a folder: a set that all workers have written, or each one's last.

    `step`: the set of this step.
    """
    found, wrong = shards.find(home) if home.is_dir() else ([], [f"{home} is no folder."])
    if step is not None:
        found = [one for one in found if one.step == step]
    if not found:
        why = " ".join(wrong) or f"it has no checkpoint{'' if step is None else f' of step {step}'}."
        raise ConfigError(f"nothing in {home} can be exported: {why} Give the folder of worker.checkpoint.")
    newest = max(found, key=lambda one: one.time)
    training = newest.origin, newest.world_size
    mine = [one for one in found if (one.origin, one.world_size) == training]
    last = {one.rank: one for one in sorted(mine, key=lambda one: one.time)}
    parts = shards.newest_whole(mine)
    # Those who step together have a set of the end; of the others each has made its own number of steps.
    ends = max(one.step for one in last.values())
    if len(last) == newest.world_size and (not parts or ends > parts[0].step):
        parts = list(last.values())
    if not parts:
        missing = sorted(set(range(newest.world_size)) - set(last))
        raise ConfigError(
            f"{home} has no shard of worker {missing[0]} of {newest.world_size}: copy all workers' files "
            "into one folder first."
        )
    return sorted(parts, key=lambda one: one.rank)


def state_dict(parts: Sequence[Manifest]) -> dict[str, Tensor]:
    """The mean of the workers' weights and buffers, or the server's model, by the names of the model."""
    weights, buffers = TensorMean(), TensorMean(buffers=True)
    centre: Tensor | None = None
    for shard in parts:
        try:
            state = shards.load(shard)
        except Damaged as error:
            raise ConfigError(f"{error} Give --step of another checkpoint.") from None
        if centre is None:
            centre = state["strategy"].get(CENTRE)
        weights.add(state["weights"])
        buffers.add(state["buffers"])
    mean = weights.result()
    if centre is not None:
        at = 0
        for name, tensor in mean.items():
            mean[name] = view(centre, at, tensor).to(tensor.dtype)
            at += tensor.numel()
    merged = buffers.result() | mean
    names = parts[0].names or {name: name for name in merged}
    return {key: merged[name].clone() for key, name in names.items() if name in merged}
