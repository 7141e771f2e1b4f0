"""Writing the folder of a run, as docs/RECORDS.md promises it: for workers, the launcher and the simulator.

A full disk or a deleted folder costs records and causes one warning, no error. A file is opened for each
line, so that a deleted folder is noticed.
"""

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.records.files import open_whole, write_whole
from freewheel.records.schema import MEASURED

THIN_BYTES = 24_000_000  # when a worker's samples are thinned
# Bytes that events, or evaluations, of one writer may take: at once, and more for each second.
BESIDES = (1_000_000, 2_000)
TIMELINE_BYTES = 8_000_000  # of a worker: half an hour of 5 ms steps
TAIL = 1 << 17  # more bytes than a sample takes

log = logging.getLogger("freewheel")


class Journal:
    """One writer's access to the folder of a run, which it makes; `by` says who writes."""

    def __init__(self, folder: Path, by: int | str) -> None:
        self.folder, self.by = folder, by
        # Of each file but those of samples: when it began, and its size.
        self._besides: dict[str, tuple[float, int]] = {}
        self._full: set[str] = set()
        self._thin_at: dict[str, int] = {}
        self._warned = False
        with self._going_on():
            folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Create an empty file of events, so that the folder is known to be a run before there are any."""
        with self._going_on():
            append(self.folder / f"events-{self.by}.jsonl", b"")

    def about(self, about: Mapping[str, Any]) -> None:
        with self._going_on():
            self.folder.stat()  # one that was deleted is not made again
            write_whole(self.folder / "run.json", _json(about))

    def sample(self, sample: Mapping[str, Any]) -> None:
        name = f"worker-{sample['rank']}.jsonl"
        with self._going_on():
            size = append(self.folder / name, _json(sample).encode())
            if size > self._thin_at.get(name, THIN_BYTES):
                self._thin_at[name] = size + THIN_BYTES // 24  # if it fails, not again with every line
                self._thin_at[name] = max(THIN_BYTES, 2 * thin(self.folder / name))
                what = f"{name} had grown to {size / 1e6:.0f} MB: every second sample was dropped"
                self._thinned(sample["time"], what)

    def timeline(self, rank: int, line: Mapping[str, Any] | None) -> None:
        if line is not None:
            self._put(f"timeline-{rank}.jsonl", line, line["from"], (TIMELINE_BYTES, 0))

    def event(
        self, time_s: float, what: str, rank: int | None, life: int | None, text: str, **own: int | str | None
    ) -> None:
        """`own`: the `peer` of a link to which something happened; `by`, if somebody else noticed it."""
        event = {"time": time_s, "what": what, "rank": rank, "life": life, "by": self.by, "text": text}
        event |= {name: value for name, value in own.items() if value is not None}
        self._put(f"events-{event['by']}.jsonl", event, time_s)

    def evaluation(self, time_s: float, **measured: float | None) -> None:
        known = dict.fromkeys(MEASURED)
        self._put(f"evaluations-{self.by}.jsonl", {**known, "time": time_s, **measured}, time_s)

    def close(self) -> None:
        """Remove the file of events if it is empty."""
        with contextlib.suppress(OSError):
            events = self.folder / f"events-{self.by}.jsonl"
            if not events.stat().st_size:
                events.unlink()

    def last_life(self, rank: int) -> int:
        """The last life of a worker in this folder's records; 0: there is none."""
        try:
            with (self.folder / f"worker-{rank}.jsonl").open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
                return int(life(file.read(TAIL).rpartition(b"\n")[0].splitlines()[-1]) or 0)
        except (OSError, ValueError, IndexError, TypeError):
            return 0

    def _put(
        self, name: str, line: Mapping[str, Any], now_s: float, allowed: tuple[int, int] = BESIDES
    ) -> None:
        """Write a line, unless this file has become too long."""
        (most, per_s), (began_s, written) = allowed, self._besides.setdefault(name, (now_s, 0))
        if written > most + per_s * (now_s - began_s) and line.get("what") != "thinned":
            if name not in self._full:
                self._full.add(name)
                self._thinned(now_s, f"{name} takes too much: lines are left out from here on")
            return
        data = _json(line).encode()
        self._besides[name] = (began_s, written + len(data))
        with self._going_on():
            append(self.folder / name, data)

    def _thinned(self, time_s: float, text: str) -> None:
        self.event(time_s, "thinned", self.by if isinstance(self.by, int) else None, None, text)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """A failure of the disk costs records; the first one is logged."""
        try:
            yield
        except (OSError, ConfigError) as error:
            if not self._warned:
                self._warned = True
                why = getattr(error, "strerror", None) or error
                log.warning("records in %s are not written: %s. Training goes on", self.folder, why)


def append(path: Path, data: bytes) -> int:
    """Add all of the data to a file, or nothing; return the file's size."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        written = file.write(data)
        if written < len(data):  # no other process writes into this file: undo the part
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before + written


def thin(path: Path) -> int:
    """Drop every second sample, but not the last one of a life; return the file's new size."""
    with path.open("rb") as old, open_whole(path) as new:
        keep, before, of = True, b"", None
        for line in old:
            if before and (keep or of != life(line)):
                new.write(before.decode(errors="replace"))
            keep, before, of = not keep, line, life(line)
        new.write(before.decode(errors="replace"))
    return path.stat().st_size


def life(line: bytes) -> Any:
    try:
        return json.loads(line)["life"]
    except (ValueError, KeyError, TypeError):
        return None


def _json(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, default=str)
    if "NaN" in text or "Infinity" in text:  # JSON has neither
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text + "\n"
