"""``freewheel simulate`` and ``chaos``: strategies in virtual time, and laws under random faults."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from freewheel.cli.options import command_line, option, ranks_and_numbers, takes
from freewheel.cli.results import Outputs, bar, output
from freewheel.errors import ConfigError, RunStopped, at_least
from freewheel.records.files import check_unused, open_whole, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.rates import trouble
from freewheel.show.tables import printed
from freewheel.sim.scenario import Compute, Fault, Links, Scenario

if TYPE_CHECKING:
    from freewheel.sim import chaos as laws

PERFETTO = ".perfetto.json"
"""A trace of this name is in Perfetto's format."""


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
    from freewheel.show.replay import as_perfetto
    from freewheel.show.report import recorded
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
    perfetto = trace if trace is not None and trace.name.endswith(PERFETTO) else None
    if perfetto and asked.workers > MOST_TIMELINES:
        raise ConfigError(f"Perfetto's format is for at most {MOST_TIMELINES} workers; give a FILE.jsonl.")
    out = Outputs(**outputs)
    out.check(trace)
    results: list[Result] = []
    runs: list[Run | None] = []
    stopped: list[str] = []
    with contextlib.ExitStack() as open_until_done:
        # A report shows what happened on the way, too: it needs records, kept or not. So does Perfetto.
        passing = Path(open_until_done.enter_context(tempfile.TemporaryDirectory())) / "records"
        records = folder or (passing if out.report or perfetto else None)
        several = len(chosen) > 1
        homes = [
            records / f"{number}-{one.name}" if records and several else records
            for number, one in enumerate(chosen)
        ]
        if folder is not None:
            check_unused([folder, *filter(None, homes)], out.force)
        file = open_until_done.enter_context(open_whole(trace)) if trace and not perfetto else None
        show = open_until_done.enter_context(bar())
        for number, (one, home) in enumerate(zip(chosen, homes, strict=True)):

            def progress(steps: int, total: int, at: int = number, name: str = one.name) -> None:
                show(name, (at + steps / total) / len(chosen))

            how: dict[str, Any] = {"progress": progress, "trace_file": file, "folder": home, "name": task}
            try:
                results.append(api.simulate(one, problem, asked, command=command_line(), **how))
            except RunStopped as error:
                if not keep_going:
                    raise
                stopped.append(str(error))
            else:
                runs += [recorded(home)] if home is not None else []
        if perfetto and results:
            write_whole(perfetto, as_perfetto([run for run in runs if run is not None]))
    console = output()
    if results:
        out.show(console, results)
        for result in results:
            if said := _trouble(result):
                console.print(f"{result.strategy}: {said}", highlight=False, soft_wrap=True)
        out.save(console, results, runs, f"{task} on {asked.workers} workers")
    if folder is not None:
        console.print(f"Records: {folder.resolve()}", highlight=False, soft_wrap=True)
    if stopped:
        raise RunStopped("; ".join(stopped))


def _compute(models: list[str], ms: float, slow: list[str] | None, pause: list[str] | None) -> Compute:
    """The compute times of all workers, from a model for all and models for single ones."""
    common, own = "constant", {}
    for text in models:
        rank, sign, model = text.partition("=")
        if not sign:
            common = text
        elif rank.isdecimal():
            own[int(rank)] = Compute.parse(model, ms=ms)
        else:
            raise ConfigError(f"cannot read --compute {text!r}: write MODEL or RANK=MODEL.")
    pauses = [(rank, *numbers) for rank, numbers in ranks_and_numbers("--pause", pause, 2)]
    factors = {rank: factor for rank, (factor,) in ranks_and_numbers("--slow", slow, 1)}
    return Compute.parse(common, ms=ms, slow=factors, pauses=pauses, of=own)


def _trouble(result: Result) -> str:
    """What faults cost, in words; nothing where there were none."""
    late = [fault for fault in result.settings["scenario"]["faults"] if fault["at_s"] > result.virtual_s]
    never = f"{len(late)} faults never happened, the run ended at {result.virtual_s:.3f} s"
    return ", ".join([*trouble(result.by_worker), *([never] if late else [])])


# -- chaos: random faults, and the laws that must hold whatever happens --
STRATEGIES = (
    "adpsgd,adpsgd:topology=ring,nodelay_free,nodelay_free:tau=6,dasgd:interval=4,allreduce,sasgd:interval=4,"
    "nodelay:tau=8,dpsgd,leader:interval=4,grouping,hierarchical_sasgd"
)


def chaos(
    seeds: int = option(100, "How many runs; the strategies take turns."),
    first: int = option(0, "The first seed: --first 17 --seeds 1 repeats run 17."),
    strategy: str = option(STRATEGIES, "One or several, separated by commas.", show_default=False),
    workers: int = option(8, "How many workers."),
) -> None:
    """Let random faults strike simulated runs, and check the laws; a failure is named with its seed."""
    from freewheel import names, strategies

    at_least("--seeds", seeds, 1)
    at_least("--first", first, 0)
    at_least("--workers", workers, 4)
    for one in strategies.resolve_all(strategy):
        one.check(workers)
    chosen = names.split(strategy)  # they take turns
    work = [(chosen[k % len(chosen)], first + k, workers) for k in range(seeds)]
    outcomes: list[laws.Outcome] = []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool, bar() as show:
        for outcome in pool.imap_unordered(_one, work):
            outcomes.append(outcome)
            show("runs", len(outcomes) / len(work))
    _show(outcomes, workers)
    if any(outcome.broken for outcome in outcomes):
        raise typer.Exit(1)


def _one(work: tuple[str, int, int]) -> laws.Outcome:
    from freewheel import strategies, tasks
    from freewheel.sim import chaos as laws

    name, seed, workers = work
    return laws.run(strategies.resolve(name), name, tasks.resolve("quadratic"), seed, workers)


def _show(outcomes: list[laws.Outcome], workers: int) -> None:
    rows = []
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        faults = sum(outcome.faults.total() for outcome in mine)
        violations = sum(bool(outcome.broken) for outcome in mine)
        rows.append([name, *map(str, (len(mine), faults, violations))])
    console = output()
    console.print(printed(["strategy", "runs", "faults", "violations"], rows))
    for outcome in sorted(outcomes, key=lambda one: one.seed):
        for broken in outcome.broken:
            again = f"--strategy {outcome.strategy} --first {outcome.seed} --seeds 1 --workers {workers}"
            console.print(f"{broken}\n  again: freewheel chaos {again}", highlight=False, soft_wrap=True)
