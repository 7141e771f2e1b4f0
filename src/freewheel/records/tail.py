"""Reading a file of JSON lines that grows, and that may be taken the place of by a thinner one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

PIECE = 1 << 16
RECENT = 16
"""So many of the last lines are always read, however few of the others are."""


class Tail:
    """The lines of a file, as they come; a file that is not there yet has none.

    With `most`, of a long file that is opened only so many lines are read, spread evenly, and the last ones:
    samples are sums, so what lies between two of them is not lost, only not drawn. `last_only` names an
    object that is read of the last ones only, and null in the others: the longest part of a sample, which is
    of interest while it is new.
    """

    def __init__(self, path: Path, most: int | None = None, last_only: str | None = None) -> None:
        self.path, self._most = path, most
        self._cut = re.compile(rf'"{last_only}": ?{{[^{{}}]*}}'.encode()) if last_only else None
        self._instead = f'"{last_only}": null'.encode()
        self._at = 0
        self._inode = -1
        self.begun = 0
        """How often reading has started at the first line: more than once where the file was replaced."""
        self.broken = 0
        """Whole lines that were no JSON objects; they are left out."""
        self.half = False
        """Whether the last line is not whole."""
        self.written_s = 0.0
        """When the file was last written to, in seconds since 1970."""

    def read(self) -> list[dict[str, Any]]:
        """What has been added since the last call; only whole lines."""
        try:
            if not self.path.is_file():  # opening a pipe would wait
                return []
            with self.path.open("rb") as file:
                return self._parse(self._new(file))
        except OSError:
            return []

    def _new(self, file: BinaryIO) -> list[bytes]:
        status = os.fstat(file.fileno())
        self.written_s = status.st_mtime
        if status.st_ino != self._inode or status.st_size < self._at:
            self._inode, self._at = status.st_ino, 0
            self.begun += 1
            lines = self._spread(file, self._most) if self._most is not None else _lines(file)
        elif status.st_size == self._at:
            return []
        else:
            file.seek(self._at)
            lines = _lines(file)
        self._at = file.tell()
        self.half = self._at < status.st_size
        return lines

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                one = json.loads(line)
            except ValueError:
                one = None
            if isinstance(one, dict):
                found.append(one)
            elif line.strip():
                self.broken += 1
        return found

    def _spread(self, file: BinaryIO, most: int) -> list[bytes]:
        """Some lines of a long file, in order, and all of its last ones; all lines of a short file."""
        size = os.fstat(file.fileno()).st_size
        length = _length(file.read(PIECE))
        file.seek(max(0, size - PIECE))
        end = int(size - 1.5 * RECENT * _length(file.read(PIECE)))  # some lines are longer
        file.seek(0)
        if size < 2 * most * length:
            return _lines(file)
        found, told = [file.readline()], file.tell()
        for number in range(1, most + 1):
            file.seek(max(told, number * end // most))
            file.readline()  # what is left of the line we are in
            at, line = file.tell(), file.readline()
            if life(line) != life(found[-1]):  # the last line of a life holds its sums: none is left out
                file.seek(told)
                found += file.read(at - told).splitlines(keepends=True)
            if number == most:
                break
            found.append(line)
            told = at + len(line)
        if self._cut is not None:
            found = [self._cut.sub(self._instead, line) for line in found]
        file.seek(at)
        return found + _lines(file)


_LIFE = re.compile(rb'"life": (\d+)')


def life(line: bytes) -> bytes:
    """Of which life of its worker a sample is."""
    found = _LIFE.search(line)
    return found[1] if found else b""


def _length(piece: bytes) -> float:
    """Of a line."""
    return len(piece) / max(1, piece.count(b"\n"))


def _lines(file: BinaryIO) -> list[bytes]:
    """All whole lines from here on; the file stays where the first one that is not whole begins."""
    at = file.tell()
    whole, newline, _ = file.read().rpartition(b"\n")
    file.seek(at + len(whole) + len(newline))
    return whole.split(b"\n") if newline else []
