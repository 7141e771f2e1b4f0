"""The figures of runs, as plotly reads them: the same in the dashboard and in a report.

Every function takes runs with their names and colours (`shown`) and gives a figure: `title`, `said` (what it
shows, in a sentence), `height`, `data`, `layout`, and `empty`, what to say where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from freewheel.records.run import Evaluation
from freewheel.show.figures.common import (
    UNITS,
    Figure,
    Shown,
    faint,
    line,
    log_axis,
    numbers,
    rounded,
    shown,
    time_axis,
)
from freewheel.show.figures.graph import graph
from freewheel.show.figures.palette import CAUSES, GREY
from freewheel.show.figures.timeline import faults
from freewheel.show.series import Floats, blocked, staleness

__all__ = [
    "Figure", "Shown", "blocked_shares", "consensus", "curves", "faults", "figures", "shown",
    "staleness_counts", "throughput",
]  # fmt: skip


def figures(all_runs: Sequence[Shown]) -> dict[str, Figure]:
    """All figures of some runs, by name."""
    return {
        "graph": graph(all_runs[0].run, all_runs[0].label if len(all_runs) > 1 else ""),
        "loss-time": curves(all_runs, "loss", "time"),
        "loss-samples": curves(all_runs, "loss", "samples"),
        "accuracy-time": curves(all_runs, "accuracy", "time"),
        "accuracy-samples": curves(all_runs, "accuracy", "samples"),
        "throughput": throughput(all_runs),
        "blocked": blocked_shares(all_runs),
        "staleness": staleness_counts(all_runs),
        "consensus": consensus(all_runs),
        "faults": faults(all_runs),
    }


# -- what was learned --

_SAID = {
    "loss": "Line: mean of the workers’ training losses{band}; dots: measured of the answer.",
    "accuracy": "Measured of the answer. Higher is better, further left is sooner.",
}


def curves(runs: Sequence[Shown], what: str, over: str) -> Figure:
    """Loss or accuracy over time or over samples."""
    in_steps = over == "samples" and not all(_counts_samples(one, what) for one in runs)
    x_hover = "%{x:,.4~s} " + ("worker-steps" if in_steps else "samples")
    if over == "time":
        x_hover = "%{x:,.4~r} " + UNITS[runs[0].unit_s]
    y_hover = "accuracy %{y:.1%}" if what == "accuracy" else "loss %{y:.4~g}"
    data: list[dict[str, Any]] = []
    for one in runs:
        if what == "loss":
            data += _training_loss(
                one, _x(one, over, in_steps), f"{x_hover}<br>{y_hover}", alone=len(runs) == 1
            )
        points = [
            (at, value)
            for evaluation in one.run.evaluations
            if (value := getattr(evaluation, what)) is not None
            and (at := _where(one, evaluation, over, in_steps)) is not None
        ]
        if points:
            dots = line(
                one,
                "",
                f"{x_hover}<br>{y_hover} of the answer" if what == "loss" else f"{x_hover}<br>{y_hover}",
                mode="markers" if what == "loss" and _has_loss(one) else "lines+markers",
                x=numbers([at for at, _ in points]),
                y=numbers([value for _, value in points]),
                marker={"color": one.colour, "size": 6 if len(points) < 60 else 4},
            )
            data.append(dots)
    counted = "worker-steps of all workers" if in_steps else "samples of all workers"
    xaxis = {"title": {"text": counted}, "rangemode": "tozero", "tickformat": ",~s"}
    yaxis: dict[str, Any] = {"title": {"text": what}}
    layout: dict[str, Any] = {"xaxis": time_axis(runs) if over == "time" else xaxis, "yaxis": yaxis}
    if what == "loss":
        yaxis |= log_axis(value for trace in data for value in trace["y"] if value is not None)
    else:
        yaxis["tickformat"] = ".0%"
        _targets(runs, layout)
    words = {"time": "time", "samples": "worker-steps" if in_steps else "samples"}[over]
    band = ", shaded: from the least to the largest" if len(runs) == 1 else ""
    return {
        "title": f"{what.capitalize()} over {words}",
        "said": _SAID[what].format(band=band),
        "height": 320,
        "data": data,
        "layout": layout,
        "empty": "No worker has reported a loss: worker.record(loss=…) does."
        if what == "loss"
        else "Not measured yet: worker.record(accuracy=…) does it; train and compare do it at the end.",
    }


def _counts_samples(one: Shown, what: str) -> bool:
    measured = (each for each in one.run.evaluations if getattr(each, what) is not None)
    return float(one.series.samples[-1]) > 0 and all(each.samples is not None for each in measured)


def _has_loss(one: Shown) -> bool:
    return any(math.isfinite(value) for value in one.series.loss)


def _x(one: Shown, over: str, in_steps: bool) -> list[float | None]:
    if over == "time":
        return numbers(one.series.time_s / one.unit_s)
    if not in_steps:
        return numbers(one.series.samples)
    # Evaluations count from the first step of all, before a checkpoint that was resumed.
    before = sum(track.lives[0].get("resumed_at") or 0 for track in one.run.workers.values())
    return numbers(one.series.steps + before)


def _where(one: Shown, evaluation: Evaluation, over: str, in_steps: bool) -> float | None:
    if over == "time":
        return one.at(evaluation.time)
    return evaluation.worker_steps if in_steps else evaluation.samples


def _training_loss(one: Shown, x: list[float | None], hover: str, *, alone: bool) -> list[dict[str, Any]]:
    if not _has_loss(one):
        return []
    drawn = []
    if alone and len(one.run.workers) > 1:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None, "x": x}
        least, most = numbers(one.series.loss_least), numbers(one.series.loss_most)
        drawn.append(line(one, "least", "", **edge, y=least))
        drawn.append(line(one, "largest", "", **edge, y=most, fill="tonexty", fillcolor=faint(one.colour)))
    return [*drawn, line(one, "", f"{hover}, mean of the workers", x=x, y=numbers(one.series.loss))]


def _targets(runs: Sequence[Shown], layout: dict[str, Any]) -> None:
    """A dotted line at every accuracy that is timed, with its name in the margin, clear of the curves."""
    known = (one.run.about.get("target") for one in runs)
    targets = sorted({float(target) for target in known if isinstance(target, int | float)})
    if not targets:
        return
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    layout["margin"] = {"r": 52}
    layout["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target, "line": line}
        for target in targets
    ]
    layout["annotations"] = [
        {"xref": "paper", "x": 1, "xanchor": "left", "y": target, "yanchor": "middle", "showarrow": False,
         "text": f" {100 * target:g} %"}
        for target in targets
    ]  # fmt: skip


# -- how fast, and what held it up --


def throughput(runs: Sequence[Shown]) -> Figure:
    """Steps of all workers in a second, and as many as they would make if nobody were ever blocked."""
    unit = UNITS[runs[0].unit_s]
    data = []
    for one in runs:
        if not any(math.isfinite(value) for value in one.series.rate):
            continue
        x = numbers(one.series.time_s / one.unit_s)
        hover = f"%{{x:,.4~r}} {unit}<br>%{{y:,.4~r}} worker-steps/s"
        ideal = {"color": GREY if len(runs) == 1 else faint(one.colour, 0.7), "dash": "dot", "width": 1.5}
        data.append(line(one, "ideal", f"{hover} ideal", x=x, y=numbers(one.series.ideal), line=ideal))
        data.append(line(one, "", hover, x=x, y=numbers(one.series.rate)))
    yaxis = {"title": {"text": "worker-steps/s"}, "rangemode": "tozero", "tickformat": ",~r"}
    return {
        "title": "Throughput",
        "said": "Steps of all workers in a second. Dotted: if those there did nothing but compute.",
        "height": 430,
        "data": data,
        "layout": {"xaxis": time_axis(runs), "yaxis": yaxis},
        "empty": "No worker has made a step.",
    }


def blocked_shares(runs: Sequence[Shown]) -> Figure:
    """The share of its time each worker was blocked, by cause; with several runs, of all workers together."""
    if len(runs) == 1:
        one = runs[0]
        ranks = sorted(one.run.workers)
        shares = [blocked([one.run.workers[rank]]) for rank in ranks]
        names: list[Any] = ranks
        said, axis = "Since each worker began. The rest is computing, and Freewheel’s own work.", "worker"
        whom: Callable[[int], str] = lambda place: f"worker {ranks[place]}"  # noqa: E731
    else:
        shares = [blocked(list(one.run.workers.values())) for one in runs]
        names = [escape(one.label) for one in runs]
        said, axis = "All workers together. The rest is computing, and Freewheel’s own work.", ""
        whom = lambda place: names[place]  # noqa: E731
    data = [
        {
            "type": "bar",
            "name": words,
            "showlegend": True,
            "x": names,
            "y": numbers([share[cause] for share in shares]),
            "marker": {"color": colour},
            "text": [whom(place) for place in range(len(names))],
            "textposition": "none",
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1%}} of its time {words}<extra></extra>",
        }
        for cause, (words, colour) in CAUSES.items()
        if any(share[cause] > 0 for share in shares)
    ]
    top = max((sum(share.values()) for share in shares), default=0.0)
    xaxis: dict[str, Any] = {"title": {"text": axis}, "showgrid": False, "type": "category"}
    if len(runs) == 1:
        xaxis |= {"type": "linear", "tickformat": "d", **({"dtick": 1} if len(names) <= 16 else {})}
    return {
        "title": "Blocked, by cause",
        "said": said,
        "height": 280,
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.25,
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
            "xaxis": xaxis,
            "yaxis": {
                "title": {"text": "share of time"},
                "tickformat": ".0%" if top > 0.04 else ".1%",
                "range": [0, min(1.0, 1.12 * max(top, 0.01))],
            },
        },
        "empty": "Nobody was ever blocked." if shares else "No worker has made a step.",
    }


# -- how far behind, how far apart --


def staleness_counts(runs: Sequence[Shown]) -> Figure:
    """How stale what was merged was: shares of all, in classes that double."""
    counts = [staleness(one.run) for one in runs]
    classes = sorted({least for count in counts for least in count})
    names = [_class(least, classes) for least in classes]
    data = []
    for one, count in zip(runs, counts, strict=True):
        total = sum(count.values())
        if not total:
            continue
        shares = [count.get(least, 0) / total for least in classes]
        text = [f"{count.get(least, 0):,} times" for least in classes]
        hover = "staleness %{x}<br>%{y:.1%} of all, %{text}"
        bar = line(one, "", hover, x=names, y=numbers(shares), text=text, textposition="none")
        bar |= {"type": "bar", "marker": {"color": one.colour}}
        del bar["mode"], bar["line"]
        data.append(bar)
    measures = {one.setting("staleness") for one in runs}
    measure = measures.pop() if len(measures) == 1 else "in each strategy’s own measure"
    return {
        "title": "Staleness",
        "said": f"Counted: {measure}." if measure else "In the strategy’s own measure.",
        "height": 280,
        "data": data,
        "layout": {
            "bargap": 0.12 if len(classes) > 2 else 0.6,
            "xaxis": {"title": {"text": "staleness"}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "share"}, "tickformat": ".0%", "rangemode": "tozero"},
        },
        "empty": "Nothing has been exchanged or merged.",
    }


def _class(least: int, classes: Sequence[int]) -> str:
    """0, 1, 2–3, 4–7, …"""
    return str(least) if least < 2 else f"{least}–{2 * least - 1}"


_DISTANCES = (
    ("consensus", "from the mean, root mean square (√M_k)", "dot"),
    ("discrepancy", "between the two most different replicas", "dash"),
)


def consensus(runs: Sequence[Shown]) -> Figure:
    """How far apart the replicas are; of several runs one curve each."""
    unit = UNITS[runs[0].unit_s]
    data = []
    for one in runs:
        hover = f"%{{x:,.4~r}} {unit}<br>%{{y:.3~g}}"
        found = []
        for name, words, dash in _DISTANCES:
            told = [(e.time, value) for e in one.run.evaluations if (value := getattr(e, name)) is not None]
            values = [math.sqrt(max(0.0, value)) if name == "consensus" else value for _, value in told]
            curve = line(one, "", f"{hover} {words}", y=_positive(values))
            curve |= {"x": numbers([one.at(time) for time, _ in told])}
            curve |= {"mode": "lines" if len(told) > 2 else "lines+markers"}
            curve["line"] = {**curve["line"], **({"dash": dash, "width": 1.5} if len(runs) == 1 else {})}
            found.append(curve)
        x, y = numbers(one.series.time_s / one.unit_s), _positive(one.series.distance)
        found.append(line(one, "", f"{hover} to the last peer met, mean of the workers", x=x, y=y))
        found = [curve for curve in found if any(value is not None for value in curve["y"])]
        data += found if len(runs) == 1 else found[:1]
    said = (
        "Solid: to the last peer met. Dashed: the two most different replicas. Dotted: root mean square "
        "from the mean."
        if len(runs) == 1
        else "Root mean square from the mean; to the last peer met where that was not measured."
    )
    values_drawn = [value for trace in data for value in trace["y"] if value is not None]
    return {
        "title": "Consensus distance",
        "said": said,
        "height": 280,
        "data": data,
        "layout": {
            "xaxis": time_axis(runs),
            "yaxis": {"title": {"text": "distance of weights"}, **log_axis(values_drawn)},
        },
        "empty": "The replicas are equal, or nobody has measured how far apart they are.",
    }


def _positive(values: Floats | Sequence[float]) -> list[float | None]:
    """For a logarithmic axis: a distance of zero, and what rounding leaves of one, are gaps."""
    least = 1e-4 * max((float(value) for value in values if math.isfinite(value)), default=0.0)
    return [rounded(float(value)) if value > least else None for value in values]
