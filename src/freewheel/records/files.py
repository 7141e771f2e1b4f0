"""Writing files so that a reader sees the old one or the new one, never half of one."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from freewheel.errors import ConfigError


@contextlib.contextmanager
def open_whole(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces the old one when it is complete; an error leaves the old one."""
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            # A folder refuses; /dev/null and its like take the text and must not be replaced by a file.
            with target.open("w", encoding="utf-8") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                yield file
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"cannot write {str(path)!r}: {why}. Give a file in a folder that can be written to."
        ) from None


def write_whole(path: Path, text: str) -> None:
    with open_whole(path) as file:
        file.write(text)


def fresh(folder: Path) -> None:
    """Make a folder for the records of a run, and remove those of an earlier one, nothing else."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _records(folder):
            old.unlink()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"cannot write records into {str(folder)!r}: {why}. Give a folder that can be written to."
        ) from None


def _records(folder: Path) -> Iterator[Path]:
    for name in ("run.json", "worker-*.jsonl", "timeline-*.jsonl", "events-*.jsonl", "evaluations*.jsonl"):
        yield from folder.glob(name)


def check_unused(folders: Iterable[Path], force: bool) -> None:
    """Refuse folders that hold records; with `force` remove these."""
    for folder in folders:
        if any(path.stat().st_size for path in _records(folder)):  # a run that did not begin leaves none
            if not force:
                raise ConfigError(
                    f"{str(folder)!r} holds the records of a run. Name another folder, or let it be "
                    "overwritten with --force."
                )
            fresh(folder)


def check_writable(path: Path | None) -> None:
    """Refuse a path that cannot be written to, before hours of work are spent on its contents."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder. Name a file.")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: {str(folder)!r} is not a folder one can write to.")
