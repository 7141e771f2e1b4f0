"""What a replay shows, in a sentence: who was there first, and who waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.show.replay.played import Played
from freewheel.show.versus import BASELINES, SHORT_OF

LABELS = {"ddp": "DDP", "allreduce": "AllReduce (what DDP does)", "adpsgd": "AD-PSGD"}
ALIKE = 1.05
"""Times whose ratio is below are called the same."""


@dataclass(frozen=True)
class Goal:
    """An accuracy that runs are measured by."""

    value: float
    words: str


def goal(runs: Sequence[Played]) -> Goal | None:
    """The target that somebody chose, or half a point less than the baseline's last accuracy."""
    if not all(run.accuracy for run in runs):
        return None
    chosen = next((run.target for run in runs if run.target), None)
    base = _baseline(runs)
    if chosen is None and base is not None and len(runs) > 1:
        chosen = round(base.accuracy[-1][1] - SHORT_OF, 3)
    return None if chosen is None else Goal(chosen, f"{100 * chosen:.4g} %")


def story(runs: Sequence[Played], target: Goal | None) -> str:
    """When each run has reached the target, and how much sooner than the baseline; "" without a target."""
    if target is None:
        return ""
    names = labels(runs)
    reached = [_first(run, target.value) for run in runs]
    if len(runs) == 1:
        return f"{names[0]} reaches {target.words} {_when(runs[0], reached[0])}."
    base = _baseline(runs)
    base_at = None if base is None else runs.index(base)
    order = sorted(range(len(runs)), key=lambda at: (reached[at] is None, reached[at] or 0.0))
    base_s = None if base_at is None else reached[base_at]
    told, sooner = [], []
    for number, at in enumerate(order):
        mine_s = reached[at]
        verb = "" if number else f" reaches {target.words}"
        told.append(f"{names[at]}{verb} {_when(runs[at], mine_s)}")
        if at != base_at and base_s and mine_s:
            sooner.append(_ratio(base_s / mine_s))
    gain = " and ".join(sooner)
    return ", ".join(told) + (f": {gain}." if gain else ".")


def waits(runs: Sequence[Played]) -> str:
    """What share of its time each run's workers wait."""
    names = labels(runs)
    told = [
        f"{name}{'' if number else ' waits'} {100 * run.waiting:.0f} %{'' if number else ' of the time'}"
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    return ", ".join(told) + "."


def labels(runs: Sequence[Played]) -> list[str]:
    """What each run is called: its strategy, or its folder where several have the same."""
    names = [LABELS.get(run.strategy, run.strategy or run.name).partition(" (")[0] for run in runs]
    return [run.name if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)]


def _baseline(runs: Sequence[Played]) -> Played | None:
    return next((run for name in BASELINES for run in runs if run.strategy == name), None)


def _first(run: Played, target: float) -> float | None:
    return next((at_s for at_s, value in run.accuracy if value >= target), None)


def _when(run: Played, reached_s: float | None) -> str:
    return f"not within {_s(run.accuracy[-1][0])}" if reached_s is None else f"after {_s(reached_s)}"


def _ratio(speedup: float) -> str:
    if 1 / ALIKE < speedup < ALIKE:
        return "as soon"
    more, word = (speedup, "sooner") if speedup > 1 else (1 / speedup, "later")
    return f"{more:.1f} times {word}"


def _s(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f} s"
