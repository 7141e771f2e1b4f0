"""How costs grow with the number of workers, as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from freewheel.planning.forecast import CEILING, Forecast, of
from freewheel.show.figures.common import Figure, axis, figure, line, log_axis
from freewheel.show.report import document, places
from freewheel.show.shown import Shown, hues

Value = Callable[[Forecast], float | None]

FIGURES: dict[str, tuple[str, bool, Value]] = {
    "Useful steps per second": (
        "worker-steps/s over the steps needed for one of synchronous SGD",
        True,
        lambda one: None if one.name == CEILING else one.useful_steps_per_s,
    ),
    "Share of the ideal": (
        "useful steps over the rate at which nobody ever waits",
        False,
        lambda one: one.useful_share,
    ),
    "Idle": ("share of worker-time in which no gradient is computed", False, lambda one: one.idle_share),
    "MB per step": (
        "sent by a worker for each of its steps",
        True,
        lambda one: one.bytes_per_step / 1e6 or None,
    ),
    "Discrepancy": ("largest distance of two workers, in updates", True, lambda one: one.discrepancy or None),
    "Steps needed": (
        "worker-steps for one of synchronous SGD",
        True,
        lambda one: None if one.name == CEILING else one.steps_needed,
    ),
}
"""By title: what is drawn, whether on a logarithmic axis, and the value."""


def html(grown: dict[int, list[Forecast]], title: str, command: str) -> str:
    """The page, in the style of a report."""
    strategies = list(dict.fromkeys(one.name for found in reversed(grown.values()) for one in found))
    curves = [
        Shown(strategy, place, hue)
        for place, (strategy, hue) in enumerate(zip(strategies, hues(strategies), strict=True))
    ]
    figures = {str(at): _figure(grown, curves, heading) for at, heading in enumerate(FIGURES)}
    command = f'<pre class="command"><code>{escape(command)}</code></pre>'
    return document(title, command + places("By number of workers", curves, figures), figures)


def _figure(grown: dict[int, list[Forecast]], curves: list[Shown], heading: str) -> Figure:
    said, log, value = FIGURES[heading]
    sizes = list(grown)
    data = []
    for curve in curves:
        by_size = [of(found, curve.label) for found in grown.values()]
        values = [None if one is None else value(one) for one in by_size]
        data.append(line(curve, "", "%{x} workers: %{y:.3~g}", x=sizes, y=values, mode="lines+markers"))
    workers = {"title": {"text": "workers"}, "type": "log", "tickvals": sizes}
    upwards = log_axis("", data) if log else axis("")
    return figure(heading, said, 340, data, xaxis=workers, yaxis=upwards)
