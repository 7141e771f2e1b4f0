"""What happened in a run, and when: who died, came, left or was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from freewheel.show.figures.common import Figure, Shown, numbers, rounded, time_axis
from freewheel.show.figures.palette import EVENTS, FAINT, GREY


def faults(runs: Sequence[Shown]) -> Figure:
    """Who died, came, left and was cut off, when; a row for each worker, or for each run."""
    rows: dict[str, None] = {}
    found: dict[str, list[tuple[float, str, str]]] = {}
    gone: list[tuple[float, float, str]] = []
    for one in runs:
        alone = len(runs) == 1
        died: dict[int | None, float] = {}
        for event in one.run.events:
            ranks = [rank for rank in (event.rank, event.peer) if rank is not None]
            whose = [f"worker {rank}" for rank in ranks] or ["all"] if alone else [escape(one.label)]
            rows |= dict.fromkeys(whose)
            at = one.at(event.time)
            by = ", ".join(str(who) for who in event.by[:6]) + (" …" if len(event.by) > 6 else "")
            text = f"{escape(event.link or event.text or event.what)}<br>noticed by {escape(by)}"
            found.setdefault(event.what, []).extend((at, row, text) for row in whose)
            if event.what in ("died", "failed"):
                died.setdefault(event.rank, at)
            elif event.what in ("joined", "resumed") and event.rank in died and alone:
                gone.append((died.pop(event.rank), at, f"worker {event.rank}"))
        if alone:
            end = one.at(one.run.last_s)
            for rank, at in died.items():
                if rank is not None:
                    gone.append((at, _back(one, rank, at) or end, f"worker {rank}"))
    data: list[dict[str, Any]] = []
    if gone:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "away",
                "hoverinfo": "skip",
                "x": [rounded(at) if at is not None else None for a, b, _ in gone for at in (a, b, None)],
                "y": [name for _, _, row in gone for name in (row, row, None)],
                "line": {"color": FAINT, "width": 7},
            }
        )
    for what, (symbol, colour) in EVENTS.items():
        if what in found:
            data.append(_marks(what, found[what], symbol, colour))
    data += [_marks(what, found[what], "circle", GREY) for what in found if what not in EVENTS]
    ordered = sorted(rows, key=_by_rank) if len(runs) == 1 else list(rows)
    xaxis = time_axis(runs)
    ends = [one.at(one.run.last_s) for one in runs if one.run.workers or one.run.events]
    xaxis["range"] = [0, 1.02 * (rounded(max(ends, default=1.0)) or 1.0)]
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


def _back(one: Shown, rank: int, died: float) -> float | None:
    """When a worker trained again that nobody has seen coming; None: it did not."""
    track = one.run.workers.get(rank)
    began = track.latest.get("began") if track is not None else None
    return one.at(began) if began is not None and one.at(began) > died else None


def _marks(what: str, points: list[tuple[float, str, str]], symbol: str, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(what),
        "x": numbers([at for at, _, _ in points]),
        "y": [row for _, row, _ in points],
        "text": [text for _, _, text in points],
        "hovertemplate": f"<b>{escape(what)}</b> %{{y}}<br>%{{text}}<extra></extra>",
        "marker": {"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2, "color": colour}},
    }


def _by_rank(row: str) -> tuple[int, str]:
    number = row.removeprefix("worker ")
    return (int(number) if number.isdigit() else -1, row)
