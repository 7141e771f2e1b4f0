"""The figures of runs, as plotly reads them: the same in the dashboard and in a report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from freewheel.numbers import given, share, short
from freewheel.records.schema import Evaluation
from freewheel.records.track import Floats
from freewheel.show.figures.common import (
    LEGEND,
    UNITS,
    Figure,
    axis,
    bars,
    drawn,
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


def faults(runs: Sequence[Shown]) -> Figure:
    """Who died, came, left and was cut off, when; a row for each worker, or for each run."""
    alone = len(runs) == 1
    rows: dict[str, None] = {}
    found = defaultdict[str, list[tuple[float, str, str]]](list)
    for one in runs:
        for event in one.run.events:
            ranks = [rank for rank in (event.rank, event.peer) if rank is not None]
            whose = [f"worker {rank}" for rank in ranks] or ["all"] if alone else [escape(one.label)]
            rows |= dict.fromkeys(whose)
            said = escape(event.link or event.text or event.what)
            text = f"{said}<br>noticed by {escape(event.noticed_by())}"
            found[event.what] += [(one.at(event.time), row, text) for row in whose]
    gone = _away(runs[0]) if alone else []
    data: list[Figure] = []
    if gone:
        spans = [
            at
            for begin, end, row in gone
            for at in ((rounded(begin), row), (rounded(end), row), (None, None))
        ]
        data = [scatter("lines", spans, name="away", hoverinfo="skip", line={"color": FAINT, "width": 7})]
    data += [_marks(what, found[what]) for what in dict.fromkeys([*EVENTS, *found]) if what in found]
    ordered = sorted(rows, key=_by_rank) if alone else list(rows)
    ends = [one.at(one.run.last_s) for one in runs if one.run.workers or one.run.events]
    yaxis = {"type": "category", "categoryorder": "array", "categoryarray": ordered}
    return figure(
        "Faults and other events",
        "What workers, the launcher or the simulator noticed. Grey: a worker was away.",
        min(620, max(190, 110 + 22 * len(ordered))),
        data,
        "Nothing has happened: nobody died, came or was cut off.",
        showlegend=True,
        legend=LEGEND,
        xaxis=time_axis(runs, range=[0, 1.02 * (rounded(max(ends, default=1.0)) or 1.0)]),
        yaxis={**yaxis, "range": [len(ordered) - 0.4, -0.6]},
    )


def event_marks(runs: Sequence[Shown]) -> list[Figure]:
    """A thin line at every death, departure and return, for figures over time; of several runs in colours."""
    marks = [
        (rounded(one.at(event.time)), EVENTS[event.what].colour if len(runs) == 1 else one.colour)
        for one in runs
        for event in one.run.events
        if event.what in GRAVE and event.rank is not None
    ]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "opacity": 0.45}
    dotted = {"width": 1, "dash": "dot"}
    return [
        line | {"x0": at, "x1": at, "line": {**dotted, "color": colour}} for at, colour in marks[:MOST_MARKS]
    ]


def _away(one: Shown) -> list[tuple[float, float, str]]:
    """From when to when which worker was away; to the end where it did not come back."""
    gone: list[tuple[float, float, str]] = []
    died: dict[int | None, float] = {}
    for event in one.run.events:
        if event.what in ("died", "failed"):
            died.setdefault(event.rank, event.time)
        elif event.what in ("joined", "resumed") and event.rank in died:
            gone.append((one.at(died.pop(event.rank)), one.at(event.time), f"worker {event.rank}"))
    for rank, at in died.items():
        track = one.run.workers.get(rank) if rank is not None else None
        began = track.latest.get("began") if track is not None else None
        # A worker may train again that nobody has seen coming.
        until = began if began is not None and began > at else one.run.last_s
        gone += [(one.at(at), one.at(until), f"worker {rank}")] if rank is not None else []
    return gone


def _marks(what: str, points: list[tuple[float, str, str]]) -> Figure:
    _, symbol, colour, _ = EVENTS.get(what, Kind("", "circle", GREY))
    return scatter(
        "markers",
        [(rounded(at), row) for at, row, _ in points],
        name=escape(what),
        text=[text for _, _, text in points],
        hovertemplate=f"<b>{escape(what)}</b> %{{y}}<br>%{{text}}<extra></extra>",
        marker={"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2, "color": colour}},
    )


def _by_rank(row: str) -> tuple[int, str]:
    number = row.removeprefix("worker ")
    return (int(number) if number.isdigit() else -1, row)


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


# -- what was learned --


def curves(runs: Sequence[Shown], what: str, over: str) -> Figure:
    """Loss, accuracy or what a script has named itself, over time or over samples."""
    in_steps = over == "samples" and not all(_counts_samples(one, what) for one in runs)
    counted = "worker-steps" if in_steps else "samples"
    across = f"%{{x:,.4~r}} {UNITS[runs[0].unit_s]}" if over == "time" else f"%{{x:,.4~s}} {counted}"
    hover = f"{across}<br>{what} %{{y:{'.1%' if what == 'accuracy' else '.4~g'}}}"
    data: list[Figure] = []
    for one in runs:
        curve = _training_loss(one, over, in_steps, hover, len(runs) == 1) if what == "loss" else []
        points = [
            (at, value)
            for evaluation in one.run.evaluations
            if (value := evaluation.told().get(what)) is not None
            and (at := _where(one, evaluation, over, in_steps)) is not None
        ]
        data += curve
        if points:
            x, y = (drawn(values) for values in zip(*points, strict=True))
            mode = "markers" if curve else "lines+markers"
            dots = {"color": one.colour, "size": 6 if len(points) < 60 else 4}
            said = hover + (" of the answer" if what == "loss" else "")
            data.append(line(one, "", said, mode=mode, x=x, y=y, marker=dots))
    layout: dict[str, Any] = {
        "xaxis": time_axis(runs) if over == "time" else axis(f"{counted} of all workers", ",~s"),
        "shapes": event_marks(runs) if over == "time" else [],
    }
    if what == "loss":
        band = ", shaded: from the least to the largest" if len(runs) == 1 else ""
        said = f"Line: mean of the workers’ training losses{band}; dots: measured of the answer."
        empty = "No worker has reported a loss: worker.record(loss=…) does."
        layout["yaxis"] = log_axis("loss", data)
    elif what != "accuracy":
        said, empty = f"worker.record({what}=…).", ""
        layout["yaxis"] = {"title": {"text": what}, "tickformat": ",~r"}
    else:
        said = "Measured of the answer. Higher is better, further left is sooner."
        empty = "Not measured yet: worker.record(accuracy=…) does it; train and compare do it at the end."
        targets = _targets(runs)
        layout["shapes"] = [*targets.pop("shapes", []), *layout["shapes"]]
        layout |= {"yaxis": {"title": {"text": "accuracy"}, "tickformat": ".0%"}, **targets}
    title = f"{what[0].upper()}{what[1:]} over {'time' if over == 'time' else counted}"
    return figure(title, said, 320, data, empty, **layout)


def _counts_samples(one: Shown, what: str) -> bool:
    measured = (each for each in one.run.evaluations if what in each.told())
    return float(one.series.samples[-1]) > 0 and all(each.samples is not None for each in measured)


def _where(one: Shown, evaluation: Evaluation, over: str, in_steps: bool) -> float | None:
    if over == "time":
        return one.at(evaluation.time)
    return evaluation.worker_steps if in_steps else evaluation.samples


def _training_loss(one: Shown, over: str, in_steps: bool, hover: str, alone: bool) -> list[Figure]:
    told = one.series
    if not any(math.isfinite(value) for value in told.loss):
        return []
    # Evaluations count from the first step of all, before a checkpoint that was resumed.
    before = sum(track.lives[0].get("resumed_at") or 0 for track in one.run.workers.values())
    x = drawn(
        told.time_s / one.unit_s if over == "time" else told.steps + before if in_steps else told.samples
    )
    band = []
    if alone and len(one.run.workers) > 1:
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None, "x": x}
        fill = {"fill": "tonexty", "fillcolor": faint(one.colour)}
        band = [
            line(one, "least", "", **edge, y=drawn(told.loss_least)),
            line(one, "largest", "", **edge, y=drawn(told.loss_most), **fill),
        ]
    return [*band, line(one, "", f"{hover}, mean of the workers", x=x, y=drawn(told.loss))]


def _targets(runs: Sequence[Shown]) -> dict[str, Any]:
    """A dotted line at every accuracy that is timed, with its name in the margin, clear of the curves."""
    known = (one.run.about.get("target") for one in runs)
    targets = sorted({float(target) for target in known if isinstance(target, int | float)})
    if not targets:
        return {}
    dotted = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
    dotted |= {"line": {"color": GREY, "width": 1.5, "dash": "dot"}}
    beside = {"xref": "paper", "x": 1, "xanchor": "left", "yanchor": "middle", "showarrow": False}
    return {
        "margin": {"r": 52},
        "shapes": [dotted | {"y0": target, "y1": target} for target in targets],
        "annotations": [beside | {"y": target, "text": f" {given(100 * target)} %"} for target in targets],
    }


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
    layout = {"xaxis": axis("worker-steps per second"), "yaxis": {"type": "category"}, "barmode": "overlay"}
    return figure("Speed against the ideal", said, 90 + 27 * len(runs), data, "", **layout)


def throughput(runs: Sequence[Shown]) -> Figure:
    """Steps of all workers in a second, and as many as they would make if nobody were ever blocked."""
    data = []
    for one in runs:
        if not any(math.isfinite(value) for value in one.series.rate):
            continue
        x = drawn(one.series.time_s / one.unit_s)
        hover = f"%{{x:,.4~r}} {UNITS[one.unit_s]}<br>%{{y:,.4~r}} worker-steps/s"
        dotted = {"color": GREY if len(runs) == 1 else faint(one.colour, 0.7), "dash": "dot", "width": 1.5}
        data.append(line(one, "ideal", f"{hover} ideal", x=x, y=drawn(one.series.ideal), line=dotted))
        data.append(line(one, "", hover, x=x, y=drawn(one.series.rate)))
    said = "Steps of all workers in a second. Dotted: if those there did nothing but compute."
    times_s = step_times_s(runs[0].run.lives).values()
    if len(runs) == 1 and len(times_s) > 1 and runs[0].setting("waits_for") == "nobody":
        said += f" AllReduce here: at most {short(len(times_s) / max(times_s))} steps/s."
    axes = {"xaxis": time_axis(runs), "yaxis": axis("worker-steps/s"), "shapes": event_marks(runs)}
    return figure("Throughput", said, 430, data, "No worker has made a step.", **axes)


def blocked_shares(runs: Sequence[Shown]) -> Figure:
    """The share of its time each worker was blocked, by cause; with several runs, of all workers together."""
    names: list[Any] = [escape(one.label) for one in runs]
    xaxis: Figure = {"title": {"text": ""}, "showgrid": False, "type": "category"}
    said, whom = "All workers together.", names
    shares = [blocked(one.run.workers.values()) for one in runs]
    if len(runs) == 1:
        workers = runs[0].run.workers
        names = sorted(workers)
        said, whom = "Since each worker began.", [f"worker {rank}" for rank in names]
        shares = [blocked([workers[rank]]) for rank in names]
        ticks = {"dtick": 1} if len(names) <= 16 else {}
        xaxis |= {"title": {"text": "worker"}, "type": "linear", "tickformat": "d", **ticks}
    data = [
        {
            "type": "bar",
            "name": words,
            "showlegend": True,
            "x": names,
            "y": drawn(share[cause] for share in shares),
            "marker": {"color": colour},
            "text": whom,
            "textposition": "none",
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1%}} of its time {words}<extra></extra>",
        }
        for cause, (words, colour) in CAUSES.items()
        if any(share[cause] > 0 for share in shares)
    ]
    top = max((sum(share.values()) for share in shares), default=0.0)
    yaxis = {"title": {"text": "share of time"}, "range": [0, min(1.0, 1.12 * max(top, 0.01))]}
    yaxis["tickformat"] = ".0%" if top > 0.04 else ".1%"
    empty = "Nobody ever waited." if shares else "No worker has made a step."
    layout = {"barmode": "stack", "bargap": 0.25, "showlegend": True, "legend": LEGEND}
    said += " The rest is computing, and Freewheel’s own work."
    return figure("Waiting, by cause", said, 280, data, empty, **layout, xaxis=xaxis, yaxis=yaxis)


# -- how far behind, how far apart --


def staleness_counts(runs: Sequence[Shown]) -> Figure:
    """How stale what was merged was: shares of all, in classes that double."""
    counts = [staleness(one.run) for one in runs]
    classes = sorted({least for count in counts for least in count})
    names = [str(least) if least < 2 else f"{least}–{2 * least - 1}" for least in classes]
    data = []
    for one, count in zip(runs, counts, strict=True):
        if total := sum(count.values()):
            many = [count.get(least, 0) for least in classes]
            y, text = drawn(one / total for one in many), [f"{one:,} times" for one in many]
            hover = "staleness %{x}<br>%{y:.1%} of all, %{text}"
            data.append(bars(one, hover, x=names, y=y, text=text, textposition="none"))
    measures = {one.setting("staleness") for one in runs}
    measure = measures.pop() if len(measures) == 1 else "in each strategy’s own measure"
    said = f"Counted: {measure}." if measure else "In the strategy’s own measure."
    axes = {
        "xaxis": {"title": {"text": "staleness"}, "type": "category", "showgrid": False},
        "yaxis": axis("share", ".0%"),
    }
    empty = "Nothing has been exchanged or merged."
    return figure("Staleness", said, 280, data, empty, bargap=0.12 if len(classes) > 2 else 0.6, **axes)


def consensus(runs: Sequence[Shown]) -> Figure:
    """How far apart the replicas are; of several runs one curve each."""
    data = []
    for one in runs:
        hover = f"%{{x:,.4~r}} {UNITS[one.unit_s]}<br>%{{y:.3~g}}"
        told = one.run.evaluations
        measured = [
            ([(e.time, math.sqrt(max(0.0, e.consensus))) for e in told if e.consensus is not None],
             "from the mean, root mean square (√M_k)", "dot"),
            ([(e.time, e.discrepancy) for e in told if e.discrepancy is not None],
             "between the two most different replicas", "dash"),
        ]  # fmt: skip
        found = []
        for points, words, dash in measured:
            x, y = drawn(one.at(time) for time, _ in points), _positive([value for _, value in points])
            mode = "lines" if len(points) > 2 else "lines+markers"
            curve = line(one, "", f"{hover} {words}", x=x, y=y, mode=mode)
            curve["line"] |= {"dash": dash, "width": 1.5} if len(runs) == 1 else {}
            found.append(curve)
        x, y = drawn(one.series.time_s / one.unit_s), _positive(one.series.distance)
        found.append(line(one, "", f"{hover} to the last peer met, mean of the workers", x=x, y=y))
        found = [curve for curve in found if any(value is not None for value in curve["y"])]
        data += found if len(runs) == 1 else found[:1]
    said = (
        "Solid: to the last peer met. Dashed: the two most different replicas. Dotted: root mean square "
        "from the mean."
        if len(runs) == 1
        else "Root mean square from the mean; to the last peer met where that was not measured."
    )
    empty = "The replicas are equal, or nobody has measured how far apart they are."
    axes = {"xaxis": time_axis(runs), "yaxis": log_axis("distance of weights", data)}
    return figure("Consensus distance", said, 280, data, empty, **axes)


def _positive(values: Floats | Sequence[float]) -> list[float | None]:
    """For a logarithmic axis: a distance of zero, and what rounding leaves of one, are gaps."""
    least = 1e-4 * max((float(value) for value in values if math.isfinite(value)), default=0.0)
    return [rounded(float(value)) if value > least else None for value in values]
