"""How costs grow with the number of workers, as one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

from freewheel.planning.choice import CEILING, name
from freewheel.planning.forecast import Forecast
from freewheel.planning.tables import useful_share
from freewheel.show.figures.palette import COLOURS, DASHES

Value = Callable[[Forecast], float | None]

FIGURES: dict[str, tuple[str, bool, Value]] = {
    "Useful steps per second": (
        "worker-steps/s over the steps needed for one of synchronous SGD",
        True,
        lambda one: None if name(one) == CEILING else one.useful_steps_per_s,
    ),
    "Share of the ideal": (
        "useful steps over the rate at which nobody ever waits",
        False,
        lambda one: useful_share([one], name(one)),
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
        lambda one: None if name(one) == CEILING else one.steps_needed,
    ),
}

CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
  gap: 1.5em; }
figure:first-child { grid-column: 1 / -1; }
.plot { height: 340px; } figure { margin: 0; } figcaption span { opacity: 0.7; margin-left: 0.6em; }
pre { overflow-x: auto; opacity: 0.8; }
"""

SCRIPT = """
const figures = JSON.parse(document.getElementById("figure-data").textContent);
const ink = () => getComputedStyle(document.body).color;
const look = () => ({ "font.color": ink() });
const places = figures.map((figure, at) => {
  const place = document.getElementById("figure-" + at);
  Plotly.newPlot(place, figure.data, figure.layout, { displayModeBar: false, responsive: true,
    showSendToCloud: false, plotlyServerURL: "" }).then(() => Plotly.relayout(place, look()));
  return place;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change",
  () => places.forEach((place) => Plotly.relayout(place, look())));
"""


def html(grown: dict[int, list[Forecast]], title: str, command: str) -> str:
    """The page."""
    from plotly.offline import get_plotlyjs  # large, and only needed here

    figures = [_figure(grown, *FIGURES[heading][1:]) for heading in FIGURES]
    figures[0]["layout"]["showlegend"] = True  # it is the widest, and one legend does for all
    # Inside a script the browser escapes nothing, so no "<" may stand there.
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    boxes = "".join(
        f"<figure><figcaption><b>{escape(heading)}</b><span>{escape(said)}</span></figcaption>"
        f'<div class="plot" id="figure-{at}"></div></figure>'
        for at, (heading, (said, _, _)) in enumerate(FIGURES.items())
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n<pre>{escape(command)}</pre>\n"
        f'<div class="figures">{boxes}</div>\n'
        f'<script type="application/json" id="figure-data">{data}</script>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _figure(grown: dict[int, list[Forecast]], log: bool, value: Value) -> dict[str, Any]:
    sizes = list(grown)
    strategies = dict.fromkeys(name(one) for found in reversed(grown.values()) for one in found)
    data = []
    for place, strategy in enumerate(strategies):
        by_size = [{name(one): one for one in grown[size]}.get(strategy) for size in sizes]
        values = [None if one is None else value(one) for one in by_size]
        line = {"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]}
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": strategy,
                "x": sizes,
                "y": values,
                "line": line,
            }
        )
    axis = {"title": {"text": "workers"}, "type": "log", "tickvals": sizes}
    grid = {"gridcolor": "rgba(128, 138, 150, 0.28)"}
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 55, "r": 10, "t": 10, "b": 40},
        "xaxis": axis | grid,
        "yaxis": {"type": "log" if log else "linear", "rangemode": "tozero"} | grid,
        "legend": {"font": {"size": 11}},
        "showlegend": False,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}
