"""Which run a folder means: the runs in it and below it, and the one to show where there are several."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from freewheel.errors import ConfigError
from freewheel.records.run import SILENT_S, Run
from freewheel.records.schema import read_run_json

STARTING_S = 120.0
"""A folder as `freewheel run` makes them that is no older than this may yet become a run."""
T = TypeVar("T")
NUMBERED = re.compile(r"\d+-")
STAMP = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")


@dataclass(frozen=True)
class Choice:
    """The run to show, the others that are live or starting, and what is wrong with those left out."""

    folder: Path
    run: Run | None
    """None: it is starting."""
    others: list[Path]
    broken: list[str]


def find_run(folder: Path) -> Choice:
    """The newest run in a folder that is starting or live, else the newest one; of those that can be read."""
    starting = _starting(folder)
    try:
        found = find_runs(folder)
    except ConfigError:
        if not starting:
            raise
        found = []
    wrong: dict[Path, str] = {}

    def readable(path: Path, read: Callable[[Path], T]) -> T | None:
        try:
            return read(path)
        except ConfigError as error:
            wrong[path] = str(error)
            return None

    runs = sorted((one for one in found if readable(one, read_run_json) is not None), key=written_s)
    lately = [one for one in runs if time.time() - written_s(one) < SILENT_S]
    awake: dict[Path, Run | None] = {one: run for one in lately if (run := readable(one, Run)) and run.live}
    awake |= dict.fromkeys(starting)
    if awake:
        newest, *others = sorted(awake, key=_began_s, reverse=True)
        return Choice(newest, awake[newest], others, list(wrong.values()))
    for one in reversed(runs):
        if one not in wrong and (run := readable(one, Run)) is not None:
            return Choice(one, run, [], list(wrong.values()))
    raise ConfigError(next(iter(wrong.values())))


def find_runs(folder: Path) -> list[Path]:
    """The run in a folder, or the runs up to two folders below; says what is wrong if there is none."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{str(folder)!r} {what}. {_known(folder)}")
    found = _below(folder)
    if not found:
        raise ConfigError(
            f"{str(folder)!r} is no run: it has neither run.json nor records in it. {_known(folder)}"
        )
    return found


def all_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs of several folders, in order; refuses one that was given twice."""
    found: dict[Path, Path] = {}
    for one in (run for folder in folders for run in find_runs(folder)):
        if found.setdefault(one.resolve(), one) is not one:
            raise ConfigError(f"{str(one)!r} was given twice; name every run once.")
    return list(found.values())


def compared(folder: Path, runs: Sequence[Path]) -> bool:
    """Whether these runs belong together: `compare` and `simulate` number those of one command."""
    return len(runs) > 1 and all(run.parent == folder and NUMBERED.match(run.name) for run in runs)


def written_s(run: Path) -> float:
    """When anything in a folder was last written."""
    return max((_changed_s(path) for path in run.glob("*") if path.is_file()), default=0.0)


def _below(folder: Path) -> list[Path]:
    """The folder if it is a run, else the runs up to two folders below it."""

    def is_run(path: Path) -> bool:
        names = ("run.json", "worker-*.jsonl", "events-*.jsonl")
        return path.is_dir() and any(next(path.glob(name), None) is not None for name in names)

    if is_run(folder):
        return [folder]
    return sorted(path for level in ("*", "*/*") for path in folder.glob(level) if is_run(path))


def _known(folder: Path) -> str:
    home = Path("runs")
    runs = [path for path in home.iterdir() if path.is_dir()] if home.is_dir() else []
    runs = [path for path in runs if path.resolve() != folder.resolve()]
    if runs and home.resolve() != folder.resolve():
        return f"The newest here is {max(runs, key=_changed_s)}."
    return "Give a folder that `freewheel run`, `train`, `compare` or `simulate --folder` has written."


def _starting(folder: Path) -> list[Path]:
    """Folders, this one or below it, that a launcher has just made and no worker has written into."""
    paths = [folder, *folder.iterdir()] if folder.is_dir() else []
    stamped = [path for path in paths if STAMP.fullmatch(path.resolve().name) and path.is_dir()]
    return [path for path in stamped if _began_s(path) > time.time() - STARTING_S and not _below(path)]


def _began_s(run: Path) -> float:
    """When it began, as well as the files tell: run.json is written once, when training begins."""
    return _changed_s(run / "run.json") or _changed_s(run)


def _changed_s(path: Path) -> float:
    """When it was last written; 0: it is not there, or not any more, as a file that took another's place."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
