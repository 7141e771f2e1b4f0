"""``freewheel train`` and ``freewheel compare``: built-in tasks on real processes."""

from __future__ import annotations

import itertools
import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from freewheel.cli.console import bars, output
from freewheel.cli.options import command_line, option, takes
from freewheel.cli.results import Outputs
from freewheel.errors import ConfigError, RunStopped
from freewheel.records.files import check_unused
from freewheel.records.result import Result
from freewheel.training.job import DDP, Job, name

SIDE_BY_SIDE = "ddp,allreduce,sasgd,nodelay,nodelay_free,adpsgd,dasgd,asgd,easgd"

DATA = option(None, "The task's data: cifar10's file or folder, chars' text.")
FOLDER = option(None, "Where records and logs go; default: runs/DATE_TIME.")
BOARD = option(None, "Write the records here for TensorBoard, too (an extra).", "--tensorboard", rare=True)


@takes(Job, Outputs, steps=None)
def train(
    job: dict[str, Any],
    outputs: dict[str, Any],
    strategy: str = option("adpsgd", "One strategy, with settings: adpsgd:topology=ring.", metavar="NAME"),
    data: Path | None = DATA,
    folder: Path | None = FOLDER,
    tensorboard: Path | None = BOARD,
    checkpoint: Path | None = option(None, "Write checkpoints to this folder."),
    every: int | None = option(None, "Steps between two; default: 100.", show_default=False, rare=True),
    resume: bool = option(False, "Go on from the checkpoint, if there is one.", "--resume", rare=True),
) -> None:
    """Train a built-in task with real processes on this machine."""
    chosen = _chosen(strategy)
    if len(chosen) != 1:
        raise ConfigError(f"train takes one strategy, not {strategy!r}; `freewheel compare` takes several.")
    if every is not None and checkpoint is None:
        raise ConfigError("--every is about checkpoints: give --checkpoint PATH, where they are to go.")
    if checkpoint is not None:
        job["checkpoint"] = str(checkpoint.resolve())
    if every is not None:
        job["every"] = every
    one = Job(strategy=chosen[0], resume=resume, **_checked(job, data))
    _train([one], Outputs(**outputs), folder, tensorboard)


@takes(Job, Outputs, steps=None)
def compare(
    job: dict[str, Any],
    outputs: dict[str, Any],
    strategy: str = option(
        SIDE_BY_SIDE, "Several, separated by commas; all; ddp is PyTorch's own DistributedDataParallel."
    ),
    data: Path | None = DATA,
    folder: Path | None = FOLDER,
    tensorboard: Path | None = BOARD,
) -> None:
    """Train the same task with several strategies, one after the other, and print one table."""
    job = _checked(job, data)
    jobs = [Job(strategy=one, **job) for one in _chosen(strategy)]
    _train(jobs, Outputs(**outputs), folder, tensorboard)


def _checked(job: dict[str, Any], data: Path | None) -> dict[str, Any]:
    """The settings of a job: with one budget, and the data in its task's."""
    if job["steps"] is None:
        del job["steps"]
    elif job["seconds"] is not None:
        raise ConfigError("--steps and --seconds are two budgets: give one of them.")
    if data is None:
        return job
    if not data.exists():
        raise ConfigError(f"--data {str(data)!r}: there is no such file or folder.")
    return job | {"task": f"{job['task']}:data={data.resolve()}"}


def _train(jobs: list[Job], outputs: Outputs, folder: Path | None, board: Path | None) -> None:
    """Run the jobs and show what came of them."""
    from freewheel.show.report import recorded

    outputs.check()
    folder = folder or Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    check_unused([folder, *(folder / name(number, one) for number, one in enumerate(jobs))], outputs.force)
    outcomes = run_all(jobs, folder.resolve(), board)
    results = [one for one in outcomes if isinstance(one, Result)]
    stopped = [str(one) for one in outcomes if not isinstance(one, Result)]
    if not results:
        raise RunStopped(" ".join(stopped))
    console = output()
    outputs.show(console, results)
    console.print(f"Records: {folder.resolve()}", highlight=False, soft_wrap=True)
    runs = [
        recorded(folder / name(number, job))
        for number, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True))
        if outputs.report is not None and isinstance(outcome, Result)
    ]
    title = f"{jobs[0].task.partition(':')[0]} on {jobs[0].workers} workers"
    outputs.save(console, results, runs, title)
    if stopped:
        raise RunStopped(" ".join(stopped))


def _chosen(spec: str) -> list[str]:
    from freewheel import names, strategies

    everything = [DDP, *strategies.ALL]
    parts = (everything if part == "all" else [part] for part in names.split(spec))
    chosen = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
    for one in chosen:
        if one != DDP:
            strategies.resolve(one)
    return chosen


def run_all(jobs: list[Job], folder: Path, tensorboard: Path | None) -> list[Result | RunStopped]:
    """Run jobs one after the other, with a bar."""
    from freewheel.training.jobs import train_all

    errors = Console(stderr=True)
    watch = f"Watch: freewheel watch {shlex.quote(str(folder))}"
    errors.print(watch, highlight=False, soft_wrap=True, markup=False)
    seconds = jobs[0].seconds
    total = jobs[0].workers * jobs[0].steps if seconds is None else seconds
    began_s: dict[int, float] = {}
    with bars() as shown:
        bar = shown.add_task("starting", total=total * len(jobs))

        def tell(number: int, done: float) -> None:
            if seconds is not None:
                done = time.monotonic() - began_s.setdefault(number, time.monotonic())
            shown.update(bar, description=jobs[number].strategy, completed=number * total + min(done, total))

        return train_all(jobs, folder, tell, tensorboard, command_line())
