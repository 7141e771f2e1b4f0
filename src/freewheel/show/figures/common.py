"""What all figures of runs have in common: axes, lines, and numbers as plotly reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

from freewheel.records.track import Floats
from freewheel.show.shown import DASHES, Shown

Figure = dict[str, Any]
UNITS = {1.0: "s", 60.0: "min", 3600.0: "h"}
"""What an axis of time may count in."""
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}


def figure(title: str, said: str, height: int, data: list[Figure], empty: str = "", **layout: Any) -> Figure:
    """A figure; `said`: what it shows, in a sentence; `empty`: what to say where there is nothing to draw."""
    return {"title": title, "said": said, "height": height, "data": data, "layout": layout, "empty": empty}


def tools() -> str:
    """The script of the buttons that a figure has on every page."""
    return resources.files(__package__).joinpath("tools.js").read_text(encoding="utf-8")


def page(package: str, data: Any, title: str, **parts: str) -> str:
    """A page that needs no other file: a package's template with its style and script, data and parts."""
    for name, file in (("css", "page.css"), ("script", "page.js"), ("html", "page.html")):
        parts[name] = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    # Inside a script the browser escapes nothing, so no "<" may stand there.
    inside = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts |= {"title": escape(title), "data": inside}
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], parts["html"])


def axis(title: str, form: str = ",~r", **rest: Any) -> Figure:
    """An axis of numbers from zero on."""
    return {"title": {"text": title}, "rangemode": "tozero", "tickformat": form, **rest}


def time_axis(runs: Sequence[Shown], **rest: Any) -> Figure:
    """An axis of time, in the unit of the runs."""
    clocks = {one.clock for one in runs}
    virtual = "virtual " if clocks == {"virtual"} else ""
    simulated = " (virtual ones of simulated runs)" if len(clocks) > 1 else ""
    return axis(f"time, {virtual}{UNITS[runs[0].unit_s]}{simulated}", **rest)


def log_axis(title: str, data: Sequence[Figure]) -> Figure:
    """A logarithmic axis of what is drawn, with ticks that can be read."""
    drawn = [value for trace in data for value in trace["y"] if value is not None and value > 0]
    # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
    found: Figure = {"title": {"text": title}, "type": "log", "tickformat": ".2~g"}
    decades = math.log10(max(drawn) / min(drawn)) if drawn else 0.0
    return found if decades >= 3 else {**found, "dtick": "D2" if decades > 0.6 else "D1"}


def rounded(value: float) -> float | None:
    """Five digits are more than a figure can show; what is not finite is a gap."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def drawn(values: Floats | Iterable[float]) -> list[float | None]:
    """Numbers as a figure needs them."""
    return [rounded(float(value)) for value in values]


def scatter(mode: str, points: Collection[tuple[Any, Any]], **rest: Any) -> Figure:
    """Lines, markers or text at points, of no run; (None, None): a gap."""
    return {"type": "scatter", "mode": mode, "x": [x for x, _ in points], "y": [y for _, y in points], **rest}


def line(one: Shown, name: str, hover: str, **rest: Any) -> Figure:
    """A curve of a run, in its colour; `hover` says what a point is."""
    drawn = {"color": one.colour, "dash": DASHES[one.style], "width": 2}
    return {"type": "scatter", "mode": "lines", "line": drawn, **_of(one, hover, name), **rest}


def bars(one: Shown, hover: str, **rest: Any) -> Figure:
    """Bars of a run, in its colour."""
    return {"type": "bar", "marker": {"color": one.colour}, **_of(one, hover), **rest}


def _of(one: Shown, hover: str, name: str = "") -> Figure:
    # Plotly reads a little HTML in its texts, so what comes from a run is escaped.
    label = escape(one.label)
    said = {"name": escape(name) or label, "hovertemplate": f"<b>{label}</b><br>{hover}<extra></extra>"}
    return {**said, "legendgroup": str(one.place)}


def faint(colour: str, share: float = 0.18) -> str:
    """A colour that lets what is behind it through."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"
