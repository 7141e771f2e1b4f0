"""Records on their way: workers send what they have written to the book, the driver writes it to one folder.

What was given to a book that is lost nobody may have read: another book wants all of it once more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from freewheel.ray.book import Line, Piece

SEND_S = 1.0


@contextlib.contextmanager
def sending(folder: Path, rank: int, life: int, line: Line) -> Iterator[None]:
    """Send a worker's folder to the book, beside what it does, and what is left when that is done."""
    sent, end = dict[str, bytes](), threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not line.ask("tell", rank, life, list(unsent(folder, sent))):
                sent.clear()  # another book: from the beginning

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


def unsent(folder: Path, sent: dict[str, bytes]) -> Iterator[Piece]:
    """What files have more than was sent; all of one that is written anew, as run.json is."""
    for file in sorted(folder.glob("[!.]*")):
        data, before = file.read_bytes(), sent.get(file.name, b"")
        if data != before:
            at = len(before) if file.suffix == ".jsonl" and data.startswith(before) else 0
            sent[file.name] = data
            yield file.name, at, data[at:]


class Collector:
    """Writes what workers send into one folder, in the driver: each life's part behind those before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begins: dict[str, tuple[int, int]] = {}
        """Of each file the newest life, and where its part begins."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, life: int, piece: Piece) -> None:
        """Let a life's part of a file have this at its end."""
        name, at, data = piece
        path = self._folder / Path(name).name
        path.touch()
        size = path.stat().st_size
        newest, begin = self._begins.get(name, (0, 0))
        if life > newest:
            newest, begin = self._begins[name] = life, size if path.suffix == ".jsonl" else 0
        if life == newest and begin + at == size:
            with path.open("ab") as file:
                file.write(data)
        elif life == newest:
            new = path.with_name(f".{name}.new")  # who reads it finds the old one or the new one
            new.write_bytes(path.read_bytes()[: begin + at] + data)
            new.replace(path)
