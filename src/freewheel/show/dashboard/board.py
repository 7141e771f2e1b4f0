"""What the page shows: the runs under a folder, and figures, tables and words on those that were picked."""

import contextlib
import hashlib
import json
import math
import threading
import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from freewheel.errors import ConfigError, FreewheelError
from freewheel.numbers import count, share, short
from freewheel.records.run import DEATHS, SILENT_S, Run, compared, find_runs, written_s
from freewheel.records.schema import read_run_json
from freewheel.show import rates
from freewheel.show.figures import figures, rounded
from freewheel.show.rows import Row, columns, total
from freewheel.show.shown import COLOURS, Shown, flatten, shown
from freewheel.show.tables import unlike
from freewheel.show.terminal import clock_time

SCAN_S = 2.0  # how often the folder is looked through for new runs
MAX_RUNS_COMPARED = len(COLOURS)

Document = dict[str, Any]


@dataclass
class Entry:
    """A run under the folder; it is read when it is first picked."""

    number: int
    folder: Path
    name: str
    run: Run | None = None
    error: str = ""

    def check(self) -> None:
        if not self.folder.is_dir():
            raise ConfigError(f"the folder of {self.name!r} is gone.")

    def poll(self) -> None:
        self.error = ""
        try:
            self.check()
            if self.run is None:
                self.run = Run(self.folder)
            else:
                self.run.poll()
        except FreewheelError as wrong:
            self.error = str(wrong)

    def started_s(self) -> float:
        try:
            # Without run.json it may have just begun, or be all that is left of an old run.
            return float(read_run_json(self.folder).get("started") or self.folder.stat().st_mtime)
        except (FreewheelError, OSError):
            return -math.inf


class Board:
    """The runs under a folder, and documents of those that somebody looks at."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[Path, Entry] = {}
        self._scanned_s = -math.inf
        self._lock = threading.Lock()
        found = find_runs(folder)
        self._enter(found)
        if len(found) == 1:
            read_run_json(found[0])  # a run of another version is refused before anything is served

    def answer(self, numbers: Sequence[int] = (), since: int | None = None) -> Document:
        """A document of JSON about these runs; None if the page has this version (`since`).

        Without numbers: all runs if one command wrote them (none if they are too many), else the newest.
        """
        with self._lock:
            if time.monotonic() - self._scanned_s >= SCAN_S:
                self._scanned_s = time.monotonic()
                with contextlib.suppress(ConfigError):  # no run is left, which each entry says itself
                    self._enter(find_runs(self._folder))
            entries = self._picked(numbers)
            for entry in entries:
                entry.poll()
            document = self._document(entries)
        digest = hashlib.sha256(json.dumps(document).encode()).digest()
        version = int.from_bytes(digest[:6], "big")  # whole bytes that a JavaScript number holds
        return {"version": version, "document": None if since == version else document}

    def _enter(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            alone = folder == self._folder
            name = folder.resolve().name if alone else str(folder.relative_to(self._folder))
            self._entries.setdefault(folder, Entry(len(self._entries), folder, name))

    def _picked(self, numbers: Sequence[int]) -> list[Entry]:
        entries = list(self._entries.values())
        if not numbers and compared(self._folder, list(self._entries)):
            return entries if len(entries) <= MAX_RUNS_COMPARED else []
        if not numbers:
            return [max(entries, key=lambda entry: (entry.started_s(), entry.number))]
        wanted = list(dict.fromkeys(numbers))
        if (many := len(wanted)) > MAX_RUNS_COMPARED:
            raise ConfigError(f"{many} runs were picked; at most {MAX_RUNS_COMPARED} can be told apart.")
        if wrong := [number for number in wanted if not 0 <= number < len(entries)]:
            raise ConfigError(f"there is no run {wrong[0]}; there are {len(entries)}, counted from 0.")
        return [entries[number] for number in wanted]

    def _document(self, entries: list[Entry]) -> Document:
        good = [(entry.number, entry.run) for entry in entries if entry.run is not None]
        runs = shown([run for _, run in good])
        begun = [one for one in runs if one.run.workers]
        return {
            "runs": [_listed(entry) for entry in self._entries.values()],
            "notes": [note for note in (*map(_note, entries), unlike(runs)) if note],
            "shown": [
                {"number": number, "label": one.label, "colour": one.colour, **_headline(one)}
                for (number, _), one in zip(good, runs, strict=True)
            ],
            "picked": [entry.number for entry in entries],
            "figures": figures(begun) if begun else {},
            "workers": _workers(begun),
            "about": [{"label": one.label, "rows": [*flatten(one.run.about).items()]} for one in runs],
        }


def _listed(entry: Entry) -> Document:
    """An entry of the list to pick from; of a run that was not picked yet only run.json is read."""
    listed: Document = {"number": entry.number, "name": entry.name, "error": entry.error}
    try:
        entry.check()
        about = entry.run.about if entry.run is not None else read_run_json(entry.folder)
    except FreewheelError as error:
        return {**listed, "error": str(error)}
    live = entry.run.live if entry.run else time.time() - written_s(entry.folder) < SILENT_S
    return {**listed, "live": live, **{key: about.get(key) for key in ("strategy", "workers", "started")}}


def _note(entry: Entry) -> str:
    if entry.error or entry.run is None:
        return entry.error
    if not entry.run.about and entry.run.workers:
        return f"{entry.name}: run.json is not there (yet): strategy and settings are not known."
    if not entry.run.workers:
        return f"{entry.name} is starting: no worker has written anything yet."
    if broken := entry.run.broken:
        return f"{entry.name}: {count(broken, 'line')} of its records cannot be read: left out."
    return ""


def _headline(one: Shown) -> Document:
    run, whole = one.run, total(one.run, one.rows)
    told = {
        "name": str(run.about.get("name") or run.folder.name),
        "strategy": str(run.about.get("strategy") or ""),
        "waits_for": one.setting("waits_for"),
        "clock": run.clock,
        "state": rates.standing(run),
    }
    if not run.workers:
        return {**told, "tiles": {}}
    rate, ideal = rates.rates(run)
    if run.live:  # the present rate, and its share of the ideal of those present
        known = np.isfinite(one.series.rate)
        now = [float(of[known][-1]) for of in (one.series.rate, one.series.ideal) if known.any()]
        rate, ideal = (now[0], min(1.0, now[0] / now[1])) if now else (None, None)
    # A worker that failed and was then missed died once.
    deaths = {(event.rank, event.life) for event in run.events if event.what in DEATHS}
    faults = len(deaths) + sum(event.what in ("cut", "half", "store lost") for event in run.events)
    latest = ChainMap(*reversed(run.evaluations))
    tiles = {
        "wall clock" if run.clock == "wall" else "virtual time": clock_time(run, rates.elapsed_s(run)),
        "workers": whole.state,
        "faults": f"{faults:,}",
        "worker-steps/s": short(rounded(rate, 6)),
        "of ideal": share(ideal),
        "waiting": share(sum(rates.blocked(run.workers.values()).values())),
        "mean staleness": short(rounded(whole.staleness, 6)),
        "training loss": short(rounded(whole.loss, 6)),
        "loss": short(rounded(latest.get("loss"), 6)),
        "accuracy": share(rounded(latest.get("accuracy"), 6)),
        "steps": f"{run.total('steps'):,.0f}",
    }
    if samples := run.total("samples"):  # not every loop counts them
        tiles["samples"] = f"{samples:,.0f}"
    return {**told, "tiles": tiles}


def _workers(runs: Sequence[Shown]) -> Document:
    all_rows = [(one.place, row) for one in runs for row in one.rows]
    found = columns([*(row for _, row in all_rows), Row(None, "")])
    live = any(one.run.live and one.run.clock == "wall" for one in runs)
    return {
        "heads": [one.key for one in found],
        "rows": [
            {
                "run": place,
                "state": row.state,
                "cells": [one.cells[at] for one in found],
                "values": [rounded(v, 6) if isinstance(v := one.values[at], float) else v for one in found],
            }
            for at, (place, row) in enumerate(all_rows)
        ],
        "said": "discrep.: distance to the last peer met. steps/s, waiting and bytes: "
        + ("of workers that train, over the last 5 s." if live else "over all the time of the worker."),
    }
