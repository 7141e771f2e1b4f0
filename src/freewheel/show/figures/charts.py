"""The figures of runs, as plotly reads them: the same in the dashboard and in a report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from freewheel.numbers import share, short
from freewheel.records.run import DEATHS
from freewheel.records.schema import Evaluation
from freewheel.show.figures.common import (
    LEGEND,
    UNITS,
    Figure,
    axis,
    bars,
    faint,
    figure,
    line,
    log_axis,
    rounded,
    scatter,
    time_axis,
)
from freewheel.show.figures.graph import graph
from freewheel.show.rates import blocked, staleness, step_times_s
from freewheel.show.shown import CAUSES, EVENTS, FAINT, GRAVE, GREY, Kind, Shown

MOST_MARKS = 100
"""More lines than this would hide the curves."""
MOST_METRICS = 24
"""Of what a script has named itself so many are drawn."""


def figures(runs: Sequence[Shown]) -> dict[str, Figure]:
    """All figures of some runs, by name."""
    own = dict.fromkeys(name for one in runs for each in one.run.evaluations for name in each.metrics)
    learned = ("loss", "accuracy", *list(own)[:MOST_METRICS])
    return {
        "graph": graph(runs[0].run, runs[0].label if len(runs) > 1 else ""),
        **{f"{what}-{over}": curves(runs, what, over) for what in learned for over in ("time", "samples")},
        "throughput": throughput(runs),
        "blocked": blocked_shares(runs),
        "staleness": staleness_counts(runs),
        "consensus": consensus(runs),
        "faults": faults(runs),
    }


# -- what happened --


def faults(runs: Sequence[Shown]) -> Figure:
    """Who died, came, left and was cut off, when; a row for each worker, or for each run."""
    alone = len(runs) == 1
    found = defaultdict[str, list[tuple[float | None, str, str]]](list)
    for one in runs:
        for event in one.run.events:
            row = ("all" if event.rank is None else f"worker {event.rank}") if alone else escape(one.label)
            said = escape(f"{event.link or event.text or event.what}, noticed by {event.noticed_by()}")
            found[event.what].append((rounded(one.at(event.time)), row, said))
    data = []
    if alone and (away := _away(runs[0])):
        data.append(scatter("lines", away, name="away", hoverinfo="skip", line={"color": FAINT, "width": 7}))
    for what, points in found.items():
        _, symbol, colour = EVENTS.get(what, Kind("", "circle", GREY))
        texts = {"name": escape(what), "text": [said for *_, said in points]}
        look = {"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2, "color": colour}}
        data.append(scatter("markers", [point[:2] for point in points], **texts, marker=look))
    said = "What workers, the launcher or the simulator noticed. Grey: a worker was away."
    axes = {"xaxis": time_axis(runs), "yaxis": {"type": "category", "categoryorder": "category descending"}}
    return figure("Faults and other events", said, 320, data, **axes, showlegend=True, legend=LEGEND)


def _away(one: Shown) -> list[tuple[float | None, str | None]]:
    """From when to when which worker was away; to the end where it did not come back."""
    died: dict[int | None, float] = {}
    spans = []
    for event in one.run.events:
        if event.what in DEATHS:
            died.setdefault(event.rank, event.time)
        elif event.what in ("joined", "resumed") and event.rank in died:
            spans.append((event.rank, died.pop(event.rank), event.time))
    spans += [(rank, since, one.run.last_s) for rank, since in died.items()]
    found: list[tuple[float | None, str | None]] = []
    for rank, since, until in spans:
        row = f"worker {rank}"
        found += [(rounded(one.at(since)), row), (rounded(one.at(until)), row), (None, None)]
    return found


def event_marks(runs: Sequence[Shown]) -> list[Figure]:
    """A thin line at every death, departure and return, for figures over time; of several runs in colours."""
    marks = [
        (rounded(one.at(event.time)), EVENTS[event.what].colour if len(runs) == 1 else one.colour)
        for one in runs
        for event in one.run.events
        if event.what in GRAVE and event.rank is not None
    ]
    common = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "opacity": 0.45}
    return [
        common | {"x0": at, "x1": at, "line": {"width": 1, "dash": "dot", "color": colour}}
        for at, colour in marks[:MOST_MARKS]
    ]


# -- what was learned --


def curves(runs: Sequence[Shown], what: str, over: str) -> Figure:
    """Loss, accuracy or what a script has named itself, over time or over samples."""
    if over == "samples" and not all(one.series.samples[-1] > 0 for one in runs):
        over = "worker-steps"
    unit = UNITS[runs[0].unit_s] if over == "time" else over
    hover = f"%{{x:,.4~r}} {unit}<br>{what} %{{y:{'.1%' if what == 'accuracy' else '.4~g'}}}"
    data: list[Figure] = []
    for one in runs:
        trained = _training_loss(one, over, hover, len(runs) == 1) if what == "loss" else []
        told = [(_where(one, each, over), each.told().get(what)) for each in one.run.evaluations]
        points = [(at, value) for at, value in told if at is not None and value is not None]
        data += trained
        if points:
            mode = "markers" if trained else "lines+markers"
            x, y = zip(*points, strict=True)
            data.append(line(one, f"{hover} of the answer", x, y, mode=mode))
    said, yaxis = f"Measured: worker.record({what}=…).", {"title": {"text": what}, "tickformat": ",~r"}
    shapes = event_marks(runs) if over == "time" else []
    if what == "loss":
        said = "Line: mean of the workers’ training losses; dots: measured of the answer."
        yaxis = log_axis("loss", data)
    elif what == "accuracy":
        yaxis["tickformat"] = ".0%"
        shapes += _targets(runs)
    xaxis = time_axis(runs) if over == "time" else axis(f"{over} of all workers", ",~s")
    title = f"{what[0].upper()}{what[1:]} over {over}"
    return figure(title, said, 320, data, xaxis=xaxis, yaxis=yaxis, shapes=shapes)


def _where(one: Shown, each: Evaluation, over: str) -> float | None:
    return {"time": one.at(each.time), "samples": each.samples, "worker-steps": each.worker_steps}[over]


def _training_loss(one: Shown, over: str, hover: str, alone: bool) -> list[Figure]:
    told = one.series
    if not any(math.isfinite(value) for value in told.loss):
        return []
    # Evaluations count from the first step of all, before a checkpoint that was resumed.
    before = sum(track.lives[0].get("resumed_at") or 0 for track in one.run.workers.values())
    x = {"time": told.time_s / one.unit_s, "samples": told.samples, "worker-steps": told.steps + before}[over]
    band = []
    if alone and len(one.run.workers) > 1:
        edge = {"line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None}
        fill = {"fill": "tonexty", "fillcolor": faint(one.colour)}
        band = [line(one, "", x, told.loss_least, **edge), line(one, "", x, told.loss_most, **edge, **fill)]
    return [*band, line(one, f"{hover}, mean of the workers", x, told.loss)]


def _targets(runs: Sequence[Shown]) -> list[Figure]:
    """A dotted line at every accuracy that is timed."""
    targets = {at for one in runs if isinstance(at := one.run.about.get("target"), int | float)}
    dotted = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": GREY, "dash": "dot"}}
    return [dotted | {"y0": at, "y1": at, "label": {"text": short(100 * at) + " %"}} for at in targets]


# -- how fast, and what held it up --


def speed(runs: Sequence[Shown]) -> Figure:
    """Worker-steps per second, the fastest run on top, the ideal behind each."""
    order = sorted(runs, key=lambda run: run.result.steps_per_s)
    data = []
    for run in order:
        rate, ideal = run.result.steps_per_s, run.result.ideal_share
        place = {"orientation": "h", "y": [escape(run.label)]}
        pale = {"marker": {"color": FAINT}, "x": [rate / ideal if ideal else 0.0]}
        data.append(bars(run, "ideal %{x:,.4~r} steps/s", **place, **pale))
        hover = f"%{{x:,.4~r}} steps/s, {share(ideal)} of the ideal"
        data.append(bars(run, hover, **place, x=[rate], text=[short(rate)]))
    said = "The pale bar is the ideal Σ 1/t_i: every worker computes and none waits."
    axes = {"xaxis": axis("worker-steps per second"), "yaxis": {"type": "category"}}
    return figure("Speed against the ideal", said, 90 + 27 * len(runs), data, **axes, barmode="overlay")


def throughput(runs: Sequence[Shown]) -> Figure:
    """Steps of all workers in a second, and as many as they would make if nobody were ever blocked."""
    data = []
    for one in runs:
        if not any(math.isfinite(value) for value in one.series.rate):
            continue
        x = one.series.time_s / one.unit_s
        hover = f"%{{x:,.4~r}} {UNITS[one.unit_s]}<br>%{{y:,.4~r}} worker-steps/s"
        dotted = {"color": faint(one.colour, 0.7), "dash": "dot", "width": 1.5}
        data.append(line(one, f"{hover} ideal", x, one.series.ideal, line=dotted))
        data.append(line(one, hover, x, one.series.rate))
    said = "Steps of all workers in a second. Dotted: if those there did nothing but compute."
    times_s = step_times_s(runs[0].run.lives).values()
    if len(runs) == 1 and times_s:
        said += f" AllReduce here: at most {short(len(times_s) / max(times_s))} steps/s."
    axes = {"xaxis": time_axis(runs), "yaxis": axis("worker-steps/s"), "shapes": event_marks(runs)}
    return figure("Throughput", said, 430, data, **axes)


def blocked_shares(runs: Sequence[Shown]) -> Figure:
    """The share of its time each worker was blocked, by cause; with several runs, of all workers together."""
    whose = {escape(one.label): list(one.run.workers.values()) for one in runs}
    if len(runs) == 1:
        whose = {f"worker {rank}": [track] for rank, track in sorted(runs[0].run.workers.items())}
    shares = [blocked(tracks) for tracks in whose.values()]
    data = [
        {
            "type": "bar",
            "name": words,
            "x": list(whose),
            "y": [rounded(share[cause]) for share in shares],
            "marker": {"color": colour},
            "hovertemplate": f"<b>%{{x}}</b><br>%{{y:.1%}} of its time {words}<extra></extra>",
        }
        for cause, (words, colour) in CAUSES.items()
        if any(share[cause] > 0 for share in shares)
    ]
    said = "Shares of the workers’ time. The rest is computing, and Freewheel’s own work."
    axes = {"xaxis": {"type": "category"}, "yaxis": axis("share of time", ".1%"), "barmode": "stack"}
    return figure("Waiting, by cause", said, 280, data, **axes, showlegend=True, legend=LEGEND)


# -- how far behind, how far apart --


def staleness_counts(runs: Sequence[Shown]) -> Figure:
    """How stale what was merged was: shares of all, in classes that double."""
    counts = [staleness(one.run) for one in runs]
    classes = sorted({least for count in counts for least in count})
    names = [str(least) if least < 2 else f"{least}–{2 * least - 1}" for least in classes]
    data = []
    for one, count in zip(runs, counts, strict=True):
        if total := sum(count.values()):
            y = [rounded(count.get(least, 0) / total) for least in classes]
            data.append(bars(one, "staleness %{x}<br>%{y:.1%} of all", x=names, y=y))
    measures = {one.setting("staleness") for one in runs} - {""}
    said = f"Counted: {measures.pop() if len(measures) == 1 else 'in each strategy’s own measure'}."
    axes = {"xaxis": {"title": {"text": "staleness"}, "type": "category"}, "yaxis": axis("share", ".0%")}
    return figure("Staleness", said, 280, data, **axes)


def consensus(runs: Sequence[Shown]) -> Figure:
    """How far apart the replicas are; of several runs the first of three measures that is known."""
    data = []
    for one in runs:
        hover = f"%{{x:,.4~r}} {UNITS[one.unit_s]}<br>%{{y:.3~g}}"
        told, met = one.run.evaluations, one.series
        times = [one.at(each.time) for each in told]
        measured: list[tuple[str, Any, Any]] = [
            ("dot", times, [math.sqrt(max(0.0, each.consensus or 0.0)) for each in told]),
            ("dash", times, [each.discrepancy or 0.0 for each in told]),
            ("solid", met.time_s / one.unit_s, met.distance),
        ]
        found = [(dash, x, y) for dash, x, values in measured if any(y := _positive(values))]
        for dash, x, y in found if len(runs) == 1 else found[:1]:
            data.append(line(one, hover, x, y, line={"dash": dash}, mode="lines+markers", marker={"size": 3}))
    said = (
        "Dotted: root mean square from the mean. Dashed: the two most different replicas. Solid: to the last "
        "peer met, mean of the workers."
    )
    axes = {"xaxis": time_axis(runs), "yaxis": log_axis("distance of weights", data)}
    return figure("Consensus distance", said, 280, data, **axes)


def _positive(values: Sequence[float]) -> list[float | None]:
    """For a logarithmic axis: a distance of zero, and what rounding leaves of one, are gaps."""
    least = 1e-4 * max((value for value in values if math.isfinite(value)), default=0.0)
    return [value if value > least else None for value in values]
