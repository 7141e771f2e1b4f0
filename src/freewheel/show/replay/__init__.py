"""Runs played on one clock: who computes, who waits, who meets whom, what they have learned.

As a page of its own, or in the trace-event format, which https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from freewheel.errors import ConfigError
from freewheel.numbers import count
from freewheel.records.counters import UNITS
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.records.track import Tail
from freewheel.show.figures.common import page
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


class Played:
    """One run as a page plays it: seconds since it began, one lane for each worker.

    Refuses a run without timelines. What has no underscore is what the page gets.
    """

    def __init__(self, run: Run) -> None:
        self._run, self.ranks = run, run.ranks
        self._place = {rank: at for at, rank in enumerate(run.ranks)}
        self.spans: list[list[float]] = [[] for _ in run.ranks]
        """Of each worker: when each gradient began and ended."""
        self.merges: list[list[Any]] = []
        self.exchanges = self._read(run.began_s)
        """Begin, length, and the places of both workers, one after the other."""
        if not any(self.spans):
            raise ConfigError(
                f"{str(run.folder)!r} has no timeline: an earlier version wrote it, or it has too many "
                "workers. Run it again."
            )
        self.spans = [sorted(lane) for lane in self.spans]
        self.merges.sort(key=lambda one: float(one[0]))
        self.seconds = max(max(lane[-1] for lane in self.spans if lane), 1e-3)
        """When the last gradient was there."""
        self.marks = self._marks()
        """When, to whom, what, and that in words."""
        self.lives = [self._lives(rank) for rank in run.ranks]
        self.cut = self._cut()
        """Gradients that nobody has: place of the worker, begin, and when it died or the run ended."""
        self.gone = [at for at in range(len(run.ranks)) if self._is_gone(at)]
        """Who had died or left when the run ended."""
        self.accuracy, self.loss = self._measured("accuracy"), self._measured("loss")

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
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _read(self, began_s: float) -> list[float]:
        """Take gradients and merges from the timelines; the exchanges, of which the lower rank tells."""
        met: dict[int, list[tuple[float, float, int]]] = {}
        for rank, own in zip(self.ranks, self.spans, strict=True):
            for line in Tail(self._run.folder / f"timeline-{rank}.jsonl").read():
                from_s, numbers = line["from"] - began_s, line["exchanges"]
                own += [_short(from_s + at / UNITS) for at in line["gradients"]]
                for at, took, peer in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
                    met.setdefault(rank, []).append((from_s + (at - took) / UNITS, took / UNITS, peer))
                for at, took, peers in line["merges"]:
                    if all(rank < peer for peer in peers):  # one of them tells it
                        members = [self._place[one] for one in sorted({rank, *peers}) if one in self._place]
                        begin_s = from_s + (at - took) / UNITS
                        self.merges.append([_short(begin_s), _short(took / UNITS), members])
        found = [
            (_short(begin_s), _short(took_s), self._place[rank], self._place[peer])
            for rank, some in met.items()
            for begin_s, took_s, peer in some
            if peer in self._place and (rank < peer or peer not in met)
        ]
        return [number for one in sorted(found) for number in one]

    def _measured(self, what: str) -> list[list[float]]:
        found = [(one.time, getattr(one, what)) for one in self._run.evaluations]
        return [[_short(time_s - self._run.began_s), value] for time_s, value in found if value is not None]

    def _marks(self) -> list[list[Any]]:
        """What happened to workers; what several tell is told once."""
        run, found = self._run, list[list[Any]]()
        away = {rank for rank, one in run.workers.items() if (one.began_s or 0.0) > run.began_s + ONCE_S}
        for event in run.events:
            if event.rank not in self._place or event.what not in MARKS:
                continue
            what, at_s, whose = MARKS[event.what], max(0.0, event.time - run.began_s), self._place[event.rank]
            if what == "joined" and event.rank not in away:  # whoever was cut off meets all others again
                continue
            if event.peer is None and what != "slowed":
                (away.discard if what == "joined" else away.add)(event.rank)
            told = [one for one in found if one[1:3] == [whose, what]]
            if not told or at_s - told[-1][0] > ONCE_S:
                found.append([_short(at_s), whose, what, f"{_words(event)} at {at_s:.2f} s"])
        return found

    def _lives(self, rank: int) -> list[list[float]]:
        """When a worker was there, by its lives; one that was killed has not written its last moments."""
        track = self._run.workers.get(rank)
        begins = [(life["began"] - self._run.began_s, life) for life in track.lives] if track else []
        found = [[_short(at_s), _short(at_s + (life.get("elapsed_s") or 0.0))] for at_s, life in begins]
        deaths = [mark[0] for mark in self.marks if mark[1:3] == [self._place[rank], "died"]]
        for life_s, next_s in zip(found, [*(later[0] for later in found[1:]), float("inf")], strict=False):
            life_s[1] = max([life_s[1], *(at_s for at_s in deaths if life_s[0] <= at_s <= next_s)])
        return found

    def _is_gone(self, at: int) -> bool:
        ends = [mark[0] for mark in self.marks if mark[1] == at and mark[2] in ("died", "left")]
        return bool(ends) and (not self.lives[at] or max(ends) >= self.lives[at][-1][0])

    def _cut(self) -> list[list[float]]:
        """What workers were computing when they died or the run ended: that is no waiting."""
        found: list[list[float]] = []
        run_s = max(lane[-1] for lane in self.spans if lane)
        for at, (lane, some) in enumerate(zip(self.spans, self.lives, strict=True)):
            pairs = _pairs(lane)
            gaps = [after[0] - one[1] for one, after in pairwise(pairs)]
            usual_s = median(gaps) if gaps else 0.0
            longest_s = max((end - begin for begin, end in pairs), default=0.0)
            deaths = [mark[0] for mark in self.marks if mark[1:3] == [at, "died"]]
            for born_s, life_s in some:
                end_s = min(life_s, run_s)
                last_s = max((end for _, end in pairs if born_s <= end <= end_s), default=born_s)
                begin_s, died = last_s + usual_s, any(abs(death - life_s) < ONCE_S for death in deaths)
                if begin_s < end_s and (died or end_s - last_s <= UNFINISHED * longest_s):
                    found.append([at, _short(begin_s), _short(end_s)])
        return found


def _words(event: Event) -> str:
    if event.link:
        return event.link
    if event.text.startswith("heal"):
        return f"worker {event.rank} can be reached again"
    return f"worker {event.rank} {EVENTS[event.what].words}"


def _pairs(lane: list[float]) -> list[tuple[float, float]]:
    return list(zip(lane[::2], lane[1::2], strict=True))


def _short(number: float) -> float:
    return round(number, DIGITS)


# -- a trace --


APART = 1000
"""Exchanges overlap gradients, so they have a row of their own: the worker's number and this."""


def as_perfetto(runs: Sequence[Run]) -> str:
    """The text of a file; ConfigError: a run has no timeline."""
    found = [one for pid, run in enumerate(shown(runs)) for one in _trace(Played(run.run), pid, run.label)]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _trace(run: Played, pid: int, label: str) -> Iterator[dict[str, Any]]:
    """A run is a process, a worker a thread of it; times are microseconds since the run began.

    Gradients, exchanges and merges are complete events (X), what happened to workers instants (i), accuracy
    and loss counters (C); what rows are called, and in which order they stand, is metadata (M).
    """

    def event(ph: str, name: str, at_s: float, tid: int, **more: Any) -> dict[str, Any]:
        return {"ph": ph, "name": name, "ts": round(max(0.0, at_s) * 1e6), "pid": pid, "tid": tid, **more}

    def part(name: str, begin_s: float, took_s: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        dur = round(max(0.0, took_s) * 1e6)
        return event("X", name, begin_s, tid, cat=name.split()[-1], dur=dur, args=args)

    yield event("M", "process_name", 0.0, 0, args={"name": label})
    for worker, rank in enumerate(run.ranks):
        for row, (tid, words) in enumerate(((worker, ""), (APART + worker, ": exchanges"))):
            yield event("M", "thread_name", 0.0, tid, args={"name": f"worker {rank}{words}"})
            yield event("M", "thread_sort_index", 0.0, tid, args={"sort_index": 2 * worker + row})
    for worker, lane in enumerate(run.spans):
        for step, (begin_s, end_s) in enumerate(_pairs(lane), 1):
            yield part("gradient", begin_s, end_s - begin_s, worker, {"step": step})
    for place, begin_s, end_s in run.cut:
        yield part("unfinished gradient", begin_s, end_s - begin_s, int(place), {})
    for at_s, took_s, one, other in zip(*(run.exchanges[k::4] for k in range(4)), strict=True):
        for mine, theirs in ((int(one), int(other)), (int(other), int(one))):
            yield part("exchange", at_s, took_s, APART + mine, {"with": run.ranks[theirs]})
    for at_s, took_s, members in run.merges:
        for worker in members:
            yield part("merge", at_s, took_s, APART + worker, {"with": [run.ranks[one] for one in members]})
    for at_s, worker, what, words in run.marks:
        yield event("i", what, at_s, worker, cat="fault", s="t", args={"what": words})
    for measure, curve in (("accuracy", run.accuracy), ("loss", run.loss)):
        for at_s, value in curve:
            yield event("C", measure, at_s, 0, args={measure: value})


# -- a page --


EXPLAINED = " (what DDP does)"
LABELS = {"ddp": "DDP", "allreduce": f"AllReduce{EXPLAINED}", "adpsgd": "AD-PSGD"}
"""What strategies are called."""
MOST = 4
"""Runs on one page."""

STEPS_SHOWN = 5
"""So many steps of the slowest worker fill the lanes."""


def html(runs: Sequence[Run], title: str) -> str:
    """The whole page, which needs nothing else."""
    all_played = [Played(run) for run in runs]
    simulated = {run.clock == "virtual" for run in runs}
    about = "Simulated, in virtual time." if simulated == {True} else "Real processes."
    means = [mean_s for one in all_played for mean_s in one.step_s]
    results, named = [result_of(run) for run in runs], shown(runs)
    labels = [LABELS.get(one.label, one.label) for one in named]
    names = [label.removesuffix(EXPLAINED) for label in labels]
    told = race(names, results)
    shares = [f"{100 * one.waiting:.0f} %" for one in all_played]
    others = [f"{name} {share}" for name, share in zip(names[1:], shares[1:], strict=True)]
    waiting = f"{', '.join([f'{names[0]} waits {shares[0]} of the time', *others])}."
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
    return page(__package__, data, title)


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
