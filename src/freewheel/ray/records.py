"""Records of workers on any node reach the driver's folder: each sends what it has written, once a second.

What the driver has not taken when the book is lost is sent again: a worker that finds another edition of the
book begins at the beginning, and the driver writes each piece where it belongs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from freewheel.ray.book import Line, Piece

SEND_S = 1.0


class Sender:
    """Sends a worker's folder to the book, beside what it does."""

    def __init__(self, folder: Path, life: int, line: Line) -> None:
        self._folder, self._life, self._line = folder, life, line
        self._sent: dict[str, bytes] = {}
        """What the book has of each file."""
        self._edition = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-records", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._send()

    def _run(self) -> None:
        while not self._end.wait(SEND_S):
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(2):  # a new edition has nothing: once more, from the beginning
                files = {file.name: file.read_bytes() for file in sorted(self._folder.iterdir())}
                edition = self._line.ask("tell", self._edition, list(self._pieces(files)))
                if edition == self._edition:
                    self._sent = files
                    return
                self._sent, self._edition = {}, edition

    def _pieces(self, files: dict[str, bytes]) -> Iterator[Piece]:
        for name, data in files.items():
            before = self._sent.get(name, b"")
            if name.endswith(".jsonl") and data.startswith(before):
                if len(data) > len(before):
                    yield name, self._life, len(before), data[len(before) :]
            elif data != before:  # written anew, as run.json is, or a file when thinned
                yield name, self._life, -1, data


class Collector:
    """Writes what workers send into one folder, in the driver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, dict[int, int]] = {}
        """How much of a file each life has written, one after the other; 0: what was there before."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, pieces: list[Piece]) -> None:
        """Write each piece where it belongs; one that was written before changes nothing."""
        for name, life, at, data in pieces:
            path = self._folder / Path(name).name
            if path.suffix != ".jsonl":
                replace(path, data)
                continue
            path.touch()
            sizes = self._sizes.setdefault(name, {0: path.stat().st_size})
            size = sizes.get(life, 0)
            if at == size and life >= max(sizes):
                with path.open("ab") as file:
                    file.write(data)
                sizes[life] = size + len(data)
            else:  # what this life has written anew, as a file when thinned; others' stays
                begin = sum(others for one, others in sizes.items() if one < life)
                all_of_it = path.read_bytes()
                own = all_of_it[begin : begin + size]
                own = own[:at] + data + own[at + len(data) :] if at >= 0 else data
                replace(path, all_of_it[:begin] + own + all_of_it[begin + size :])
                sizes[life] = len(own)


def replace(path: Path, data: bytes) -> None:
    """Write a file anew; who reads it finds the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)
