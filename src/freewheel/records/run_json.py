"""run.json: what was run. Written once, when training begins."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, at_least

FORMAT = 1
KINDS = {
    "strategy": str,
    "workers": int,
    "seed": int,
    "settings": dict,
    "started": int | float,
    "target": int | float | None,
}
"""What a reader needs of it."""


def run_json(
    *,
    freewheel: str,
    torch: str,
    clock: str,
    name: str,
    command: str,
    strategy: str,
    workers: int,
    seed: int,
    settings: Mapping[str, Any],
    target: float | None,
) -> dict[str, Any]:
    """What run.json says; the versions of Freewheel and torch are given, as this room does not know them."""
    said = dict(locals())
    return {"format": FORMAT, "python": platform.python_version(), "started": time.time(), **said}


def typed() -> str:
    """What was typed to start this process, near enough."""
    program, *rest = sys.orig_argv or ["python"]
    return shlex.join([Path(program).name, *rest])


def stamp(folder: Path) -> tuple[int, ...] | None:
    """What tells one run.json from the next in the same folder; None while there is none."""
    try:
        status = (folder / "run.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_run_json(folder: Path) -> dict[str, Any]:
    """What run.json says; nothing while there is none."""
    path = folder / "run.json"
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ConfigError(f"{str(path)!r} is no file. Give a folder as `freewheel run` makes them.")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}.") from None
    except ValueError:
        what = "is empty" if not path.stat().st_size else "is damaged: it is no JSON"
        raise ConfigError(
            f"{str(path)!r} {what}. Give an unchanged folder of a run; or move this file away, and "
            "`freewheel watch` shows what else is there."
        ) from None
    wrong = f"{str(path)!r} is not what a run writes"
    if not isinstance(said, dict) or "format" not in said:
        raise ConfigError(
            f"{wrong}: it has no format. Give a folder as `freewheel run` makes them, unchanged."
        )
    if said["format"] != FORMAT:
        raise ConfigError(
            f"{str(folder)!r} was written by freewheel {said.get('freewheel', 'unknown')} (records of format "
            f"{said['format']}); this version reads format {FORMAT}. Show it with that version."
        )
    for key, kinds in KINDS.items():
        if not isinstance(said.get(key), kinds):
            raise ConfigError(f"{wrong}: {key} is {said.get(key)!r}.")
    at_least(f"workers in {str(path)!r}", said["workers"], 1)
    return said
