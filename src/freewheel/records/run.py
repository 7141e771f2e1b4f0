"""A run as its folder tells it, live or ended, real or simulated. docs/RECORDS.md says what is in the folder.

`Run.poll` reads what is new. It keeps a bounded number of points per worker, whatever the length of the run.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.events import Event, Events
from freewheel.records.run_json import read_about, stamp
from freewheel.records.tail import Tail

POINTS = 256
"""So many points per worker are read of what was written before, and at most twice as many are kept."""
LINES = 3072
"""Of all workers together about so many lines are read of what was written before: many workers have fewer
points each, and a run opens in the same time."""
RECENT = 32
"""So many of the last samples of a worker are kept whole."""
SILENT_S = 5.0
"""A worker that has written nothing for so long is called silent."""
DEATHS = ("died", "failed")
COMINGS = ("joined", "restarted")
SUMS = ("steps", "elapsed_s", "compute_s", "peers_s", "data_s", "checkpoint_s", "exchanges", "merges",
        "bytes_out", "bytes_in", "samples")  # fmt: skip
LEVELS = ("loss", "staleness_mean", "discrepancy", "progress", "members", "life")
NUMBERS = ("began", "resumed_at", "staleness_max", "discrepancy_max", "blocked_share", "steps_per_s",
           "messages_dropped")  # fmt: skip
TABLES = ("exchanges", "merges", "staleness_counts")
"""What else is read of a sample, and must be numbers, or numbers by name."""


@dataclass
class Evaluation:
    """What was measured of the answer at one moment."""

    time: float
    worker_steps: int | None = None
    samples: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    discrepancy: float | None = None
    consensus: float | None = None
    discrepancy_max: float | None = None


class Track:
    """What is known of one worker: `points` by column (sums over all its lives), the last samples whole."""

    def __init__(self, rank: int) -> None:
        self.rank, self.life = rank, 0
        self.latest: dict[str, Any] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._ended: list[dict[str, Any]] = []
        """The last samples of earlier lives."""
        self.began_s: float | None = None
        """When its first life began to train; None: it joins."""
        self.ended_s = 0.0
        """When it made its last step, as far as is known; 0: it joins."""
        self.points: dict[str, list[float | None]] = {name: [] for name in ("time", *SUMS, *LEVELS)}
        self.heard_s: float | None = None
        """When a sample last came in while we were reading, on our own clock."""
        self._before = dict.fromkeys(SUMS, 0.0)

    def add(self, sample: dict[str, Any]) -> None:
        """Take a sample in; one that is older than the last is left out, one that is none changes nothing.

        A later life may be on a host whose clock is behind: its points begin where those before it end.
        """
        row, life = _checked(sample), int(sample.get("life", 1))
        if self.latest and sample["time"] < self.latest["time"] and life <= self.life:
            return
        until_s = _until_s(sample)
        row["time"] = max(until_s, self.points["time"][-1] or 0.0) if self.latest else until_s
        if self.latest and life > self.life:
            for name in SUMS:
                self._before[name] = self.points[name][-1] or 0.0
            self._ended.append(self.latest)
            self.recent.clear()
        self.life, self.latest = life, sample
        if elapsed_s := sample.get("elapsed_s"):  # who only joins has not begun
            began_s = _began_s(sample)
            self.began_s = began_s if self.began_s is None else self.began_s
            self.ended_s = max(self.ended_s, began_s + elapsed_s)
        self.recent.append(sample)
        for name, column in self.points.items():
            value = row[name]
            column.append(value + self._before[name] if name in self._before and value is not None else value)
        if len(self.points["time"]) > 2 * POINTS:
            self._thin()

    def _thin(self) -> None:
        """Keep the last points, and of those before the first in each of equal parts of the time.

        Dropping every second one again and again would leave next to nothing of what is long past.
        """
        times = [time or 0.0 for time in self.points["time"]]
        older = range(len(times) - RECENT)
        span_s = times[-RECENT] - times[0]
        width_s = 2.0 ** math.ceil(math.log2(span_s / POINTS)) if span_s > 0 else 1.0
        first = {(times[place] - times[0]) // width_s: place for place in reversed(older)}
        kept = [*sorted(first.values()), *range(len(older), len(times))]
        for column in self.points.values():
            column[:] = [column[place] for place in kept]

    @property
    def lives(self) -> list[dict[str, Any]]:
        """The last sample of every life, the present one's too, and when that life `began`."""
        lasts = [*self._ended, self.latest] if self.latest else []
        return [{**last, "began": _began_s(last)} for last in lasts]

    def value(self, name: str) -> float | None:
        """The last value of a column; None: not known."""
        column = self.points[name]
        return column[-1] if column else None

    def rate(self, name: str, over_s: float = 5.0) -> float | None:
        """How fast a sum grew in the last seconds in which it lived; None: there are not two samples yet."""
        times, sums, lived = (self.points[one] for one in ("time", name, "elapsed_s"))
        if len(times) < 2:
            return None
        end = len(times) - 1
        begin = end - 1
        while begin > 0 and (times[end] or 0.0) - (times[begin] or 0.0) < over_s:
            begin -= 1
        took = (lived[end] or 0.0) - (lived[begin] or 0.0)
        return ((sums[end] or 0.0) - (sums[begin] or 0.0)) / took if took > 0 else None


def _began_s(sample: dict[str, Any]) -> float:
    """When the life of a sample began to train; records of earlier versions do not say it."""
    began: float | None = sample.get("began")
    return sample["time"] - (sample.get("elapsed_s") or 0.0) if began is None else began


def _until_s(sample: dict[str, Any]) -> float:
    """When what a sample counts was so: of a worker that has finished, when it made its last step."""
    time_s: float = sample["time"]
    ended = sample.get("state") == "finished" and sample.get("elapsed_s")
    return min(time_s, _began_s(sample) + sample["elapsed_s"]) if ended else time_s


def _checked(sample: dict[str, Any]) -> dict[str, float | None]:
    """The columns of a sample; raises where it is none."""
    kinds = {"time": int | float, "rank": int, "steps": int}
    if not all(isinstance(sample[name], kind) for name, kind in kinds.items()):
        raise TypeError("time, rank and steps must be numbers")
    row = _row(sample)
    levels = (sample.get(name) for name in NUMBERS)
    if not all(value is None or isinstance(value, int | float) for value in (*row.values(), *levels)):
        raise TypeError("what is counted must be numbers")
    counted = [value for name in TABLES for value in (sample.get(name) or {}).values()]
    if not all(isinstance(value, int | float) for value in counted):
        raise TypeError("what is counted by name must be numbers")
    return row


def _row(sample: dict[str, Any]) -> dict[str, float | None]:
    blocked, members = sample.get("blocked_s") or {}, sample.get("members")
    return {
        **{name: sample.get(name) for name in ("time", *SUMS, *LEVELS)},
        **{f"{cause}_s": blocked.get(cause, 0.0) for cause in ("peers", "data", "checkpoint")},
        **{name: (sample.get(name) or {}).get("done", 0) for name in ("exchanges", "merges")},
        "members": None if members is None else len(members),
    }


class Run:
    """One run: `about` it, its `workers` by rank, `events` and `evaluations` in order of time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened = False
        self._heard_s: float | None = None
        """When anything last came in while we were reading, on our own clock."""
        self._stamp: tuple[int, ...] | None = None
        """Of the run.json that was read."""
        self._start()
        self.poll()
        self._opened = True
        if self._wrong and not (self.workers or self.events or self.evaluations):
            raise ConfigError(
                f"{self._wrong}. Nothing else is in {str(folder)!r}; give a folder as `freewheel run` makes "
                "them, unchanged."
            )

    # -- reading --

    def _start(self) -> None:
        """Know nothing yet."""
        self.about: dict[str, Any] = {}
        """What run.json says; empty while the run is starting."""
        self.workers: dict[int, Track] = {}
        self.evaluations: list[Evaluation] = []
        self._of: dict[tuple[float, int | None], Evaluation] = {}
        """By when, and after how many steps, what was last measured."""
        self._tails: dict[str, Tail] = {}
        self._happened = Events()
        self._unsorted: list[tuple[Path, Tail, dict[str, Any]]] = []
        """Events that have been read, of all who noticed some."""
        self._wrong = ""
        """What was wrong with the last line that could not be read, where it was JSON."""

    def poll(self) -> bool:
        """Read what has been written since the last call; whether there was anything.

        Another run in the same folder has a run.json of its own: then all is read anew.
        """
        found = stamp(self.folder)
        news = found is not None and found != self._stamp
        if news:
            about = read_about(self.folder)
            if self.about:
                self._start()
            self.about, self._stamp = about, found
        paths = sorted(self.folder.glob("*.jsonl"))
        workers = sum(path.name.startswith("worker-") for path in paths)
        most = max(POINTS // 8, min(POINTS, LINES // max(1, workers)))
        for path in paths:
            news = self._read(path, most) or news
        self._unsorted.sort(key=lambda one: _when(one[2]))
        for path, tail, line in self._unsorted:
            self._take(path, tail, line, self._happened.add)
        self._unsorted.clear()
        self._happened.sort()
        self.evaluations.sort(key=lambda one: one.time)
        return news

    def _read(self, path: Path, most: int) -> bool:
        name = path.name
        kind, _, who = path.stem.partition("-")
        if kind not in ("worker", "events", "evaluations"):
            return False
        if name not in self._tails:
            self._tails[name] = Tail(path, most, "peers") if kind == "worker" else Tail(path)
        tail = self._tails[name]
        begun = tail.begun
        lines = tail.read()
        if not lines:
            return False
        heard_s = self._heard_s = time.monotonic() if self._opened else None
        if kind == "events":
            self._unsorted += [(path, tail, line) for line in lines]
            return True
        take = {
            "worker": lambda line: self._sampled(int(who), line, heard_s),
            "evaluations": self._evaluated,
        }[kind]
        if kind == "worker" and who.isdecimal() and tail.begun > begun > 0 and int(who) in self.workers:
            self.workers[int(who)] = Track(int(who))
        for line in lines:
            self._take(path, tail, line, take)
        return True

    def _take(
        self, path: Path, tail: Tail, line: dict[str, Any], take: Callable[[dict[str, Any]], None]
    ) -> None:
        """Take a line in; one that is no record is counted, and the next one may be whole."""
        try:
            take(line)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            tail.broken += 1
            self._wrong = f"{str(path)!r} is not what a run writes ({type(error).__name__}: {error})"

    def _evaluated(self, line: dict[str, Any]) -> None:
        """Add what was measured; where it was of the same moment as something else, to that."""
        new = _evaluation(line)
        known = self._of.get((new.time, new.worker_steps))
        if known is not None:
            both = {name: value for name, value in vars(known).items() if value is not None}
            more = {name: value for name, value in vars(new).items() if value is not None}
            if both.keys() & more.keys() <= {"time", "worker_steps", "samples"}:
                vars(known).update(more)
                return
        self._of[new.time, new.worker_steps] = new
        self.evaluations.append(new)

    def _sampled(self, rank: int, sample: dict[str, Any], heard_s: float | None) -> None:
        track = self.workers.get(rank) or Track(rank)
        track.add(sample)
        track.heard_s = heard_s
        self.workers[rank] = track

    # -- what it says --

    @property
    def events(self) -> list[Event]:
        """What happened, in order of time."""
        return self._happened.all

    @property
    def clock(self) -> str:
        """wall or virtual."""
        return str(self.about.get("clock", "wall"))

    @property
    def now(self) -> float:
        """The present on the run's clock: of a simulated run its last moment."""
        return time.time() if self.clock == "wall" else self.last_s

    @property
    def began_s(self) -> float:
        """When the first worker began to train, on the run's clock; before that, when it began to join."""
        if self.clock == "virtual":
            return 0.0
        begun = [track.began_s for track in self.workers.values() if track.began_s is not None]
        firsts = (track.points["time"][0] or 0.0 for track in self.workers.values() if track.points["time"])
        return min(begun) if begun else min(firsts, default=0.0)

    @property
    def ended_s(self) -> float:
        """When the last step was made, as far as is known, on the run's clock; before that, its beginning."""
        return max((track.ended_s for track in self.workers.values()), default=0.0) or self.began_s

    @property
    def last_s(self) -> float:
        """When anything was last written, on the run's clock."""
        lasts = [track.latest["time"] for track in self.workers.values() if track.latest]
        # A fault of a simulation may lie behind its end.
        events = [] if lasts and self.clock == "virtual" else [event.time for event in self.events]
        return max([*lasts, *events], default=0.0)

    @property
    def quiet_s(self) -> float:
        """For how long nobody has written, in seconds of the wall, whatever the run's clock."""
        written_s = max((tail.written_s for tail in self._tails.values()), default=0.0)
        quiet_s = time.time() - written_s
        return quiet_s if self._heard_s is None else min(quiet_s, time.monotonic() - self._heard_s)

    @property
    def ranks(self) -> list[int]:
        """The workers that have written, and those the run began with."""
        return sorted({*self.workers, *range(self.about.get("workers", 0))})

    def state(self, rank: int) -> str:
        """joining, training, finished, dead or silent."""
        track = self.workers.get(rank)
        if track is None:
            if self._news_of(rank, 0) == "dead":
                return "dead"
            return "joining" if self.live else "silent"
        latest = track.latest
        if latest.get("last"):
            return "finished"
        deaths = (
            self._happened.last.get((what, rank, life)) for what in DEATHS for life in (track.life, None)
        )
        if any(event is not None and event.last_s >= latest["time"] - 1.0 for event in deaths):
            return self._news_of(rank, track.life) or "dead"
        late = self.now - latest["time"] > SILENT_S and self.clock == "wall"
        # A clock of another host may be wrong: whom we hear is not silent.
        if late and (track.heard_s is None or time.monotonic() - track.heard_s > SILENT_S):
            return "silent"
        return str(latest.get("state", "training"))

    def _news_of(self, rank: int, life: int) -> str | None:
        """Whether a worker is coming or dead in a life after this one, of which it has written nothing."""
        later = [event for event in self.events if event.rank == rank and (event.life or 0) > life]
        for event in reversed(later):
            if event.what in (*DEATHS, *COMINGS):
                return "dead" if event.what in DEATHS else "joining"
        return None

    @property
    def live(self) -> bool:
        """Whether there is anything to wait for: a worker that goes on, or none that has begun yet."""
        if not self.workers:
            return self.clock == "wall"
        return any(self.state(rank) in ("joining", "training") for rank in self.workers)

    @property
    def lives(self) -> list[dict[str, Any]]:
        """The last sample of every life of every worker, in order of rank; see `Track.lives`."""
        return [life for rank in sorted(self.workers) for life in self.workers[rank].lives]

    @property
    def broken(self) -> int:
        """How many lines were no records, and are left out; one that is not whole where nobody ends it."""
        halves = sum(tail.half for tail in self._tails.values()) if self.quiet_s > SILENT_S else 0
        return halves + sum(tail.broken for tail in self._tails.values())

    def totals(self) -> Iterator[tuple[str, float]]:
        """The sums of all workers over all their lives."""
        for name in SUMS:
            yield name, sum(track.value(name) or 0.0 for track in self.workers.values())


def _when(line: dict[str, Any]) -> float:
    found = line.get("time")
    return found if isinstance(found, int | float) else 0.0


def _evaluation(line: dict[str, Any]) -> Evaluation:
    known = {name: line[name] for name in Evaluation.__dataclass_fields__ if line.get(name) is not None}
    for name, value in known.items():
        if not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number")
    return Evaluation(**known)


def find_runs(folder: Path) -> list[Path]:
    """The run in a folder, or the runs up to two folders below; says what is wrong if there is none."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}. {_known(folder)}")
    if _is_run(folder):
        return [folder]
    below = sorted(path for level in ("*", "*/*") for path in folder.glob(level) if _is_run(path))
    if not below:
        raise ConfigError(
            f"{str(folder)!r} is no run: it has neither run.json nor records in it. {_known(folder)}"
        )
    return below


def _is_run(folder: Path) -> bool:
    names = ("run.json", "worker-*.jsonl", "events-*.jsonl")
    return folder.is_dir() and any(next(folder.glob(name), None) is not None for name in names)


def _known(folder: Path) -> str:
    home = Path("runs")
    runs = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    runs = [path for path in runs if path.resolve() != folder.resolve()]
    if runs and home.resolve() != folder.resolve():
        return f"The newest here is {max(runs, key=lambda path: path.stat().st_mtime)}."
    return "Give a folder that `freewheel run`, `train`, `compare` or `simulate --folder` has written."
