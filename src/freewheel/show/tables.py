"""Runs beside each other: who learned how much when, and tables for the terminal, a page and markdown."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import rich.table

from freewheel.numbers import UNKNOWN, given, listed, number, share, short
from freewheel.records.result import Result
from freewheel.show.shown import Shown, ranked

BASELINES = ("ddp", "allreduce")
"""What others are faster than: the first of these that is there."""
SHORT_OF = 0.005
"""Without a target that somebody chose: half a point less than the baseline's last accuracy."""

ALIKE = 1.05
"""Who went on for no more than this has had the same budget: a step begun in time is finished."""


@dataclass(frozen=True)
class Versus:
    """What can be said of all runs; `what` was measured: accuracy, or loss where there is none."""

    what: str
    worker_steps: float
    """What the run with the fewest steps has made: with batches of one size, as many samples."""
    time_s: float
    """When the first run had ended."""
    baseline: str | None
    target: float | None
    own_target: bool
    """Whether somebody chose the target."""
    rows: tuple[Row, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """For a file, a row for each run."""
        common = {"steps": self.worker_steps, "s": self.time_s, "target": self.target, "over": self.baseline}
        return [{"versus": {"of": self.what, **common, **vars(row)}} for row in self.rows]


@dataclass(frozen=True)
class Row:
    """One run among them; None: not measured, or never reached."""

    equal_samples: float | None
    equal_time: float | None
    target_s: float | None
    speedup: float | None
    """How many times as fast as the baseline it reached the target."""
    at_least: bool = False
    """The baseline never did: this many times, or more."""


def versus(results: Sequence[Result]) -> Versus | None:
    """All runs beside each other; None where there are not several, or nothing was learned."""
    if len(results) < 2 or len({result.clock for result in results}) > 1:
        return None
    what = next((one for one in ("accuracy", "loss") if all(len(_points(r, one)) > 1 for r in results)), None)
    if what is None:
        return None
    points = [_points(result, what) for result in results]
    time_s, steps = min(of[-1][0] for of in points), min(of[-1][1] for of in points)
    baseline = baseline_of(results)
    target = next((r.target for r in results if r.target is not None), None)
    chosen = target is not None
    if target is None and baseline is not None and what == "accuracy":
        target = points[results.index(baseline)][-1][2] - SHORT_OF
    reached = [_first(of, target) if target is not None and what == "accuracy" else None for of in points]
    rows = []
    for of, target_s in zip(points, reached, strict=True):
        speedup, at_least = None, False
        if baseline is not None and target_s:
            base = results.index(baseline)
            at_least = reached[base] is None
            speedup = (points[base][-1][0] if at_least else reached[base] or 0.0) / target_s
        rows.append(Row(_at(of, 1, steps), _at(of, 0, time_s), target_s, speedup, at_least))
    name = baseline.strategy if baseline is not None else None
    return Versus(what, steps, time_s, name, target, chosen, tuple(rows))


def baseline_of(results: Sequence[Result]) -> Result | None:
    """The run that the others are compared with, if there is one."""
    return next((one for name in BASELINES for one in results if one.strategy == name), None)


def goal(results: Sequence[Result]) -> tuple[float | None, list[float | None]]:
    """The accuracy that runs are timed to, chosen or the baseline's; and when each reached it."""
    if target := next((one.target for one in results if one.target), None):
        return target, [one.target_s for one in results]
    beside = versus(results)
    return (None, []) if beside is None else (beside.target, [row.target_s for row in beside.rows])


def race(names: Sequence[str], results: Sequence[Result]) -> str:
    """Who reaches the target first, how much sooner than the baseline, and who does not; "": no target."""
    target, after_s = goal(results)
    if target is None:
        return ""
    base = None if (run := baseline_of(results)) is None else results.index(run)
    what = f"{given(100 * target)} % accuracy"
    if base is not None and not any(one.target for one in results):
        what = f"{share(target)} accuracy, about what {names[base]} ended with,"
    reached = {place: at_s for place, at_s in enumerate(after_s) if at_s is not None}
    if not reached:
        return f"No run reaches {what}."
    first, first_s = min(reached.items(), key=lambda one: one[1])
    said = f"{names[first]} reaches {what} {'first, ' if len(results) > 1 else ''}after {number(first_s)} s"
    if base not in (None, first) and base in reached and first_s:
        times = reached[base] / first_s
        said += f", {number(times)} times sooner than {names[base]} ({number(reached[base])} s)"
    if late := [name for place, name in enumerate(names) if place not in reached]:
        said += f"; {listed(late)} {'does' if len(late) == 1 else 'do'} not reach it in this run"
    return f"{said}."


Point = tuple[float, float, float]
"""A time, the steps of all workers until then, and what was measured."""


def _points(result: Result, what: str) -> list[Point]:
    measured = [(one.virtual_s, one.worker_steps, getattr(one, what)) for one in result.curve]
    return [(at, steps, value) for at, steps, value in measured if value is not None]


def _first(points: Sequence[Point], target: float) -> float | None:
    return next((at for at, _, value in points if value >= target), None)


def _at(points: Sequence[Point], axis: int, moment: float) -> float | None:
    """What was measured at this moment, or lies between what was measured around it."""
    if moment <= 0:  # a script need not say how many steps were made
        return None
    if points[-1][axis] <= ALIKE * moment:
        return points[-1][2]
    if points[0][axis] > moment:
        return None
    return float(np.interp(moment, [point[axis] for point in points], [point[2] for point in points]))


@dataclass(frozen=True)
class Table:
    """Rows of cells under heads. The first cell of a row says what it is about."""

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: frozenset[int] = frozenset({0})
    """The columns that are words; numbers stand on the right."""
    marks: frozenset[tuple[int, int]] = frozenset()
    """Row and column of the best figures."""
    whose: Sequence[Shown] = ()
    """The run each row is about, where rows are about runs."""

    def cut(self, most: int) -> Table:
        """Only the first rows of it."""
        return self if len(self.rows) <= most else replace(self, rows=self.rows[:most]).without_empty()

    def without_empty(self) -> Table:
        """Without the columns nobody has a value for."""
        kept = [at for at in range(len(self.heads)) if not at or any(row[at] != UNKNOWN for row in self.rows)]
        left = frozenset(place for place, at in enumerate(kept) if at in self.left)
        rows = [[row[at] for at in kept] for row in self.rows]
        return Table(self.name, [self.heads[at] for at in kept], rows, left, whose=self.whose)


# -- figures of runs --


@dataclass(frozen=True)
class Column:
    """A figure of every run as text, and which of its values is the best."""

    head: str
    texts: Sequence[str]
    values: Sequence[float | None] = ()
    best: Callable[[Iterable[float]], float] | None = None
    of_budget: bool = False
    """Whether it can be compared only between runs of as many steps."""
    group: int = 0
    """Where there is no room for all columns: how fast, how well, and what that is worth."""

    @property
    def width(self) -> int:
        """What it takes in a terminal."""
        return max(map(len, (self.head, *self.texts))) + 2

    def marked(self) -> set[int]:
        """The rows of the best. What reads the same is as good; where all read the same there is no best."""
        known = [value for value in self.values if value is not None]
        if not self.best or not known or len(set(self.texts)) == 1:
            return set()
        best = self.texts[self.values.index(self.best(known))]
        return {place for place, text in enumerate(self.texts) if text == best}


def _columns(runs: Sequence[Shown]) -> list[Column]:
    results = [run.result for run in runs]
    beside = versus(results)

    def words(head: str, value: Callable[[Result], object]) -> Column:
        return Column(head, [str(value(one)) for one in results])

    def figure(
        head: str,
        value: Callable[[Result], float | None],
        text: Callable[[float | None], str] = number,
        best: Callable[[Iterable[float]], float] | None = None,
        *,
        of_budget: bool = False,
        group: int = 0,
    ) -> Column:
        values = [value(one) for one in results]
        return Column(head, list(map(text, values)), values, best, of_budget, group)

    clocks = {one.clock for one in results}
    found = [
        Column("strategy", [run.label for run in runs]),
        words("waits for", lambda r: r.settings.get("waits_for", UNKNOWN)),
        *([words("clock", lambda r: r.clock)] if len(clocks) > 1 else []),
        figure("seconds", lambda r: r.virtual_s, best=min, of_budget=True),
        figure("steps/s", lambda r: r.steps_per_s, best=max),
        figure("of\xa0ideal", lambda r: r.ideal_share, share, max),
        figure("idle", lambda r: r.idle_share, share, min),
        figure("kB/step", lambda r: r.bytes_per_step / 1e3, best=min),
        words("trace", lambda r: r.trace_sha256[:10] or UNKNOWN),
        figure("lr", lambda r: r.settings.get("lr"), short, group=1),
        figure("stale mean", lambda r: r.staleness_mean, group=1),
        figure("stale max", lambda r: r.staleness_max, group=1),
        figure("discrepancy", lambda r: None if r.loss is None else r.discrepancy_max, best=min, group=1),
        figure("loss", lambda r: r.loss, best=min, of_budget=True, group=1),
        figure("accuracy", lambda r: r.accuracy, share, max, of_budget=True, group=1),
    ]
    if beside is not None:  # what they learned, with equally many samples and in equal time
        text, best = (share, max) if beside.what == "accuracy" else (number, min)
        equal = {
            f"{beside.what} at equal\xa0samples": [row.equal_samples for row in beside.rows],
            "at equal\xa0time": [row.equal_time for row in beside.rows],
        }
        found += [Column(head, list(map(text, of)), of, best, group=2) for head, of in equal.items()]
    target, after_s = goal(results)
    if target is not None:
        texts = ["never" if at_s is None else number(at_s) for at_s in after_s]
        found.append(Column(f"s to {share(target)}", texts, after_s, min, group=1 if beside is None else 2))
    if beside is not None and beside.baseline is not None:
        texts = [f"{'> ' if row.at_least else ''}{number(row.speedup)}" for row in beside.rows]
        times = [row.speedup for row in beside.rows]
        found.append(Column(f"speed-up over {beside.baseline}", texts, times, max, group=2))
    return found


def unlike(runs: Sequence[Shown]) -> str:
    """Why these runs cannot be ranked against each other; nothing where they can."""
    if len({run.clock for run in runs}) > 1:
        return "Some of these runs are simulated, in virtual seconds, and some real: they are not ranked."
    return ""


def same_budget(runs: Sequence[Shown]) -> bool:
    """Whether all have made as many steps, near enough."""
    steps = [run.result.worker_steps for run in runs]
    return max(steps) <= ALIKE * min(steps)


def results_table(runs: Sequence[Shown]) -> Table:
    """All figures of all runs; the best of each column is marked, where they can be compared."""
    found = [one for one in _columns(runs) if one.head not in ("lr", "trace")]
    # What is first seen: what it is worth, before how fast and how well.
    columns = sorted(found, key=lambda one: (bool(one.values), -(one.group // 2)))
    unranked, same = bool(unlike(runs)), same_budget(runs)
    ranked_ = [not unranked and (same or not one.of_budget) for one in columns]
    marks = {(row, at) for at, one in enumerate(columns) if ranked_[at] for row in one.marked()}
    left = frozenset(at for at, one in enumerate(columns) if not one.values)
    rows = [list(row) for row in zip(*(one.texts for one in columns), strict=True)]
    return Table("figures of all runs", [one.head for one in columns], rows, left, frozenset(marks), runs)


def results_tables(results: Sequence[Result], width: int) -> list[rich.table.Table | str]:
    """The same for a terminal: one table, or where that is too wide three; words explain the last."""
    first, *rest = _columns(ranked(results))
    shown = [one for one in rest if any(text != UNKNOWN for text in one.texts)]
    if first.width + sum(one.width for one in shown) <= width:
        groups = [shown]
    else:
        groups = [list(some) for _, some in groupby(shown, key=lambda one: one.group)]
    found: list[rich.table.Table | str] = [_fitted([first, *some], width) for some in groups]
    if beside := versus(results):
        said = [
            f"Equal samples: the first {beside.worker_steps:,.0f} steps of all workers together.",
            f"Equal time: the first {short(beside.time_s, 4)} s.",
        ]
        if beside.target is not None and not beside.own_target:
            said.append(f"{share(beside.target)}: what {beside.baseline} ended with, less half a point.")
        found.append("\n".join(said))
    return found


def brief_table(runs: Sequence[Shown]) -> rich.table.Table:
    """How fast, how much of the time is lost, and what was learned: when, and how well."""
    found = {one.head: one for one in _columns(runs) if set(one.texts) != {UNKNOWN}}
    timed = [head for head in found if head.startswith(("s to ", "speed-up"))]
    learned = "accuracy" if "accuracy" in found else "loss"
    wanted = ["strategy", "steps/s", "idle", *([] if len(timed) > 1 else ["seconds"]), *timed, learned]
    called = {"idle": "time waiting", "seconds": f"{runs[0].clock} s"}
    columns = [found[head] for head in wanted if head in found]
    heads = [called.get(one.head, one.head) for one in columns]
    return printed(heads, zip(*(one.texts for one in columns), strict=True))


def _fitted(columns: list[Column], width: int) -> rich.table.Table:
    while len(columns) > 2 and sum(one.width for one in columns) > width + 2:
        columns = columns[:-1]
    left = {at for at, one in enumerate(columns) if not one.values}
    return printed([one.head for one in columns], zip(*(one.texts for one in columns), strict=True), left)


def printed(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: Container[int] = (0,)
) -> rich.table.Table:
    """A table for a terminal; numbers, which are all but some columns, stand on the right."""
    table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
