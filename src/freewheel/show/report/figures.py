"""The figures of a report: those of the dashboard, and runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from freewheel.numbers import listed, number, share
from freewheel.show.figures import charts
from freewheel.show.figures.common import Figure, axis, bars, figure
from freewheel.show.figures.graph import graph
from freewheel.show.shown import FAINT, Shown, timed
from freewheel.show.tables import unlike

MAX_GRAPHS = 6
"""With more runs than this their graphs are left out: one would not find them among each other."""


def all_figures(runs: Sequence[Shown]) -> tuple[dict[str, Figure], str]:
    """All figures that have something to show, by name; and what was left out, and why."""
    figures = {"speed": _speed(runs)} if len(runs) > 1 and not unlike(runs) else {}
    recorded = [run for run in runs if run.records is not None]
    figures |= _dashboards(timed(recorded)) if recorded else {}
    drawn = {name: figure for name, figure in figures.items() if figure["data"]}
    untrained = [run.label for run in runs if run.result.loss is None]
    if untrained:
        who = "these runs" if len(untrained) == len(runs) > 1 else listed(untrained)
        return drawn, f"Of {who} no loss was reported, only timing is shown."
    # Where nothing happened, nothing is missing.
    missing = [figures[name]["title"].lower() for name in figures if name not in (*drawn, "faults")]
    return drawn, f"Left out, since there is nothing to draw: {listed(missing)}." if missing else ""


def _dashboards(runs: list[Shown]) -> dict[str, Figure]:
    """The dashboard's figures, those that are about speed or about learning beside each other."""
    figures = charts.figures(runs)
    if len(runs) > 1:
        figures = {"blocked": figures["blocked"]} | figures
    first, happened = figures.pop("graph"), figures.pop("faults")
    for one in runs if len(runs) <= MAX_GRAPHS else ():
        drawn = first if one is runs[0] else graph(one.run, one.label)
        if len(drawn["data"]) > 1:  # else there are workers, and nobody met another
            figures[f"graph-{one.place}"] = drawn | ({"height": 340} if len(one.run.workers) <= 24 else {})
    return figures | {"faults": happened}


def _speed(runs: Sequence[Shown]) -> Figure:
    """Worker-steps per second, the fastest run on top, the ideal behind each."""
    order = sorted(runs, key=lambda run: -run.result.steps_per_s)
    data = []
    for run in order:
        rate, ideal = run.result.steps_per_s, run.result.ideal_share
        at = {"orientation": "h", "y": [escape(run.label)], "textposition": "outside", "cliponaxis": False}
        # The ideal stands behind each bar: runs of different scenarios have different ones.
        behind = {
            "width": 0.84,
            "marker": {"color": FAINT},
            "x": [rate / ideal if ideal else 0.0],
            "text": [""],
        }
        data.append(bars(run, "ideal %{x:,.4~r} steps/s", **at, **behind))
        said = f"%{{x:,.4~r}} steps/s, {share(ideal)} of the ideal"
        data.append(bars(run, said, **at, width=0.62, x=[rate], text=[number(rate)]))
    names = [escape(run.label) for run in order]
    # A fixed range: a run that is hidden leaves its row empty, and the other bars stay as they are.
    yaxis: Figure = {"categoryorder": "array", "categoryarray": names, "range": [len(names) - 0.4, -0.6]}
    # Invisible ticks keep a mark at zero clear of the name beside it.
    yaxis |= {"ticks": "outside", "ticklen": 8, "tickcolor": "rgba(0,0,0,0)", "showgrid": False}
    return figure(
        "Speed against the ideal",
        "The pale bar is the ideal Σ 1/t_i: every worker computes and none waits.",
        90 + 27 * len(order),
        data,
        barmode="overlay",
        xaxis=axis("worker-steps per second"),
        yaxis=yaxis,
        margin={"r": 74},
    )
