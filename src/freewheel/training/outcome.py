"""What came of a job: its figures, from the records every run writes."""

from __future__ import annotations

import json
from pathlib import Path

from freewheel.errors import ConfigError, RunStopped
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.summary import result_of


def read_outcome(folder: Path, workers: int) -> Result:
    """The figures of a run on real processes, the same that `freewheel report` reads."""
    for failed in [_failed(folder / f"outcome-{rank}.json") for rank in range(workers)]:
        if failed:
            raise RunStopped(failed)
    try:
        return result_of(Run(folder))
    except ConfigError as error:  # a full disk
        raise RunStopped(f"it ended, but its records cannot be read: {error}") from None


def _failed(path: Path) -> str:
    try:
        return str(json.loads(path.read_text())["failed"])
    except (OSError, ValueError):
        raise RunStopped("") from None  # the worker's last words are in its log
