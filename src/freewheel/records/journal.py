"""Writing the folder of a run, as docs/RECORDS.md promises it: for workers, the launcher and the simulator.

Whoever writes goes on, whatever happens: a full disk or a folder that is gone costs records, with one
warning. A file is opened for each line: a folder that was deleted is noticed, and nothing is kept open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.files import write_whole
from freewheel.records.schema import MEASURED
from freewheel.records.track import life

THIN_BYTES = 24_000_000
"""When a worker's samples are thinned."""
BESIDES_BYTES, BESIDES_BYTES_PER_S = 1_000_000, 2_000
"""What events and evaluations of one writer may take: so much at once, and so much for each second."""
TIMELINE_BYTES = 8_000_000
"""What a worker's timeline may take: half an hour of 5 ms steps."""
TAIL = 1 << 17
"""More than a sample takes."""

log = logging.getLogger("freewheel")


class Journal:
    """One writer's pen for the folder of a run; `by` says whose. Makes the folder.

    With `hold` lines are kept back until a file has so many characters to write: `close` writes the rest.
    """

    def __init__(self, folder: Path, by: int | str, hold: int = 0) -> None:
        self.folder, self.by = folder, by
        self._hold = hold
        self._held: dict[str, list[str]] = {}
        self._chars: Counter[str] = Counter()
        self._besides: dict[str, tuple[float, int]] = {}
        self._full: set[str] = set()
        self._thin_at: dict[str, int] = {}
        self._warned = False
        with self._going_on():
            folder.mkdir(parents=True, exist_ok=True)

    # -- what is written --

    def begin(self) -> None:
        """Leave a file for events, so that the folder is known to be a run before there are any."""
        with self._going_on():
            append(self.folder / f"events-{self.by}.jsonl", b"")

    def about(self, about: Mapping[str, Any]) -> None:
        """Say what is run; see `run_json`."""
        with self._going_on():
            self.folder.stat()  # one that was deleted is not made again
            write_whole(self.folder / "run.json", _json(about) + "\n")

    def sample(self, sample: Mapping[str, Any]) -> None:
        """How a worker goes."""
        self._put(f"worker-{sample['rank']}.jsonl", sample)

    def timeline(self, rank: int, line: Mapping[str, Any] | None) -> None:
        """What a worker did, one by one; a run that does very much is written down up to a size."""
        if line is not None:
            self._put_besides(f"timeline-{rank}.jsonl", line, line["from"], TIMELINE_BYTES, 0)

    def event(
        self,
        time_s: float,
        what: str,
        rank: int | None,
        life: int | None,
        text: str,
        by: int | str | None = None,
        peer: int | None = None,
    ) -> None:
        """Something happened to a worker, or to its link to a peer."""
        by = self.by if by is None else by
        event = {"time": time_s, "what": what, "rank": rank, "life": life, "by": by, "text": text}
        event |= {} if peer is None else {"peer": peer}
        self._put_besides(f"events-{by}.jsonl", event, time_s)

    def evaluation(self, time_s: float, **measured: float | None) -> None:
        """What was measured of the answer."""
        known = dict.fromkeys(MEASURED)
        self._put_besides(f"evaluations-{self.by}.jsonl", {**known, "time": time_s, **measured}, time_s)

    def close(self) -> None:
        """Write what was kept back; a file that `begin` has left and nobody has written to is removed."""
        for name in list(self._held):
            self._flush(name)
        with contextlib.suppress(OSError):
            events = self.folder / f"events-{self.by}.jsonl"
            if not events.stat().st_size:
                events.unlink()

    def last_life(self, rank: int) -> int:
        """The last life of a worker that wrote into this folder; 0: it has not been here."""
        try:
            with (self.folder / f"worker-{rank}.jsonl").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                return int(json.loads(file.read(TAIL).rpartition(b"\n")[0].splitlines()[-1])["life"])
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return 0

    # -- how --

    def _put_besides(
        self,
        name: str,
        line: Mapping[str, Any],
        now_s: float,
        most: int = BESIDES_BYTES,
        per_s: int = BESIDES_BYTES_PER_S,
    ) -> None:
        """Write a line, unless lines of this kind have taken too much already."""
        began_s, written = self._besides.setdefault(name, (now_s, 0))
        if written > most + per_s * (now_s - began_s):
            if name not in self._full:
                self._full.add(name)
                self._thinned(now_s, f"{name} takes too much: lines are left out from here on")
            return
        self._besides[name] = (began_s, written + self._put(name, line))

    def _put(self, name: str, line: Mapping[str, Any]) -> int:
        text = _json(line) + "\n"
        self._held.setdefault(name, []).append(text)
        self._chars[name] += len(text)
        if self._chars[name] > self._hold:
            self._flush(name)
        return len(text)

    def _flush(self, name: str) -> None:
        text = "".join(self._held.pop(name, ()))
        del self._chars[name]
        path = self.folder / name
        with self._going_on():
            size = append(path, text.encode())
            if name.startswith("worker-") and size > self._thin_at.get(name, THIN_BYTES):
                self._thin_at[name] = size + THIN_BYTES // 24  # if it fails, not again with every line
                kept = thin(path)
                self._thin_at[name] = max(THIN_BYTES, 2 * kept)
                what = f"{name} had grown to {size / 1e6:.0f} MB: every second sample was dropped"
                self._thinned(time.time(), what)

    def _thinned(self, time_s: float, text: str) -> None:
        rank = self.by if isinstance(self.by, int) else None
        event = {"time": time_s, "what": "thinned", "rank": rank, "life": None, "by": self.by, "text": text}
        self._put(f"events-{self.by}.jsonl", event)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """What goes wrong with the disk costs records, and the first time a word."""
        try:
            yield
        except (OSError, ConfigError) as error:
            if not self._warned:
                self._warned = True
                why = getattr(error, "strerror", None) or error
                log.warning("records in %s are not written: %s. Training goes on", self.folder, why)


def append(path: Path, data: bytes) -> int:
    """Add whole lines to a file, or nothing; return its size."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(handle, left) :]
        except OSError:
            _cut_back(handle, len(data) - len(left))
            raise
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _cut_back(handle: int, written: int) -> None:
    """Take back the beginning of a line whose end could not be written; nobody else writes into the file."""
    status = os.fstat(handle)
    if written and stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError):
            os.ftruncate(handle, status.st_size - written)


def thin(path: Path) -> int:
    """Drop every second line of a file of samples, but not the last one of a life; return its new size.

    The file that is there stays whole until the new one takes its place.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with path.open("rb") as old, part.open("wb") as new:
            keep, before, of = True, b"", None
            for line in old:
                if before and (keep or of != life(line)):
                    new.write(before)
                keep, before, of = not keep, line, life(line)
            new.write(before)
            size = new.tell()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return size


def _json(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, default=str)
    if "NaN" in text or "Infinity" in text:  # JSON has neither
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text
