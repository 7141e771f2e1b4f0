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
from freewheel.runtime.worker.inventory import TensorMean

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
    steps = " and ".join(map(str, sorted({one.step for one in parts})))
    return f"Wrote {out}: {len(state)} tensors; workers: {len(parts)}, at step {steps}."


def chosen(home: Path, step: int | None = None) -> list[Manifest]:
    """Each worker's last shard of the newest training in a folder; of this step alone, where one is given."""
    found, wrong = shards.find(home) if home.is_dir() else ([], [f"{home} is no folder."])
    if step is not None:
        found = [one for one in found if one.step == step]
    if not found:
        why = " ".join(wrong) or f"it has no checkpoint{'' if step is None else f' of step {step}'}."
        raise ConfigError(f"nothing in {home} can be exported: {why} Give the folder of worker.checkpoint.")
    found.sort(key=lambda one: one.time)
    training = found[-1].origin, found[-1].world_size
    last = {one.rank: one for one in found if (one.origin, one.world_size) == training}
    missing = set(range(training[1])).difference(last)
    if missing:
        raise ConfigError(
            f"{home} has no shard of worker {min(missing)} of {training[1]}: copy all workers' files into "
            "one folder first."
        )
    return [last[rank] for rank in sorted(last)]


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
