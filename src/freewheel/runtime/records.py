"""What a worker writes down while it trains: JSON lines in the run folder, a line for the console.

Watching can never stop a run: a disk that is full costs the records, with one warning.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from freewheel.errors import ConfigError

RECORD_S = 1.0
CONSOLE_S = 5.0

log = logging.getLogger("freewheel")


class Recorder:
    """Appends a record a second to ``worker-RANK.jsonl``; worker 0 also says how it goes."""

    def __init__(
        self,
        metrics: Callable[[], dict[str, Any]],
        folder: str | Path | None,
        rank: int,
        *,
        console: bool = False,
        tensorboard: str | Path | None = None,
    ) -> None:
        self._metrics, self._console = metrics, console and rank == 0
        self._board = _board(tensorboard, rank) if tensorboard is not None else None
        self._file: TextIO | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if folder is not None:
            path = Path(folder) / f"worker-{rank}.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                log.warning("no records: cannot write %s (%s)", path, error.strerror or error)
        self._failed = False
        if self._file is not None or self._console or self._board is not None:
            self._thread = threading.Thread(target=self._run, name="freewheel-records", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the last record."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join(timeout=5.0)
        self._write(last=True)
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def _run(self) -> None:
        spoke_s = time.monotonic()
        while not self._ended.wait(RECORD_S):
            record = self._write()
            if record is None:
                return
            if self._console and time.monotonic() - spoke_s >= CONSOLE_S:
                spoke_s = time.monotonic()
                sys.stderr.write(line(record) + "\n")

    def _write(self, last: bool = False) -> dict[str, Any] | None:
        """Write a record; None: that cannot be done any more, and training goes on without."""
        if self._failed:
            return None
        try:
            return self._put(last)
        except Exception as error:  # whoever looks on never stops a run
            self._failed = True
            log.warning("no more records: %s", error)
            return None

    def _put(self, last: bool) -> dict[str, Any]:
        record = {"time": time.time(), **self._metrics(), "last": last}
        if self._file is not None:
            self._file.write(json.dumps(_plain(record)) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if isinstance(value, int | float) and name not in ("time", "rank", "last"):
                    self._board.add_scalar(f"freewheel/{name}", value, record["steps"])
        return record


def _board(folder: str | Path, rank: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard is not installed: pip install 'freewheel[tensorboard]', or leave the option away."
        ) from None
    return SummaryWriter(str(Path(folder) / f"worker-{rank}"))


def line(record: dict[str, Any]) -> str:
    """A record for people."""
    parts = [
        f"{record['elapsed_s']:.0f} s",
        f"step {record['steps']}",
        f"{record['steps_per_s']:.1f} steps/s",
        f"blocked {100 * record['blocked_share']:.1f} %",
        f"exchanges {record['exchanges']['done'] + record['merges']['done']}",
        f"staleness {record['staleness_mean']:.1f}",
    ]
    if not math.isnan(record["loss"]):
        parts.append(f"loss {record['loss']:.4g}")
    return "  ".join(parts)


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no nan."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
