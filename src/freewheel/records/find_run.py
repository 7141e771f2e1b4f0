"""Which run to show when a folder with several is given, or none."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.records.run import SILENT_S, Run, find_runs
from freewheel.records.run_json import read_about

STARTING_S = 120.0
"""A folder as `freewheel run` makes them that is no older than this may yet become a run."""
STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")


@dataclass(frozen=True)
class Choice:
    """The run to show, whether it has begun, and the others that are live or starting."""

    folder: Path
    begun: bool = True
    others: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """What is wrong with newer runs that cannot be shown."""


def pick(folder: Path, unreadable: Mapping[Path, str] | None = None) -> Choice:
    """The newest run in a folder that is starting or live, else the newest one; of those that can be read.

    `unreadable` names runs of which it is known that they cannot be, and why.
    """
    starting = _starting(folder)
    try:
        runs = find_runs(folder)
    except ConfigError:
        if not starting:
            raise
        runs = []
    known = unreadable or {}
    runs, broken = _readable([run for run in runs if run not in known])
    broken += known.values()
    if broken and not runs and not starting:
        raise ConfigError(broken[0])
    lately = [run for run in runs if time.time() - written_s(run) < SILENT_S and _live(run)]
    awake = sorted([*starting, *lately], key=_began_s)
    if not awake:
        return Choice(max(runs, key=written_s), broken=broken)
    return Choice(awake[-1], awake[-1] not in starting, awake[-2::-1], broken)


def _readable(runs: list[Path]) -> tuple[list[Path], list[str]]:
    """Those whose run.json can be read, or is not there yet; and what is wrong with the others."""
    good, broken = [], []
    for run in runs:
        try:
            read_about(run)
            good.append(run)
        except ConfigError as error:
            broken.append(str(error))
    return good, broken


def _starting(folder: Path) -> list[Path]:
    """Folders, this one or below it, that a launcher has just made and no worker has written into."""
    if not folder.is_dir():
        return []
    found = []
    for path in [folder, *folder.iterdir()]:
        if (
            STAMP.fullmatch(path.resolve().name)
            and path.is_dir()
            and _began_s(path) > time.time() - STARTING_S
        ):
            try:
                find_runs(path)
            except ConfigError:
                found.append(path)
    return found


def _live(run: Path) -> bool:
    try:
        return Run(run).live
    except ConfigError:
        return False


def written_s(run: Path) -> float:
    """When anything in a folder was last written."""
    return max((_changed_s(path) for path in run.glob("*") if path.is_file()), default=0.0)


def _began_s(run: Path) -> float:
    """When it began, as well as the files tell: run.json is written once, when training begins."""
    about = run / "run.json"
    return _changed_s(about) or _changed_s(run)


def _changed_s(path: Path) -> float:
    """When it was last written; 0: it is not there, or not any more, as a file that took another's place."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
