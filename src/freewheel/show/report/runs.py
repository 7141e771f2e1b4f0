"""Runs in a report: their names, and what each one looks like in every figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.figures.palette import COLOURS, DASHES

NAMED = 3
"""Runs that differ in more settings than this are called by their folders: nobody reads a name so long."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A run in a report: its name, its figures, its records if there are any, and its place.

    The place gives it its colour and dash.
    """

    label: str
    result: Result
    place: int
    run: Run | None = None

    @property
    def colour(self) -> str:
        """The run's colour in every figure."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def clock(self) -> str:
        """wall or virtual."""
        return self.result.clock

    @property
    def style(self) -> int:
        """Which of the dashes it has."""
        return self.place // len(COLOURS) % len(DASHES)


ALIKE = 1.05
"""Runs whose steps differ by no more than this have had the same budget: lost workers may cost some."""


def unlike(runs: Sequence[Shown]) -> str:
    """Why these runs cannot be ranked against each other; nothing where they can."""
    if len({run.clock for run in runs}) > 1:
        return "Some of these runs are simulated, in virtual seconds, and some real: they are not ranked."
    return ""


def same_budget(runs: Sequence[Shown]) -> bool:
    """Whether all have made as many steps, near enough."""
    steps = [run.result.worker_steps for run in runs]
    return max(steps) <= ALIKE * min(steps)


def named_runs(results: Sequence[Result], runs: Sequence[Run | None] = ()) -> list[Shown]:
    """Results with names that tell them apart, and with their records where those are given."""
    return [
        Shown(label, result, place, runs[place] if runs else None)
        for place, (label, result) in enumerate(zip(_labels(results, runs), results, strict=True))
    ]


def _labels(results: Sequence[Result], runs: Sequence[Run | None]) -> list[str]:
    """The strategies' names; twins get the settings they differ in, or their folder's name, or a number."""
    labels = [result.strategy for result in results]
    for prefix in ("strategy.", "scenario.", ""):
        for places in _twins(labels):
            flat = [flatten(results[place].settings) for place in places]
            if not prefix:
                flat = [{"workers": str(results[place].workers)} for place in places]
            keys = [key for key in differing(flat) if key.startswith(prefix)]
            if len(keys) > NAMED:
                continue
            for place, settings in zip(places, flat, strict=True):
                own = [f":{key.removeprefix(prefix)}={settings[key]}" for key in keys if key in settings]
                labels[place] += "".join(own)
    for places in _twins(labels):
        recorded = [runs[place] if runs else None for place in places]
        names = [run.folder.resolve().name if run else "" for run in recorded]
        if len(set(names)) < len(places):
            names = [str(number) for number in range(1, len(places) + 1)]
        for place, name in zip(places, names, strict=True):
            labels[place] += f" ({name})"
    return labels


def _twins(labels: Sequence[str]) -> list[list[int]]:
    """The places of each label that is there more than once."""
    several = [label for label, count in Counter(labels).items() if count > 1]
    return [[place for place, other in enumerate(labels) if other == label] for label in several]


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``a.b.c`` to text, cut where it is too long to read."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = "–" if value in ({}, (), []) else "none" if value is None else str(value)
            flat[f"{prefix}{key}"] = text if len(text) <= 300 else text[:299] + "…"
    return flat


def differing(settings: Sequence[dict[str, str]]) -> list[str]:
    """The keys that not all of these settings have with the same value."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]
