"""The workers as a graph: who met whom in the last seconds, and how far apart they were."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from html import escape

from freewheel.numbers import share, short
from freewheel.records.run import Run
from freewheel.show.figures.common import Figure, figure, scatter
from freewheel.show.rates import LATELY_S, every_s
from freewheel.show.rows import Row, rows
from freewheel.show.shown import DISTANCES, GREY, STATES

DECADES = 2.0
"""From the largest distance down to a hundredth of it edges have colours of their own."""
MAX_EDGES, EDGES_EACH = 256, 2
"""More edges than this are thinned out: so many of each worker are left."""

Places = dict[int, tuple[float, float]]


@dataclass(frozen=True, order=True)
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
        told = [
            (sample["time"], sample["peers"])
            for sample in track.recent
            if isinstance(sample.get("peers"), dict)
        ]
        earlier = [peers for time, peers in told if time <= since + 1e-9]
        if not told or told[-1][0] < since - 1e-9:
            continue
        for name, (times, distance) in told[-1][1].items():
            new = times - (earlier[-1].get(name, (0, None))[0] if earlier else 0)
            one, other = sorted((rank, int(name)))
            known = found.get((one, other), Edge(one, other, 0, None))
            if new > 0:  # both sides count it; the one that has written last knows more
                far = known.distance if distance is None else distance
                found[one, other] = Edge(one, other, max(new, known.count), far)
    return sorted(found.values())


def graph(run: Run, label: str = "") -> Figure:
    """Workers on a circle, an edge for every two that exchanged or merged in the last seconds."""
    met, span_s = edges(run)
    found = _few(met)
    known = {row.rank: row for row in rows(run)}
    ranks = sorted({*run.workers, *(rank for edge in found for rank in (edge.one, edge.other))})
    turn = 2 * math.pi / max(1, len(ranks))
    places = {
        rank: (round(math.sin(at * turn), 4), round(math.cos(at * turn), 4)) for at, rank in enumerate(ranks)
    }
    workers = [known.get(rank, Row(rank, "joining")) for rank in ranks]
    title = f"Who met in the last {short(max(span_s, 0.01), 2)} s" if found else "Workers"
    said = "An edge for every two that exchanged or merged; colour: how far apart they were."
    if len(found) < len(met):
        said = f"{len(met):,} pairs exchanged or merged; of each worker the {EDGES_EACH} farthest are drawn."
    bare = {"visible": False, "range": [-1.34, 1.34], "fixedrange": True, "constrain": "domain"}
    return figure(
        f"{title} of {label}" if label else title,
        said,
        430,
        [*_edges(run, found, places), _nodes(workers, places)] if ranks else [],
        xaxis=bare,
        yaxis={**bare, "scaleanchor": "x"},
    )


def _few(met: list[Edge]) -> list[Edge]:
    """All edges, or where those would only blacken the circle the farthest of each worker."""
    if len(met) <= MAX_EDGES:
        return met
    own = defaultdict[int, list[Edge]](list)
    for edge in sorted(met, key=lambda edge: -(edge.distance or 0.0)):
        own[edge.one].append(edge)
        own[edge.other].append(edge)
    return sorted({edge for farthest in own.values() for edge in farthest[:EDGES_EACH]})


def _edges(run: Run, found: list[Edge], places: Places) -> list[Figure]:
    """One trace for every shade, which draws faster than one for every edge; and the scale of colours.

    The scale ends at the largest distance of the whole run: a colour means the same from first to last.
    """
    known = [edge.distance for edge in found if edge.distance]
    most = math.log10(
        max([*known, *(life.get("discrepancy_max") or 0.0 for life in run.lives)], default=0) or 1
    )
    shades = defaultdict[str, list[Edge]](list)
    for edge in found:
        height = (math.log10(edge.distance) - most) / DECADES + 1 if edge.distance else -1.0
        shade = min(len(DISTANCES) - 1, max(0, math.floor(height * len(DISTANCES))))
        shades[DISTANCES[shade] if edge.distance else GREY].append(edge)
    data = []
    for colour, some in shades.items():
        ends = [at for edge in some for at in (places[edge.one], places[edge.other], (None, None))]
        data.append(scatter("lines", ends, hoverinfo="skip", line={"color": colour}, opacity=0.8))
    return [*data, _scale(most)] if known else data


def _scale(most: float) -> Figure:
    """A trace without points that carries the scale of the colours."""
    parts, ends = len(DISTANCES), [most - DECADES, most]
    steps = [[at / parts, colour] for place, colour in enumerate(DISTANCES) for at in (place, place + 1)]
    title = {"text": "distance", "side": "top"}
    bar = {"title": title, "orientation": "h", "y": 0, "yanchor": "top", "thickness": 8, "len": 0.6}
    bar |= {"tickvals": ends, "ticktext": [short(10**end, 2) for end in ends]}
    marker = {"color": ends[:1], "colorscale": steps, "cmin": ends[0], "cmax": most, "showscale": True}
    return scatter("markers", [(None, None)], hoverinfo="skip", marker=marker | {"colorbar": bar})


def _nodes(workers: list[Row], places: Places) -> Figure:
    """Each worker, and how fast it steps beside it: who is slow can be seen."""
    said = [
        f"<b>worker {row.rank}</b>, {escape(row.state)}<br>{short(row.steps_per_s)} steps/s<br>"
        f"waiting {share(row.blocked_share)}<br>loss {short(row.loss, 4)}"
        for row in workers
    ]
    return scatter(
        "markers+text",
        places.values(),
        text=[f"<b>{row.rank}</b> {short(row.steps_per_s)}/s" for row in workers],
        textposition="top center",
        textfont={"size": 11},
        customdata=said,
        hovertemplate="%{customdata}<extra></extra>",
        marker={
            "size": 18,
            "opacity": 1,
            "color": [STATES.get(row.state, STATES["training"]) for row in workers],
            "symbol": ["square" if row.state == "dead" else "circle" for row in workers],
        },
    )
