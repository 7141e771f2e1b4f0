"""What the page shows: the runs under a folder, and of those that were picked figures, tables and words.

All of it is one document of JSON. Whoever asks says which version it has, and gets what has changed since.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, FreewheelError
from freewheel.records.run import DEATHS, SILENT_S, Run, find_runs
from freewheel.records.run_json import read_about
from freewheel.show.dashboard.delta import delta
from freewheel.show.figures import charts
from freewheel.show.figures.palette import COLOURS
from freewheel.show.report.runs import flatten
from freewheel.show.rows import elapsed_s, standing, total
from freewheel.show.series import blocked
from freewheel.show.summary import rates

SCAN_S = 2.0
"""So often the folder is looked through for new runs."""
POLL_S = 0.2
"""What is asked for more often than this is answered from memory."""
STALE_S = 1.0
"""A document of a live run is made anew after so long, even if nothing was written: workers fall silent."""
MOST = len(COLOURS)
"""So many runs are compared at once."""
PICKS, VERSIONS = 8, 4
"""Of so many picks the last so many versions are kept."""

Document = dict[str, Any]


@dataclass
class Entry:
    """A run under the folder; it is read when it is first picked."""

    number: int
    folder: Path
    name: str
    run: Run | None = None
    error: str = ""
    version: int = 0
    polled_s: float = -math.inf

    def check(self) -> None:
        """Refuse one whose folder was deleted."""
        if not self.folder.is_dir():
            raise ConfigError(f"the folder of {self.name!r} is gone.")

    def poll(self) -> None:
        """Read what is new."""
        now = time.monotonic()
        if now - self.polled_s < POLL_S:
            return
        self.polled_s = now
        error = ""
        try:
            self.check()
            if self.run is None:
                self.run = Run(self.folder)
                self.version += 1
            elif self.run.poll():
                self.version += 1
        except FreewheelError as wrong:
            error = str(wrong)
        if error != self.error:
            self.error = error
            self.version += 1


@dataclass
class Pick:
    """The document of some runs: its last versions."""

    made_s: float = -math.inf
    of: tuple[int, ...] = ()
    versions: deque[tuple[int, Document]] = field(default_factory=lambda: deque(maxlen=VERSIONS))


class Board:
    """The runs under a folder, and documents of those that somebody looks at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[Path, Entry] = {}
        self._scanned_s = -math.inf
        self._picks: OrderedDict[tuple[int, ...], Pick] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        found = find_runs(folder)
        self._enter(found)
        if len(found) == 1:
            read_about(found[0])  # a run of another version is refused before anything is served

    def open(self) -> None:
        """Read the run that the page shows first, so that it need not wait for it."""
        self.answer((), None)

    def answer(self, numbers: Sequence[int], since: int | None) -> Document:
        """What to show of these runs (none: the newest), or what has changed in it since a version."""
        with self._lock:
            self._scan()
            entries = self._picked(numbers)
            for entry in entries:
                entry.poll()
            return self._answer(entries, since)

    def _answer(self, entries: list[Entry], since: int | None) -> Document:
        key = tuple(entry.number for entry in entries)
        pick = self._picks.setdefault(key, Pick())
        self._picks.move_to_end(key)
        while len(self._picks) > PICKS:
            self._picks.popitem(last=False)
        of, now = tuple(entry.version for entry in entries), time.monotonic()
        if of != pick.of or now - pick.made_s > STALE_S:
            document = self._document(entries)
            if not pick.versions or document != pick.versions[-1][1]:
                pick.versions.append((next(self._numbers), document))
            pick.of, pick.made_s = of, now
        version, document = pick.versions[-1]
        for known, before in pick.versions:
            if known == since:
                return {"version": version, "change": delta(before, document)}
        return {"version": version, "change": {"v": document}}

    # -- which runs --

    def _scan(self) -> None:
        now = time.monotonic()
        if now - self._scanned_s < SCAN_S:
            return
        self._scanned_s = now
        try:
            self._enter(find_runs(self._folder))
        except ConfigError:
            return  # all of them are gone, and each entry says so itself

    def _enter(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if folder not in self._entries:
                alone = folder == self._folder
                name = folder.resolve().name if alone else str(folder.relative_to(self._folder))
                self._entries[folder] = Entry(len(self._entries), folder, name)

    def _picked(self, numbers: Sequence[int]) -> list[Entry]:
        entries = list(self._entries.values())
        if not numbers:
            return [max(entries, key=lambda entry: (_started(entry.folder), entry.number))]
        wanted = list(dict.fromkeys(numbers))
        if len(wanted) > MOST:
            raise ConfigError(f"{len(wanted)} runs were picked; at most {MOST} can be told apart.")
        if not all(0 <= number < len(entries) for number in wanted):
            raise ConfigError(f"there is no run {max(wanted)}; there are {len(entries)}, counted from 0.")
        return [entries[number] for number in wanted]

    # -- what to show --

    def _document(self, entries: list[Entry]) -> Document:
        good = [(entry, entry.run) for entry in entries if entry.run is not None]
        shown = charts.shown([run for _, run in good])
        begun = [one for one in shown if one.run.workers]
        return {
            "runs": [_listed(entry) for entry in self._entries.values()],
            "notes": [note for entry in entries if (note := _note(entry))] + _clocks(shown),
            "shown": [
                {"number": entry.number, "label": one.label, "colour": one.colour, **_headline(one)}
                for (entry, _), one in zip(good, shown, strict=True)
            ],
            "picked": [entry.number for entry in entries],
            "figures": charts.figures(begun) if begun else {},
            "workers": [row for one in begun for row in _rows(one)],
            "about": [{"label": one.label, "rows": _about(one.run)} for one in shown],
        }


def _started(folder: Path) -> float:
    try:
        # Without run.json it may have just begun, or be all that is left of an old run.
        return float(read_about(folder).get("started") or folder.stat().st_mtime)
    except (FreewheelError, OSError, TypeError, ValueError):
        return -math.inf


def _listed(entry: Entry) -> Document:
    """A run in the list to pick from; of one that was not picked yet only run.json is read."""
    listed: Document = {"number": entry.number, "name": entry.name, "error": entry.error}
    try:
        entry.check()
        about = entry.run.about if entry.run is not None else read_about(entry.folder)
    except FreewheelError as error:
        return {**listed, "error": str(error)}
    live = entry.run.live if entry.run is not None else _touched(entry.folder)
    strategy, workers = about.get("strategy"), about.get("workers")
    return {**listed, "strategy": strategy, "workers": workers, "live": live, "started": about.get("started")}


def _touched(folder: Path) -> bool:
    path = next(folder.glob("worker-*.jsonl"), None)
    try:
        return path is not None and time.time() - path.stat().st_mtime < SILENT_S
    except OSError:
        return False


def _note(entry: Entry) -> str:
    if entry.error or entry.run is None:
        return entry.error
    if not entry.run.about and entry.run.workers:
        return f"{entry.name}: run.json is not there (yet): strategy and settings are not known."
    if not entry.run.workers:
        return f"{entry.name} is starting: no worker has written anything yet."
    if entry.run.broken:
        lines = "1 line" if entry.run.broken == 1 else f"{entry.run.broken:,} lines"
        verb = "is" if entry.run.broken == 1 else "are"
        return f"{entry.name}: {lines} of its records cannot be read, and {verb} left out."
    return ""


def _clocks(shown: Sequence[charts.Shown]) -> list[str]:
    """A word of warning where times are not of one kind."""
    if len({one.run.clock for one in shown}) < 2:
        return []
    virtual = ", ".join(one.label for one in shown if one.run.clock == "virtual")
    return [f"Simulated, in virtual seconds: {virtual}. Its times and rates are not those of the other runs."]


def _headline(one: charts.Shown) -> Document:
    """The figures of a run that come first."""
    run = one.run
    states = [run.state(rank) for rank in run.workers]
    live = run.live
    whole = total(run, one.rows)
    totals = dict(run.totals())
    rate, ideal_share = _now(one) if live else rates(run)
    waited = blocked(list(run.workers.values()))
    return {
        "name": str(run.about.get("name") or run.folder.name),
        "strategy": str(run.about.get("strategy") or ""),
        "waits_for": one.setting("waits_for"),
        "clock": run.clock,
        "state": standing(run),
        "elapsed_s": round(elapsed_s(run), 1) if run.workers else None,
        "there": states.count("training" if live else "finished"),
        "workers": max(len(states), _whole(run.about.get("workers"))),
        "steps": int(totals["steps"]),
        "samples": int(totals["samples"]),
        "progress": max((one.value("progress") or 0.0 for one in run.workers.values()), default=0.0) or None,
        "rate": _short(rate),
        "ideal_share": _short(ideal_share),
        "blocked": _short(sum(waited.values()) if totals["elapsed_s"] else None),
        "staleness": _short(whole.staleness),
        "loss": _short(whole.loss),
        "loss_answer": _short(_evaluated(run, "loss")),
        "accuracy": _short(_evaluated(run, "accuracy")),
        "faults": _faults(run),
    }


def _faults(run: Run) -> int:
    """How often something went wrong; a worker that failed and then was missed died once."""
    deaths = {(event.rank, event.life) for event in run.events if event.what in DEATHS}
    return len(deaths) + sum(event.what in ("cut", "half", "store lost") for event in run.events)


COLUMNS = ("run", "worker", "state", "life", "steps", "rate", "blocked", "staleness", "distance", "exchanges",
           "out", "loss", "windows", "node")  # fmt: skip


def _rows(one: charts.Shown) -> list[list[Any]]:
    """A row of the table for every worker, in the order of COLUMNS."""
    return [
        [
            one.place,
            row.rank,
            row.state,
            one.run.workers[row.rank].life,
            int(row.steps),
            _short(row.steps_per_s),
            _short(row.blocked_share),
            _short(row.staleness),
            _short(row.discrepancy),
            int(row.exchanges + row.merges),
            _short(row.bytes_per_s),
            _short(row.loss),
            row.windows,
            row.node,
        ]
        for row in one.rows
        if row.rank in one.run.workers
    ]


def _about(run: Run) -> list[list[str]]:
    return [[key, value] for key, value in flatten(run.about).items() if key != "format"]


def _evaluated(run: Run, what: str) -> float | None:
    values = (getattr(one, what) for one in reversed(run.evaluations))
    return next((value for value in values if value is not None), None)


def _last(values: Any) -> float | None:
    known = [float(value) for value in values[-3:] if math.isfinite(value)]
    return known[-1] if known else None


def _now(one: charts.Shown) -> tuple[float | None, float | None]:
    """Steps of all workers in a second at present, and which share that is of what the living could make."""
    rate, ideal = _last(one.series.rate), _last(one.series.ideal)
    return rate, min(1.0, rate / ideal) if rate is not None and ideal else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
