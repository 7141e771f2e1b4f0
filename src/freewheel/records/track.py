"""What is known of one worker: numbers over time, by column, and its last samples whole."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from freewheel.records.schema import LEVELS, SUMS, began_s, columns

POINTS = 256
"""Points of a worker that are read of what was written before; at most twice as many are kept."""
RECENT = 32
"""The last samples of a worker that are kept whole."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Track:
    """One worker: `points` by column (sums run over all its lives), and the last samples."""

    def __init__(self, rank: int) -> None:
        self.rank, self.life = rank, 0
        self.latest: dict[str, Any] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._ended: list[dict[str, Any]] = []
        """The last samples of earlier lives."""
        self.began_s: float | None = None
        """When its first life began to train; None: it joins."""
        self.ended_s = 0.0
        """When it made its last step, as far as is known; 0: it joins."""
        self.points: dict[str, list[float | None]] = {name: [] for name in ("time", *SUMS, *LEVELS)}
        self.heard_s: float | None = None
        """When a sample last came in while we were reading, on our own clock."""
        self._before = dict.fromkeys(SUMS, 0.0)
        self._arrays: dict[str, Floats] = {}

    def add(self, sample: dict[str, Any]) -> None:
        """Take a sample in; one that is older than the last is left out, one that is none changes nothing.

        A later life may be on a host whose clock is behind: its points begin where those before it end.
        """
        row, life = columns(sample), int(sample.get("life", 1))
        if self.latest and sample["time"] < self.latest["time"] and life <= self.life:
            return
        elapsed_s = sample.get("elapsed_s") or 0.0
        until_s = sample["time"]
        if elapsed_s:  # a worker that only joins has not begun
            self.began_s = began_s(sample) if self.began_s is None else self.began_s
            self.ended_s = max(self.ended_s, began_s(sample) + elapsed_s)
            if sample.get("state") == "finished":  # what it counts was so at its last step
                until_s = min(until_s, began_s(sample) + elapsed_s)
        row["time"] = max(until_s, self.points["time"][-1] or 0.0) if self.latest else until_s
        if self.latest and life > self.life:
            self._before = {name: self.value(name) or 0.0 for name in SUMS}
            self._ended.append(self.latest)
            self.recent.clear()
        self.life, self.latest, self._arrays = life, sample, {}
        self.recent.append(sample)
        for name, column in self.points.items():
            value = row[name]
            column.append(None if value is None else value + self._before.get(name, 0.0))
        if len(self.points["time"]) > 2 * POINTS:
            self._thin()

    def _thin(self) -> None:
        """Keep the last points, and of those before the first in each of equal parts of the time.

        Dropping every second one again and again would leave next to nothing of what is long past.
        """
        times = [time or 0.0 for time in self.points["time"]]
        older = range(len(times) - RECENT)
        span_s = times[-RECENT] - times[0]
        width_s = 2.0 ** math.ceil(math.log2(span_s / POINTS)) if span_s > 0 else 1.0
        first = {(times[place] - times[0]) // width_s: place for place in reversed(older)}
        kept = [*sorted(first.values()), *range(len(older), len(times))]
        for column in self.points.values():
            column[:] = [column[place] for place in kept]

    @property
    def lives(self) -> list[dict[str, Any]]:
        """The last sample of every life, the present one's too, and when that life `began`."""
        lasts = [*self._ended, self.latest] if self.latest else []
        return [{**last, "began": began_s(last)} for last in lasts]

    def array(self, name: str) -> Floats:
        """A column as an array; nan: not known."""
        if name not in self._arrays:
            self._arrays[name] = np.array(self.points[name], dtype=float)
        return self._arrays[name]

    def value(self, name: str) -> float | None:
        """The last value of a column; None: not known."""
        column = self.points[name]
        return column[-1] if column else None
