"""The workers as a graph: who met whom in the last seconds, and how far apart they were."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from freewheel.numbers import short
from freewheel.records.run import Run
from freewheel.show.figures.palette import DISTANCES, STATES
from freewheel.show.series import Edge, edges

MOST, EACH = 256, 2
"""More edges than this are thinned out: so many of each worker are left."""


def graph(run: Run, label: str = "") -> dict[str, Any]:
    """Workers on a circle, an edge for every two that exchanged or merged in the last seconds."""
    met, span_s = edges(run)
    found = _few(met)
    ranks = sorted({*run.workers, *(rank for edge in found for rank in (edge.one, edge.other))})
    turn = 2 * math.pi / max(1, len(ranks))
    places = {
        rank: (round(math.sin(place * turn), 4), round(math.cos(place * turn), 4))
        for place, rank in enumerate(ranks)
    }
    if len(ranks) == 1:
        places = dict.fromkeys(ranks, (0.0, 0.0))
    least, most = _span([edge.distance for edge in found if edge.distance])
    data = [*_lines(found, places, least, most), *_middles(found, places, least, most)]
    data += _nodes(run, places) if ranks else []
    bare = {"visible": False, "range": [-1.22, 1.22], "fixedrange": True}
    many = len(found) > 3 * len(ranks)
    return {
        "title": ("Workers" if not found else f"Who met in the last {short(max(span_s, 0.01), 2)} s")
        + (f" of {label}" if label else ""),
        "said": _said(found, len(met)),
        "height": 430,
        "data": data,
        "layout": {
            "xaxis": {**bare, "constrain": "domain"},
            "yaxis": {**bare, "scaleanchor": "x", "constrain": "domain"},
            "hoverdistance": 12 if many else 24,
        },
        "empty": "No worker has written anything yet.",
    }


def _few(met: list[Edge]) -> list[Edge]:
    """All edges, or where those would only blacken the circle the farthest of each worker."""
    if len(met) <= MOST:
        return met
    of: dict[int, list[Edge]] = {}
    for edge in met:
        of.setdefault(edge.one, []).append(edge)
        of.setdefault(edge.other, []).append(edge)
    kept = {
        (edge.one, edge.other)
        for own in of.values()
        for edge in sorted(own, key=lambda edge: -(edge.distance or 0.0))[:EACH]
    }
    return [edge for edge in met if (edge.one, edge.other) in kept]


def _said(found: list[Edge], met: int) -> str:
    if not found:
        return "Nobody has exchanged or merged anything."
    who = "An edge for every two that exchanged or merged"
    if len(found) < met:
        who = f"{met:,} pairs exchanged or merged; of each worker the {EACH} farthest are drawn"
    if not any(edge.distance for edge in found):
        return f"{who}; how far apart they were is not known."
    return f"{who}; colour: how far apart they were."


def _span(distances: list[float]) -> tuple[float, float]:
    if not distances:
        return 0.0, 1.0
    least, most = math.log10(min(distances)), math.log10(max(distances))
    # Distances within a tenth of each other look the same.
    return (least, most) if most - least > 0.05 else (least - 0.15, most + 0.15)


def _shade(edge: Edge, least: float, most: float) -> int | None:
    if not edge.distance:
        return None
    share = (math.log10(edge.distance) - least) / (most - least)
    return min(len(DISTANCES) - 1, int(share * len(DISTANCES)))


def _lines(
    found: list[Edge], places: dict[int, tuple[float, float]], least: float, most: float
) -> list[dict[str, Any]]:
    """One trace for every shade: that draws faster than one for every edge."""
    shades: dict[int | None, list[Edge]] = {}
    for edge in found:
        shades.setdefault(_shade(edge, least, most), []).append(edge)
    many = len(found) > 64
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "hoverinfo": "skip",
            "x": [at for e in some for at in (places[e.one][0], places[e.other][0], None)],
            "y": [at for e in some for at in (places[e.one][1], places[e.other][1], None)],
            "line": {
                "color": DISTANCES[shade] if shade is not None else "rgba(128, 138, 150, 0.6)",
                "width": 1 if many else 2,
            },
            "opacity": 0.6 if many else 0.9,
        }
        for shade, some in sorted(shades.items(), key=lambda item: -1 if item[0] is None else item[0])
    ]


def _middles(
    found: list[Edge], places: dict[int, tuple[float, float]], least: float, most: float
) -> list[dict[str, Any]]:
    """What hovering over an edge tells, and the scale of its colour."""
    if not found:
        return []
    count = len(DISTANCES)
    scale = [[at / count, c] for place, c in enumerate(DISTANCES) for at in (place, place + 1)]
    text = [
        f"<b>{e.one} and {e.other}</b><br>{e.count} exchange{'' if e.count == 1 else 's'}<br>"
        + ("distance not known" if e.distance is None else f"distance {short(e.distance)}")
        for e in found
    ]
    # Off the middle: there all the edges through the centre of the circle meet.
    hovers = {
        "type": "scatter",
        "mode": "markers",
        "x": [round(0.62 * places[e.one][0] + 0.38 * places[e.other][0], 4) for e in found],
        "y": [round(0.62 * places[e.one][1] + 0.38 * places[e.other][1], 4) for e in found],
        "text": text,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 8, "opacity": 0},
    }
    if not any(edge.distance for edge in found):
        return [hovers]
    ticks = [least + (most - least) * share for share in (0.0, 0.5, 1.0)]
    bar = {
        "title": {"text": "distance between the two", "side": "top"},
        "orientation": "h",
        "y": 0,
        "yanchor": "top",
        "thickness": 8,
        "len": 0.6,
        "outlinewidth": 0,
        "tickvals": ticks,
        "ticktext": [short(10**tick, 2) for tick in ticks],
    }
    marker = {"color": [least], "colorscale": scale, "cmin": least, "cmax": most, "showscale": True}
    return [
        hovers,
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "hoverinfo": "skip"}
        | {"marker": marker | {"colorbar": bar}},
    ]


def _nodes(run: Run, places: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    states = {rank: run.state(rank) if rank in run.workers else "joining" for rank in places}
    size = 26 if len(places) <= 16 else 18 if len(places) <= 40 else 14
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": [at for at, _ in places.values()],
            "y": [at for _, at in places.values()],
            "text": [str(rank) for rank in places],
            "textposition": "middle center",
            "textfont": {"color": "#ffffff", "size": 12 if size > 20 else 10 if size > 14 else 8},
            "customdata": [_about(run, rank, states[rank]) for rank in places],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {
                "size": size,
                "opacity": 1,
                "color": [STATES.get(state, STATES["training"]) for state in states.values()],
                "symbol": ["square" if state == "dead" else "circle" for state in states.values()],
            },
        }
    ]


def _about(run: Run, rank: int, state: str) -> str:
    said = [f"<b>worker {rank}</b>, {escape(state)}"]
    track = run.workers.get(rank)
    if track is not None:
        rate, loss = track.rate("steps"), track.value("loss")
        said += [f"{short(rate)} steps/s"] if rate is not None else []
        said += [f"blocked {100 * float(track.latest.get('blocked_share') or 0):.1f} %"]
        said += [f"loss {short(loss, 4)}"] if loss is not None else []
    return "<br>".join(said)
