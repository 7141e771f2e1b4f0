"""What was run, as the run.json of its folder says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, at_least
from freewheel.records.journal import FORMAT

KINDS = {
    "strategy": str,
    "workers": int,
    "seed": int,
    "settings": dict,
    "started": int | float,
    "target": int | float | None,
}
"""What must be in a run.json."""


def stamp(folder: Path) -> tuple[int, ...] | None:
    """What tells one run.json from the next in the same folder; None while there is none."""
    try:
        status = (folder / "run.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_about(folder: Path) -> dict[str, Any]:
    """What run.json says; nothing while there is none."""
    path = folder / "run.json"
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ConfigError(f"{str(path)!r} is no file. Give a folder as `freewheel run` makes them.")
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}.") from None
    except ValueError:
        what = "is empty" if not path.stat().st_size else "is damaged: it is no JSON"
        raise ConfigError(
            f"{str(path)!r} {what}. Give a folder as `freewheel run` makes them, unchanged; or move this "
            "file away, and `freewheel watch` shows what else is there."
        ) from None
    if not isinstance(about, dict) or "format" not in about:
        raise ConfigError(
            f"{str(path)!r} is not what a run writes: it has no format. Give a folder as `freewheel run` "
            "makes them, unchanged."
        )
    if about["format"] != FORMAT:
        of = about.get("freewheel", "unknown")
        raise ConfigError(
            f"{str(folder)!r} was written by freewheel {of} (records of format {about['format']}); this "
            f"version reads format {FORMAT}. Use that version of freewheel to show it."
        )
    for key, kinds in KINDS.items():
        if not isinstance(about.get(key), kinds):
            raise ConfigError(f"{str(path)!r} is not what a run writes: {key} is {about.get(key)!r}.")
    at_least(f"workers in {str(path)!r}", about["workers"], 1)
    return about
