"""The figures of a report, as plotly reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from freewheel.observe.palette import DASHES, FAINT, GREY, SVG_DASHES
from freewheel.observe.report.runs import Run
from freewheel.observe.report.words import listed, number, percent
from freewheel.observe.result import Result

Figure = dict[str, Any]


def all_figures(runs: Sequence[Run]) -> tuple[dict[str, Figure], str]:
    """All figures that have something to show, by name; and what was left out, and why."""
    figures = {
        "loss-time": _curves(runs, "Loss over time", "virtual_s", "loss", log=True),
        "accuracy-time": _curves(runs, "Accuracy over time", "virtual_s", "accuracy"),
        "loss-steps": _curves(runs, "Loss over worker-steps", "worker_steps", "loss", log=True),
        "discrepancy-time": _curves(runs, "Discrepancy over time", "virtual_s", "discrepancy", log=True),
        "idle": _idle(runs),
        "speed": _speed(runs),
        "staleness": _staleness(runs),
    }
    shown = {name: figure for name, figure in figures.items() if figure["data"]}
    untrained = [run.label for run in runs if run.result.loss is None]
    if untrained:
        who = "These runs" if len(untrained) == len(runs) else listed(untrained)
        return shown, f"{who} measured timing only: there is no loss, accuracy or discrepancy to show."
    left_out = [figure["title"].lower() for figure in figures.values() if not figure["data"]]
    return shown, f"Left out, since there is nothing to draw: {listed(left_out)}." if left_out else ""


_AXES = {
    "virtual_s": ("time, s", "%{x:.3~f} s"),
    "worker_steps": ("worker-steps of all workers", "%{x:,d} worker-steps"),
    "loss": ("loss", "loss %{y:.3~g}"),
    "accuracy": ("accuracy", "accuracy %{y:.1%}"),
    "discrepancy": ("largest ‖x_i - x_j‖", "discrepancy %{y:.3~g}"),
}


_SAID = {
    "loss": "Lower is better, further left is sooner.",
    "accuracy": "Higher is better, further left is sooner.",
    "discrepancy": "How far the two most different replicas are apart. Equal ones are not drawn.",
}


def _trace(run: Run, hover: str, **rest: Any) -> dict[str, Any]:
    """What every trace of a run has: its name, by which the legend finds it, and what hovering tells."""
    # Plotly reads a little HTML in its texts, so these are escaped like the rest of the page.
    label = escape(run.label)
    template = f"<b>{label}</b><br>{hover}<extra></extra>"
    return {"name": label, "legendgroup": str(run.place), "hovertemplate": template, **rest}


def _curves(runs: Sequence[Run], title: str, x: str, y: str, *, log: bool = False) -> Figure:
    points = {run: _points(run.result, x, y) for run in runs}
    values = [value for drawn in points.values() for _, value in drawn]
    if log:
        # What rounding leaves of a distance of zero would stretch the axis over many decades.
        least = 1e-6 * max(values, default=0.0) if y == "discrepancy" else 0.0
        points = {run: [point for point in drawn if point[1] > least] for run, drawn in points.items()}
        values = [value for value in values if value > least]
    hover = f"{_AXES[x][1]}<br>{_AXES[y][1]}"
    data = [
        _trace(
            run,
            hover,
            type="scatter",
            mode="lines" if len(drawn) > 2 else "lines+markers",
            x=[at for at, _ in drawn],
            y=[value for _, value in drawn],
            line={"color": run.colour, "dash": DASHES[run.style], "width": 2},
        )
        for run, drawn in points.items()
        if drawn
    ]
    xaxis = {"title": {"text": _AXES[x][0]}, "rangemode": "tozero", "tickformat": ",~r"}
    yaxis: dict[str, Any] = {"title": {"text": _AXES[y][0]}}
    layout: dict[str, Any] = {"xaxis": xaxis, "yaxis": yaxis}
    said = _SAID[y] if x == "virtual_s" else "What a step is worth, however long it takes."
    if log:
        # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
        yaxis |= {"type": "log", "tickformat": ".2~g"}
        decades = math.log10(max(values) / min(values)) if values else 0.0
        if decades < 3:
            yaxis["dtick"] = "D2" if decades > 0.6 else "D1"
    if y == "accuracy":
        yaxis["tickformat"] = ".0%"
        targets = sorted({run.result.target for run in runs if run.result.target})
        if targets:
            said += " Dotted: the target."
            layout["margin"] = {"r": 52}
            layout["shapes"] = [_target_line(target) for target in targets]
            layout["annotations"] = [_target_label(target) for target in targets]
    return {"title": title, "said": said, "height": 380, "data": data, "layout": layout}


def _points(result: Result, x: str, y: str) -> list[tuple[float, float]]:
    pairs = [(getattr(sample, x), getattr(sample, y)) for sample in result.curve]
    return [(at, value) for at, value in pairs if value is not None and math.isfinite(value)]


def _target_line(target: float) -> dict[str, Any]:
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target, "line": line}


def _target_label(target: float) -> dict[str, Any]:
    # In the margin: inside the figure the curves run through it.
    where = {"xref": "paper", "x": 1, "xanchor": "left", "y": target, "yanchor": "middle"}
    return {**where, "text": f" {100 * target:g} %", "showarrow": False}


def _idle(runs: Sequence[Run]) -> Figure:
    order = sorted(runs, key=lambda run: run.result.idle_share)
    data = [_bar(run, idle := run.result.idle_share, percent(idle), "idle %{x:.1%}") for run in order]
    what = "share of worker-time without a gradient"
    xaxis = {"title": {"text": what}, "tickformat": ".0%", "range": [0, 1]}
    return _bars("Idle share", "Waiting for others, or for the network.", order, data, xaxis)


def _speed(runs: Sequence[Run]) -> Figure:
    order = sorted(runs, key=lambda run: -run.result.steps_per_s)
    data = []
    for run in order:
        rate, share = run.result.steps_per_s, run.result.ideal_share
        # The ideal stands behind each bar: runs of different scenarios have different ones.
        ideal = {"x": [rate / share if share else 0.0], "width": 0.84, "marker": {"color": FAINT}}
        data.append(_bar(run, 0.0, "", "ideal %{x:,.4~r} steps/s", **ideal))
        data.append(_bar(run, rate, number(rate), f"%{{x:,.4~r}} steps/s, {percent(share)} of the ideal"))
    xaxis = {"title": {"text": "worker-steps per second"}, "tickformat": ",~r"}
    said = "The pale bar is the ideal Σ 1/t_i: every worker computes and none waits."
    return _bars("Speed against the ideal", said, order, data, xaxis)


def _staleness(runs: Sequence[Run]) -> Figure:
    order = sorted(runs, key=lambda run: (run.result.staleness_max, run.result.staleness_mean))
    data = []
    for run in order:
        mean, largest = run.result.staleness_mean, run.result.staleness_max
        measure = escape(str(run.result.settings.get("staleness", "")))
        data.append(_bar(run, mean, "", f"mean %{{x:,.3~r}}<br>{measure}"))
        data.append(
            _trace(
                run,
                f"largest %{{x:,.3~r}}<br>{measure}",
                type="scatter",
                mode="markers+text",
                x=[largest],
                y=[escape(run.label)],
                text=[f"  {number(mean)} / {number(largest)}"],
                textposition="middle right",
                cliponaxis=False,
                marker={"color": run.colour, "symbol": "diamond", "size": 9},
            )
        )
    top = max(run.result.staleness_max for run in runs) or 1.0
    xaxis = {"title": {"text": "staleness"}, "tickformat": ",~r", "range": [0, 1.04 * top]}
    said = "Bar: mean; diamond: largest. Each strategy counts in its own measure; hover to read it."
    return _bars("Staleness, mean / max", said, order, data, xaxis)


def _bar(run: Run, value: float, text: str, hover: str, **rest: Any) -> dict[str, Any]:
    bar = {
        "type": "bar",
        "orientation": "h",
        "x": [value],
        "y": [escape(run.label)],
        "text": [text],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": run.colour},
        "width": 0.62,
    }
    return _trace(run, hover, **bar | rest)


def _bars(
    title: str, said: str, order: Sequence[Run], data: list[dict[str, Any]], xaxis: dict[str, Any]
) -> Figure:
    """Horizontal bars, the first run on top."""
    names = [escape(run.label) for run in order]
    # Invisible ticks keep a mark at zero clear of the name beside it.
    apart = {"ticks": "outside", "ticklen": 8, "tickcolor": "rgba(0,0,0,0)", "showgrid": False}
    layout = {
        "barmode": "overlay",
        "xaxis": {"rangemode": "tozero", **xaxis},
        # A fixed range: a run that is hidden leaves its row empty, and the other bars stay as they are.
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": names,
            "range": [len(names) - 0.4, -0.6],
            **apart,
        },
        "margin": {"r": 74},
    }
    return {"title": title, "said": said, "height": 90 + 27 * len(order), "data": data, "layout": layout}


def legend(runs: Sequence[Run]) -> str:
    """The names of all runs, to click on: one legend for all figures."""
    chips = "".join(
        f'<button type="button" data-run="{run.place}" aria-pressed="true">'
        f"{swatch(run)}{escape(run.label)}</button>"
        for run in runs
    )
    hint = "Click: hide or show in all figures. Double-click: only this one, or all again."
    return f'<div class="legend" title="{hint}">{chips}</div><p class="note">{hint}</p>'


def swatch(run: Run) -> str:
    """A short line in a run's colour and dash."""
    return (
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
    )


def figure_box(name: str, figure: Figure) -> str:
    """The place a figure is drawn into."""
    return (
        f"<figure><figcaption><b>{escape(figure['title'])}</b><span>{escape(figure['said'])}</span></figcaption>"
        f'<div class="plot" id="figure-{name}" style="height:{figure["height"]}px"></div></figure>'
    )
