"""Runs played on one clock, as a page of its own or in the trace-event format of https://ui.perfetto.dev."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from freewheel.errors import ConfigError
from freewheel.numbers import count, share
from freewheel.records.counters import UNITS
from freewheel.records.run import Run
from freewheel.records.track import Tail
from freewheel.show.figures import page
from freewheel.show.rates import result_of
from freewheel.show.shown import EVENTS, shown
from freewheel.show.tables import BASELINES, goal, race

MARKS = {"died": "died", "failed": "died", "left": "left", "cut": "cut", "slowed": "slowed"}
LABELS = {"ddp": "DDP", "allreduce": "AllReduce", "adpsgd": "AD-PSGD"}  # what strategies are called
MOST = 4  # runs on one page
ONCE_S = 1.0  # the same thing told of a worker again within this time is not shown again
UNFINISHED = 1.5  # a life that ends within so many longest gradients after its last one was computing another


class Played:
    """One run as a page plays it: seconds since it began, one lane for each worker.

    Refuses a run without timelines. The page gets all attributes.
    """

    def __init__(self, run: Run) -> None:
        self.ranks, place = run.ranks, {rank: at for at, rank in enumerate(run.ranks)}
        # Of each worker: when each gradient began and ended.
        self.spans: list[list[float]] = [[] for _ in run.ranks]
        # Exchanges and merges: begin, length, and the places of all members, as the lowest rank wrote them.
        self.meetings: list[list[Any]] = []
        for rank, own in zip(self.ranks, self.spans, strict=True):
            for line in Tail(run.folder / f"timeline-{rank}.jsonl").read():
                from_s, numbers = line["from"] - run.began_s, line["exchanges"]
                own += [round(from_s + at / UNITS, 4) for at in line["gradients"]]
                pairs = [[*numbers[k : k + 2], numbers[k + 2 : k + 3]] for k in range(0, len(numbers), 3)]
                for at, took, peers in (*pairs, *line["merges"]):
                    members = [place[one] for one in (rank, *sorted(peers)) if one in place]
                    if all(rank < peer for peer in peers):
                        self.meetings.append([round(from_s + (at - took) / UNITS, 4), took / UNITS, members])
            own.sort()
        self.meetings.sort(key=lambda one: float(one[0]))
        if not any(self.spans):
            raise ConfigError(
                f"{str(run.folder)!r} has no timeline: an earlier version wrote it, or it has too many "
                "workers. Run it again."
            )
        self.seconds = max(max(lane[-1] for lane in self.spans if lane), 1e-3)  # when the last gradient ended
        self.lives: list[list[list[float]]] = [[] for _ in run.ranks]  # begin and end of each life
        for life in run.lives:
            born_s, lived_s = life["began"] - run.began_s, life.get("elapsed_s") or 0.0
            self.lives[place[life["rank"]]].append([round(born_s, 4), round(born_s + lived_s, 4)])
        self.marks = self._marks(run, place)  # time, worker's place, kind, words
        # Unfinished gradients: the worker's place, begin, and when it died or the run ended.
        self.cut = list(self._cut())
        self.gone = [at for rank, at in place.items() if run.state(rank) in ("dead", "silent")]
        self.accuracy, self.loss = (
            [[round(one["time"] - run.began_s, 4), one[what]] for one in run.evaluations if what in one]
            for what in ("accuracy", "loss")
        )

    def _marks(self, run: Run, place: dict[int, int]) -> list[list[Any]]:
        found: list[list[Any]] = []
        for at, lives in enumerate(self.lives):
            for number, (begin_s, _) in enumerate(lives):
                if number or begin_s > ONCE_S:
                    words = f"worker {self.ranks[at]} {'came back' if number else 'joined'}"
                    found.append([begin_s, at, "joined", words])
        for event in run.events:
            who, what = place.get(event.rank if event.rank is not None else -1), MARKS.get(event.what)
            time_s = round(max(0.0, event.time - run.began_s), 4)
            known = any(one[1:3] == [who, what] and abs(time_s - one[0]) <= ONCE_S for one in found)
            if who is not None and what is not None and not known:
                words = event.link or f"worker {event.rank} {EVENTS[event.what].words}"
                found.append([time_s, who, what, words])
        return sorted([at_s, *rest, f"{words} at {at_s:.2f} s"] for at_s, *rest, words in found)

    def _cut(self) -> Iterator[list[float]]:
        """Gradients that were never finished: their time is no waiting."""
        for at, (lane, lives) in enumerate(zip(self.spans, self.lives, strict=True)):
            longest_s = max((end - begin for begin, end in _pairs(lane)), default=0.0)
            for born_s, died_s in lives:
                end_s = min(died_s, self.seconds)
                last_s = max((end for end in lane[1::2] if born_s <= end <= end_s), default=born_s)
                if 0 < end_s - last_s <= UNFINISHED * longest_s:
                    yield [at, last_s, end_s]


def _pairs(lane: list[float]) -> list[tuple[float, float]]:
    return list(zip(lane[::2], lane[1::2], strict=True))


def as_perfetto(runs: Sequence[Run]) -> str:
    found = [one for pid, run in enumerate(shown(runs)) for one in _trace(Played(run.run), pid, run.label)]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _trace(run: Played, pid: int, label: str) -> Iterator[dict[str, Any]]:
    """A run is a process, a worker two threads of it; times are microseconds since the run began.

    X is a span of time, i an instant, C a counter, and M the name of a row.
    """

    def event(ph: str, name: str, at_s: float, tid: int, args: dict[str, Any], **more: Any) -> dict[str, Any]:
        at = {"ts": round(max(0.0, at_s) * 1e6), "pid": pid, "tid": tid}
        return {"ph": ph, "name": name, **at, "args": args, **more}

    def part(name: str, begin_s: float, took_s: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
        return event("X", name, begin_s, tid, args, dur=round(max(0.0, took_s) * 1e6))

    yield event("M", "process_name", 0.0, 0, {"name": label})
    for worker, (rank, lane) in enumerate(zip(run.ranks, run.spans, strict=True)):
        yield event("M", "thread_name", 0.0, 2 * worker, {"name": f"worker {rank}"})
        yield event("M", "thread_name", 0.0, 2 * worker + 1, {"name": f"worker {rank}: exchanges"})
        for step, (begin_s, end_s) in enumerate(_pairs(lane), 1):
            yield part("gradient", begin_s, end_s - begin_s, 2 * worker, {"step": step})
    for place, begin_s, end_s in run.cut:
        yield part("unfinished gradient", begin_s, end_s - begin_s, 2 * int(place), {})
    for at_s, took_s, members in run.meetings:
        name = "exchange" if len(members) == 2 else "merge"
        for worker in members:
            yield part(name, at_s, took_s, 2 * worker + 1, {"of": [run.ranks[one] for one in members]})
    for at_s, worker, what, words in run.marks:
        yield event("i", what, at_s, 2 * worker, {"what": words}, s="t")
    for measure, curve in (("accuracy", run.accuracy), ("loss", run.loss)):
        for at_s, value in curve:
            yield event("C", measure, at_s, 0, {measure: value})


def html(runs: Sequence[Run], title: str) -> str:
    all_played = [Played(run) for run in runs]
    simulated = all(run.clock == "virtual" for run in runs)
    results, named = [result_of(run) for run in runs], shown(runs)
    labels = [LABELS.get(one.label, one.label) for one in named]
    shares = [f"{label} {share(one.idle_share, 0)}" for one, label in zip(results, labels, strict=True)]
    waiting = f"Time spent waiting: {', '.join(shares)}."
    longest_s = max(one.seconds for one in all_played)
    data = {
        "title": title,
        "story": race(labels, results) or waiting,
        "about": f"{waiting} {'Simulated, in virtual time.' if simulated else 'Real processes.'}",
        "measure": "accuracy" if all(one.accuracy for one in all_played) else "loss",
        "target": goal(results)[0],
        # The whole replay takes about half a minute.
        "speed": next((speed for speed in (0.1, 0.25, 0.5, 1, 2, 5, 10) if longest_s / speed <= 30), 25),
        "runs": [
            {**vars(one), "colour": run.colour, "label": label}
            for one, run, label in zip(all_played, named, labels, strict=True)
        ],
    }
    return page(__package__, data, title)


def two(runs: Sequence[Run]) -> list[Run]:
    """The baseline, and of the others the run that ended first."""
    named = {str(run.about.get("strategy")): run for run in runs}
    baseline = next((named[one] for one in BASELINES if one in named), runs[0])
    others = [run for run in runs if run is not baseline]
    return [baseline, min(others, key=lambda run: run.ended_s - run.began_s)]


def title_of(runs: Sequence[Run]) -> str:
    names = {str(run.about.get("name", run.folder.name)) for run in runs}
    workers = {len(run.ranks) for run in runs}
    if len(names) > 1 or len(workers) > 1:
        return f"{len(runs)} runs"
    return f"{names.pop()} on {count(workers.pop(), 'worker')}"
