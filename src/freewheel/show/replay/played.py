"""One run as a page plays it: seconds since it began, one lane for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.events import Event
from freewheel.records.run import Run
from freewheel.records.tail import Tail
from freewheel.records.timeline import UNITS, seconds
from freewheel.show.figures.palette import EVENTS

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
