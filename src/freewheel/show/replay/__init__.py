"""A page that plays runs on one clock: who computes, who waits, who meets whom, what they have learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.run import Run
from freewheel.records.tail import Tail
from freewheel.records.timeline import UNITS, seconds
from freewheel.show.versus import BASELINES

LABELS = {"ddp": "DDP", "allreduce": "AllReduce (what DDP does)", "adpsgd": "AD-PSGD"}
BASELINE = "#c2503b"
COLOURS = ("#2f7ef5", "#16996a", "#9254de", "#b7791f")
STEPS_SHOWN = 5
"""So many steps of the slowest worker fill the lanes."""
DIGITS = 4
MARKS = {"died": "died", "failed": "died", "left": "left", "joined": "joined", "restarted": "joined"}


def html(runs: Sequence[Run], title: str) -> str:
    """The whole page, which needs nothing else."""
    free = iter(COLOURS)
    played = [
        _played(run, BASELINE if run.about.get("strategy") in BASELINES else next(free)) for run in runs
    ]
    simulated = {run.clock == "virtual" for run in runs}
    about = "Simulated, in virtual time." if simulated == {True} else "Real processes."
    length_s = max(one["seconds"] for one in played)
    data = {
        "title": title,
        "about": about,
        "target": next((run.about["target"] for run in runs if run.about.get("target")), None),
        "window": STEPS_SHOWN * max(_longest_s(one) for one in played),
        "speed": _speed(length_s),
        "runs": played,
    }
    page = files(__package__)
    part = {name: (page / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    inside = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{part['css']}</style></head><body>{part['html']}"
        f'<script id="data" type="application/json">{inside}</script>'
        f"<script>{part['js']}</script></body></html>\n"
    )


def _played(run: Run, colour: str) -> dict[str, Any]:
    """One run as the page plays it: seconds since it began, rounded."""
    began_s, ranks = run.began_s, run.ranks
    place = {rank: at for at, rank in enumerate(ranks)}
    spans: list[list[float]] = [[] for _ in ranks]
    lives: list[list[list[float]]] = [[] for _ in ranks]
    met: dict[int, list[tuple[float, float, int]]] = {}
    merges: list[list[Any]] = []
    for rank in ranks:
        for line in Tail(run.folder / f"timeline-{rank}.jsonl").read():
            moments = seconds(line, line["gradients"])
            spans[place[rank]] += [_short(at_s - began_s) for at_s in moments]
            numbers = line["exchanges"]
            ends = seconds(line, numbers[::3])
            for end_s, took, peer in zip(ends, numbers[1::3], numbers[2::3], strict=True):
                met.setdefault(rank, []).append((end_s - began_s, took / UNITS, peer))
            for at, took, peers in line["merges"]:
                if all(rank < peer for peer in peers):  # one of them tells it
                    (end_s,) = seconds(line, [at])
                    members = [place[one] for one in sorted({rank, *peers}) if one in place]
                    merges.append([_short(end_s - began_s - took / UNITS), _short(took / UNITS), members])
        for life in run.workers[rank].lives if rank in run.workers else ():
            from_s = life["began"] - began_s
            lives[place[rank]].append([_short(from_s), _short(from_s + (life.get("elapsed_s") or 0.0))])
    if not any(spans):
        raise ConfigError(
            f"{str(run.folder)!r} has no timeline: an earlier version wrote it, or it has too many workers. "
            "Run it again."
        )
    return {
        "label": LABELS.get(run.about.get("strategy", ""), run.about.get("strategy", run.folder.name)),
        "colour": colour,
        "seconds": max(max((lane[-1] for lane in spans if lane), default=0.0), 1e-3),
        "spans": [sorted(lane) for lane in spans],
        "lives": lives,
        "exchanges": _exchanges(met, place),
        "merges": sorted(merges, key=lambda one: float(one[0])),
        "marks": [
            [_short(event.time - began_s), place[event.rank], MARKS[event.what]]
            for event in run.events
            if event.rank in place and event.what in MARKS
        ],
        "accuracy": [
            [_short(one.time - began_s), one.accuracy] for one in run.evaluations if one.accuracy is not None
        ],
    }


def _exchanges(met: dict[int, list[tuple[float, float, int]]], place: dict[int, int]) -> list[float]:
    """Begin, length, and both workers of each exchange, in order of time; the lower rank tells it."""
    found = [
        (_short(end_s - took_s), _short(took_s), place[rank], place[peer])
        for rank, some in met.items()
        for end_s, took_s, peer in some
        if peer in place and (rank < peer or peer not in met)
    ]
    return [number for one in sorted(found) for number in one]


def _longest_s(played: dict[str, Any]) -> float:
    """What a step takes the slowest worker."""
    means = [(lane[-1] - lane[0]) / (len(lane) / 2) for lane in played["spans"] if lane]
    return float(max(means))


def _speed(length_s: float) -> float:
    """At which all is seen within half a minute, about."""
    return next((speed for speed in (0.1, 0.25, 0.5, 1, 2, 5, 10) if length_s / speed <= 30), 25)


def _short(number: float) -> float:
    return round(number, DIGITS)
