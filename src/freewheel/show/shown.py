"""Runs as they are shown together: names, and what runs, causes and events look like everywhere."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.rates import Series, series
from freewheel.show.rows import Row, rows

# They read on white and on black; more runs than eight differ by their dashes. The first three belong to the
# strategies that are compared most often, in every picture.
COLOURS = ("#c2503b", "#2f7ef5", "#16996a", "#9254de", "#0e7490", "#c0267a", "#b08a10", "#4d6b8f")
OWN = {"ddp": 0, "allreduce": 0, "adpsgd": 1, "nodelay_free": 2}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SVG_DASHES = ("", "7 4", "2 3", "7 3 2 3", "12 4")

GREY, FAINT = "rgba(128, 138, 150, 0.9)", "rgba(128, 138, 150, 0.28)"

# From near to far; told apart with every kind of colour blindness, and seen on white and black.
DISTANCES = ("#3b6fd4", "#6d93d0", "#9aa7b5", "#cf9f68", "#e5812e", "#d9480f")

# Why a worker waits, in words, and a colour that no run has.
CAUSES = {
    "peers": ("for peers", "#d98c7a"),
    "data": ("for data", "#7d8ca3"),
    "checkpoint": ("for a checkpoint", "#cfa92c"),
}


class Kind(NamedTuple):
    """A kind of event: what is said of its worker, its symbol and colour."""

    words: str
    symbol: str
    colour: str


BAD, GOOD, ODD, PLAIN = "#d9480f", "#1f9d8a", "#e5812e", "#9aa7b5"
EVENTS = {
    "died": Kind("died", "x", BAD),
    "failed": Kind("failed", "x-open", BAD),
    "cut": Kind("was cut off", "line-ns-open", BAD),
    "left": Kind("left", "triangle-left", PLAIN),
    "joined": Kind("joined", "triangle-right", GOOD),
    "restarted": Kind("was started again", "circle-open", GOOD),
    "resumed": Kind("resumed", "circle", GOOD),
    "half": Kind("was met in half an exchange", "diamond-open", ODD),
    "store lost": Kind("lost the rendezvous", "square", BAD),
    "store back": Kind("has the rendezvous again", "square-open", GOOD),
    "view": Kind("is in another view", "diamond", "#3b82f6"),
    "checkpoint": Kind("wrote a checkpoint", "star", "#9b6bd6"),
    "slowed": Kind("became slower", "triangle-down", ODD),
    "thinned": Kind("has thinned records", "cross-thin-open", PLAIN),
}
GRAVE = ("died", "failed", "cut", "left", "joined", "restarted")  # those marked in figures over time
STATES = {
    "joining": "#9b6bd6",
    "training": "#3b82f6",
    "finished": "#1f9d8a",
    "silent": "#b08a10",
    "dead": "#d9480f",
}
NAMED = 3  # runs that differ in more settings than this are called by their folders: the names would be long


@dataclass(eq=False)
class Shown:
    """A run with its name and place. Pages that follow it have its records, pages that rank it a result."""

    label: str
    place: int
    hue: int  # which of the colours it has; beyond them, dashes
    records: Run | None = None
    summary: Result | None = None
    unit_s: float = 1.0  # what the axis of time counts in

    @property
    def run(self) -> Run:
        assert self.records is not None, f"{self.label} has no records"
        return self.records

    @property
    def result(self) -> Result:
        assert self.summary is not None, f"{self.label} has no result"
        return self.summary

    @property
    def about(self) -> dict[str, Any]:
        return self.run.about if self.summary is None else vars(self.summary)

    @property
    def clock(self) -> str:
        """wall or virtual."""
        return self.run.clock if self.summary is None else self.summary.clock

    @property
    def colour(self) -> str:
        return COLOURS[self.hue % len(COLOURS)]

    @property
    def style(self) -> int:
        """Its dashes; the first eight runs have solid lines."""
        return self.hue // len(COLOURS) % len(DASHES)

    @cached_property
    def series(self) -> Series:
        return series(self.run)

    @cached_property
    def rows(self) -> list[Row]:
        return rows(self.run)

    @cached_property
    def began_s(self) -> float:
        return self.run.began_s

    def at(self, time: float) -> float:
        return (time - self.began_s) / self.unit_s

    def setting(self, name: str) -> str:
        return str((self.about.get("settings") or {}).get(name) or "")


def shown(runs: Sequence[Run]) -> list[Shown]:
    """Runs on one axis of time; they need not have begun."""
    names = [str(run.about.get("strategy") or run.folder.name) for run in runs]
    each = zip(names, range(len(names)), hues(names), runs, strict=True)
    return timed(_named([Shown(*one) for one in each]))


def hues(strategies: Sequence[str]) -> list[int]:
    """A colour for each run: its strategy's own, unless an earlier run has it."""
    first = {OWN[name]: place for place, name in reversed([*enumerate(strategies)]) if name in OWN}
    given = {place: hue for hue, place in first.items()}
    others = [*range(3, len(COLOURS)), *OWN.values(), *range(len(COLOURS), len(COLOURS) + len(strategies))]
    free = (hue for hue in dict.fromkeys(others) if hue not in first)
    return [given[place] if place in given else next(free) for place in range(len(strategies))]


def timed(found: list[Shown]) -> list[Shown]:
    """Sets the unit of time by the longest run."""
    spans = [one.run.last_s - one.began_s for one in found if one.run.workers]
    longest = max(spans, default=0.0)
    for one in found:
        one.unit_s = 1.0 if longest < 600 else 60.0 if longest < 4 * 3600 else 3600.0
    return found


def ranked(results: Sequence[Result], runs: Sequence[Run | None] = ()) -> list[Shown]:
    names = [result.strategy for result in results]
    records = list(runs) or [None] * len(results)
    each = zip(names, range(len(names)), hues(names), records, results, strict=True)
    return _named([Shown(*one) for one in each])


def _named(found: list[Shown]) -> list[Shown]:
    """Tells runs of one label apart by settings that differ, the folder's name, or a number."""
    for twins in _twins(found):
        each = [(one.about.get("settings") or {}, one.about.get("workers")) for one in twins]
        flat = [flatten({**of.get("strategy", {}), **of.get("scenario", {}), "workers": n}) for of, n in each]
        keys = differing(flat)
        for one, own in zip(twins, flat, strict=True):
            one.label += "".join(f":{key}={own[key]}" for key in keys if key in own and len(keys) <= NAMED)
    for twins in _twins(found):
        folders = [one.records.folder.resolve().name if one.records else "" for one in twins]
        for number, (one, name) in enumerate(zip(twins, folders, strict=True), start=1):
            one.label += f" ({name if len(set(folders)) == len(twins) else number})"
    return found


def _twins(found: list[Shown]) -> list[list[Shown]]:
    alike = defaultdict[str, list[Shown]](list)
    for one in found:
        alike[one.label].append(one)
    return [twins for twins in alike.values() if len(twins) > 1]


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as ``a.b.c`` to text, cut where it is too long to read."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = "–" if value in ({}, (), []) else "none" if value is None else str(value)
            flat[f"{prefix}{key}"] = text[:300]
    return flat


def differing(settings: Sequence[dict[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({one.get(key) for one in settings}) > 1]
