"""One training run on real processes: what it is asked to do."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.errors import ConfigError, at_least
from freewheel.settings import Training, setting

if TYPE_CHECKING:  # torch takes seconds, and help on the options needs none
    from freewheel.schedule import Schedule

DDP = "ddp"
"""PyTorch's DistributedDataParallel on gloo: not a strategy of ours, but what they are compared with."""


@dataclass(frozen=True)
class Job(Training):
    """A task, a strategy, and how many workers of what speed."""

    task: str = setting("digits", "digits, digits:net=cnn, cifar10, cifar10:net=vgg or chars.")
    strategy: str = "adpsgd"
    workers: int = setting(4, "How many processes.")
    seconds: float | None = setting(None, "Budget: a time for all, instead of --steps.")
    slow: dict[int, float] = setting(dict, "RANK:FACTOR, this worker is slower, by sleeping; repeatable.")
    compute_ms: float = setting(
        0.0, "A step takes at least this long, by sleeping: a machine for every worker.", rare=True
    )
    wire: str = setting("fp32", "What vectors travel as: fp32 or bf16.", rare=True)
    checkpoint: str | None = None
    """Where checkpoints go."""
    every: int = 100
    """Steps of a worker between two of them."""
    resume: bool = False
    """Whether to go on from the one that is there."""

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds must be above 0, not {self.seconds:g}.")
        super().__post_init__()
        at_least("evaluations", self.evaluations, 1)
        at_least("every", self.every, 1)
        if self.resume and self.checkpoint is None:
            raise ConfigError("--resume goes on from a checkpoint: give --checkpoint PATH, where it is.")
        if self.checkpoint is not None and self.strategy == DDP:
            raise ConfigError("ddp writes no checkpoints here; give a strategy of Freewheel's.")
        at_least("compute-ms", self.compute_ms, 0)
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                raise ConfigError(
                    f"--slow {rank}:{factor:g}: there is no worker {rank}, only 0 to {self.workers - 1}."
                )
            at_least(f"the factor of worker {rank}", factor, 1)
        if self.seconds is not None and self.resume:
            raise ConfigError("--resume goes on by steps: give --steps instead of --seconds.")
        from freewheel import strategies, tasks
        from freewheel.task import check_optimizer

        tasks.resolve(self.task)
        chosen = None if self.strategy == DDP else strategies.resolve(self.strategy)
        if chosen is not None:
            chosen.check(self.workers)
        check_optimizer(self.optimizer, self.momentum, chosen)

    @cached_property
    def rates(self) -> Schedule:
        """How the learning rate goes."""
        from freewheel.schedule import Schedule

        if self.seconds is not None:  # how long a step takes is not known yet
            return Schedule(self.seconds, self.schedule, self.warmup, step=self.seconds / 1000)
        return super().rates

    def scenario(self) -> dict[str, Any]:
        """All but the strategy, the optimizer, the target and the checkpoints, as plain data."""
        budget = "seconds" if self.seconds is None else "steps"  # the one that there is not
        left_out = ("strategy", "target", "checkpoint", "every", "resume", "optimizer", budget)
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}

    def save(self, path: Path) -> None:
        """Write it where the workers read it."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read it again."""
        given = json.loads(path.read_text())
        given["slow"] = {int(rank): factor for rank, factor in given["slow"].items()}
        return cls(**given)


def name(number: int, job: Job) -> str:
    """The folder of a job among others."""
    return f"{number}-{job.strategy.replace(':', '-').replace('/', '-')}"
