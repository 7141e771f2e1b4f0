"""Figures of runs as plotly reads them, the same in a report and on the dashboard; and pages to stand on."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from freewheel.numbers import share, short
from freewheel.records.run import DEATHS, Run
from freewheel.records.schema import MEASURED
from freewheel.records.track import Floats
from freewheel.show.rates import LATELY_S, blocked, every_s, staleness, step_times_s
from freewheel.show.rows import Row, rows
from freewheel.show.shown import CAUSES, DASHES, DISTANCES, EVENTS, FAINT, GRAVE, GREY, STATES, Kind, Shown

Figure = dict[str, Any]
TOOLS = resources.files(__package__).joinpath("tools.js")  # a figure's buttons, on every page
UNITS = {1.0: "s", 60.0: "min", 3600.0: "h"}  # what an axis of time may count in
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
MOST_MARKS = 100  # more lines than this would hide the curves
MOST_METRICS = 24  # of a script's own that are drawn
DECADES = 2.0  # the scale of colours ends at a hundredth of the largest distance
MAX_EDGES, EDGES_EACH = 256, 2  # of more edges only so many of each worker are drawn


def figure(title: str, said: str, height: int, data: list[Figure], **layout: Any) -> Figure:
    """`said`: what it shows, in a sentence."""
    return {"title": title, "said": said, "height": height, "data": data, "layout": layout}


def page(package: str, data: Any, title: str, **parts: str) -> str:
    """A page that needs no other file: the package's page.html with its style, script, data and parts."""
    for name, file in (("css", "page.css"), ("script", "page.js"), ("html", "page.html")):
        parts[name] = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    # Inside a script the browser escapes nothing, so no "<" may stand there.
    inside = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts |= {"title": escape(title), "data": inside, "tools": TOOLS.read_text(encoding="utf-8")}
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], parts["html"])


def axis(title: str, form: str = ",~r") -> Figure:
    return {"title": {"text": title}, "rangemode": "tozero", "tickformat": form}


def time_axis(runs: Sequence[Shown]) -> Figure:
    virtual = "virtual " if all(one.clock == "virtual" for one in runs) else ""
    return axis(f"time, {virtual}{UNITS[runs[0].unit_s]}")


def log_axis(title: str, data: Sequence[Figure]) -> Figure:
    drawn = [value for trace in data for value in trace["y"] if value is not None and value > 0]
    # Without a format of ours plotly labels the ticks inside a decade with a bare digit.
    few = {"dtick": "D2"} if drawn and max(drawn) < 1000 * min(drawn) else {}
    return {"title": {"text": title}, "type": "log", "tickformat": ".2~g", **few}


def rounded(value: float | None, digits: int = 5) -> float | None:
    """Five digits are more than a figure shows; infinity and nan become a gap."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def scatter(mode: str, points: Collection[tuple[Any, Any]], **rest: Any) -> Figure:
    """Points that belong to no run; (None, None) is a gap."""
    return {"type": "scatter", "mode": mode, "x": [x for x, _ in points], "y": [y for _, y in points], **rest}


Numbers = Floats | Iterable[float | None]


def line(one: Shown, hover: str, x: Numbers, y: Numbers, **rest: Any) -> Figure:
    """A curve in the run's colour; `hover` says what a point is."""
    look = {"color": one.colour, "dash": DASHES[one.style], "width": 2} | rest.pop("line", {})
    numbers = {"x": list(map(rounded, x)), "y": list(map(rounded, y))}
    return {"type": "scatter", "mode": "lines", "line": look, **_of(one, hover), **numbers, **rest}


def bars(one: Shown, hover: str, **rest: Any) -> Figure:
    return {"type": "bar", "marker": {"color": one.colour}, **_of(one, hover), **rest}


def _of(one: Shown, hover: str) -> Figure:
    label = escape(one.label)  # plotly reads a little HTML in its texts
    said = f"<b>{label}</b><br>{hover}<extra></extra>"
    return {"name": label, "hovertemplate": said, "legendgroup": str(one.place)}


def faint(colour: str, share: float = 0.18) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {share})"


def figures(runs: Sequence[Shown]) -> dict[str, Figure]:
    told = dict.fromkeys(name for one in runs for each in one.run.evaluations for name in each)
    learned = ("loss", "accuracy", *[name for name in told if name not in MEASURED][:MOST_METRICS])
    return {
        "graph": graph(runs[0].run, runs[0].label if len(runs) > 1 else ""),
        **{f"{what}-{over}": curves(runs, what, over) for what in learned for over in ("time", "samples")},
        "throughput": throughput(runs),
        "blocked": blocked_shares(runs),
        "staleness": staleness_counts(runs),
        "consensus": consensus(runs),
        "faults": faults(runs),
    }


def faults(runs: Sequence[Shown]) -> Figure:
    """All events over time; a row for each worker, or for each run where there are several."""
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
    """The times at which workers were dead, up to the end where they did not come back."""
    died: dict[int | None, float] = {}
    spans = []
    for event in one.run.events:
        if event.what in DEATHS:
            died.setdefault(event.rank, event.time)
        elif event.what in ("joined", "resumed") and event.rank in died:
            spans.append((event.rank, died.pop(event.rank), event.time))
    spans += [(rank, since, one.run.last_s) for rank, since in died.items()]
    found: list[tuple[float | None, str | None]] = []
    for rank, *span in spans:
        found += [*((rounded(one.at(time)), f"worker {rank}") for time in span), (None, None)]
    return found


def event_marks(runs: Sequence[Shown]) -> list[Figure]:
    common = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "opacity": 0.45}
    marks = []
    for one in runs:
        own = one.colour if len(runs) > 1 else ""
        for event in (each for each in one.run.events if each.what in GRAVE and each.rank is not None):
            at, colour = rounded(one.at(event.time)), own or EVENTS[event.what].colour
            marks.append(common | {"x0": at, "x1": at, "line": {"width": 1, "dash": "dot", "color": colour}})
    return marks[:MOST_MARKS]


def curves(runs: Sequence[Shown], what: str, over: str) -> Figure:
    """`what`: loss, accuracy or a metric of the script's own; `over`: time or samples."""
    if over == "samples" and not all(one.series.samples[-1] > 0 for one in runs):
        over = "worker-steps"
    unit = UNITS[runs[0].unit_s] if over == "time" else over
    hover = f"%{{x:,.4~r}} {unit}<br>{what} %{{y:{'.1%' if what == 'accuracy' else '.4~g'}}}"
    data: list[Figure] = []
    for one in runs:
        trained = _training_loss(one, over, hover, len(runs) == 1) if what == "loss" else []
        points = []
        for each in one.run.evaluations:
            at = one.at(each["time"]) if over == "time" else each.get(over.replace("-", "_"))
            if at is not None and what in each:
                points.append((at, each[what]))
        data += trained
        if points:
            mode = "markers" if trained else "lines+markers"
            data.append(line(one, f"{hover} of the answer", *zip(*points, strict=True), mode=mode))
    said, yaxis = f"Measured: worker.record({what}=…).", {"title": {"text": what}, "tickformat": ",~r"}
    shapes = event_marks(runs) if over == "time" else []
    if what == "loss":
        said = "Line: mean of the workers’ training losses; dots: measured of the answer."
        yaxis = log_axis("loss", data)
    elif what == "accuracy":
        yaxis["tickformat"] = ".0%"
        targets = {at for one in runs if isinstance(at := one.run.about.get("target"), int | float)}
        dotted = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"color": GREY, "dash": "dot"}}
        shapes += [dotted | {"y0": at, "y1": at, "label": {"text": short(100 * at) + " %"}} for at in targets]
    xaxis = time_axis(runs) if over == "time" else axis(f"{over} of all workers", ",~s")
    title = f"{what[0].upper()}{what[1:]} over {over}"
    return figure(title, said, 320, data, xaxis=xaxis, yaxis=yaxis, shapes=shapes)


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


def speed(runs: Sequence[Shown]) -> Figure:
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
    whose = {escape(one.label): list(one.run.workers.values()) for one in runs}
    if len(runs) == 1:
        whose = {f"worker {rank}": [track] for rank, track in sorted(runs[0].run.workers.items())}
    shares = [blocked(tracks) for tracks in whose.values()]
    data = []
    for cause, (words, colour) in CAUSES.items():
        if any(y := [rounded(share[cause]) for share in shares]):
            hover = f"<b>%{{x}}</b><br>%{{y:.1%}} of its time {words}<extra></extra>"
            look = {"marker": {"color": colour}, "hovertemplate": hover}
            data.append({"type": "bar", "name": words, "x": list(whose), "y": y, **look})
    said = "Shares of the workers’ time. The rest is computing, and Freewheel’s own work."
    axes = {"xaxis": {"type": "category"}, "yaxis": axis("share of time", ".1%"), "barmode": "stack"}
    return figure("Waiting, by cause", said, 280, data, **axes, showlegend=True, legend=LEGEND)


def staleness_counts(runs: Sequence[Shown]) -> Figure:
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
    """How far apart replicas are; of several runs the first of three measures that is known."""
    data = []
    for one in runs:
        hover = f"%{{x:,.4~r}} {UNITS[one.unit_s]}<br>%{{y:.3~g}}"
        told, met = one.run.evaluations, one.series
        times = [one.at(each["time"]) for each in told]
        measured: list[tuple[str, Any, Any]] = [
            ("dot", times, [math.sqrt(max(0.0, each.get("consensus", 0.0))) for each in told]),
            ("dash", times, [each.get("discrepancy", 0.0) for each in told]),
            ("solid", met.time_s / one.unit_s, met.distance),
        ]
        found = []
        for dash, x, values in measured:
            # For a logarithmic axis: a distance of zero, and what rounding leaves of one, are gaps.
            least = 1e-4 * max((value for value in values if math.isfinite(value)), default=0.0)
            if any(y := [value if value > least else None for value in values]):
                found.append((dash, x, y))
        for dash, x, y in found if len(runs) == 1 else found[:1]:
            data.append(line(one, hover, x, y, line={"dash": dash}, mode="lines+markers", marker={"size": 3}))
    said = (
        "Dotted: root mean square from the mean. Dashed: the two most different replicas. Solid: to the last "
        "peer met, mean of the workers."
    )
    axes = {"xaxis": time_axis(runs), "yaxis": log_axis("distance of weights", data)}
    return figure("Consensus distance", said, 280, data, **axes)


@dataclass(frozen=True, order=True)
class Edge:
    """What two workers did with each other in the last seconds."""

    one: int
    other: int
    count: int
    distance: float | None


def edges(run: Run) -> tuple[list[Edge], float]:
    """Who met whom in the last seconds, or if nobody did in all of the run; how many seconds these are."""
    tracks = run.workers.values()
    often_s = max((every_s([sample["time"] for sample in track.recent]) for track in tracks), default=0.0)
    end = max((track.latest["time"] for track in tracks), default=0.0)
    # A simulation may be over in a second, and writes as many samples in it.
    for over_s in (min(LATELY_S, 10 * often_s) or LATELY_S, math.inf):
        if found := _met(run, end - over_s):
            return found, min(over_s, end - run.began_s)
    return [], 0.0


def _met(run: Run, since: float) -> list[Edge]:
    found: dict[tuple[int, int], Edge] = {}
    for rank, track in run.workers.items():
        told = [(one["time"], one["peers"]) for one in track.recent if isinstance(one.get("peers"), dict)]
        if not told or told[-1][0] < since - 1e-9:
            continue
        earlier = [peers for time, peers in told if time <= since + 1e-9] or [{}]
        for name, (times, distance) in told[-1][1].items():
            new = times - earlier[-1].get(name, (0, None))[0]
            one, other = sorted((rank, int(name)))
            known = found.get((one, other), Edge(one, other, 0, None))
            if new > 0:  # both sides count it; the one that has written last knows more
                far = known.distance if distance is None else distance
                found[one, other] = Edge(one, other, max(new, known.count), far)
    return sorted(found.values())


def graph(run: Run, label: str = "") -> Figure:
    met, span_s = edges(run)
    found = _few(met)
    known = {row.rank: row for row in rows(run)}
    ranks = sorted({*run.workers, *(rank for edge in found for rank in (edge.one, edge.other))})
    turn = 2 * math.pi / max(1, len(ranks))
    angles = {rank: at * turn for at, rank in enumerate(ranks)}
    places = {rank: (round(math.sin(at), 4), round(math.cos(at), 4)) for rank, at in angles.items()}
    workers = [known.get(rank, Row(rank, "joining")) for rank in ranks]
    title = f"Who met in the last {short(max(span_s, 0.01), 2)} s" if found else "Workers"
    said = "An edge for every two that exchanged or merged; colour: how far apart they were."
    if len(found) < len(met):
        said = f"{len(met):,} pairs exchanged or merged; of each worker the {EDGES_EACH} farthest are drawn."
    data = [*_edges(run, found, places), _nodes(workers, places)] if ranks else []
    bare = {"visible": False, "range": [-1.34, 1.34], "fixedrange": True, "constrain": "domain"}
    title += f" of {label}" if label else ""
    return figure(title, said, 430, data, xaxis=bare, yaxis={**bare, "scaleanchor": "x"})


def _few(met: list[Edge]) -> list[Edge]:
    """All edges; of too many only the farthest of each worker."""
    if len(met) <= MAX_EDGES:
        return met
    own = defaultdict[int, list[Edge]](list)
    for edge in sorted(met, key=lambda edge: -(edge.distance or 0.0)):
        own[edge.one].append(edge)
        own[edge.other].append(edge)
    return sorted({edge for farthest in own.values() for edge in farthest[:EDGES_EACH]})


def _edges(run: Run, found: list[Edge], places: dict[int, tuple[float, float]]) -> list[Figure]:
    """A trace for each shade, and the scale of colours, which ends at the run's largest distance."""
    known = [edge.distance for edge in found if edge.distance]
    largest = [life.get("discrepancy_max") or 0.0 for life in run.lives]
    most = math.log10(max([*known, *largest], default=0) or 1)
    shades = defaultdict[str, list[Edge]](list)
    for edge in found:
        height = (math.log10(edge.distance) - most) / DECADES + 1 if edge.distance else -1.0
        shade = min(len(DISTANCES) - 1, max(0, math.floor(height * len(DISTANCES))))
        shades[DISTANCES[shade] if edge.distance else GREY].append(edge)
    data = []
    for colour, some in shades.items():
        ends = [at for edge in some for at in (places[edge.one], places[edge.other], (None, None))]
        data.append(scatter("lines", ends, hoverinfo="skip", line={"color": colour}, opacity=0.8))
    if not known:
        return data
    parts, scale = len(DISTANCES), [most - DECADES, most]
    steps = [[at / parts, colour] for place, colour in enumerate(DISTANCES) for at in (place, place + 1)]
    title = {"text": "distance", "side": "top"}
    bar = {"title": title, "orientation": "h", "y": 0, "yanchor": "top", "thickness": 8, "len": 0.6}
    bar |= {"tickvals": scale, "ticktext": [short(10**end, 2) for end in scale]}
    marker = {"color": scale[:1], "colorscale": steps, "cmin": scale[0], "cmax": most, "showscale": True}
    # A trace without points carries the scale.
    return [*data, scatter("markers", [(None, None)], hoverinfo="skip", marker=marker | {"colorbar": bar})]


def _nodes(workers: list[Row], places: dict[int, tuple[float, float]]) -> Figure:
    said = [
        f"<b>worker {row.rank}</b>, {escape(row.state)}<br>{short(row.steps_per_s)} steps/s<br>"
        f"waiting {share(row.blocked_share)}<br>loss {short(row.loss, 4)}"
        for row in workers
    ]
    names = [f"<b>{row.rank}</b> {short(row.steps_per_s)}/s" for row in workers]
    text = {"text": names, "textposition": "top center", "textfont": {"size": 11}}
    hover = {"customdata": said, "hovertemplate": "%{customdata}<extra></extra>"}
    colours = [STATES.get(row.state, STATES["training"]) for row in workers]
    symbols = ["square" if row.state == "dead" else "circle" for row in workers]
    marker = {"size": 18, "opacity": 1, "color": colours, "symbol": symbols}
    return scatter("markers+text", places.values(), **text, **hover, marker=marker)
