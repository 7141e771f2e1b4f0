"""When a worker's checkpoints are taken, and what goes into them.

A checkpoint is due at a step's boundary and is taken when the loop asks its loader for the next batch: only
then is what follows the optimizer's step, such as a scheduler's, done. Without a loader it is taken at the
boundary itself. Taking copies into memory that is kept for the next time; writing happens beside training.
"""

import collections
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.errors import ConfigError, at_least
from freewheel.runtime.checkpoint.resume import restore, resume
from freewheel.runtime.checkpoint.shards import Manifest, Writer
from freewheel.runtime.membership.generation import Beginning
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.checks import name_of, signature

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
CLOSE_S = 600.0  # how long the end of a run waits for a checkpoint that is being written

log = logging.getLogger("freewheel")


class Checkpoints:
    """One worker's checkpoints. All but the writing is done in the training thread."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.loaders: list[Any] = []  # in the order in which they were made
        self.counts = {"done": 0, "skipped": 0, "failed": 0}
        self._every: int | None = None
        self._extra: Mapping[str, Any] = {}
        self._writer: Writer | None = None
        self._kept: dict[str, Any] = {}
        self._vector = torch.empty(0)
        self._due = self._must = False
        self._fed: set[int] = set()  # loaders that have given a batch whose step is still to come
        self._alone = True  # the last step used no loader's batch
        self._step = self._taken = 0
        self._between = between  # called when a step has used all batches that were given
        # What a resumed run still has to restore:
        self._random: dict[str, Any] | None = None
        self._states: list[dict[str, Any]] = []
        self._unclaimed: dict[str, Any] = {}

    def begin(
        self, agent: Agent, path: str | Path | None, rendezvous: Rendezvous | None, beginning: Beginning
    ) -> dict[str, Tensor] | None:
        """Resume what the workers agree on, if anything; return the strategy's vectors.

        Loaders and extras are restored in `made` and `arrange`.
        """
        self._agent, inventory, model, me = agent, agent.inventory, agent.inventory.model, agent.me
        known = {id(one): name for name, one in [*model.named_parameters(), *model.named_buffers()]}
        entries, run, strategy = model.state_dict(keep_vars=True), me.run.hex(), agent.strategy
        self._manifest = Manifest(
            version=me.version,
            run=run,
            origin=run,
            rank=beginning.place(me.rank),  # where some of the workers are missing, among those there are
            world_size=len(beginning.ranks),
            strategy=strategy.name,
            settings={name: str(value) for name, value in vars(strategy).items()},
            optimizer=name_of(inventory.optimizer),
            model=signature(model),
            names={key: known[id(one)] for key, one in entries.items() if id(one) in known},
        )
        found = (
            resume(Path(path), self._manifest, strategy.waits_for, rendezvous) if path is not None else None
        )
        step, origin, state = found or (0, run, {})
        if rendezvous is not None:  # a worker that comes back does not resume, and takes the others' origin
            origin = rendezvous.first("origin", origin)
        self._manifest = dataclasses.replace(self._manifest, origin=origin)
        if agent.late:  # its checkpoints, if any, are of an earlier life: one is due at the end
            self._taken = -1
        if found is None:
            return None
        restore(state, inventory)
        agent.node.begin_at(step)
        agent.events.note("resumed", me.rank, f"goes on at step {step} of {path}")
        self._step = self._taken = step
        self._random, self._states, self._unclaimed = state["random"], state["loaders"], state["extra"]
        if self._random is not None:
            set_random_state(self._random["states"])
        vectors: dict[str, Tensor] = state["strategy"]
        return vectors

    @property
    def arranged(self) -> bool:
        """Whether this worker writes checkpoints."""
        return self._writer is not None

    def arrange(self, path: Path, every: int | None, keep: int, extra: Mapping[str, Any] | None) -> None:
        """Take a checkpoint every so many steps; None: one, now."""
        at_least("checkpoint: every", every, 1)
        at_least("checkpoint: keep", keep, 1)
        if self._manifest.rank >= self._manifest.world_size:
            log.warning("this worker joined a run that goes on: the workers it began with write checkpoints")
            return
        if self._writer is None:
            self._writer = Writer(path, self._manifest, self.counts, self._agent.events.note)
        elif self._writer.home != path:
            raise ConfigError(
                f"checkpoints of this run go to {self._writer.home}; {path} is a second place. Give one path."
            )
        self._writer.keep = keep
        for name, one in (extra or {}).items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(
                    f"checkpoint: extra has {name!r}, a {type(one).__name__} without state_dict and "
                    "load_state_dict. Give objects that have both, such as a scheduler or a GradScaler."
                )
            try:
                if name in self._unclaimed:
                    one.load_state_dict(self._unclaimed.pop(name))
            except (ValueError, TypeError, KeyError, RuntimeError) as error:
                raise ConfigError(
                    f"{name} cannot be resumed: its load_state_dict says {error!r}. Make it as it was made "
                    "when the checkpoint was taken, or leave it out of extra."
                ) from error
        if extra is not None:
            self._extra = dict(extra)
        if every is not None:
            self._every = every
        else:
            self._due = self._must = True
            if not self._fed:
                self.take()

    def made(self, loader: Any) -> None:
        """Register a new loader; in a resumed run restore the state of the loader of the same number."""
        number = len(self.loaders)
        self.loaders.append(loader)
        if number < len(self._states):
            loader.load_state_dict(self._states[number])

    def like(self, loader: Any) -> list[Any]:
        """A loader, and loaders that continue its passes."""
        return [one for one in self.loaders if one is loader or one.goes_on(loader)]

    def passes(self, loader: Any) -> float:
        """Passes of all workers together over the data of a loader."""
        return float(sum(one.progress for one in self.like(loader)))

    def counted(self) -> Any | None:
        """The loader that a schedule goes by: the first that was given epochs, or else the first."""
        return next((one for one in self.loaders if one.epochs is not None), next(iter(self.loaders), None))

    @property
    def progress(self) -> float:
        """Passes of all workers together over the data of the first loader."""
        return self.passes(self.loaders[0]) if self.loaders else 0.0

    def asked(self, number: int) -> None:
        """The loop asks a loader for its next batch, so it is done with the last one."""
        if self._random is not None and self._random["asked"] == number:
            # Undo what the script drew between the beginning of the block and its first batch.
            set_random_state(self._random["states"])
            self._random = None
        if self._due:
            self.take(number)
        if not self._fed:
            self._between()
        self._fed.add(number)

    def used(self) -> None:
        """A step has moved the weights: the batches that were given are used."""
        self._alone = not self._fed
        self._fed.clear()

    def stepped(self, step: int) -> None:
        self._step = step
        if self._unclaimed:
            log.warning("the checkpoint has %s, which begins anew: not in extra", ", ".join(self._unclaimed))
        self._unclaimed, self._random = {}, None
        if self._writer is not None and self._every is not None and step % self._every == 0:
            self._due = True
        if self._alone:
            if self._due:
                self.take()
            self._between()

    def leave(self, within_s: float) -> None:
        """Before this worker leaves: count what is used, take what is due. A failure only warns."""
        for number, loader in enumerate(self.loaders):
            if loader.in_hand and number not in self._fed:
                loader.use()  # the loop still has it
            loader.in_hand = False  # a batch whose step was not made is dealt to another
        try:
            if self._writer is not None:
                self._writer.wait(within_s)
                if not self._writer.busy:
                    self.close()
        except ConfigError as error:
            log.warning("no checkpoint of the end: %s", error)

    def take(self, asked: int | None = None) -> None:
        assert self._writer is not None
        must, self._due, self._must = self._must, False, False
        if self._writer.busy and not must:
            self.counts["skipped"] += 1
            return
        agent, inventory, replica, kept = self._agent, self._agent.inventory, self._agent.replica, self._kept
        agent.counters.wait("checkpoint", time.perf_counter())
        try:
            self.wait()
            state = {
                "buffers": inventory.still(),
                "optimizer": inventory.optimizer.state_dict(),
                "random": {"asked": asked, "states": random_state()},
                "loaders": [loader.own_state() for loader in self.loaders],
                "extra": {name: one.state_dict() for name, one in self._extra.items()},
            }
            self._kept = {name: copied(part, kept.get(name), name) for name, part in state.items()}
            if not self._vector.numel():
                pinned = replica.side is not None
                self._vector = torch.empty(replica.size, dtype=replica.dtype, pin_memory=pinned)
            self._kept["strategy"] = agent.call(agent.hold_still(self._vector))
            self._kept["weights"] = dict(inventory.pieces(self._vector))
            self._writer.begin(self._step, self._kept)
            self._taken = self._step
        finally:
            agent.counters.go_on(time.perf_counter())

    def close(self) -> None:
        """Take what is still due; with `every`, one of the end, too."""
        if self._writer is not None and self._every is not None and self._step > self._taken:
            self._due = self._must = True
        if self._due:
            self.take()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.wait(CLOSE_S)


def copied(value: Any, kept: Any, where: str) -> Any:
    """Copy nested plain data to the CPU; tensors reuse the memory of the last copy, `kept`, if they fit."""
    if isinstance(value, Tensor):
        value = value.detach()
        if isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            return kept.copy_(value)
        return value.to("cpu", copy=True)
    if type(value) in MAPPINGS:
        old = kept if isinstance(kept, dict) else {}
        parts = {key: copied(one, old.get(key), f"{where}[{key!r}]") for key, one in value.items()}
        return type(value)(parts)
    if type(value) in (list, tuple):
        last = kept if isinstance(kept, list | tuple) and len(kept) == len(value) else [None] * len(value)
        return type(value)(copied(one, last[k], f"{where}[{k}]") for k, one in enumerate(value))
    if type(value) in PLAIN:
        return value
    if isinstance(value, np.generic):
        return value.item()
    raise ConfigError(
        f"a checkpoint cannot hold {where}, a {type(value).__name__}: only tensors, numbers, text, lists and "
        "dicts can be read back without running code. Leave it out of the state_dict."
    )


def random_state() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    numpy = kind, keys.tolist(), *rest
    state = {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": numpy}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state.get("cuda", ()))
