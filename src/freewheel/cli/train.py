"""``freewheel train`` and ``freewheel compare``: built-in tasks on real processes."""

from __future__ import annotations

import itertools
import shlex
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from freewheel import names, strategies
from freewheel.cli.console import bars, output
from freewheel.cli.options import Curve, Decay, Optimizer, Warmup, command_line, ranks_and_numbers
from freewheel.cli.results import save, show
from freewheel.errors import ConfigError, RunStopped
from freewheel.observe.files import check_unused, check_writable
from freewheel.observe.report import recorded
from freewheel.observe.result import Result
from freewheel.training.job import DDP, STEPS, Job, name, train_all

SIDE_BY_SIDE = "ddp,allreduce,sasgd,nodelay,nodelay_free,adpsgd,dasgd,asgd,easgd"

Strategy = Annotated[str, typer.Option(help="One strategy, with settings: adpsgd:topology=ring.")]
Strategies = Annotated[
    str, typer.Option(help="Several, separated by commas; all; ddp is PyTorch's own DistributedDataParallel.")
]
Task = Annotated[str, typer.Option(help="digits, digits:net=cnn, cifar10, cifar10:net=vgg or chars.")]
Data = Annotated[Path | None, typer.Option(help="The task's data: cifar10's file or folder, chars' text.")]
Workers = Annotated[int, typer.Option(help="How many processes.")]
Steps = Annotated[
    int | None,
    typer.Option(help="Budget: workers × steps in all; fast workers may use it up; default: 200."),
]
Seconds = Annotated[float | None, typer.Option(help="Budget: a time for all, instead of --steps.")]
Slow = Annotated[
    list[str] | None, typer.Option(help="RANK:FACTOR, this worker is slower, by sleeping; repeatable.")
]
ComputeMs = Annotated[
    float, typer.Option(help="A step takes at least this long, by sleeping: a machine for every worker.")
]
Rate = Annotated[float | None, typer.Option(help="Of the averaged update; default: the task's, scaled.")]
Momentum = Annotated[float | None, typer.Option(help="Nesterov momentum; default: the strategy's.")]
Wire = Annotated[str, typer.Option(help="What vectors travel as: fp32 or bf16.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; workers share one device.")]
Target = Annotated[float | None, typer.Option(help="Accuracy to time, e.g. 0.9.")]
Seed = Annotated[int, typer.Option(help="Of weights, batches and peers.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML report here.")]
Board = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write the records here for TensorBoard, too (an extra).")
]
Folder = Annotated[Path | None, typer.Option(help="Where records and logs go; default: runs/DATE_TIME.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite records in --folder.")]


def train(
    strategy: Strategy = "adpsgd",
    task: Task = "digits",
    data: Data = None,
    workers: Workers = 4,
    steps: Steps = None,
    seconds: Seconds = None,
    slow: Slow = None,
    compute_ms: ComputeMs = 0.0,
    optimizer: Optimizer = "sgd",
    lr: Rate = None,
    momentum: Momentum = None,
    weight_decay: Decay = 0.0,
    schedule: Curve = "constant",
    warmup: Warmup = None,
    wire: Wire = "fp32",
    device: Device = "cpu",
    target: Target = None,
    seed: Seed = 0,
    json_path: Json = None,
    report: Report = None,
    folder: Folder = None,
    tensorboard: Board = None,
    force: Force = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Write checkpoints to this folder.")] = None,
    every: Annotated[
        int | None, typer.Option(help="Steps between two checkpoints; default: 100.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint that is there, if there is one.")
    ] = False,
) -> None:
    """Train a built-in task with real processes on this machine."""
    if "," in strategy:
        raise ConfigError("train takes one strategy; `freewheel compare` takes several.")
    job = _job(
        task, data, workers, steps, seconds, slow, compute_ms, optimizer, lr, momentum, weight_decay,
        schedule, warmup, wire, device, target, seed,
    )  # fmt: skip
    if every is not None and checkpoint is None:
        raise ConfigError("--every is about checkpoints: give --checkpoint PATH, where they are to go.")
    job = replace(
        job,
        strategy=_one(strategy),
        checkpoint=str(checkpoint.resolve()) if checkpoint is not None else None,
        every=job.every if every is None else every,
        resume=resume,
    )
    _train([job], json_path, report, folder, tensorboard, force)


def compare(
    strategy: Strategies = SIDE_BY_SIDE,
    task: Task = "digits",
    data: Data = None,
    workers: Workers = 4,
    steps: Steps = None,
    seconds: Seconds = None,
    slow: Slow = None,
    compute_ms: ComputeMs = 0.0,
    optimizer: Optimizer = "sgd",
    lr: Rate = None,
    momentum: Momentum = None,
    weight_decay: Decay = 0.0,
    schedule: Curve = "constant",
    warmup: Warmup = None,
    wire: Wire = "fp32",
    device: Device = "cpu",
    target: Target = None,
    seed: Seed = 0,
    json_path: Json = None,
    report: Report = None,
    folder: Folder = None,
    tensorboard: Board = None,
    force: Force = False,
) -> None:
    """Train the same task with several strategies, one after the other, and print one table."""
    job = _job(
        task, data, workers, steps, seconds, slow, compute_ms, optimizer, lr, momentum, weight_decay,
        schedule, warmup, wire, device, target, seed,
    )  # fmt: skip
    jobs = [replace(job, strategy=one) for one in _chosen(strategy)]
    _train(jobs, json_path, report, folder, tensorboard, force)


def _job(
    task: str,
    data: Path | None,
    workers: int,
    steps: int | None,
    seconds: float | None,
    slow: list[str] | None,
    compute_ms: float,
    optimizer: str,
    lr: float | None,
    momentum: float | None,
    weight_decay: float,
    schedule: str,
    warmup: float | None,
    wire: str,
    device: str,
    target: float | None,
    seed: int,
) -> Job:
    if steps is not None and seconds is not None:
        raise ConfigError("--steps and --seconds are two budgets: give one of them.")
    if data is not None:
        if not data.exists():
            raise ConfigError(f"--data {str(data)!r}: there is no such file or folder.")
        task = f"{task}:data={data.resolve()}"
    return Job(
        task=task,
        workers=workers,
        steps=STEPS if steps is None else steps,
        seconds=seconds,
        seed=seed,
        slow={rank: factor for rank, (factor,) in ranks_and_numbers("--slow", slow, 1)},
        compute_ms=compute_ms,
        optimizer=optimizer,
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        wire=wire,
        device=device,
        target=target,
    )


def _train(
    jobs: list[Job],
    json_path: Path | None,
    report: Path | None,
    folder: Path | None,
    board: Path | None,
    force: bool,
) -> None:
    """Run the jobs and show what came of them."""
    for path in (json_path, report):
        check_writable(path)
    folder = folder or Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    check_unused([folder, *(folder / name(number, one) for number, one in enumerate(jobs))], force)
    outcomes = _run_all(jobs, folder.resolve(), board)
    results = [one for one in outcomes if isinstance(one, Result)]
    stopped = [str(one) for one in outcomes if not isinstance(one, Result)]
    if not results:
        raise RunStopped(" ".join(stopped))
    console = output()
    show(console, results)
    console.print(f"Records: {folder.resolve()}", highlight=False, soft_wrap=True)
    runs = [
        recorded(folder / name(number, job))
        for number, (job, outcome) in enumerate(zip(jobs, outcomes, strict=True))
        if report is not None and isinstance(outcome, Result)
    ]
    title = f"{jobs[0].task.partition(':')[0]} on {jobs[0].workers} workers"
    save(console, results, runs, json_path=json_path, report=report, title=title)
    if stopped:
        raise RunStopped(" ".join(stopped))


def _one(spec: str) -> str:
    chosen = _chosen(spec)
    if len(chosen) != 1:
        raise ConfigError(f"train takes one strategy, not {spec!r}; compare takes several.")
    return chosen[0]


def _chosen(spec: str) -> list[str]:
    everything = [DDP, *strategies.ALL]
    parts = (everything if part == "all" else [part] for part in names.split(spec))
    chosen = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
    for one in chosen:
        if one != DDP:
            strategies.resolve(one)
    return chosen


def _run_all(jobs: list[Job], folder: Path, tensorboard: Path | None) -> list[Result | RunStopped]:
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
