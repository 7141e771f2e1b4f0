"""What happened in a run, and when: who died, came, left or was cut off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from freewheel.show.figures.common import LEGEND, Figure, figure, rounded, scatter, time_axis
from freewheel.show.shown import EVENTS, FAINT, GRAVE, GREY, Kind, Shown

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
