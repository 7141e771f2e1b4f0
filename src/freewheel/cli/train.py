"""``freewheel train``, ``compare``, ``simulate`` and ``demo``: tasks on real processes or in virtual time."""

import contextlib
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freewheel.cli.options import bar, command_line, option, output, ranks_and_numbers, takes
from freewheel.errors import ConfigError, RunStopped
from freewheel.records.files import check_unused, check_writable, open_whole, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.settings import setting
from freewheel.show import replay as replays
from freewheel.show import report as reports
from freewheel.show.rates import trouble
from freewheel.show.shown import ranked
from freewheel.show.tables import brief_table, versus, wide_tables
from freewheel.sim.scenario import Compute, Fault, Links, Scenario
from freewheel.training.job import DDP, Job, name, train_all

SIDE_BY_SIDE = "ddp,allreduce,sasgd,nodelay,nodelay_free,adpsgd,dasgd,asgd,easgd"
DATA = option(None, "The task's data: cifar10's file or folder, chars' text.")


@dataclass(frozen=True)
class Outputs:
    """What is made of results."""

    json: Path | None = setting(None, "Write the figures here.", rare=True)
    report: Path | None = setting(None, "Write an HTML report here.")
    force: bool = setting(False, "Overwrite records in --folder.", rare=True)
    wide: bool = setting(False, "Print all figures, not the six that matter most.")

    def check(self, *others: Path | None) -> None:
        """Refuse files that cannot be written, or are one and the same, before anything is run."""
        paths = [path for path in (self.json, self.report, *others) if path is not None]
        for path in paths:
            check_writable(path)
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError(f"{' and '.join(map(str, paths))} must be different files.")

    def finish(
        self,
        title: str,
        outcomes: Sequence[tuple[Result | RunStopped, Run | None]],
        folder: Path | None,
        notes: Sequence[str] = (),
    ) -> None:
        """Print and write what came of runs, with each its records; raise what stopped some of them."""
        if results := [one for one, _ in outcomes if isinstance(one, Result)]:
            console, shown = output(), ranked(results)
            for table in wide_tables(shown) if self.wide else [brief_table(shown)]:
                console.print(table)
            for note in (*notes, *([] if folder is None else [f"Records: {folder.resolve()}"])):
                console.print(note, soft_wrap=True)
            if self.json is not None:
                rows = [{"versus": vars(row)} for row in versus(results)] or [{}] * len(results)
                found = [{**result.as_json(), **row} for result, row in zip(results, rows, strict=True)]
                write_whole(self.json, json.dumps(found, indent=2) + "\n")
            if self.report is not None:
                runs = [run for one, run in outcomes if isinstance(one, Result)]
                page = reports.html(results, runs, title=f"Freewheel: {title}", command=command_line())
                write_whole(self.report, page)
                console.print(f"Report: {self.report.resolve()}", soft_wrap=True)
        if stopped := [str(one) for one, _ in outcomes if isinstance(one, RunStopped)]:
            raise RunStopped(" ".join(stopped))


@dataclass(frozen=True)
class Kept(Outputs):
    """What is written on the way, too."""

    folder: Path | None = setting(None, "Where records and logs go; default: runs/DATE_TIME.")
    tensorboard: Path | None = setting(
        None, "Write the records here for TensorBoard, too (an extra).", rare=True
    )


@takes(Job, Kept, steps=None)
def train(
    job: dict[str, Any],
    kept: dict[str, Any],
    strategy: str = option("adpsgd", "One strategy, with settings: adpsgd:topology=ring.", metavar="NAME"),
    data: Path | None = DATA,
    checkpoint: Path | None = option(None, "Write checkpoints to this folder."),
    every: int | None = option(None, "Steps between two; default: 100.", rare=True),
    resume: bool = option(False, "Go on from the checkpoint, if there is one.", "--resume", rare=True),
) -> None:
    """Train a built-in task with real processes on this machine."""
    chosen = _chosen(strategy)
    if len(chosen) != 1:
        raise ConfigError(f"train takes one strategy, not {strategy!r}; `freewheel compare` takes several.")
    job["checkpoint"] = None if checkpoint is None else str(checkpoint.resolve())
    _train(chosen, job | {"every": every, "resume": resume}, data, Kept(**kept))


@takes(Job, Kept, steps=None)
def compare(
    job: dict[str, Any],
    kept: dict[str, Any],
    strategy: str = option(
        SIDE_BY_SIDE, "Several, separated by commas; all; ddp is PyTorch's own DistributedDataParallel."
    ),
    data: Path | None = DATA,
) -> None:
    """Train the same task with several strategies, one after the other, and print one table."""
    _train(_chosen(strategy), job, data, Kept(**kept))


def _train(strategies: list[str], job: dict[str, Any], data: Path | None, kept: Kept) -> None:
    if job["steps"] is None:
        del job["steps"]
    elif job["seconds"] is not None:
        raise ConfigError("--steps and --seconds are two budgets: give one of them.")
    if data is not None:
        if not data.exists():
            raise ConfigError(f"--data {str(data)!r}: there is no such file or folder.")
        job["task"] += f":data={data.resolve()}"
    jobs = [Job(strategy=one, **job) for one in strategies]
    kept.check()
    folder = kept.folder or Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    homes = [folder / name(number, one) for number, one in enumerate(jobs)]
    check_unused([folder, *homes], kept.force)
    found = run_all(jobs, folder.resolve(), kept.tensorboard)
    outcomes = [(one, reports.recorded(home)) for one, home in zip(found, homes, strict=True)]
    kept.finish(f"{jobs[0].task.partition(':')[0]} on {jobs[0].workers} workers", outcomes, folder)


def _chosen(spec: str) -> list[str]:
    from freewheel import names, strategies

    chosen: list[str] = []
    for one in names.split(spec):
        if one not in ("all", DDP):
            strategies.resolve(one)
        chosen += [DDP, *strategies.ALL] if one == "all" else [one]
    return list(dict.fromkeys(chosen))


def run_all(jobs: list[Job], folder: Path, tensorboard: Path | None) -> list[Result | RunStopped]:
    print(f"Watch: freewheel watch {shlex.quote(str(folder))}", file=sys.stderr, flush=True)
    steps = None if jobs[0].seconds else jobs[0].workers * jobs[0].steps
    with bar() as show:

        def tell(number: int, done: float) -> None:
            part = min(1.0, done / steps) if steps else 0.0  # how many steps fit into --seconds is not known
            show(jobs[number].strategy, (number + part) / len(jobs))

        return train_all(jobs, folder, tell, tensorboard, command_line())


@takes(Scenario, Links, Outputs)
def simulate(
    scenario: dict[str, Any],
    links: dict[str, Any],
    outputs: dict[str, Any],
    strategy: str = option("adpsgd", "One or several, with settings: sasgd:interval=8,adpsgd; or all."),
    task: str = option("digits", "digits, digits:net=cnn, quadratic, cifar10 or chars."),
    compute_ms: float = option(10.0, "Mean time of a gradient."),
    compute: list[str] | None = option(
        None,
        "constant, uniform:0.3, exponential, lognormal:0.3 or trace:FILE (ms per step); "
        "RANK=MODEL for one worker; repeatable.",
        rare=True,
    ),
    slow: list[str] | None = option(None, "RANK:FACTOR, this worker computes slower; repeatable."),
    pause: list[str] | None = option(None, "RANK:AT_S:FOR_S, this worker stops for a while.", rare=True),
    fault: list[str] | None = option(
        None,
        "crash:3@0.5, restart:3@1, leave:3@0.5, cut:3@0.5, cut:3-5@0.5, heal:3@2, slow:3x9@0.5, "
        "throttle:3x9@0.5.",
    ),
    topology: str | None = option(None, "ring, torus:rows=4, … for the strategies that have one.", rare=True),
    trace: Path | None = option(
        None,
        "Write every event here, as JSON lines; with a name in .perfetto.json for ui.perfetto.dev.",
        rare=True,
    ),
    folder: Path | None = option(
        None, "Write records here, as a real run does; one folder for each of several strategies."
    ),
    keep_going: bool = option(
        False, "When a strategy cannot go on (a crash), show the others.", "--keep-going", rare=True
    ),
) -> None:
    """Train a task with one or several strategies in virtual time and compare them."""
    from freewheel import api, strategies, tasks
    from freewheel.sim.records import MOST_TIMELINES

    asked = Scenario(
        compute=_compute(compute or [], compute_ms, slow, pause),
        links=Links(**links),
        faults=[Fault.parse(text) for text in fault or []],
        **scenario,
    )
    chosen = strategies.resolve_all(strategy)
    if topology is not None:
        having = [one for one in chosen if hasattr(one, "topology")]
        if not having:
            raise ConfigError("--topology: none of the chosen strategies has one; adpsgd and dpsgd do.")
        for one in having:
            one.topology = topology
    problem = tasks.resolve(task)
    for one in chosen:
        one.check(asked.workers)
    if trace is not None and len(chosen) > 1:
        raise ConfigError("--trace takes the events of one strategy; give only one.")
    perfetto = trace if trace is not None and trace.name.endswith(".perfetto.json") else None
    if perfetto and asked.workers > MOST_TIMELINES:
        raise ConfigError(f"Perfetto's format is for at most {MOST_TIMELINES} workers; give a FILE.jsonl.")
    out = Outputs(**outputs)
    out.check(trace)
    outcomes: list[tuple[Result | RunStopped, Run | None]] = []
    with contextlib.ExitStack() as until_done:
        # Reports and Perfetto need records, even if these are not kept.
        passing = Path(until_done.enter_context(tempfile.TemporaryDirectory())) / "records"
        records = folder or (passing if out.report or perfetto else None)
        homes = [records for _ in chosen]
        if records is not None and len(chosen) > 1:
            homes = [records / f"{number}-{one.name}" for number, one in enumerate(chosen)]
        if folder is not None:
            check_unused([folder, *filter(None, homes)], out.force)
        file = until_done.enter_context(open_whole(trace)) if trace and not perfetto else None
        show = until_done.enter_context(bar())
        how: dict[str, Any] = {"trace_file": file, "name": task, "command": command_line()}
        for number, (one, home) in enumerate(zip(chosen, homes, strict=True)):

            def progress(steps: int, total: int, at: int = number, name: str = one.name) -> None:
                show(name, (at + steps / total) / len(chosen))

            try:
                result = api.simulate(one, problem, asked, progress=progress, folder=home, **how)
                outcomes.append((result, reports.recorded(home) if home is not None else None))
            except RunStopped as error:
                if not keep_going:
                    raise
                outcomes.append((error, None))
        if perfetto and isinstance(outcomes[0][0], Result):
            write_whole(perfetto, replays.as_perfetto([run for _, run in outcomes if run is not None]))
    notes = []
    for result in (one for one, _ in outcomes if isinstance(one, Result)):
        late = [fault for fault in result.settings["scenario"]["faults"] if fault["at_s"] > result.virtual_s]
        never = f"{len(late)} faults never happened, the run ended at {result.virtual_s:.3f} s"
        if said := [*trouble(result.by_worker), *([never] if late else [])]:  # what faults cost
            notes.append(f"{result.strategy}: {', '.join(said)}")
    out.finish(f"{task} on {asked.workers} workers", outcomes, folder, notes)


def _compute(models: list[str], ms: float, slow: list[str] | None, pause: list[str] | None) -> Compute:
    common, own = "constant", {}
    for text in models:
        rank, sign, model = text.partition("=")
        if not sign:
            common = text
        elif rank.isdecimal():
            own[int(rank)] = Compute.parse(model, ms=ms)
        else:
            raise ConfigError(f"cannot read --compute {text!r}: write MODEL or RANK=MODEL.")
    pauses, factors = ranks_and_numbers("--pause", pause, 2), dict(ranks_and_numbers("--slow", slow, 1))
    return Compute.parse(common, ms=ms, slow=factors, pauses=pauses, of=own)


# What the demo shows: a slow worker, with DDP and without waiting.
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
    labels = replays.LABELS
    console.print(f"{TITLE}. {', '.join(labels.get(one, one) for one in STRATEGIES)}: {seconds:g} s each.")
    results = []
    for outcome in run_all(jobs, folder.resolve(), None):
        if isinstance(outcome, RunStopped):
            raise outcome
        results.append(outcome)
    runs = [replace(one, label=labels.get(one.label, one.label)) for one in ranked(results)]
    console.print("", brief_table(runs), "", *reports.findings(runs), "", sep="\n")
    report, replay = folder / "report.html", folder / "replay.html"
    words = {"title": f"Freewheel: {TITLE}", "command": command_line()}
    write_whole(report, reports.html(results, [reports.recorded(home) for home in homes], **words))
    write_whole(replay, replays.html([Run(home) for home in homes[:2]], TITLE))
    console.print(f"Report, all figures: {report.resolve()}", soft_wrap=True)
    console.print(f"Replay, open it in a browser: {replay.resolve()}", soft_wrap=True)
