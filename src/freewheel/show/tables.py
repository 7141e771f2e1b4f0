"""Runs beside each other: who learned how much when, and tables for the terminal, a page and markdown."""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import rich.table

from freewheel.numbers import UNKNOWN, number, share, short
from freewheel.records.result import Result
from freewheel.show.shown import Shown

BASELINES = ("ddp", "allreduce")  # others are compared with the first of these that is there
SHORT_OF = 0.005  # the default target is so much below the baseline's last accuracy
ALIKE = 1.05  # a run that goes on for at most this much longer has had the same budget: it finished a step


@dataclass(frozen=True)
class Versus:
    """A run beside the others; None: not measured, or never reached."""

    of: str  # what was measured: accuracy, or loss where there is none
    steps: float  # of the run with the fewest: with batches of one size, equal samples
    s: float  # when the first run ended
    target: float | None
    over: str | None  # the baseline
    equal_samples: float | None
    equal_time: float | None
    target_s: float | None
    speedup: float | None  # how many times as fast as the baseline it reached the target
    at_least: bool  # the baseline never did: this many times, or more


Point = tuple[float, float, float]  # a time, the steps of all workers until then, and what was measured


def versus(results: Sequence[Result]) -> list[Versus]:
    """Empty for a single run, for mixed clocks, and where nothing was learned."""
    if len(results) < 2 or len({result.clock for result in results}) > 1:
        return []
    for of in ("accuracy", "loss"):
        curves = [_points(result, of) for result in results]
        if min(map(len, curves)) > 1:
            break
    else:
        return []
    s, steps = min(curve[-1][0] for curve in curves), min(curve[-1][1] for curve in curves)
    base, target = baseline_of(results), next((one.target for one in results if one.target is not None), None)
    if target is None and base is not None and of == "accuracy":
        target = curves[base][-1][2] - SHORT_OF
    least = target if target is not None and of == "accuracy" else math.inf
    reached = [next((at for at, _, value in curve if value >= least), None) for curve in curves]
    over = None if base is None else results[base].strategy
    base_s = None if base is None else curves[base][-1][0] if reached[base] is None else reached[base]
    rows = []
    for curve, target_s in zip(curves, reached, strict=True):
        speedup = base_s / target_s if base_s and target_s else None
        at_least = speedup is not None and base is not None and reached[base] is None
        equal = (_at(curve, 1, steps), _at(curve, 0, s))
        rows.append(Versus(of, steps, s, target, over, *equal, target_s, speedup, at_least))
    return rows


def baseline_of(results: Sequence[Result]) -> int | None:
    names = [one.strategy for one in results]
    return next((names.index(one) for one in BASELINES if one in names), None)


def goal(results: Sequence[Result]) -> tuple[float | None, list[float | None]]:
    """The target accuracy, chosen or the baseline's, and when each run reached it."""
    if target := next((one.target for one in results if one.target), None):
        return target, [one.target_s for one in results]
    rows = versus(results)
    return (rows[0].target, [row.target_s for row in rows]) if rows else (None, [])


def race(names: Sequence[str], results: Sequence[Result]) -> str:
    """Who reached the target when, in words; empty where there is no target."""
    target, after_s = goal(results)
    if target is None:
        return ""
    what = f"{short(100 * target)} % accuracy"
    reached = {place: at_s for place, at_s in enumerate(after_s) if at_s is not None}
    if not reached:
        return f"No run reaches {what}."
    first, first_s = min(reached.items(), key=lambda one: one[1])
    said = f"{names[first]} reaches {what} {'first, ' * (len(names) > 1)}after {number(first_s)} s"
    base = baseline_of(results)
    if base is not None and base in reached and base != first and first_s:
        base_s = reached[base]
        said += f", {number(base_s / first_s)} times sooner than {names[base]} ({number(base_s)} s)"
    late = [name for place, name in enumerate(names) if place not in reached]
    return f"{said}; never: {', '.join(late)}." if late else f"{said}."


def _points(result: Result, what: str) -> list[Point]:
    measured = [(one.virtual_s, one.worker_steps, getattr(one, what)) for one in result.curve]
    return [(at, steps, value) for at, steps, value in measured if value is not None]


def _at(points: Sequence[Point], axis: int, moment: float) -> float | None:
    if moment <= 0:  # a script need not count steps
        return None
    if points[-1][axis] <= ALIKE * moment:
        return points[-1][2]
    if points[0][axis] > moment:
        return None
    return float(np.interp(moment, [point[axis] for point in points], [point[2] for point in points]))


@dataclass(frozen=True)
class Column:
    """A cell for each row, as text."""

    head: str
    cells: Sequence[str]
    words: bool = True  # numbers are aligned right
    best: frozenset[int] = frozenset()  # the rows with the best figure


@dataclass(frozen=True)
class Table:
    """Columns; the first one says what a row is about."""

    name: str
    columns: Sequence[Column]


def column(
    head: str,
    values: Sequence[Any],
    text: Callable[[Any], str] = number,
    best: Callable[[Iterable[float]], float] | None = None,
) -> Column:
    known = [value for value in values if value is not None]
    top = best(known) if best is not None and len(set(known)) > 1 else None
    marked = (place for place, value in enumerate(values) if value is not None and value == top)
    return Column(head, list(map(text, values)), text is str, frozenset(marked))


def filled(columns: Iterable[Column]) -> list[Column]:
    return [one for one in columns if any(cell != UNKNOWN for cell in one.cells)]


def _columns(runs: Sequence[Shown]) -> tuple[list[Column], ...]:
    """In groups: the run, its speed, its worth beside the others, what it learned."""
    results = [run.result for run in runs]

    def of(head: str, value: Callable[[Result], Any], *how: Any) -> Column:
        return column(head, list(map(value, results)), *how)

    run = [
        Column("strategy", [run.label for run in runs]),
        of("waits for", lambda r: r.settings.get("waits_for", UNKNOWN), str),
        of("clock", lambda r: r.clock, str),
    ]
    fast = [
        of("seconds", lambda r: r.virtual_s),
        of("steps/s", lambda r: r.steps_per_s, number, max),
        of("of\xa0ideal", lambda r: r.ideal_share, share, max),
        of("idle", lambda r: r.idle_share, share, min),
        of("kB/step", lambda r: r.bytes_per_step / 1e3, number, min),
    ]
    learned = [
        of("lr", lambda r: r.settings.get("lr"), short),
        of("stale mean", lambda r: r.staleness_mean),
        of("stale max", lambda r: r.staleness_max),
        of("discrepancy", lambda r: None if r.loss is None else r.discrepancy_max),
        of("loss", lambda r: r.loss),
        of("accuracy", lambda r: r.accuracy, share),
        of("trace", lambda r: r.trace_sha256[:10] or UNKNOWN, str),
    ]
    return run, fast, filled(_beside(results)), filled(learned)


def _beside(results: Sequence[Result]) -> list[Column]:
    found, (target, after_s), rows = list[Column](), goal(results), versus(results)
    if rows:
        how: Any = (share, max) if rows[0].of == "accuracy" else (number, min)
        found.append(column(f"{rows[0].of} at equal\xa0samples", [row.equal_samples for row in rows], *how))
        found.append(column("at equal\xa0time", [row.equal_time for row in rows], *how))
    if target is not None:
        how = (lambda at_s: "never" if at_s is None else number(at_s), min)
        found.append(column(f"s to {share(target)}", after_s, *how))
    if rows and rows[0].over is not None:
        texts = [f"{'> ' if row.at_least else ''}{number(row.speedup)}" for row in rows]
        times = column(f"speed-up over {rows[0].over}", [row.speedup for row in rows], best=max)
        found.append(replace(times, cells=texts))
    return found


def unlike(runs: Sequence[Shown]) -> str:
    """Why these runs cannot be ranked against each other; empty where they can."""
    if len({run.clock for run in runs}) > 1:
        return "Some of these runs are simulated, in virtual seconds, and some real: they are not ranked."
    return ""


def results_table(runs: Sequence[Shown]) -> Table:
    run, fast, beside, learned = _columns(runs)
    columns = [*run, *beside, *fast, *learned]
    if unlike(runs):
        columns = [replace(one, best=frozenset()) for one in columns]
    return Table("figures of all runs", columns)


def wide_tables(runs: Sequence[Shown]) -> list[rich.table.Table]:
    run, *groups = _columns(runs)
    return [_printed([*run[:2], *some]) for some in groups if some]


def brief_table(runs: Sequence[Shown]) -> rich.table.Table:
    columns = {one.head: one for group in _columns(runs) for one in group}
    learned = "accuracy" if "accuracy" in columns else "loss"
    wanted = ["strategy", "steps/s", "idle", "s to ", "speed-up", learned]
    rates = {
        rate
        for run in runs
        for rate in (run.result.settings.get("lr"), run.result.scenario.get("lr"))
        if rate
    }
    if len(rates) > 1:  # not all have the rate that was asked for
        wanted.append("lr")
    return _printed(
        [one for head, one in columns.items() if head.startswith(tuple(wanted)) and " at " not in head]
    )


def _printed(columns: Sequence[Column]) -> rich.table.Table:
    rows = zip(*(one.cells for one in columns), strict=True)
    return printed([one.head for one in columns], rows, [at for at, one in enumerate(columns) if one.words])


def printed(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Container[int] = (0,)
) -> rich.table.Table:
    """A table for a terminal; columns other than `left` are numbers, aligned right."""
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
