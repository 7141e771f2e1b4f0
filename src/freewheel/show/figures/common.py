"""What all figures of runs have in common: names and colours of the runs, axes, lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from freewheel.records.run import Run
from freewheel.show.figures.palette import COLOURS, DASHES
from freewheel.show.rows import Row, rows
from freewheel.show.series import Floats, Series, series

Figure = dict[str, Any]
UNITS = {1.0: "s", 60.0: "min", 3600.0: "h"}
"""What an axis of time may count in."""


@dataclass(eq=False)
class Shown:
    """A run with its name and its place among those shown, which gives its colour and dash."""

    run: Run
    label: str
    place: int = 0
    unit_s: float = field(default=1.0, kw_only=True)
    """What the axis of time counts in."""

    @property
    def colour(self) -> str:
        """The run's colour in every figure."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dash(self) -> str:
        """Its dash: the first eight have solid lines."""
        return DASHES[self.place // len(COLOURS) % len(DASHES)]

    def setting(self, name: str) -> str:
        """One of the settings in words; nothing where the run does not say."""
        settings = self.run.about.get("settings")
        return str(settings.get(name) or "") if isinstance(settings, dict) else ""

    @cached_property
    def series(self) -> Series:
        """Computed once for all figures."""
        return series(self.run)

    @cached_property
    def rows(self) -> list[Row]:
        """One for each worker, for tables and what stands above them."""
        return rows(self.run)

    def at(self, time: float) -> float:
        """A moment of the run, as the axis of time counts."""
        return (time - self.began_s) / self.unit_s

    @cached_property
    def began_s(self) -> float:
        """When the run began, on its own clock."""
        return self.run.began_s


def shown(runs: Sequence[Run]) -> list[Shown]:
    """Runs with names that tell them apart, and a common unit of time."""
    names = [str(run.about.get("strategy") or run.folder.name) for run in runs]
    twins = Counter(names)
    names = [
        f"{name} · {run.folder.name}" if twins[name] > 1 and name != run.folder.name else name
        for name, run in zip(names, runs, strict=True)
    ]
    longest = max((run.last_s - run.began_s for run in runs if run.workers), default=0.0)
    unit_s = 1.0 if longest < 600 else 60.0 if longest < 4 * 3600 else 3600.0
    return [
        Shown(run, name, place, unit_s=unit_s)
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]


def time_axis(runs: Sequence[Shown]) -> dict[str, Any]:
    """An axis of time, in the unit of the runs."""
    unit = UNITS[runs[0].unit_s]
    clocks = {one.run.clock for one in runs}
    virtual = "virtual " if clocks == {"virtual"} else ""
    simulated = " (virtual ones of simulated runs)" if len(clocks) > 1 else ""
    title = {"text": f"time, {virtual}{unit}{simulated}"}
    return {"title": title, "rangemode": "tozero", "tickformat": ",~r"}


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis, with ticks that can be read."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
    axis: dict[str, Any] = {"type": "log", "tickformat": ".2~g"}
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    if decades < 3:
        axis["dtick"] = "D2" if decades > 0.6 else "D1"
    return axis


def rounded(value: float) -> float | None:
    """Five digits are more than a figure can show; what is not finite is a gap."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def numbers(values: Floats | Sequence[float]) -> list[float | None]:
    """Numbers as a figure needs them."""
    return [rounded(float(value)) for value in values]


def line(one: Shown, name: str, hover: str, **rest: Any) -> dict[str, Any]:
    """A curve of a run, in its colour; `hover` says what a point is."""
    # Plotly reads a little HTML in its texts, so what comes from a run is escaped.
    label = escape(one.label)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name) or label,
        "legendgroup": str(one.place),
        "hovertemplate": f"<b>{label}</b><br>{hover}<extra></extra>",
        "line": {"color": one.colour, "dash": one.dash, "width": 2},
        **rest,
    }


def faint(colour: str, share: float = 0.18) -> str:
    """A colour that lets what is behind it through."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"
