"""``freewheel chaos``: random faults in virtual time, and the laws that must hold whatever happens."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import track

from freewheel.cli.console import output
from freewheel.cli.options import option
from freewheel.errors import at_least
from freewheel.show.tables import printed

if TYPE_CHECKING:
    from freewheel.sim import chaos as laws

STRATEGIES = (
    "adpsgd,adpsgd:topology=ring,nodelay_free,nodelay_free:tau=6,dasgd:interval=4,allreduce,sasgd:interval=4,"
    "nodelay:tau=8,dpsgd,leader:interval=4,grouping,hierarchical_sasgd"
)


def chaos(
    seeds: int = option(100, "How many runs; the strategies take turns."),
    first: int = option(0, "The first seed: --first 17 --seeds 1 repeats run 17."),
    strategy: str = option(STRATEGIES, "One or several, separated by commas.", show_default=False),
    workers: int = option(8, "How many workers."),
    jobs: int | None = option(None, "How many runs at once; default: one a core."),
    wide: bool = option(False, "Count each kind of fault.", "--wide"),
) -> None:
    """Let random faults strike simulated runs, and check the laws; a failure is named with its seed."""
    from freewheel import names, strategies
    from freewheel.sim import chaos as laws

    at_least("--seeds", seeds, 1)
    at_least("--first", first, 0)
    at_least("--workers", workers, 4)
    at_least("--jobs", jobs, 1)
    for one in strategies.resolve_all(strategy):
        one.check(workers)
    chosen = laws.chosen(names.split(strategy), range(first, first + seeds))
    work = [(name, seed, workers) for name, seed in chosen]
    errors = Console(stderr=True)
    with multiprocessing.get_context("spawn").Pool(jobs or len(os.sched_getaffinity(0))) as pool:
        done = pool.imap_unordered(_one, work)
        bar = track(done, "runs", len(work), console=errors, transient=True, disable=not errors.is_terminal)
        outcomes = list(bar)
    _show(outcomes, workers, wide)
    if any(outcome.broken for outcome in outcomes):
        raise typer.Exit(1)


def _one(work: tuple[str, int, int]) -> laws.Outcome:
    from freewheel import strategies, tasks
    from freewheel.sim import chaos as laws

    name, seed, workers = work
    return laws.run(strategies.resolve(name), name, tasks.resolve("quadratic"), seed, workers)


def _show(outcomes: list[laws.Outcome], workers: int, wide: bool) -> None:
    kinds = sorted({kind for outcome in outcomes for kind in outcome.faults}) if wide else ["faults"]
    rows = []
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        total = sum((outcome.faults for outcome in mine), Counter[str]())
        total["faults"] = total.total()
        violations = sum(bool(outcome.broken) for outcome in mine)
        rows.append([name, str(len(mine)), *(str(total[kind]) for kind in kinds), str(violations)])
    console = output()
    console.print(printed(["strategy", "runs", *kinds, "violations"], rows))
    for outcome in sorted(outcomes, key=lambda one: one.seed):
        for broken in outcome.broken:
            again = f"--strategy {outcome.strategy} --first {outcome.seed} --seeds 1 --workers {workers}"
            console.print(f"{broken}\n  again: freewheel chaos {again}", highlight=False, soft_wrap=True)
