"""Follow a growing JSON-lines file, which may be replaced by a thinned copy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

PIECE = 1 << 16
"""Bytes read to learn how long lines are."""
RECENT = 16
"""The last lines of a long file that are always read."""

Line = dict[str, Any]


class Tail:
    """The lines of a file, as they come; a file that is not there yet has none.

    With `most`, a long file that is opened gives about so many lines, spread evenly, and the last ones.
    Samples are sums: what lies between two of them is not lost, only not drawn.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self._most = path, most
        self._at, self._inode = 0, -1
        self.begun = 0
        """How often reading has started at the first line: more than once where the file was replaced."""
        self.broken = 0
        """Whole lines that were no JSON objects; they are left out."""
        self.half = False
        """Whether the last line is not whole."""
        self.written_s = 0.0
        """When the file was last written to, in seconds since 1970."""

    def read(self) -> list[Line]:
        """What has been added since the last call; only whole lines."""
        try:
            if not self.path.is_file():  # opening a pipe would wait
                return []
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:
            return []

    def _read(self, file: BinaryIO) -> list[Line]:
        status = os.fstat(file.fileno())
        self.written_s = status.st_mtime
        found: list[Line] = []
        if status.st_ino != self._inode or status.st_size < self._at:
            self._inode, self._at = status.st_ino, 0
            self.begun += 1
            found = self._spread(file, status.st_size)
        file.seek(self._at)
        whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        self.half = self._at < status.st_size
        return found + self._parsed(whole)

    def _spread(self, file: BinaryIO, size: int) -> list[Line]:
        """Evenly spread lines of a long file, up to its last ones; of a short one none."""
        line_bytes = _line_bytes(file.read(PIECE))
        if self._most is None or size < 2 * self._most * line_bytes:
            return []
        file.seek(max(0, size - PIECE))
        end = int(size - 1.5 * RECENT * _line_bytes(file.read(PIECE)))  # some lines are longer
        file.seek(0)
        found = self._parsed(file.readline())
        self._at = file.tell()
        for number in range(1, self._most):
            file.seek(max(self._at, number * end // self._most))
            file.readline()  # the rest of the line we are in
            at, line = file.tell(), file.readline()
            new = self._parsed(line)
            if found and new and found[-1].get("life") != new[0].get("life"):
                file.seek(self._at)  # the last line of a life holds its sums: none is left out
                found += self._parsed(file.read(at - self._at))
            found += new
            self._at = at + len(line)
        file.seek(end)
        file.readline()
        at, line = file.tell(), file.readline()
        if at > self._at and found and life(line) == found[-1].get("life"):
            self._at = at
        return found

    def _parsed(self, text: bytes) -> list[Line]:
        found: list[Line] = []
        for line in filter(bytes.strip, text.split(b"\n")):
            try:
                one = json.loads(line)
            except ValueError:
                one = None
            if isinstance(one, dict):
                found.append(one)
            else:
                self.broken += 1
        return found


def life(line: bytes) -> Any:
    """The life of its worker that a sample is of; None where the line is no sample."""
    try:
        return json.loads(line)["life"]
    except (ValueError, KeyError, TypeError):
        return None


def _line_bytes(piece: bytes) -> float:
    return len(piece) / max(1, piece.count(b"\n"))
