"""Runs in a report: their names, and what each one looks like in every figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.observe.palette import COLOURS, DASHES
from freewheel.observe.result import Result


@dataclass(frozen=True, eq=False)
class Run:
    """A result with its name and its place in the report, which gives its colour and dash."""

    label: str
    result: Result
    place: int

    @property
    def colour(self) -> str:
        """The run's colour in every figure."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def style(self) -> int:
        """Which of the dashes it has."""
        return self.place // len(COLOURS) % len(DASHES)


def named_runs(results: Sequence[Result]) -> list[Run]:
    """Results with names that tell them apart."""
    return [
        Run(label, result, place)
        for place, (label, result) in enumerate(zip(_labels(results), results, strict=True))
    ]


def _labels(results: Sequence[Result]) -> list[str]:
    """The strategies' names; runs of one strategy get the settings they differ in, or a number."""
    labels = [result.strategy for result in results]
    for prefix in ("strategy.", "scenario."):
        twins = {label for label, count in Counter(labels).items() if count > 1}
        for twin in twins:
            places = [place for place, label in enumerate(labels) if label == twin]
            flat = [flatten(results[place].settings) for place in places]
            keys = [key for key in differing(flat) if key.startswith(prefix)]
            for place, settings in zip(places, flat, strict=True):
                own = [f":{key.removeprefix(prefix)}={settings[key]}" for key in keys if key in settings]
                labels[place] += "".join(own)
    seen: Counter[str] = Counter()
    totals = Counter(labels)
    for place, label in enumerate(labels):
        seen[label] += 1
        if totals[label] > 1:
            labels[place] = f"{label} ({seen[label]})"
    return labels


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
