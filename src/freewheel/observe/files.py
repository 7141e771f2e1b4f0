"""Writing files so that a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TextIO

from freewheel.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one act; make the folder if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}. Choose another place.") from None


def open_text(path: Path) -> TextIO:
    """Open a text file for writing as one goes; make the folder if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}. Choose another place.") from None


def check_writable(path: Path | None) -> None:
    """Refuse a place that cannot be written to, before hours of work are spent on what goes there."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder. Name a file.")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: {str(folder)!r} is not a folder one can write to.")
