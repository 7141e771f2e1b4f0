"""Going on from a checkpoint: which shards, by agreement of all workers, and how they are loaded.

Where workers step together each begins with its shard of the newest set that is whole; else with its own
newest one. With another number of workers all begin with the mean of the old ones' weights.

Every worker says which shards it sees, worker 0 chooses, all read what it chose. If somebody finds a shard
damaged, it says so, and they choose again without it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from freewheel.errors import ConfigError
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Damaged, Manifest
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker.buffers import TensorMean
from freewheel.runtime.worker.checks import first_difference
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.optimizers import members

TOGETHER = ("all", "neighbours", "group")
"""Whose steps, in the words of `Strategy.waits_for`, are numbered alike on several workers."""
FOREIGN = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
"""Endings of checkpoints that other programs write."""
OFFERED = ("origin", "world_size", "set", "rank", "time", "step")
"""What a worker says of each shard it sees."""

log = logging.getLogger("freewheel")


Resumed: TypeAlias = tuple[int, str, dict[str, Any]]
"""What a worker begins with: step, origin, a shard's parts (None where it has no such part of its own)."""


class Alone:
    """The rendezvous of a single worker."""

    def first(self, key: str, text: str) -> str:
        """What was left first under a key: nobody was faster."""
        return text

    def agree(self, key: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """What the first worker decides by what all have said: nobody else says anything."""
        return decide([mine])


def resume(home: Path, me: Manifest, waits_for: str, meeting: Rendezvous | Alone) -> Resumed | None:
    """Agree with the others what to begin with and read it; None: there is nothing yet."""
    damaged: dict[Path, str] = {}
    for attempt in itertools.count():
        found, wrong = _look(home, damaged)
        offer = {
            "wrong": wrong,
            "shards": [[getattr(one, name) for name in OFFERED] for one in found],
        }
        plan = meeting.agree(f"resume/{attempt}", offer, partial(_plan, home, me, waits_for, found))
        if "error" in plan:
            raise ConfigError(plan["error"])
        if not plan["sets"]:
            if me.rank == 0:
                log.warning("there is no checkpoint in %s yet: training begins anew", home)
            return None
        resumed = finished = None
        by_place = {(one.set, one.rank): one for one in found}
        try:
            chosen = [by_place[name, rank] for rank, name in enumerate(plan["sets"]) if name is not None]
            resumed = _read(chosen, me)
            finished = [one["ledger"] for one in resumed[2]["loaders"]]
        except Damaged as error:
            damaged[error.shard.path] = str(error)
            log.warning("%s An older checkpoint is taken", error)
        # All know what all have finished before anybody deals.
        everybody = meeting.agree(
            f"resume/{attempt}/read", finished, lambda said: None if None in said else said
        )
        if everybody is not None and resumed is not None:
            step, origin, state = resumed
            for loader, *ledgers in zip(state["loaders"], *everybody, strict=False):
                loader["others"] = ledgers
            step = plan["step"] if plan["step"] is not None else step
            log.info("resumes %s at step %d", home, step)
            return step, origin, state
    raise AssertionError("unreachable")


# -- choosing --


def _look(home: Path, damaged: dict[Path, str]) -> tuple[list[Manifest], list[str]]:
    """The shards that count, and what is wrong with the others."""
    if not home.exists():
        return [], []
    if not home.is_dir():
        return [], [f"{home} is a file; resume takes the folder that worker.checkpoint was given."]
    found, wrong = shards.find(home)
    if not found and not wrong:
        foreign = sorted(path for path in home.iterdir() if path.suffix in FOREIGN)
        wrong = [
            f"{one} was not written by Freewheel; load it into the model before attach."
            for one in foreign[:1]
        ]
    good = [one for one in found if one.path not in damaged]
    return good, wrong + list(damaged.values())


def _plan(
    home: Path, me: Manifest, waits_for: str, mine: Sequence[Manifest], offers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Worker 0's choice: the set of each old rank, and the step where all must have the same one."""
    wrong = list(dict.fromkeys(itertools.chain(*(offer["wrong"] for offer in offers))))
    trainings: dict[tuple[str, int], float] = {}
    for origin, size, _, _, taken, _ in itertools.chain(*(offer["shards"] for offer in offers)):
        trainings[origin, size] = max(taken, trainings.get((origin, size), 0.0))
    if not trainings and not wrong:
        return {"sets": []}
    last: str | None = None
    for origin, size in sorted(trainings, key=lambda one: -trainings[one]):
        if last is not None and origin != last:
            break  # an older training is not what is asked for
        last = origin
        steps: dict[int, dict[str, tuple[float, int]]] = {}
        for rank in range(size):
            # Each reads its own shard; another number of workers, who need the mean, all read all.
            readers = [offers[rank]] if size == me.world_size else offers
            seen = set.intersection(*(set(map(tuple, offer["shards"])) for offer in readers))
            theirs = [one[2:] for one in seen if (*one[:2], one[3]) == (origin, size, rank)]
            steps[rank] = {name: (taken, step) for name, _, taken, step in theirs}
        sets = _choose(steps, waits_for)
        if sets is None:
            who = [rank for rank in range(size) if not steps[rank]]
            what = f"no shard of worker {who[0]} of {size}" if who else "no set that all workers have written"
            wrong.append(f"{home} has {what}.")
            continue
        sample = next(one for one in mine if (one.set, one.rank) == (sets[0], 0))
        if (why := _other(sample, me)) is not None:
            return {"error": f"{home} cannot be resumed: {why}"}
        counts = [steps[rank][name][1] for rank, name in enumerate(sets)]
        if wrong:
            log.warning("%s: %s Step %d is resumed", home, " ".join(wrong), min(counts))
        return {"sets": sets, "step": min(counts) if waits_for in TOGETHER else None}
    return {
        "error": f"nothing in {home} can be resumed: {' '.join(wrong)} Give resume the folder of a good "
        "checkpoint, or leave it out to begin anew."
    }


def _choose(steps: dict[int, dict[str, tuple[float, int]]], waits_for: str) -> list[str] | None:
    """A set for each rank: the newest one that all have, or each one's own newest."""
    if waits_for in TOGETHER:
        common = set.intersection(*(set(one) for one in steps.values()))
        if common:
            newest = max(common, key=lambda name: max(one[name] for one in steps.values()))
            return [newest] * len(steps)
        if waits_for != "group":  # groups are at different steps, and may have no set in common
            return None
    if not all(steps.values()):
        return None
    return [max(one, key=lambda name: one[name]) for one in steps.values()]


def _other(was: Manifest, now: Manifest) -> str | None:
    """Why a shard of this kind is not for this run."""
    if was.strategy != now.strategy:
        return (
            f"its strategy is {was.strategy}, this run's {now.strategy}. Take {was.strategy}, or begin anew."
        )
    if was.optimizer != now.optimizer:
        return f"its optimizer is {was.optimizer}, not {now.optimizer}. Take {was.optimizer}, or begin anew."
    if was.model != now.model:
        why = first_difference(was.model, now.model, "in the checkpoint")
        return f"its model is another one. {why} Build the model that was trained, or begin anew."
    if was.settings != now.settings:
        log.warning(
            "the checkpoint's %s had the settings %s, this one %s", was.strategy, was.settings, now.settings
        )
    return None


# -- reading --


def _read(chosen: Sequence[Manifest], me: Manifest) -> Resumed:
    """This worker's shard; with another number of workers the mean of all, and its own where it has one."""
    if len(chosen) == me.world_size:
        mine = chosen[me.rank]
        return mine.step, mine.origin, shards.load(mine)
    own: dict[str, Any] | None = None
    absent: list[dict[str, Any]] = []
    weights, buffers = TensorMean(), TensorMean(buffers=True)
    for shard in chosen:
        state = shards.load(shard)
        weights.add(state["weights"])
        buffers.add(state["buffers"])
        if shard.rank in (0, me.rank):
            own = state
        elif me.rank == 0 and shard.rank >= me.world_size:
            absent.append(state)
    assert own is not None
    for state in absent:  # what they finished, worker 0 answers for from now on
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
    """Put weights, buffers and the optimizer's state where they belong."""
    replica, optimizer = inventory.replica, inventory.optimizer
    vector = torch.empty(replica.size, dtype=replica.dtype)
    for name, piece in inventory.pieces(vector):
        piece.copy_(state["weights"][name])
    replica.load(vector)
    buffers, saved = inventory.still(), state["buffers"]
    for name in sorted(buffers.keys() ^ saved.keys()):
        where = "in the checkpoint only" if name in saved else "in this model only"
        raise ConfigError(
            f"cannot resume: {name} is {where}. Build the model that was trained, or begin anew."
        )
    with torch.no_grad():
        for name, tensor in buffers.items():
            if tensor.shape != saved[name].shape:
                raise ConfigError(
                    f"cannot resume: {name} has the shape {tuple(tensor.shape)} here and "
                    f"{tuple(saved[name].shape)} in the checkpoint. Build the model that was trained."
                )
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
