"""Runs beside each other: equally many samples, equal time, and how long each takes to learn as much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freewheel.numbers import given, listed, number, share
from freewheel.records.result import Result

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
