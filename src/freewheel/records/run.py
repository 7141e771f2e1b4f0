"""A run as its folder tells it, live or ended, real or simulated; docs/RECORDS.md says what is in the folder.

`Run.poll` reads what is new. It keeps a bounded number of points per worker, whatever the length of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.events import Event, Events
from freewheel.records.schema import Evaluation, read_run_json, stamp
from freewheel.records.track import POINTS, Tail, Track

LINES = 3072
"""Lines of all workers that are read of what was written before: a run of many workers opens as fast."""
SILENT_S = 5.0
"""A worker that has written nothing for so long is called silent."""
DEATHS = ("died", "failed")
COMINGS = ("joined", "restarted")


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
        self._last_of: dict[tuple[float, int | None], Evaluation] = {}
        """What was last measured, by when and after how many steps."""
        self._tails: dict[str, Tail] = {}
        self._happened = Events()
        self._wrong = ""
        """What was wrong with the last line that was JSON and no record."""

    def poll(self) -> bool:
        """Read what has been written since the last call; whether there was anything.

        Another run in the same folder has a run.json of its own: then all is read anew.
        """
        found = stamp(self.folder)
        news = found is not None and found != self._stamp
        if news:
            about = read_run_json(self.folder)
            if self.about:
                self._start()
            self.about, self._stamp = about, found
        paths = sorted(self.folder.glob("*.jsonl"))
        workers = sum(path.name.startswith("worker-") for path in paths)
        most = max(POINTS // 8, min(POINTS, LINES // max(1, workers)))
        happened = []
        for path in paths:
            kind, _, who = path.stem.partition("-")
            if kind not in ("worker", "events", "evaluations"):
                continue
            tail = self._tails.setdefault(path.name, Tail(path, most if kind == "worker" else None))
            begun, lines = tail.begun, tail.read()
            if not lines:
                continue
            news, self._heard_s = True, time.monotonic() if self._opened else None
            if kind == "events":
                happened += [(line, tail) for line in lines]
                continue
            if kind == "worker" and tail.begun > begun > 0 and who.isdecimal():
                self.workers.pop(int(who), None)  # a thinned file took the place of the old one
            add = partial(self._sampled, who) if kind == "worker" else self._evaluated
            for line in lines:
                self._take(tail, line, add)
        for line, tail in sorted(happened, key=lambda one: _when(one[0])):
            self._take(tail, line, self._happened.add)
        self._happened.sort()
        self.evaluations.sort(key=lambda one: one.time)
        return news

    def _take(self, tail: Tail, line: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
        """Take a line in; one that is no record is counted, and the next one may be whole."""
        try:
            add(line)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            tail.broken += 1
            self._wrong = f"{str(tail.path)!r} is not what a run writes ({type(error).__name__}: {error})"

    def _evaluated(self, line: dict[str, Any]) -> None:
        new = Evaluation.read(line)
        known = self._last_of.get((new.time, new.worker_steps))
        if known is None or not known.join(new):
            self._last_of[new.time, new.worker_steps] = new
            self.evaluations.append(new)

    def _sampled(self, who: str, line: dict[str, Any]) -> None:
        track = self.workers.get(int(who)) or Track(int(who))
        track.add(line)
        track.heard_s = self._heard_s
        self.workers[track.rank] = track

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
        firsts = [track.points["time"][0] or 0.0 for track in self.workers.values() if track.latest]
        return min(begun or firsts, default=0.0)

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
        quiet_s = time.time() - max((tail.written_s for tail in self._tails.values()), default=0.0)
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
        keys = [(what, rank, life) for what in DEATHS for life in (track.life, None)]
        deaths = [event for key in keys if (event := self._happened.last.get(key)) is not None]
        if any(event.last_s >= latest["time"] - 1.0 for event in deaths):
            return self._news_of(rank, track.life) or "dead"
        late = self.now - latest["time"] > SILENT_S and self.clock == "wall"
        # A clock of another host may be wrong: whom we hear is not silent.
        if late and (track.heard_s is None or time.monotonic() - track.heard_s > SILENT_S):
            return "silent"
        return str(latest.get("state", "training"))

    def _news_of(self, rank: int, life: int) -> str | None:
        """Whether a worker is coming or dead in a life after this one, of which it has written nothing."""
        for event in reversed(self.events):
            if event.rank == rank and (event.life or 0) > life and event.what in (*DEATHS, *COMINGS):
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

    def total(self, name: str) -> float:
        """A sum of all workers over all their lives; `schema.SUMS` names them."""
        return sum(track.value(name) or 0.0 for track in self.workers.values())


def _when(line: dict[str, Any]) -> float:
    found = line.get("time")
    return found if isinstance(found, int | float) else 0.0
