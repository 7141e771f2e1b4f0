"""The figures of runs, as plotly reads them: the same in the dashboard and in a report.

Every function takes runs with their names and colours (`shown`) and gives a figure: `title`, `said` (what it
shows, in a sentence), `height`, `data`, `layout`, and `empty`, what to say where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from freewheel.observe.graph import graph
from freewheel.observe.palette import CAUSES, COLOURS, DASHES, EVENTS, FAINT, GREY
from freewheel.observe.run import Evaluation, Run
from freewheel.observe.series import Floats, Series, blocked, series, staleness

Figure = dict[str, Any]
_UNITS = {1.0: "s", 60.0: "min", 3600.0: "h"}


@dataclass(eq=False)
class Shown:
    """A run with its name and its place among those shown, which gives its colour and dash."""

    run: Run
    label: str
    place: int = 0
    unit_s: float = field(default=1.0, kw_only=True)
    """What the axis of time counts in."""

    @property
    def colour(self) -> str:
        """The run's colour in every figure."""
        return COLOURS[self.place % len(COLOURS)]

    @property
    def dash(self) -> str:
        """Its dash: the first eight have solid lines."""
        return DASHES[self.place // len(COLOURS) % len(DASHES)]

    @cached_property
    def series(self) -> Series:
        """Computed once for all figures."""
        return series(self.run)

    def at(self, time: float) -> float:
        """A moment of the run, as the axis of time counts."""
        return (time - self.run.began_s) / self.unit_s


def shown(runs: Sequence[Run]) -> list[Shown]:
    """Runs with names that tell them apart, and a common unit of time."""
    names = [str(run.about.get("strategy") or run.folder.name) for run in runs]
    twins = Counter(names)
    names = [
        f"{name} · {run.folder.name}" if twins[name] > 1 and name != run.folder.name else name
        for name, run in zip(names, runs, strict=True)
    ]
    longest = max((run.last_s - run.began_s for run in runs if run.workers), default=0.0)
    unit_s = 1.0 if longest < 600 else 60.0 if longest < 4 * 3600 else 3600.0
    return [
        Shown(run, name, place, unit_s=unit_s)
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]


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


# -- axes --


def _time_axis(runs: Sequence[Shown]) -> dict[str, Any]:
    unit = _UNITS[runs[0].unit_s]
    virtual = "virtual " if all(one.run.clock == "virtual" for one in runs) else ""
    return {"title": {"text": f"time, {virtual}{unit}"}, "rangemode": "tozero", "tickformat": ",~r"}


def _log(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis, with ticks that can be read."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
    axis: dict[str, Any] = {"type": "log", "tickformat": ".2~g"}
    decades = math.log10(max(positive) / min(positive)) if positive else 0.0
    if decades < 3:
        axis["dtick"] = "D2" if decades > 0.6 else "D1"
    return axis


def _round(value: float) -> float | None:
    """Five digits are more than a figure can show; what is not finite is a gap."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _numbers(values: Floats | Sequence[float]) -> list[float | None]:
    return [_round(float(value)) for value in values]


def _line(one: Shown, name: str, hover: str, **rest: Any) -> dict[str, Any]:
    # Plotly reads a little HTML in its texts, so what comes from a run is escaped.
    label = escape(one.label)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name) or label,
        "legendgroup": str(one.place),
        "hovertemplate": f"<b>{label}</b><br>{hover}<extra></extra>",
        "line": {"color": one.colour, "dash": one.dash, "width": 2},
        **rest,
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
        x_hover = "%{x:,.4~r} " + _UNITS[runs[0].unit_s]
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
            dots = _line(
                one,
                "",
                f"{x_hover}<br>{y_hover} of the answer" if what == "loss" else f"{x_hover}<br>{y_hover}",
                mode="markers" if what == "loss" and _has_loss(one) else "lines+markers",
                x=_numbers([at for at, _ in points]),
                y=_numbers([value for _, value in points]),
                marker={"color": one.colour, "size": 6 if len(points) < 60 else 4},
            )
            data.append(dots)
    counted = "worker-steps of all workers" if in_steps else "samples of all workers"
    xaxis = {"title": {"text": counted}, "rangemode": "tozero", "tickformat": ",~s"}
    yaxis: dict[str, Any] = {"title": {"text": what}}
    layout: dict[str, Any] = {"xaxis": _time_axis(runs) if over == "time" else xaxis, "yaxis": yaxis}
    if what == "loss":
        yaxis |= _log(value for trace in data for value in trace["y"] if value is not None)
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
        "empty": "No worker has reported a loss yet: worker.record(loss=…) does."
        if what == "loss"
        else "Nobody has measured the accuracy: worker.record(accuracy=…) does.",
    }


def _counts_samples(one: Shown, what: str) -> bool:
    measured = (each for each in one.run.evaluations if getattr(each, what) is not None)
    return float(one.series.samples[-1]) > 0 and all(each.samples is not None for each in measured)


def _has_loss(one: Shown) -> bool:
    return any(math.isfinite(value) for value in one.series.loss)


def _x(one: Shown, over: str, in_steps: bool) -> list[float | None]:
    if over == "time":
        return _numbers(one.series.time_s / one.unit_s)
    return _numbers(one.series.steps if in_steps else one.series.samples)


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
        least, most = _numbers(one.series.loss_least), _numbers(one.series.loss_most)
        drawn.append(_line(one, "least", "", **edge, y=least))
        drawn.append(_line(one, "largest", "", **edge, y=most, fill="tonexty", fillcolor=_faint(one.colour)))
    return [*drawn, _line(one, "", f"{hover}, mean of the workers", x=x, y=_numbers(one.series.loss))]


def _faint(colour: str, share: float = 0.18) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"


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
    unit = _UNITS[runs[0].unit_s]
    data = []
    for one in runs:
        if not any(math.isfinite(value) for value in one.series.rate):
            continue
        x = _numbers(one.series.time_s / one.unit_s)
        hover = f"%{{x:,.4~r}} {unit}<br>%{{y:,.4~r}} worker-steps/s"
        ideal = {"color": GREY if len(runs) == 1 else _faint(one.colour, 0.7), "dash": "dot", "width": 1.5}
        data.append(_line(one, "ideal", f"{hover} ideal", x=x, y=_numbers(one.series.ideal), line=ideal))
        data.append(_line(one, "", hover, x=x, y=_numbers(one.series.rate)))
    yaxis = {"title": {"text": "worker-steps/s"}, "rangemode": "tozero", "tickformat": ",~r"}
    return {
        "title": "Throughput",
        "said": "Steps of all workers in a second. Dotted: if no worker were ever blocked.",
        "height": 430,
        "data": data,
        "layout": {"xaxis": _time_axis(runs), "yaxis": yaxis},
        "empty": "No worker has made a step yet.",
    }


def blocked_shares(runs: Sequence[Shown]) -> Figure:
    """The share of its time each worker was blocked, by cause; with several runs, of all workers together."""
    if len(runs) == 1:
        one = runs[0]
        ranks = sorted(one.run.workers)
        shares = [blocked([one.run.workers[rank]]) for rank in ranks]
        names: list[Any] = ranks
        said, axis = "Since each worker began; the rest is computing.", "worker"
        whom: Callable[[int], str] = lambda place: f"worker {ranks[place]}"  # noqa: E731
    else:
        shares = [blocked(list(one.run.workers.values())) for one in runs]
        names = [escape(one.label) for one in runs]
        said, axis = "All workers together; the rest is computing.", ""
        whom = lambda place: names[place]  # noqa: E731
    data = [
        {
            "type": "bar",
            "name": words,
            "showlegend": True,
            "x": names,
            "y": _numbers([share[cause] for share in shares]),
            "marker": {"color": colour},
            "text": [whom(place) for place in range(len(names))],
            "textposition": "none",
            "hovertemplate": f"<b>%{{text}}</b><br>%{{y:.1%}} of its time {words}<extra></extra>",
        }
        for cause, (words, colour) in CAUSES.items()
        if any(share[cause] > 0 for share in shares)
    ]
    top = max((sum(share.values()) - share["compute"] for share in shares), default=0.0)
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
        "empty": "Nobody was ever blocked." if shares else "No worker has made a step yet.",
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
        bar = _line(one, "", hover, x=names, y=_numbers(shares), text=text, textposition="none")
        bar |= {"type": "bar", "marker": {"color": one.colour}}
        del bar["mode"], bar["line"]
        data.append(bar)
    measures = {str(one.run.about.get("settings", {}).get("staleness") or "") for one in runs}
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
        "empty": "Nothing has been exchanged or merged yet.",
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
    unit = _UNITS[runs[0].unit_s]
    data = []
    for one in runs:
        hover = f"%{{x:,.4~r}} {unit}<br>%{{y:.3~g}}"
        found = []
        for name, words, dash in _DISTANCES:
            told = [(e.time, value) for e in one.run.evaluations if (value := getattr(e, name)) is not None]
            values = [math.sqrt(max(0.0, value)) if name == "consensus" else value for _, value in told]
            curve = _line(one, "", f"{hover} {words}", y=_positive(values))
            curve |= {"x": _numbers([one.at(time) for time, _ in told])}
            curve |= {"mode": "lines" if len(told) > 2 else "lines+markers"}
            curve["line"] = {**curve["line"], **({"dash": dash, "width": 1.5} if len(runs) == 1 else {})}
            found.append(curve)
        x, y = _numbers(one.series.time_s / one.unit_s), _positive(one.series.distance)
        found.append(_line(one, "", f"{hover} to the last peer met, mean of the workers", x=x, y=y))
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
            "xaxis": _time_axis(runs),
            "yaxis": {"title": {"text": "distance of weights"}, **_log(values_drawn)},
        },
        "empty": "The replicas are equal, or nobody has measured how far apart they are.",
    }


def _positive(values: Floats | Sequence[float]) -> list[float | None]:
    """For a logarithmic axis: a distance of zero, and what rounding leaves of one, are gaps."""
    least = 1e-4 * max((float(value) for value in values if math.isfinite(value)), default=0.0)
    return [_round(float(value)) if value > least else None for value in values]


# -- what happened --


def faults(runs: Sequence[Shown]) -> Figure:
    """Who died, came, left and was cut off, when; a row for each worker, or for each run."""
    rows: dict[str, None] = {}
    found: dict[str, list[tuple[float, str, str]]] = {}
    gone: list[tuple[float, float, str]] = []
    for one in runs:
        alone = len(runs) == 1
        died: dict[int | None, float] = {}
        for event in one.run.events:
            row = escape(one.label) if not alone else "all" if event.rank is None else f"worker {event.rank}"
            rows[row] = None
            at = one.at(event.time)
            by = ", ".join(str(who) for who in event.by[:6]) + (" …" if len(event.by) > 6 else "")
            text = f"{escape(event.text or event.what)}<br>noticed by {escape(by)}"
            found.setdefault(event.what, []).append((at, row, text))
            if event.what in ("died", "failed"):
                died.setdefault(event.rank, at)
            elif event.what in ("joined", "restarted", "resumed") and event.rank in died and alone:
                gone.append((died.pop(event.rank), at, row))
        if alone:
            end = one.at(one.run.last_s)
            gone += [(at, end, f"worker {rank}") for rank, at in died.items() if rank is not None]
    data: list[dict[str, Any]] = []
    if gone:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "away",
                "hoverinfo": "skip",
                "x": [_round(at) if at is not None else None for a, b, _ in gone for at in (a, b, None)],
                "y": [name for _, _, row in gone for name in (row, row, None)],
                "line": {"color": FAINT, "width": 7},
            }
        )
    for what, (symbol, colour) in EVENTS.items():
        if what in found:
            data.append(_marks(what, found[what], symbol, colour))
    data += [_marks(what, found[what], "circle", GREY) for what in found if what not in EVENTS]
    ordered = sorted(rows, key=_by_rank) if len(runs) == 1 else list(rows)
    xaxis = _time_axis(runs)
    ends = [one.at(one.run.last_s) for one in runs if one.run.workers or one.run.events]
    xaxis["range"] = [0, 1.02 * (_round(max(ends, default=1.0)) or 1.0)]
    return {
        "title": "Faults and other events",
        "said": "What workers, the launcher or the simulator noticed. Grey: a worker was away.",
        "height": min(620, max(190, 110 + 22 * len(ordered))),
        "data": data,
        "layout": {
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "xaxis": xaxis,
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": ordered,
                "range": [len(ordered) - 0.4, -0.6],
            },
        },
        "empty": "Nothing has happened: nobody died, came or was cut off.",
    }


def _marks(what: str, points: list[tuple[float, str, str]], symbol: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(what),
        "x": _numbers([at for at, _, _ in points]),
        "y": [row for _, row, _ in points],
        "text": [text for _, _, text in points],
        "hovertemplate": f"<b>{escape(what)}</b> %{{y}}<br>%{{text}}<extra></extra>",
        "marker": {"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2, "color": colour}},
    }


def _by_rank(row: str) -> tuple[int, str]:
    number = row.removeprefix("worker ")
    return (int(number) if number.isdigit() else -1, row)
