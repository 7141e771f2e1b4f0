"""The trace of a run: every event in order, and one hash over all of them.

Two runs are the same exactly when their hashes are: times, losses and sizes are hashed with all their
digits. A file gets a line of JSON for each event: its time, what happened, and what FIELDS says of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, TextIO

FIELDS = {
    "step": ("worker", "step", "loss"),
    "send": ("worker", "to", "message", "bytes"),
    "land": ("worker", "from", "message"),
    "fault": ("fault",),
    "left": ("worker",),
}


class Trace:
    """Takes events as tuples; hashes them as text, and writes them out if asked to."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._hash = hashlib.sha256()
        self._events: list[tuple[Any, ...]] = []
        self._file = file
        self.events = 0

    def add(self, event: tuple[Any, ...]) -> None:
        """Add an event: its time, what happened, to whom."""
        self._events.append(event)
        if len(self._events) >= 4096:
            self._flush()

    def sha256(self) -> str:
        """The hash of all events so far."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        self._hash.update("".join(f"{event!r}\n" for event in self._events).encode())
        if self._file is not None:
            for time_s, what, *more in self._events:
                told = dict(zip(FIELDS[what], more, strict=True))
                self._file.write(json.dumps({"time_s": time_s, "event": what, **told}) + "\n")
        self.events += len(self._events)
        self._events.clear()
