"""The workers as a graph: who met whom in the last seconds, and how far apart they were."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from html import escape

from freewheel.numbers import count, share, short
from freewheel.records.run import Run
from freewheel.show.figures.common import Figure, figure, scatter
from freewheel.show.rates import LATELY_S, every_s
from freewheel.show.rows import Row, rows
from freewheel.show.shown import DISTANCES, GREY, STATES

DECADES = 2.0
"""From the largest distance down to a hundredth of it edges have colours of their own."""
MAX_RATES = 24
"""Of more workers than this no rates are written beside the nodes."""
MAX_EDGES, EDGES_EACH = 256, 2
"""More edges than this are thinned out: so many of each worker are left."""


@dataclass(frozen=True)
class Edge:
    """What two workers did with each other in the last seconds."""

    one: int
    other: int
    count: int
    distance: float | None


def edges(run: Run) -> tuple[list[Edge], float]:
    """Who exchanged or merged with whom in the last seconds of a run, and in how many seconds that was.

    Where nobody did, which is so where merges are rare, in all of the run.
    """
    tracks = [track for track in run.workers.values() if track.latest]
    often_s = [every_s([sample["time"] for sample in track.recent]) for track in tracks]
    # A simulation may be over in a second, and writes as many samples in it.
    over_s = min(LATELY_S, 10 * max(often_s, default=0.0)) or LATELY_S
    found, span_s = _met(run, over_s)
    return (found, span_s) if found else _met(run, math.inf)


def _met(run: Run, over_s: float) -> tuple[list[Edge], float]:
    end = max((track.latest["time"] for track in run.workers.values()), default=0.0)
    span = 0.0
    found: dict[tuple[int, int], tuple[int, float | None]] = {}
    for rank, track in run.workers.items():
        recent = [sample for sample in track.recent if isinstance(sample.get("peers"), dict)]
        if not recent or recent[-1]["time"] < end - over_s - 1e-9:
            continue
        earlier = [sample for sample in recent[:-1] if sample["time"] <= end - over_s + 1e-9]
        full = len(recent) == track.recent.maxlen and math.isfinite(over_s)
        base = earlier[-1] if earlier else recent[0] if full else None
        before = base["peers"] if base else {}
        span = max(span, end - (base["time"] if base else recent[-1].get("began") or run.began_s))
        for name, (times, distance) in recent[-1]["peers"].items():
            new = times - before.get(name, (0, None))[0]
            if new > 0:
                pair = (min(rank, int(name)), max(rank, int(name)))
                most, known = found.get(pair, (0, None))
                # Both sides count it; the one that has written last knows more.
                found[pair] = (max(new, most), distance if distance is not None else known)
    return [Edge(*pair, *what) for pair, what in sorted(found.items())], span


def graph(run: Run, label: str = "") -> Figure:
    """Workers on a circle, an edge for every two that exchanged or merged in the last seconds."""
    met, span_s = edges(run)
    found = _few(met)
    ranks = sorted({*run.workers, *(rank for edge in found for rank in (edge.one, edge.other))})
    turn, radius = 2 * math.pi / max(1, len(ranks)), 0.0 if len(ranks) == 1 else 1.0
    places = {
        rank: (round(radius * math.sin(place * turn), 4), round(radius * math.cos(place * turn), 4))
        for place, rank in enumerate(ranks)
    }
    known = {row.rank: row for row in rows(run)}
    workers = [known.get(rank, Row(rank, "joining")) for rank in ranks]
    data = _edges(run, found, places)
    data += [*_rates(workers, places), _nodes(workers, places)] if ranks else []
    title = f"Who met in the last {short(max(span_s, 0.01), 2)} s" if found else "Workers"
    bare = {"visible": False, "range": [-1.34, 1.34], "fixedrange": True, "constrain": "domain"}
    return figure(
        title + (f" of {label}" if label else ""),
        _said(found, len(met)),
        430,
        data,
        "No worker has written anything yet.",
        xaxis=bare,
        yaxis={**bare, "scaleanchor": "x"},
        hoverdistance=12 if len(found) > 3 * len(ranks) else 24,
    )


def _few(met: list[Edge]) -> list[Edge]:
    """All edges, or where those would only blacken the circle the farthest of each worker."""
    if len(met) <= MAX_EDGES:
        return met
    own = defaultdict[int, list[Edge]](list)
    for edge in sorted(met, key=lambda edge: -(edge.distance or 0.0)):
        own[edge.one].append(edge)
        own[edge.other].append(edge)
    kept = {edge for farthest in own.values() for edge in farthest[:EDGES_EACH]}
    return [edge for edge in met if edge in kept]


def _said(found: list[Edge], met: int) -> str:
    if not found:
        return "Nobody has exchanged or merged anything."
    who = "An edge for every two that exchanged or merged"
    if len(found) < met:
        who = f"{met:,} pairs exchanged or merged; of each worker the {EDGES_EACH} farthest are drawn"
    known = any(edge.distance for edge in found)
    return f"{who}; {'colour: how far apart they were' if known else 'how far apart they were is not known'}."


def _edges(run: Run, found: list[Edge], places: dict[int, tuple[float, float]]) -> list[Figure]:
    """One trace for every shade, which draws faster than one for every edge; hovers; the scale of colours.

    The scale ends at the largest distance of the whole run: a colour means the same from first to last.
    """
    known = [edge.distance for edge in found if edge.distance]
    ever = [life.get("discrepancy_max") or 0.0 for life in run.lives]
    most = math.log10(max([*known, *ever], default=1.0) or 1.0)
    least = most - DECADES
    shades = defaultdict[int, list[Edge]](list)
    for edge in found:
        height = (math.log10(edge.distance) - least) / (most - least) if edge.distance else -1.0
        shades[max(-1, min(len(DISTANCES) - 1, math.floor(height * len(DISTANCES))))].append(edge)
    thin = len(found) > 64
    data = []
    for shade, some in sorted(shades.items()):
        ends = [at for edge in some for at in (places[edge.one], places[edge.other], (None, None))]
        drawn = {"color": DISTANCES[shade] if shade >= 0 else GREY, "width": 1 if thin else 2}
        data.append(scatter("lines", ends, hoverinfo="skip", line=drawn, opacity=0.6 if thin else 0.9))
    if found:
        data.append(_hovers(found, places))
    return data + ([_scale(least, most)] if known else [])


def _hovers(found: list[Edge], places: dict[int, tuple[float, float]]) -> Figure:
    """What hovering over an edge tells; off its middle, where all edges through the centre meet."""

    def far(edge: Edge) -> str:
        return "distance not known" if edge.distance is None else f"distance {short(edge.distance)}"

    def between(edge: Edge, axis: int) -> float:
        return round(0.62 * places[edge.one][axis] + 0.38 * places[edge.other][axis], 4)

    return scatter(
        "markers",
        [(between(e, 0), between(e, 1)) for e in found],
        text=[f"<b>{e.one} and {e.other}</b><br>{count(e.count, 'exchange')}<br>{far(e)}" for e in found],
        hovertemplate="%{text}<extra></extra>",
        marker={"size": 8, "opacity": 0},
    )


def _scale(least: float, most: float) -> Figure:
    """A trace without points that carries the scale of the colours."""
    parts = len(DISTANCES)
    steps = [[at / parts, colour] for place, colour in enumerate(DISTANCES) for at in (place, place + 1)]
    ticks = [least + (most - least) * part for part in (0.0, 0.5, 1.0)]
    bar = {
        "title": {"text": "distance between the two", "side": "top"},
        "orientation": "h", "y": 0, "yanchor": "top", "thickness": 8, "len": 0.6, "outlinewidth": 0,
        "tickvals": ticks, "ticktext": [short(10**tick, 2) for tick in ticks],
    }  # fmt: skip
    marker = {"color": [least], "colorscale": steps, "cmin": least, "cmax": most, "showscale": True}
    return scatter("markers", [(None, None)], hoverinfo="skip", marker=marker | {"colorbar": bar})


def _rates(workers: list[Row], places: dict[int, tuple[float, float]]) -> list[Figure]:
    """How fast each worker steps, outside the circle: who is slow can be seen."""
    known = [(places[row.rank or 0], row.steps_per_s) for row in workers if row.steps_per_s is not None]
    if len(workers) > MAX_RATES:
        return []
    far = 1.24 if len(places) > 1 else 0.0
    beside = [(round(far * x, 4), round(far * y - (0.0 if far else 0.2), 4)) for (x, y), _ in known]
    said, small = [f"{short(value)}/s" for _, value in known], {"size": 10, "color": GREY}
    none = {"size": 1, "opacity": 0}
    return [scatter("text", beside, hoverinfo="skip", text=said, textfont=small, marker=none)]


def _nodes(workers: list[Row], places: dict[int, tuple[float, float]]) -> Figure:
    size, letters = (26, 12) if len(places) <= 16 else (18, 10) if len(places) <= 40 else (14, 8)
    colours = [STATES.get(row.state, STATES["training"]) for row in workers]
    symbols = ["square" if row.state == "dead" else "circle" for row in workers]
    return scatter(
        "markers+text",
        places.values(),
        text=[str(rank) for rank in places],
        textposition="middle center",
        textfont={"color": "#ffffff", "size": letters},
        customdata=[_about(row) for row in workers],
        hovertemplate="%{customdata}<extra></extra>",
        marker={"size": size, "opacity": 1, "color": colours, "symbol": symbols},
    )


def _about(row: Row) -> str:
    said = [f"<b>worker {row.rank}</b>, {escape(row.state)}"]
    said += [f"{short(row.steps_per_s)} steps/s"] if row.steps_per_s is not None else []
    said += [f"waiting {share(row.blocked_share)}"] if row.blocked_share is not None else []
    return "<br>".join([*said, *([f"loss {short(row.loss, 4)}"] if row.loss is not None else [])])
