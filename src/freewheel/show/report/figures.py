"""The figures of a report: those of the dashboard, and runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from freewheel.show.figures import charts
from freewheel.show.figures.charts import Figure
from freewheel.show.figures.graph import graph
from freewheel.show.figures.palette import FAINT, SVG_DASHES
from freewheel.show.report.runs import Shown, unlike
from freewheel.show.report.words import listed, number, percent

GRAPHS = 6
"""With more runs than this their graphs are left out: one would not find them among each other."""


def all_figures(runs: Sequence[Shown]) -> tuple[dict[str, Figure], str]:
    """All figures that have something to show, by name; and what was left out, and why."""
    figures = {"speed": _speed(runs)} if len(runs) > 1 and not unlike(runs) else {}
    recorded = [run for run in runs if run.run is not None]
    if recorded:
        figures |= _dashboards(recorded)
    shown = {name: figure for name, figure in figures.items() if figure["data"]}
    untrained = [run.label for run in runs if run.result.loss is None]
    if untrained:
        who = "these runs" if len(untrained) == len(runs) > 1 else listed(untrained)
        return shown, f"Of {who} no loss was reported, only timing is shown."
    left_out = [
        figure["title"].lower()
        for name, figure in figures.items()
        if not figure["data"] and name != "faults"  # where nothing happened, nothing is missing
    ]
    return shown, f"Left out, since there is nothing to draw: {listed(left_out)}." if left_out else ""


def _dashboards(runs: Sequence[Shown]) -> dict[str, Figure]:
    """The dashboard's figures, those that are about speed or about learning beside each other."""
    drawn = charts.shown([run.run for run in runs if run.run is not None])
    for one, run in zip(drawn, runs, strict=True):
        one.label, one.place = run.label, run.place
    figures = charts.figures(drawn)
    if len(drawn) > 1:
        figures = {"blocked": figures["blocked"]} | figures
    first, happened = figures.pop("graph"), figures.pop("faults")
    graphs = [first, *(graph(one.run, one.label) for one in drawn[1:])] if len(drawn) <= GRAPHS else []
    for one, figure in zip(drawn, graphs, strict=False):
        if len(figure["data"]) > 1:  # else there are workers, and nobody met another
            few = len(one.run.workers) <= 24
            figures[f"graph-{one.place}"] = figure | ({"height": 340} if few else {})
    figures["faults"] = happened
    return figures


def _speed(runs: Sequence[Shown]) -> Figure:
    """Worker-steps per second, the fastest run on top, the ideal behind each."""
    order = sorted(runs, key=lambda run: -run.result.steps_per_s)
    data = []
    for run in order:
        rate, share = run.result.steps_per_s, run.result.ideal_share
        # The ideal stands behind each bar: runs of different scenarios have different ones.
        ideal = {"x": [rate / share if share else 0.0], "width": 0.84, "marker": {"color": FAINT}}
        data.append(_bar(run, 0.0, "", "ideal %{x:,.4~r} steps/s", **ideal))
        data.append(_bar(run, rate, number(rate), f"%{{x:,.4~r}} steps/s, {percent(share)} of the ideal"))
    names = [escape(run.label) for run in order]
    # Invisible ticks keep a mark at zero clear of the name beside it.
    apart = {"ticks": "outside", "ticklen": 8, "tickcolor": "rgba(0,0,0,0)", "showgrid": False}
    # A fixed range: a run that is hidden leaves its row empty, and the other bars stay as they are.
    yaxis = {"categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.4, -0.6], **apart}
    return {
        "title": "Speed against the ideal",
        "said": "The pale bar is the ideal Σ 1/t_i: every worker computes and none waits.",
        "height": 90 + 27 * len(order),
        "data": data,
        "layout": {
            "barmode": "overlay",
            "xaxis": {
                "title": {"text": "worker-steps per second"},
                "rangemode": "tozero",
                "tickformat": ",~r",
            },
            "yaxis": yaxis,
            "margin": {"r": 74},
        },
    }


def _bar(run: Shown, value: float, text: str, hover: str, **rest: Any) -> dict[str, Any]:
    # Plotly reads a little HTML in its texts, so these are escaped like the rest of the page.
    label = escape(run.label)
    return {
        "type": "bar",
        "name": label,
        "legendgroup": str(run.place),
        "hovertemplate": f"<b>{label}</b><br>{hover}<extra></extra>",
        "orientation": "h",
        "x": [value],
        "y": [label],
        "text": [text],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": run.colour},
        "width": 0.62,
        **rest,
    }


def legend(runs: Sequence[Shown]) -> str:
    """The names of all runs, to click on: one legend for all figures."""
    chips = "".join(
        f'<button type="button" data-run="{run.place}" aria-pressed="true">'
        f"{swatch(run)}{escape(run.label)}</button>"
        for run in runs
    )
    hint = "Click: hide or show in all figures. Double-click: only this one, or all again."
    return f'<div class="legend" title="{hint}">{chips}</div><p class="note">{hint}</p>'


def swatch(run: Shown) -> str:
    """A short line in a run's colour and dash."""
    return (
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
    )


def figure_box(name: str, figure: Figure) -> str:
    """The place a figure is drawn into."""
    return (
        f"<figure><figcaption><b>{escape(figure['title'])}</b><span>{escape(figure['said'])}</span></figcaption>"
        f'<div class="plot" id="figure-{name}" style="min-height:{figure["height"]}px"></div></figure>'
    )
