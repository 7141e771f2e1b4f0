"""What is read of one worker: the lines of its growing file, numbers over time, its last samples whole."""

import contextlib
import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from freewheel.records.schema import SUMS, began_s, columns

ENDING = 48_000  # bytes at the end of a long file that are always read

Line = dict[str, Any]


class Tail:
    """The lines of a file, as they come; a file that is not there yet has none.

    With `most`, the first reading of a long file gives about so many lines, spread evenly, and the last ones.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self._most = path, most
        self._at, self._inode = 0, -1
        self.anew = False  # whether the last reading began at the first line: a new file, or one in its place
        self.broken = 0  # whole lines that were no JSON objects; they are left out
        self.half = False  # whether the last line is not whole
        self.written_s = 0.0  # when the file was last written to, in seconds since 1970

    def read(self) -> list[Line]:
        """The whole lines added since the last call."""
        with contextlib.suppress(OSError):
            if self.path.is_file():  # opening a pipe would wait
                with self.path.open("rb") as file:
                    return self._read(file)
        return []

    def _read(self, file: BinaryIO) -> list[Line]:
        status = os.fstat(file.fileno())
        self.written_s = status.st_mtime
        self.anew = status.st_ino != self._inode or status.st_size < self._at
        found: list[Line] = []
        if self.anew:
            self._inode, self._at = status.st_ino, 0
            found = self._spread(file, status.st_size)
        file.seek(self._at)
        whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        self.half = self._at < status.st_size
        return found + self._parsed(whole)

    def _spread(self, file: BinaryIO, size: int) -> list[Line]:
        """Lines spread evenly over a long file up to its ending; none of a short file."""
        found: list[Line] = []
        if self._most is None or size < 4 * ENDING:
            return found
        for place in range(self._most + 1):
            file.seek(max(self._at, place * (size - ENDING) // self._most))
            if file.tell() > self._at:
                file.readline()  # the rest of the line we are in
            begin, new = file.tell(), self._parsed(file.readline())
            end = file.tell()
            if found and new and found[-1].get("life") != new[0].get("life"):
                file.seek(self._at)  # the last line of a life holds its sums: none is left out
                found += self._parsed(file.read(begin - self._at))
            found += new
            self._at = end
        return found

    def _parsed(self, text: bytes) -> list[Line]:
        found: list[Line] = []
        for line in filter(bytes.strip, text.split(b"\n")):
            with contextlib.suppress(ValueError):
                if isinstance(one := json.loads(line), dict):
                    found.append(one)
                    continue
            self.broken += 1
        return found


POINTS = 256  # of a worker, read when a run is opened; at most twice as many are kept
RECENT = 32  # the last samples of a worker, which are kept whole

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Track:
    """One worker with a sample or more: numbers over time, of which sums run over all its lives."""

    def __init__(self, rank: int) -> None:
        self.rank, self.life = rank, 0
        self.latest: Line = {}
        self.recent: deque[Line] = deque(maxlen=RECENT)
        self._ended: list[Line] = []  # the last samples of earlier lives
        self.began_s: float | None = None  # when its first life began to train; None: it joins
        self.ended_s = 0.0  # when its last known step ended; 0: it is joining
        self.heard_s = 0.0  # when a poll last found a sample, on our own clock
        self._before = dict.fromkeys(SUMS, 0.0)
        self._rows: list[dict[str, Any]] = []
        self._arrays: dict[str, Floats] = {}

    def add(self, sample: Line) -> None:
        """Take a sample in, unless it is older than the last one; an error leaves all as it was.

        A later life may be on a host whose clock is behind: its points begin where those before it end.
        """
        row, life = columns(sample), int(sample.get("life", 1))
        if self.latest and sample["time"] < self.latest["time"] and life <= self.life:
            return
        if elapsed_s := sample.get("elapsed_s") or 0.0:  # a worker that only joins has not begun
            self.began_s = began_s(sample) if self.began_s is None else self.began_s
            self.ended_s = max(self.ended_s, began_s(sample) + elapsed_s)
            if sample.get("state") == "finished":  # its counts are those of its last step
                row["time"] = min(sample["time"], began_s(sample) + elapsed_s)
        if self.latest and life > self.life:
            self._ended.append(self.latest)
            self.recent.clear()
            self._before = {name: self.value(name) or 0.0 for name in SUMS}
        row |= {name: value + self._before[name] for name in SUMS if (value := row[name]) is not None}
        row["time"] = max([row["time"], *(one["time"] for one in self._rows[-1:])])
        self.life, self.latest, self._arrays = life, sample, {}
        self.recent.append(sample)
        self._rows.append(row)
        if len(self._rows) > 2 * POINTS:
            # The last points stay, and the first in each of equal parts of the time before. Dropping every
            # second one again and again would leave next to nothing of what is long past.
            begin_s = self._rows[0]["time"]
            span_s = self._rows[-RECENT]["time"] - begin_s
            width_s = 2.0 ** math.ceil(math.log2(span_s / POINTS)) if span_s > 0 else 1.0
            first = {(row["time"] - begin_s) // width_s: row for row in reversed(self._rows[:-RECENT])}
            self._rows = [*reversed(first.values()), *self._rows[-RECENT:]]

    @property
    def lives(self) -> list[Line]:
        """The last sample of every life, with the time at which that life `began`."""
        return [{**last, "began": began_s(last)} for last in (*self._ended, self.latest)]

    def array(self, name: str) -> Floats:
        """A column; nan where it is not known."""
        if name not in self._arrays:
            self._arrays[name] = np.array([row[name] for row in self._rows], dtype=float)
        return self._arrays[name]

    def value(self, name: str) -> float | None:
        return self._rows[-1][name] if self._rows else None
