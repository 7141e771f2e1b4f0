"""A run as its folder tells it, live or ended, real or simulated; docs/RECORDS.md describes the folder."""

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freewheel.errors import ConfigError
from freewheel.records.events import TOGETHER_S, Events
from freewheel.records.schema import evaluation, read_run_json
from freewheel.records.track import POINTS, Line, Tail, Track

LINES = 3072  # of all workers, read when a run is opened: one of many workers opens as fast
SILENT_S = 5.0  # a worker that has written nothing for so long is called silent
STARTING_S = 120.0  # a run in which nobody has written for so long never began
DEATHS = ("died", "failed")
COMINGS = ("joined", "restarted")


class Run:
    """One run: `about` it, its `workers` by rank, `events` and `evaluations` in order of time.

    It keeps a bounded number of points per worker, whatever the length of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._heard_s = 0.0  # when a poll last found anything, on our own clock
        self._stamp: tuple[int, ...] | None = None  # of the run.json that was read
        self._start()
        self._read(0.0)
        if self._wrong and not (self.workers or self.events or self.evaluations):
            raise ConfigError(
                f"{self._wrong}. Nothing else is in {str(folder)!r}; give a folder as `freewheel run` makes "
                "them, unchanged."
            )

    def _start(self) -> None:
        self.about: dict[str, Any] = {}  # what run.json says; empty while the run is starting
        self.workers: dict[int, Track] = {}
        self.evaluations: list[dict[str, float]] = []
        self._moments: dict[tuple[float, float | None], dict[str, float]] = {}  # by time and steps
        self._tails: dict[str, Tail] = {}
        self._happened = Events()
        self.events = self._happened.all
        self._wrong = ""  # what is wrong with the last broken record

    def poll(self) -> bool:
        """Read what was written since the last call; whether there was anything."""
        return self._read(time.time())

    def _read(self, heard_s: float) -> bool:
        news = self._read_about()
        paths = sorted(self.folder.glob("*.jsonl"))
        workers = sum(path.name.startswith("worker-") for path in paths)
        most = max(POINTS // 8, min(POINTS, LINES // max(1, workers)))
        events: list[tuple[float, Line, Tail]] = []
        for path in paths:
            kind, _, who = path.stem.partition("-")
            if kind not in ("worker", "events", "evaluations"):
                continue
            tail = self._tails.setdefault(path.name, Tail(path, most if kind == "worker" else None))
            if not (lines := tail.read()):
                continue
            news, self._heard_s = True, heard_s
            if kind == "events":
                for line in lines:
                    at_s = line.get("time")
                    events.append((at_s if isinstance(at_s, int | float) else 0.0, line, tail))
                continue
            if kind == "worker" and tail.anew and who.isdecimal():
                self.workers.pop(int(who), None)  # a thinned file took the place of the old one
            for line in lines:
                self._take(tail, line, kind, who)
        for _, line, tail in sorted(events, key=lambda one: one[0]):
            self._take(tail, line, "events")
        # At one moment, what the launcher or simulator did comes first.
        self.events.sort(key=lambda event: (event.time, all(isinstance(one, int) for one in event.by)))
        self.evaluations.sort(key=lambda one: one["time"])
        return news

    def _read_about(self) -> bool:
        """Read run.json if it is new. Where another run took over the folder, all is read anew."""
        try:
            status = (self.folder / "run.json").stat()
        except OSError:
            return False
        found = (status.st_ino, status.st_mtime_ns, status.st_size)
        if found == self._stamp:
            return False
        about = read_run_json(self.folder)
        if self.about:
            self._start()
        self.about, self._stamp = about, found
        return True

    def _take(self, tail: Tail, line: Line, kind: str, who: str = "") -> None:
        """A line that is no record is counted and left out."""
        try:
            if kind == "events":
                self._happened.add(line)
            elif kind == "worker":
                track = self.workers.get(int(who)) or Track(int(who))
                track.add(line)
                track.heard_s = self._heard_s
                self.workers[track.rank] = track
            else:
                new = evaluation(line)
                moment = (new["time"], new.get("worker_steps"))
                known = self._moments.get(moment)
                if known is not None and known.keys() & new.keys() <= {"time", "worker_steps", "samples"}:
                    known |= new  # another writer measured something else at this moment
                else:
                    self._moments[moment] = new
                    self.evaluations.append(new)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            tail.broken += 1
            self._wrong = f"{str(tail.path)!r} is not what a run writes ({type(error).__name__}: {error})"

    @property
    def clock(self) -> str:
        """wall or virtual."""
        return str(self.about.get("clock", "wall"))

    @property
    def now(self) -> float:
        """The present on the run's clock; for a simulated run its last moment."""
        return time.time() if self.clock == "wall" else self.last_s

    @property
    def began_s(self) -> float:
        """When the first worker began to train, on the run's clock; before that, to join."""
        if self.clock == "virtual":
            return 0.0
        begun = [track.began_s for track in self.workers.values() if track.began_s is not None]
        firsts = [float(track.array("time")[0]) for track in self.workers.values()]
        return min(begun or firsts, default=0.0)

    @property
    def ended_s(self) -> float:
        """When the last known step ended, on the run's clock; before any, when the run began."""
        return max((track.ended_s for track in self.workers.values()), default=0.0) or self.began_s

    @property
    def last_s(self) -> float:
        """When anything was last written, on the run's clock."""
        lasts = [track.latest["time"] for track in self.workers.values()]
        # A simulation may end before its last fault.
        events = [] if lasts and self.clock == "virtual" else [event.time for event in self.events]
        return max([*lasts, *events], default=0.0)

    @property
    def quiet_s(self) -> float:
        """Seconds since anybody wrote, by the wall clock even for a simulated run."""
        return time.time() - max([self._heard_s, *(tail.written_s for tail in self._tails.values())])

    @property
    def ranks(self) -> list[int]:
        """The workers that have written, and those the run began with."""
        return sorted({*self.workers, *range(self.about.get("workers", 0))})

    def state(self, rank: int) -> str:
        """joining, training, finished, dead or silent."""
        track = self.workers.get(rank)
        latest = track.latest if track is not None else {}
        if latest.get("last"):
            return "finished"
        life, since_s = (0, -math.inf) if track is None else (track.life, latest["time"] - 1.0)
        for event in reversed(self.events):
            if event.time < since_s - TOGETHER_S:
                break
            if event.rank != rank or event.last_s < since_s:
                continue
            if event.what in DEATHS and (event.life or life) >= life:
                return "dead"
            if event.what in COMINGS and (event.life or 0) > life:
                return "joining"
        if track is None:
            return "joining" if self.live else "silent"
        # Another host's clock may be wrong: a worker we hear from is not silent.
        if self.clock == "wall" and time.time() - max(latest["time"], track.heard_s) > SILENT_S:
            return "silent"
        return str(latest.get("state", "training"))

    @property
    def live(self) -> bool:
        """Whether a worker goes on, or none has begun yet."""
        if not self.workers:
            return self.clock == "wall"
        return any(self.state(rank) in ("joining", "training") for rank in self.workers)

    @property
    def lives(self) -> list[dict[str, Any]]:
        """The last sample of every life of every worker, by rank; see `Track.lives`."""
        return [life for rank in sorted(self.workers) for life in self.workers[rank].lives]

    @property
    def broken(self) -> int:
        """How many lines were left out: no records, or half a line in a file nobody writes to any more."""
        halves = sum(tail.half for tail in self._tails.values()) if self.quiet_s > SILENT_S else 0
        return halves + sum(tail.broken for tail in self._tails.values())

    def total(self, name: str) -> float:
        """A column of `schema.SUMS`, summed over all lives of all workers."""
        return sum(track.value(name) or 0.0 for track in self.workers.values())


class Choice(NamedTuple):
    """The run to show, and what else there is."""

    run: Run
    others: list[Path]  # that are live or starting
    broken: list[str]  # what is wrong with those left out


def find_run(folder: Path) -> Choice:
    """The newest run in a folder that is starting or live, else the newest that can be read."""
    newest, awake, broken = None, [], []
    for path in sorted(find_runs(folder), key=written_s, reverse=True):
        lately = time.time() - written_s(path) < SILENT_S
        if newest is not None and not lately:
            break
        try:
            run = Run(path)
        except ConfigError as error:
            broken.append(str(error))
            continue
        newest = newest or run
        if lately and run.live:
            awake.append(run)
    if newest is None:
        raise ConfigError(broken[0])
    # run.json is written once, when training begins.
    began_s = {run: _changed_s(run.folder / "run.json") or _changed_s(run.folder) for run in awake}
    shown, *others = sorted(awake, key=began_s.__getitem__, reverse=True) or [newest]
    return Choice(shown, [one.folder for one in others], broken)


def find_runs(folder: Path) -> list[Path]:
    """The run in a folder, or those up to two folders below it; ConfigError: there is none."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}. {_known(folder)}")

    def is_run(path: Path) -> bool:
        names = ("run.json", "worker-*.jsonl", "events-*.jsonl")
        return path.is_dir() and any(next(path.glob(name), None) is not None for name in names)

    levels = (folder.glob(level) for level in ("*", "*/*"))
    found = [folder] if is_run(folder) else sorted(path for one in levels for path in one if is_run(path))
    if not found:
        raise ConfigError(
            f"{str(folder)!r} is no run: it has neither run.json nor records in it. {_known(folder)}"
        )
    return found


def all_runs(folders: Sequence[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for run in (one for folder in folders for one in find_runs(folder)):
        found.setdefault(run.resolve(), run)
    return list(found.values())


def compared(folder: Path, runs: Sequence[Path]) -> bool:
    """Whether one `compare` or `simulate` wrote these runs, whose folders it numbers."""
    return len(runs) > 1 and all(run.parent == folder and re.match(r"\d+-", run.name) for run in runs)


def written_s(run: Path) -> float:
    return max((_changed_s(path) for path in run.glob("*") if path.is_file()), default=0.0)


def _known(folder: Path) -> str:
    home = Path("runs")
    runs = [path for path in home.glob("*/") if path.resolve() != folder.resolve()]
    if runs and home.resolve() != folder.resolve():
        return f"The newest here is {max(runs, key=_changed_s)}."
    return "Give a folder that `freewheel run`, `train`, `compare` or `simulate --folder` has written."


def _changed_s(path: Path) -> float:
    """0: the file is not there, or was replaced meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
