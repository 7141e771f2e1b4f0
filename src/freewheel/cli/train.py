"""``freewheel train``, ``compare`` and ``demo``: built-in tasks on real processes."""

from __future__ import annotations

import math
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from freewheel.training.job import DDP, Job, name, train_all

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
    every: int | None = option(None, "Steps between two; default: 100.", rare=True),
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
    _train(chosen, job | {"resume": resume}, Outputs(**outputs), data, folder, tensorboard)


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
    _train(_chosen(strategy), job, Outputs(**outputs), data, folder, tensorboard)


def _train(
    strategies: list[str],
    job: dict[str, Any],
    outputs: Outputs,
    data: Path | None,
    folder: Path | None,
    tensorboard: Path | None,
) -> None:
    if job["steps"] is None:
        del job["steps"]
    elif job["seconds"] is not None:
        raise ConfigError("--steps and --seconds are two budgets: give one of them.")
    if data is not None:
        if not data.exists():
            raise ConfigError(f"--data {str(data)!r}: there is no such file or folder.")
        job["task"] += f":data={data.resolve()}"
    jobs = [Job(strategy=one, **job) for one in strategies]
    outputs.check()
    folder = folder or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    homes = [folder / name(number, one) for number, one in enumerate(jobs)]
    check_unused([folder, *homes], outputs.force)
    results, runs, stopped = [], [], []
    for home, outcome in zip(homes, run_all(jobs, folder.resolve(), tensorboard), strict=True):
        if isinstance(outcome, RunStopped):
            stopped.append(str(outcome))
        else:
            results.append(outcome)
            runs.append(recorded(home))
    if results:
        title = f"{jobs[0].task.partition(':')[0]} on {jobs[0].workers} workers"
        outputs.finish(title, results, runs, folder)
    if stopped:
        raise RunStopped(" ".join(stopped))


def _chosen(spec: str) -> list[str]:
    from freewheel import names, strategies

    chosen: list[str] = []
    for one in names.split(spec):
        if one not in ("all", DDP):
            strategies.resolve(one)
        chosen += [DDP, *strategies.ALL] if one == "all" else [one]
    return list(dict.fromkeys(chosen))


def run_all(jobs: list[Job], folder: Path, tensorboard: Path | None) -> list[Result | RunStopped]:
    """Run jobs one after the other, with a bar."""
    print(f"Watch: freewheel watch {shlex.quote(str(folder))}", file=sys.stderr, flush=True)
    steps = None if jobs[0].seconds else jobs[0].workers * jobs[0].steps
    with bar() as show:

        def tell(number: int, done: float) -> None:
            part = min(1.0, done / steps) if steps else 0.0  # nobody knows how many a time is enough for
            show(jobs[number].strategy, (number + part) / len(jobs))

        return train_all(jobs, folder, tell, tensorboard, command_line())


# -- the demo: one minute that shows what a slow worker costs, with DDP and without waiting --
STRATEGIES = ("ddp", "adpsgd", "nodelay_free")
TITLE = "handwritten digits on 4 workers, worker 0 is 5 times slower"


def demo(
    seconds: float = option(15.0, "For each of the three."),
    folder: Path = option(Path("runs/demo"), "Where records, report and replay go."),
) -> None:
    """Show in a minute what a slow worker costs with DDP, AD-PSGD and nodelay_free, in equal time."""
    # Steps of 30 ms, most of it asleep: four workers fit on two cores, and a busy machine changes little.
    alike = Job(seconds=seconds, slow={0: 5.0}, compute_ms=30.0, target=0.9, lr=0.15, momentum=0.9)
    alike = replace(alike, schedule="cosine", evaluations=math.ceil(10 * seconds))
    jobs = [replace(alike, strategy=strategy) for strategy in STRATEGIES]
    homes = [folder / name(number, one) for number, one in enumerate(jobs)]
    check_unused([folder, *homes], force=True)
    console = output()
    console.print(f"{TITLE}. {', '.join(map(_label, STRATEGIES))}: {seconds:g} s each.")
    results = []
    for outcome in run_all(jobs, folder.resolve(), None):
        if isinstance(outcome, RunStopped):
            raise outcome
        results.append(outcome)
    runs = [replace(one, label=_label(one.label)) for one in ranked(results)]
    console.print("", brief_table(runs), "", *findings(runs), "", sep="\n")
    report, replay = folder / "report.html", folder / "replay.html"
    words = {"title": f"Freewheel: {TITLE}", "command": command_line()}
    write(report, results, [recorded(home) for home in homes], **words)
    write_whole(replay, html([Run(home) for home in homes[:2]], TITLE))
    console.print(f"Report, all figures: {report.resolve()}", soft_wrap=True)
    console.print(f"Replay, open it in a browser: {replay.resolve()}", soft_wrap=True)


def _label(strategy: str) -> str:
    return LABELS.get(strategy, strategy)
