"""Runs played on one clock: who computes, who waits, who meets whom, what they have learned.

As a page of its own, or in the trace-event format, which https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from statistics import median
from typing import Any

from freewheel.errors import ConfigError
from freewheel.numbers import count
from freewheel.records.counters import UNITS, seconds
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.records.track import Tail
from freewheel.show.rates import result_of
from freewheel.show.shown import EVENTS, shown
from freewheel.show.tables import BASELINES, goal, race

DIGITS = 4
MARKS = {
    "died": "died",
    "failed": "died",
    "left": "left",
    "joined": "joined",
    "restarted": "joined",
    "cut": "cut",
    "slowed": "slowed",
}
ONCE_S = 1.0
"""What is told of a worker again within this time is the same thing."""
UNFINISHED = 1.5
"""A worker that ends so many of its longest gradients after the last one was in the middle of one."""


@dataclass(frozen=True)
class Played:
    """What a page, a story and a trace are made of."""

    ranks: list[int]
    spans: list[list[float]]
    """Of each worker: when each gradient began and ended."""
    lives: list[list[list[float]]]
    cut: list[list[float]]
    """Gradients that nobody has: place of the worker, begin, and when it died or the run ended."""
    exchanges: list[float]
    """Begin, length, and the places of both workers, one after the other."""
    merges: list[list[Any]]
    marks: list[list[Any]]
    gone: list[int]
    """Who had died or left when the run ended."""
    accuracy: list[list[float]]
    loss: list[list[float]]

    @property
    def seconds(self) -> float:
        """When the last gradient was there."""
        return max(max((lane[-1] for lane in self.spans if lane), default=0.0), 1e-3)

    @property
    def step_s(self) -> list[float]:
        """What a step takes each worker."""
        return [(lane[-1] - lane[0]) / (len(lane) / 2) for lane in self.spans if lane]

    @property
    def waiting(self) -> float:
        """The share of all workers' time in which no gradient was computed."""
        busy_s = sum(end - begin for lane in self.spans for begin, end in _pairs(lane))
        busy_s += sum(end - begin for _, begin, end in self.cut)
        there_s = sum(end - begin for lives in self.lives for begin, end in lives)
        return max(0.0, 1 - busy_s / there_s) if there_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {**vars(self), "seconds": self.seconds}


def played(run: Run) -> Played:
    """Read a run's timelines; ConfigError: it has none."""
    began_s, ranks = run.began_s, run.ranks
    place = {rank: at for at, rank in enumerate(ranks)}
    spans: list[list[float]] = [[] for _ in ranks]
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
    if not any(spans):
        raise ConfigError(
            f"{str(run.folder)!r} has no timeline: an earlier version wrote it, or it has too many workers. "
            "Run it again."
        )
    spans = [sorted(lane) for lane in spans]
    end_s = max(lane[-1] for lane in spans if lane)
    marks = _marks(run, place)
    lives = [_lives(run, rank, [m[0] for m in marks if m[1:3] == [place[rank], "died"]]) for rank in ranks]
    return Played(
        ranks=ranks,
        spans=spans,
        lives=lives,
        cut=_cut(spans, lives, marks, end_s),
        exchanges=_exchanges(met, place),
        merges=sorted(merges, key=lambda one: float(one[0])),
        marks=marks,
        gone=[at for at in range(len(ranks)) if _is_gone(at, lives[at], marks)],
        accuracy=_measured(run, "accuracy"),
        loss=_measured(run, "loss"),
    )


def waits(names: Sequence[str], runs: Sequence[Played]) -> str:
    """What share of its time each run's workers wait."""
    told = [
        f"{name}{'' if number else ' waits'} {100 * run.waiting:.0f} %{'' if number else ' of the time'}"
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    return ", ".join(told) + "."


def _measured(run: Run, what: str) -> list[list[float]]:
    found = [(one.time, getattr(one, what)) for one in run.evaluations]
    return [[_short(time_s - run.began_s), value] for time_s, value in found if value is not None]


def _marks(run: Run, place: dict[int, int]) -> list[list[Any]]:
    """When, to whom, what, and that in words; what several tell is told once."""
    found: list[list[Any]] = []
    late = {rank for rank, track in run.workers.items() if (track.began_s or 0.0) > run.began_s + ONCE_S}
    away = set(late)
    for event in run.events:
        if event.rank not in place or event.what not in MARKS:
            continue
        what, at_s = MARKS[event.what], max(0.0, event.time - run.began_s)
        if what == "joined" and event.rank not in away:  # whoever was cut off meets all others again
            continue
        if event.peer is None and what != "slowed":
            (away.discard if what == "joined" else away.add)(event.rank)
        told = [one for one in found if one[1:3] == [place[event.rank], what]]
        if not told or at_s - told[-1][0] > ONCE_S:
            found.append([_short(at_s), place[event.rank], what, f"{_words(event)} at {at_s:.2f} s"])
    return found


def _words(event: Event) -> str:
    if event.link:
        return event.link
    if event.text.startswith("heal"):
        return f"worker {event.rank} can be reached again"
    return f"worker {event.rank} {EVENTS[event.what].words}"


def _lives(run: Run, rank: int, deaths: list[float]) -> list[list[float]]:
    """When a worker was there, by its lives; one that was killed has not written its last moments."""
    track = run.workers.get(rank)
    if track is None:
        return []
    found: list[list[float]] = []
    for life in track.lives:
        from_s = life["began"] - run.began_s
        found.append([_short(from_s), _short(from_s + (life.get("elapsed_s") or 0.0))])
    for number, life_s in enumerate(found):
        next_s = found[number + 1][0] if number + 1 < len(found) else float("inf")
        life_s[1] = max([life_s[1], *(at_s for at_s in deaths if life_s[0] <= at_s <= next_s)])
    return found


def _is_gone(at: int, lives: list[list[float]], marks: list[list[Any]]) -> bool:
    ends = [mark[0] for mark in marks if mark[1] == at and mark[2] in ("died", "left")]
    return bool(ends) and (not lives or max(ends) >= lives[-1][0])


def _cut(
    spans: list[list[float]], lives: list[list[list[float]]], marks: list[list[Any]], run_s: float
) -> list[list[float]]:
    """What workers were computing when they died or the run ended: that is no waiting."""
    found: list[list[float]] = []
    for at, (lane, some) in enumerate(zip(spans, lives, strict=True)):
        pairs = _pairs(lane)
        gaps = [after[0] - one[1] for one, after in pairwise(pairs)]
        usual_s = median(gaps) if gaps else 0.0
        longest_s = max((end - begin for begin, end in pairs), default=0.0)
        for born_s, life_s in some:
            end_s = min(life_s, run_s)
            last_s = max((end for _, end in pairs if born_s <= end <= end_s), default=born_s)
            begin_s = last_s + usual_s
            died = any(mark[1:3] == [at, "died"] and abs(mark[0] - life_s) < ONCE_S for mark in marks)
            if begin_s < end_s and (died or end_s - last_s <= UNFINISHED * longest_s):
                found.append([at, _short(begin_s), _short(end_s)])
    return found


def _exchanges(met: dict[int, list[tuple[float, float, int]]], place: dict[int, int]) -> list[float]:
    """Begin, length, and both workers of each exchange, in order of time; the lower rank tells it."""
    found = [
        (_short(end_s - took_s), _short(took_s), place[rank], place[peer])
        for rank, some in met.items()
        for end_s, took_s, peer in some
        if peer in place and (rank < peer or peer not in met)
    ]
    return [number for one in sorted(found) for number in one]


def _pairs(lane: list[float]) -> list[tuple[float, float]]:
    return list(zip(lane[::2], lane[1::2], strict=True))


def _short(number: float) -> float:
    return round(number, DIGITS)


US = 1e6
APART = 1000
"""Exchanges overlap gradients, so they have a row of their own: the worker's number and this."""


def as_perfetto(runs: Sequence[Run]) -> str:
    """The text of a file; ConfigError: a run has no timeline."""
    found: list[dict[str, Any]] = []
    for pid, one in enumerate(shown(runs)):
        run = played(one.run)
        found += _names(run, pid, one.label)
        found += _work(run, pid)
        found += _meetings(run, pid)
        for at_s, worker, what, words in run.marks:
            found.append(_event("i", what, at_s, pid, worker, cat="fault", s="t", args={"what": words}))
        for measure, curve in (("accuracy", run.accuracy), ("loss", run.loss)):
            found += [_event("C", measure, at_s, pid, 0, args={measure: value}) for at_s, value in curve]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _names(run: Played, pid: int, name: str) -> list[dict[str, Any]]:
    """What rows are called, and in which order they stand."""
    found = [_event("M", "process_name", 0.0, pid, 0, args={"name": name})]
    for worker, rank in enumerate(run.ranks):
        for row, (tid, words) in enumerate(((worker, ""), (APART + worker, ": exchanges"))):
            named, place = {"name": f"worker {rank}{words}"}, {"sort_index": 2 * worker + row}
            found.append(_event("M", "thread_name", 0.0, pid, tid, args=named))
            found.append(_event("M", "thread_sort_index", 0.0, pid, tid, args=place))
    return found


def _work(run: Played, pid: int) -> list[dict[str, Any]]:
    found = []
    for worker, lane in enumerate(run.spans):
        for step, (begin_s, end_s) in enumerate(zip(lane[::2], lane[1::2], strict=True), 1):
            found.append(_slice("gradient", begin_s, end_s - begin_s, pid, worker, {"step": step}))
    for place, begin_s, end_s in run.cut:
        found.append(_slice("unfinished gradient", begin_s, end_s - begin_s, pid, int(place), {}))
    return found


def _meetings(run: Played, pid: int) -> list[dict[str, Any]]:
    found = []
    met = run.exchanges
    for at_s, took_s, one, other in zip(*(met[k::4] for k in range(4)), strict=True):
        for mine, theirs in ((int(one), int(other)), (int(other), int(one))):
            told = {"with": run.ranks[theirs]}
            found.append(_slice("exchange", at_s, took_s, pid, APART + mine, told))
    for at_s, took_s, members in run.merges:
        every = {"with": [run.ranks[one] for one in members]}
        found += [_slice("merge", at_s, took_s, pid, APART + one, every) for one in members]
    return found


def _slice(
    name: str, begin_s: float, took_s: float, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    dur = round(max(0.0, took_s) * US)
    return _event("X", name, begin_s, pid, tid, cat=name.split()[-1], dur=dur, args=args)


def _event(ph: str, name: str, at_s: float, pid: int, tid: int, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "name": name, "ts": round(max(0.0, at_s) * US), "pid": pid, "tid": tid, **more}


EXPLAINED = " (what DDP does)"
LABELS = {"ddp": "DDP", "allreduce": f"AllReduce{EXPLAINED}", "adpsgd": "AD-PSGD"}
"""What strategies are called."""
MOST = 4
"""Runs on one page."""

STEPS_SHOWN = 5
"""So many steps of the slowest worker fill the lanes."""


def html(runs: Sequence[Run], title: str) -> str:
    """The whole page, which needs nothing else."""
    all_played = [played(run) for run in runs]
    simulated = {run.clock == "virtual" for run in runs}
    about = "Simulated, in virtual time." if simulated == {True} else "Real processes."
    means = [mean_s for one in all_played for mean_s in one.step_s]
    results, named = [result_of(run) for run in runs], shown(runs)
    labels = [LABELS.get(one.label, one.label) for one in named]
    names = [label.removesuffix(EXPLAINED) for label in labels]
    told, waiting = race(names, results), waits(names, all_played)
    target, _ = goal(results)
    data = {
        "title": title,
        "story": told or waiting,
        "about": f"{waiting} {about}" if told else about,
        "measure": "accuracy" if all(one.accuracy for one in all_played) else "loss",
        "target": target,
        "goal": target and f"{100 * target:.4g} %",
        "window": STEPS_SHOWN * max(means),
        "usual": min(means),
        "speed": _speed(max(one.seconds for one in all_played)),
        "runs": [
            {**one.as_json(), "colour": run.colour, "short": name, "label": label}
            for one, run, name, label in zip(all_played, named, names, labels, strict=True)
        ],
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


def two(runs: Sequence[Run]) -> list[Run]:
    """Of many runs the baseline, and the one that ended first."""
    named = {str(run.about.get("strategy")): run for run in runs}
    baseline = next((named[one] for one in BASELINES if one in named), runs[0])
    others = [run for run in runs if run is not baseline]
    return [baseline, min(others, key=lambda run: run.ended_s - run.began_s)]


def title_of(runs: Sequence[Run]) -> str:
    """What runs are about, and who is slow in them."""
    names = {str(run.about.get("name", run.folder.name)) for run in runs}
    if len(names) > 1:
        return f"{len(runs)} runs"
    name = names.pop()
    task = name.partition(":")[0] if "=" in name else name  # a built-in one may have settings
    results = [result_of(run) for run in runs]
    slow = [one.scenario.get("slow") or one.scenario.get("compute", {}).get("slow", {}) for one in results]
    if len({one.workers for one in results}) > 1 or any(one != slow[0] for one in slow):
        return task
    who = [f"worker {rank} is {float(factor):g}× slower" for rank, factor in slow[0].items()]
    return ", ".join([f"{task} on {count(results[0].workers, 'worker')}", *who])


def _speed(length_s: float) -> float:
    """At which all is seen within half a minute, about."""
    return next((speed for speed in (0.1, 0.25, 0.5, 1, 2, 5, 10) if length_s / speed <= 30), 25)
