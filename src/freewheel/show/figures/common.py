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


def figure(title: str, said: str, height: int, data: list[Figure], **layout: Any) -> Figure:
    """A figure; `said`: what it shows, in a sentence."""
    return {"title": title, "said": said, "height": height, "data": data, "layout": layout}


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
    virtual = "virtual " if all(one.clock == "virtual" for one in runs) else ""
    return axis(f"time, {virtual}{UNITS[runs[0].unit_s]}", **rest)


def log_axis(title: str, data: Sequence[Figure]) -> Figure:
    """A logarithmic axis of what is drawn, with ticks that can be read."""
    drawn = [value for trace in data for value in trace["y"] if value is not None and value > 0]
    # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
    few = {"dtick": "D2"} if drawn and max(drawn) < 1000 * min(drawn) else {}
    return {"title": {"text": title}, "type": "log", "tickformat": ".2~g", **few}


def rounded(value: float | None) -> float | None:
    """Five digits are more than a figure can show; what is not finite is a gap."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def scatter(mode: str, points: Collection[tuple[Any, Any]], **rest: Any) -> Figure:
    """Lines, markers or text at points, of no run; (None, None): a gap."""
    return {"type": "scatter", "mode": mode, "x": [x for x, _ in points], "y": [y for _, y in points], **rest}


Numbers = Floats | Iterable[float | None]


def line(one: Shown, hover: str, x: Numbers, y: Numbers, **rest: Any) -> Figure:
    """A curve of a run, in its colour; `hover` says what a point is."""
    look = {"color": one.colour, "dash": DASHES[one.style], "width": 2} | rest.pop("line", {})
    numbers = {"x": list(map(rounded, x)), "y": list(map(rounded, y))}
    return {"type": "scatter", "mode": "lines", "line": look, **_of(one, hover), **numbers, **rest}


def bars(one: Shown, hover: str, **rest: Any) -> Figure:
    """Bars of a run, in its colour."""
    return {"type": "bar", "marker": {"color": one.colour}, **_of(one, hover), **rest}


def _of(one: Shown, hover: str) -> Figure:
    # Plotly reads a little HTML in its texts, so what comes from a run is escaped.
    label = escape(one.label)
    said = f"<b>{label}</b><br>{hover}<extra></extra>"
    return {"name": label, "hovertemplate": said, "legendgroup": str(one.place)}


def faint(colour: str, share: float = 0.18) -> str:
    """A colour that lets what is behind it through."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"
