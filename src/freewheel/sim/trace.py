"""The trace of a run: every event in order, and one hash over all of them.

Two runs are the same exactly when their hashes are: times, losses and sizes are written with all their
digits.
"""

from __future__ import annotations

import hashlib
from typing import Any, TextIO


class Trace:
    """Takes events as tuples; hashes them as text, a line each, and writes them out if asked to."""

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
        text = "".join(f"{event!r}\n" for event in self._events)
        self._hash.update(text.encode())
        if self._file is not None:
            self._file.write(text)
        self.events += len(self._events)
        self._events.clear()
