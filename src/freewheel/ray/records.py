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


@contextlib.contextmanager
def sending(folder: Path, life: int, line: Line) -> Iterator[None]:
    """Send a worker's folder to the book, beside what it does, and what is left when that is done."""
    sent, edition = dict[str, bytes](), ""
    end = threading.Event()

    def send() -> None:
        nonlocal sent, edition
        with contextlib.suppress(OSError):
            for _ in range(2):  # a new edition has nothing: once more, from the beginning
                files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
                found = line.ask("tell", edition, list(_pieces(files, sent, life)))
                if found == edition:
                    sent = files
                    return
                sent, edition = {}, found

    def run() -> None:
        while not end.wait(SEND_S):
            send()

    thread = threading.Thread(target=run, name="freewheel-records", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        send()


def _pieces(files: dict[str, bytes], sent: dict[str, bytes], life: int) -> Iterator[Piece]:
    """What the book has not of each file."""
    for name, data in files.items():
        before = sent.get(name, b"")
        if name.endswith(".jsonl") and data.startswith(before):
            if len(data) > len(before):
                yield name, life, len(before), data[len(before) :]
        elif data != before:  # written anew, as run.json is, or a file when thinned
            yield name, life, -1, data


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
