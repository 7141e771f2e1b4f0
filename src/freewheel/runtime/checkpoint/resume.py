"""Resume from a checkpoint: the workers agree which shards, and load them; or export the shards as one model.

Every worker says which shards it sees, worker 0 chooses, all read what it chose. If one finds a shard
damaged, it says so, and they choose again without it. Workers that step together begin with the newest set
that is whole, others each with its own newest shard, another number of workers with the mean of the weights.
"""

import itertools
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.records.files import check_writable
from freewheel.replica import view
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Damaged, Manifest
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker.checks import first_difference, members
from freewheel.runtime.worker.inventory import Inventory, TensorMean

TOGETHER = ("all", "neighbours", "group")  # values of `Strategy.waits_for` under which steps number alike
CENTRE = "centre"  # the vector in which a strategy with a server keeps the model, which is the answer
FOREIGN = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # endings of other programs' checkpoints

log = logging.getLogger("freewheel")

# What a worker begins with: step, origin, a shard's parts (None: it has no such part of its own).
Resumed: TypeAlias = tuple[int, str, dict[str, Any]]


class Offer(NamedTuple):
    """A shard that a worker sees, as it tells the others."""

    origin: str
    world_size: int
    rank: int
    set: str
    time: float
    step: int


def resume(home: Path, me: Manifest, waits_for: str, meeting: Rendezvous | None) -> Resumed | None:
    """Agree with the others on shards and read this worker's; None: there are none yet."""
    agree = meeting.agree if meeting is not None else lambda key, mine, decide: decide([mine])
    damaged: dict[Path, str] = {}
    for attempt in itertools.count():
        found, wrong = _look(home, damaged)
        offers = [[getattr(one, name) for name in Offer._fields] for one in found]
        choose = partial(_plan, home, me, waits_for, found)
        plan = agree(f"resume/{attempt}", {"wrong": wrong, "shards": offers}, choose)
        if "error" in plan:
            raise ConfigError(plan["error"])
        if not plan["sets"]:
            if me.rank == 0:
                log.warning("there is no checkpoint in %s yet: training begins anew", home)
            return None
        finished, sets = None, plan["sets"]
        by_place = {(one.set, one.rank): one for one in found}
        try:
            if len(sets) == me.world_size:  # others' shards may be on other hosts
                mine = by_place[sets[me.rank], me.rank]
                step, origin, state = mine.step, mine.origin, shards.load(mine)
            else:
                step, origin, state = _mean([by_place[name, rank] for rank, name in enumerate(sets)], me)
            finished = [one["ledger"] for one in state["loaders"]]
        except Damaged as error:
            damaged[error.shard.path] = str(error)
            log.warning("%s An older checkpoint is taken", error)
        # Each worker must know what all have finished before any deals.
        read = f"resume/{attempt}/read"
        everybody = agree(read, finished, lambda said: None if None in said else said)
        if everybody is not None:
            for loader, *ledgers in zip(state["loaders"], *everybody, strict=False):
                loader["others"] = ledgers
            step = plan["step"] if plan["step"] is not None else step
            log.info("resumes %s at step %d", home, step)
            return step, origin, state
    raise AssertionError("unreachable")


def _look(home: Path, damaged: dict[Path, str]) -> tuple[list[Manifest], list[str]]:
    if not home.exists():
        return [], []
    if not home.is_dir():
        return [], [f"{home} is a file; resume takes the folder that worker.checkpoint was given."]
    found, wrong = shards.find(home)
    foreign = sorted(path for path in home.iterdir() if path.suffix in FOREIGN)
    if foreign and not (found or wrong):
        wrong = [f"{foreign[0]} was not written by Freewheel; load it into the model before attach."]
    return [one for one in found if one.path not in damaged], [*wrong, *damaged.values()]


def _plan(
    home: Path, me: Manifest, waits_for: str, mine: Sequence[Manifest], said: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Worker 0's choice: a set for each old rank, and the step if all must have the same one."""
    wrong = list(dict.fromkeys(itertools.chain(*(one["wrong"] for one in said))))
    seen = [{Offer(*one) for one in each["shards"]} for each in said]
    newest = sorted(set[Offer]().union(*seen), key=lambda one: one.time, reverse=True)
    if not newest and not wrong:
        return {"sets": []}
    # Only the newest training is resumed; it may have gone on with another number of workers.
    for size in dict.fromkeys(one.world_size for one in newest if one.origin == newest[0].origin):
        # Each reads its own shard; for the mean, with another number of workers, each reads all.
        there = [seen[rank] if size == me.world_size else set.intersection(*seen) for rank in range(size)]
        theirs = [
            {one.set: one for one in some if one[:3] == (newest[0].origin, size, rank)}
            for rank, some in enumerate(there)
        ]
        common = set.intersection(*map(set, theirs)) if waits_for in TOGETHER else ()
        if common:
            last = max(common, key=lambda name: max(sets[name].time for sets in theirs))
            chosen = [sets[last] for sets in theirs]
        elif all(theirs) and waits_for not in ("all", "neighbours"):  # groups may have no set in common
            chosen = [max(sets.values(), key=lambda one: one.time) for sets in theirs]
        else:
            missing = [rank for rank, sets in enumerate(theirs) if not sets]
            what = f"shard of worker {missing[0]} of {size}" if missing else "set that all have written"
            wrong.append(f"{home} has no {what}.")
            continue
        sample = next(one for one in mine if (one.set, one.rank) == (chosen[0].set, 0))
        if (why := _why_not(sample, me)) is not None:
            return {"error": f"{home} cannot be resumed: {why}"}
        step = min(one.step for one in chosen)
        if wrong:
            log.warning("%s: %s Step %d is resumed", home, " ".join(wrong), step)
        return {"sets": [one.set for one in chosen], "step": step if waits_for in TOGETHER else None}
    return {
        "error": f"nothing in {home} can be resumed: {' '.join(wrong)} Give resume the folder of a good "
        "checkpoint, or leave it out to begin anew."
    }


def _why_not(was: Manifest, now: Manifest) -> str | None:
    for what in ("strategy", "optimizer"):
        if (then := getattr(was, what)) != (here := getattr(now, what)):
            return f"its {what} is {then}, not {here}. Take {then}, or begin anew."
    if was.model != now.model:
        why = first_difference(was.model, now.model, "in the checkpoint")
        return f"its model is another one. {why} Build the model that was trained, or begin anew."
    if was.settings != now.settings:
        log.warning("the checkpoint's strategy had the settings %s, now %s", was.settings, now.settings)
    return None


def _mean(chosen: Sequence[Manifest], me: Manifest) -> Resumed:
    """For another number of workers: the mean weights, and what else an old worker of this rank had."""
    own: dict[str, Any] = {}
    weights, buffers = TensorMean(), TensorMean(buffers=True)
    for shard in chosen:
        state = shards.load(shard)
        weights.add(state["weights"])
        buffers.add(state["buffers"])
        if shard.rank in (0, me.rank):
            own = state
        elif me.rank == 0 and shard.rank >= me.world_size:  # worker 0 answers for what the others finished
            for loader, theirs in zip(own["loaders"], state["loaders"], strict=False):
                loader["ledger"] = loader["ledger"] + theirs["ledger"]
    own |= {"weights": weights.result(), "strategy": {}}
    own["buffers"] |= buffers.result()
    if me.rank < len(chosen):
        return chosen[me.rank].step, chosen[0].origin, own
    own["optimizer"] = own["random"] = None
    for loader in own["loaders"]:
        loader["ledger"] = []
    return min(one.step for one in chosen), chosen[0].origin, own


def restore(state: dict[str, Any], inventory: Inventory) -> None:
    replica, optimizer = inventory.replica, inventory.optimizer
    vector = torch.empty(replica.size, dtype=replica.dtype)
    for name, piece in inventory.pieces(vector):
        piece.copy_(state["weights"][name])
    replica.load(vector)
    buffers, saved = inventory.still(), state["buffers"]
    there, here = ({name: tuple(one.shape) for name, one in some.items()} for some in (saved, buffers))
    for name in sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
        raise ConfigError(
            f"cannot resume: {name} has the shape {here.get(name, 'none')} here and "
            f"{there.get(name, 'none')} in the checkpoint. Build the model that was trained, or begin anew."
        )
    with torch.no_grad():
        for name, tensor in buffers.items():
            tensor.copy_(saved[name])
    if state["optimizer"] is None:
        return
    for one in members(optimizer):
        one._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn that it never stepped
    try:
        optimizer.load_state_dict(state["optimizer"])
    except ValueError as error:
        raise ConfigError(
            f"the optimizer's state cannot be resumed: {error}. Make the optimizer as it was made then."
        ) from error


def export(folder: Path, out: Path, step: int | None = None, force: bool = False) -> str:
    """Write the workers' mean, or the server's model, to a file; return a sentence about it.

    Each worker's last shard of the newest training counts, or that of `step`.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already: give another file, or --force.")
    check_writable(out)
    found, wrong = shards.find(folder) if folder.is_dir() else ([], [f"{folder} is no folder."])
    found = sorted((one for one in found if step in (None, one.step)), key=lambda one: one.time)
    if not found:
        why = " ".join(wrong) or f"it has no checkpoint{'' if step is None else f' of step {step}'}."
        raise ConfigError(f"nothing in {folder} can be exported: {why} Give the folder of worker.checkpoint.")
    origin, workers = found[-1].origin, found[-1].world_size
    last = {one.rank: one for one in found if (one.origin, one.world_size) == (origin, workers)}
    if missing := set(range(workers)).difference(last):
        raise ConfigError(
            f"{folder} has no shard of worker {min(missing)} of {workers}: copy all workers' files into one "
            "folder first."
        )
    weights, buffers = TensorMean(), TensorMean(buffers=True)
    centre: Tensor | None = None
    for _, shard in sorted(last.items()):
        try:
            state = shards.load(shard)
        except Damaged as error:
            raise ConfigError(f"{error} Give --step of another checkpoint.") from None
        centre = state["strategy"].get(CENTRE) if centre is None else centre
        weights.add(state["weights"])
        buffers.add(state["buffers"])
    mean, at = weights.result(), 0
    if centre is not None:
        for name, tensor in mean.items():
            mean[name] = view(centre, at, tensor).to(tensor.dtype)
            at += tensor.numel()
    merged = buffers.result() | mean
    names = last[0].names or {name: name for name in merged}
    model = {key: merged[name].clone() for key, name in names.items() if name in merged}
    temporary = out.with_name(f"{out.name}.tmp")
    torch.save(model, temporary)
    os.replace(temporary, out)
    steps = " and ".join(map(str, sorted({one.step for one in last.values()})))
    return f"Wrote {out}: {len(model)} tensors; workers: {len(last)}, at step {steps}."
