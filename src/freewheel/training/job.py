"""Jobs, runs of built-in tasks on real processes: what is asked, and what came of several in a row."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.errors import ConfigError, RunStopped, at_least, first_line
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.settings import Training, setting
from freewheel.show.rates import result_of

if TYPE_CHECKING:  # torch takes seconds, and help on the options needs none
    from freewheel.schedule import Schedule

DDP = "ddp"  # PyTorch's DistributedDataParallel on gloo: no strategy, but what they are compared with


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
    checkpoint: str | None = None  # where checkpoints go
    every: int | None = None  # steps of a worker between two of them; None: 100
    resume: bool = False  # whether to go on from the one that is there

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"--seconds must be above 0, not {self.seconds:g}.")
        super().__post_init__()
        at_least("evaluations", self.evaluations, 1)
        at_least("every", self.every, 1)
        if self.every is not None and self.checkpoint is None:
            raise ConfigError("--every is about checkpoints: give --checkpoint PATH, where they are to go.")
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
        from freewheel.schedule import Schedule

        if self.seconds is not None:  # how long a step takes is not known yet
            return Schedule(self.seconds, self.schedule, self.warmup, step=self.seconds / 1000)
        return super().rates

    def scenario(self) -> dict[str, Any]:
        """All but the strategy, the optimizer, the target and the checkpoints, as plain data."""
        unused = "seconds" if self.seconds is None else "steps"
        left_out = ("strategy", "target", "checkpoint", "every", "resume", "optimizer", unused)
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Job:
        given = json.loads(path.read_text())
        return cls(**given | {"slow": {int(rank): factor for rank, factor in given["slow"].items()}})


def name(number: int, job: Job) -> str:
    """The folder of a job among others."""
    return f"{number}-{job.strategy.replace(':', '-').replace('/', '-')}"


def train_all(
    jobs: Sequence[Job],
    folder: Path,
    progress: Callable[[int, int], None] = lambda number, done: None,
    tensorboard: Path | None = None,
    typed: str | None = None,
) -> list[Result | RunStopped]:
    """Run jobs one after the other in one set of processes; progress hears which one, and its worker-steps.

    A job that fails gives its reason in place of a result; the next one runs all the same.
    """
    from freewheel.runtime.launch.launcher import Captured, launch
    from freewheel.runtime.membership.entries import Options

    homes = [folder / name(number, job) for number, job in enumerate(jobs)]
    for job, home in zip(jobs, homes, strict=True):
        home.mkdir(parents=True, exist_ok=True)
        for old in home.glob("*.json*"):
            old.unlink()
        job.save(home / "job.json")
    runs = [Run(home) for home in homes]

    def newest() -> int:
        begun = (number for number, home in enumerate(homes) if (home / "worker-0.jsonl").exists())
        return max(begun, default=0)

    def tick() -> None:
        run = runs[number := newest()]
        if run.poll():
            progress(number, sum(int(life["steps"] + life["resumed_at"]) for life in run.lives))

    output = Captured(folder)
    code = launch(
        [sys.executable, "-m", "freewheel.training.process", *map(str, homes)],
        jobs[0].workers,
        output=output,
        options=Options(folder=str(folder), tensorboard=tensorboard, typed=typed),
        tick=tick,
        events=lambda: homes[newest()],
    )
    if code in (130, 143):
        raise KeyboardInterrupt
    return [_outcome(job, home, output.lines) for job, home in zip(jobs, homes, strict=True)]


def _outcome(job: Job, home: Path, lines: Mapping[int | None, Sequence[str]]) -> Result | RunStopped:
    try:
        failed = [json.loads((home / f"outcome-{rank}.json").read_text()) for rank in range(job.workers)]
        if not any(failed):
            return result_of(Run(home))
        why = next(filter(None, failed))
    except FileNotFoundError:  # a worker was lost
        lasts = [line for rank in range(job.workers) for line in list(lines[rank])[-1:]]
        why = next((line for line in lasts if "Error" in line), "a worker ended without a word.")
    except (OSError, ValueError) as error:  # a full disk
        why = f"it has no result ({first_line(error)})."
    return RunStopped(f"{job.strategy}: {why} The logs of its workers are in {home.parent}.")
