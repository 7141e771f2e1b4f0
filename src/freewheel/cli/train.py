"""``freewheel train``, ``compare`` and ``demo``: built-in tasks on real processes."""

from __future__ import annotations

import itertools
import math
import shlex
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from freewheel.cli.options import command_line, option, takes
from freewheel.cli.results import Outputs, bar, output
from freewheel.errors import ConfigError, RunStopped
from freewheel.records.files import check_unused, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.replay import LABELS, html
from freewheel.show.report import recorded, write
from freewheel.show.report.words import findings
from freewheel.show.shown import ranked
from freewheel.show.tables import brief_table
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
    with bar() as show:

        def tell(number: int, done: float) -> None:
            if seconds is not None:
                done = time.monotonic() - began_s.setdefault(number, time.monotonic())
            show(jobs[number].strategy, (number + min(1.0, done / total)) / len(jobs))

        return train_all(jobs, folder, tell, tensorboard, command_line())


# -- the demo: one minute that shows what a slow worker costs, with DDP and without waiting --
STRATEGIES = ("ddp", "adpsgd", "nodelay_free")
SLOW, FACTOR = 0, 5.0
TARGET = 0.9
TITLE = f"handwritten digits on 4 workers, worker {SLOW} is {FACTOR:g}× slower"


def demo(
    seconds: float = option(15.0, "For each of the three."),
    folder: Path = option(Path("runs/demo"), "Where records, report and replay go."),
) -> None:
    """Show in a minute what a slow worker costs with DDP, AD-PSGD and nodelay_free, in equal time."""
    jobs = [_job(strategy, seconds) for strategy in STRATEGIES]
    homes = [folder / name(number, one) for number, one in enumerate(jobs)]
    check_unused([folder, *homes], force=True)
    console = output()
    console.print(
        f"4 workers train a small net on handwritten digits, mixed evenly; worker {SLOW} is {FACTOR:g} times "
        f"slower. {', '.join(map(_label, STRATEGIES))}: {seconds:g} s each.",
        highlight=False,
    )
    outcomes = run_all(jobs, folder.resolve(), None)
    for one in outcomes:
        if isinstance(one, RunStopped):
            raise one
    results = [one for one in outcomes if isinstance(one, Result)]
    runs = [replace(one, label=_label(one.label)) for one in ranked(results)]
    console.print("", brief_table(runs), "", *findings(runs), "", sep="\n", highlight=False)
    report, replay = folder / "report.html", folder / "replay.html"
    write(
        report,
        results,
        [recorded(home) for home in homes],
        title=f"Freewheel: {TITLE}",
        command=command_line(),
    )
    write_whole(replay, html([Run(home) for home in homes[:2]], TITLE))
    for what, path in (("Report, all figures", report), ("Replay, open it in a browser", replay)):
        console.print(f"{what}: {path.resolve()}", highlight=False, soft_wrap=True)


def _job(strategy: str, seconds: float) -> Job:
    """Steps of 30 ms, most of it asleep: four workers fit on two cores, and a busy machine changes little."""
    return Job(
        task="digits", strategy=strategy, workers=4, seconds=seconds, slow={SLOW: FACTOR}, compute_ms=30.0,
        target=TARGET, lr=0.15, momentum=0.9, schedule="cosine", evaluations=math.ceil(10 * seconds),
    )  # fmt: skip


def _label(strategy: str) -> str:
    return LABELS.get(strategy, strategy)
