"""Checkpoints on disk: a folder for each set, a shard and a manifest for each worker, who writes in a thread.

    PATH/step-00000100-3f2a9c01/worker-0-5d41402abc4b.pt     what worker 0 had after step 100, by torch.save
    PATH/step-00000100-3f2a9c01/worker-0.json                its manifest: of which run and model, its digest

A set is named by step and run, so that runs do not overwrite each other. A shard counts once its manifest has
its name: both are written, flushed to the disk and renamed, and what was there before stays until then.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch

from freewheel.errors import ConfigError, first_line
from freewheel.fabric.base import Notice

FORMAT = 2
TEMPORARY = ".tmp"
TRIES = 10
PARTS = {"weights", "buffers", "optimizer", "random", "loaders", "strategy", "extra"}  # what a shard holds

log = logging.getLogger("freewheel")


class Damaged(Exception):
    """A file is not what its manifest says."""

    def __init__(self, shard: Manifest, why: str) -> None:
        super().__init__(f"{shard.tensors} {why}")
        self.shard = shard


@dataclass(frozen=True)
class Manifest:
    """What is known of a shard without reading it."""

    version: str  # Freewheel's
    run: str
    origin: str  # the run that began this training: one that resumes another has its origin
    rank: int
    world_size: int
    strategy: str
    settings: dict[str, str]
    optimizer: str
    model: list[list[Any]]  # name, shape and type of every trainable parameter
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # from a state_dict's keys to first names
    step: int = 0
    time: float = 0.0  # in seconds since 1970
    file: str = ""
    size: int = 0
    sha256: str = ""
    format: int = FORMAT
    path: Path = Path()  # where it was found; it is not written down

    @property
    def set(self) -> str:
        return f"step-{self.step:08d}-{self.run[:8]}"

    @property
    def tensors(self) -> Path:
        return self.path.parent / self.file

    def delete(self) -> None:
        """Remove it, manifest first: a half-removed shard never counts."""
        self.path.unlink(missing_ok=True)
        self.tensors.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other workers' shards are still there
            self.path.parent.rmdir()


def write(home: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Write a shard and, once it is safe on the disk, its manifest. `tidy` removes what a failure leaves."""
    folder = home / manifest.set
    temporary = folder / f"worker-{manifest.rank}{TEMPORARY}"
    with _open_in(folder, temporary) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch says only that a write failed
            raise error.__context__ or error from None
        size = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    name = f"worker-{manifest.rank}-{digest[:12]}.pt"
    manifest = dataclasses.replace(manifest, file=name, size=size, sha256=digest)
    temporary.rename(folder / name)
    with temporary.open("wb") as file:
        written = {name: one for name, one in dataclasses.asdict(manifest).items() if name != "path"}
        file.write(json.dumps(written).encode())
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(folder)  # the shard's name is there before its manifest's is
    temporary.rename(folder / f"worker-{manifest.rank}.json")
    _flush_folder(folder)
    _flush_folder(home)


def tidy(home: Path, ranks: Iterable[int], sets: str = "step-*") -> None:
    """Remove files of these workers that no manifest names: failed or replaced shards."""
    for rank in ranks:
        left = _each(home, f"worker-{rank}{TEMPORARY}", sets)
        for path in _each(home, f"worker-{rank}-*.pt", sets):
            manifest = _read(at := path.parent / f"worker-{rank}.json")
            # A manifest that cannot be read, as of another version, may name the file.
            if not at.exists() if isinstance(manifest, str) else manifest.file != path.name:
                left.append(path)
        for path in left:
            path.unlink(missing_ok=True)
    for folder in home.glob(sets):
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty


def find(home: Path) -> tuple[list[Manifest], list[str]]:
    """The whole shards below a folder, and what is wrong with the others."""
    shards, wrong = [], []
    for path in sorted(_each(home, "worker-*.json")):
        one = _read(path)
        if isinstance(one, str):
            wrong.append(f"{path}: {one}.")
            continue
        try:
            size = one.tensors.stat().st_size
        except FileNotFoundError:  # its worker may clear it away in this moment
            wrong.append(f"{one.tensors} is missing.")
            continue
        if size == one.size:
            shards.append(one)
        else:
            wrong.append(f"{one.tensors} has {size} bytes and should have {one.size}: it was cut off.")
    return shards, wrong


def load(shard: Manifest) -> dict[str, Any]:
    """Read a shard without running code in it; may raise Damaged."""
    try:
        with shard.tensors.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise Damaged(shard, "was changed after it was written: its SHA-256 is another.")
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Damaged(shard, f"cannot be read: {error.strerror or error}.") from error
    except Damaged:
        raise
    except Exception as error:  # a file of unknown making: torch and pickle raise whatever they meet
        raise Damaged(shard, f"is not a shard of Freewheel: {first_line(error, 160)}") from error
    if not isinstance(state, dict) or set(state) != PARTS:
        raise Damaged(shard, "is not a shard of Freewheel: it holds other things.")
    return state


def _each(home: Path, pattern: str, sets: str = "step-*") -> list[Path]:
    """The files of some sets; another worker may remove a set meanwhile."""
    found: list[Path] = []
    for folder in home.glob(sets):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += folder.glob(pattern)
    return found


def _open_in(folder: Path, file: Path) -> BufferedRandom:
    """Make a folder and a file in it, again if another worker's `tidy` removes the empty folder."""
    for _ in range(TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return file.open("w+b")
    return file.open("w+b")


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _read(path: Path) -> Manifest | str:
    try:
        given = json.loads(path.read_bytes())
        if given["format"] != FORMAT:
            return f"it was written by another Freewheel ({given['version']})"
        one = Manifest(**given, path=path)
        numbers = (one.rank, one.world_size, one.step, one.size)
        good = all(type(number) is int and number >= 0 for number in numbers) and one.rank < one.world_size
        good = good and (path.name, path.parent.name) == (f"worker-{one.rank}.json", one.set)
        good = good and one.file == Path(one.file).name and isinstance(one.time, float)
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        good = False
    return one if good else "it is not a manifest of Freewheel"


class Writer:
    """Writes a worker's shards in a thread and removes old ones. Failures cost checkpoints, never the run."""

    def __init__(self, home: Path, manifest: Manifest, counts: dict[str, int], notice: Notice) -> None:
        self.home, self.keep = home, 1
        self._manifest, self._counts, self._notice = manifest, counts, notice
        self._thread: threading.Thread | None = None
        self._fails = False
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {home}: {error.strerror or error}. Give a folder."
            ) from None
        found, _ = find(home)
        if manifest.rank == 0 and any(one.origin != manifest.origin for one in found):
            log.warning("%s holds checkpoints of another training, too: they stay", home)
        # It removes old shards of its own rank, and of ranks that only a larger run had.
        most = max([manifest.world_size, *(one.world_size for one in found)])
        self._ranks = range(manifest.rank, most, manifest.world_size)
        with contextlib.suppress(OSError):  # what cannot be removed stays
            tidy(home, self._ranks)

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Write a shard beside training; nobody may change `state` until that is done."""
        manifest = dataclasses.replace(self._manifest, step=step, time=time.time())
        self._thread = threading.Thread(
            target=self._run, args=(manifest, state), name="freewheel-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.busy:
            log.warning("the last checkpoint is not written after %g s: %s", timeout_s, self.home)

    def _run(self, manifest: Manifest, state: dict[str, Any]) -> None:
        before = self._fails
        try:
            write(self.home, manifest, state)
            self._fails, said = False, f"of step {manifest.step}"
            if before:
                log.warning("checkpoints are written again: that of step %d is safe", manifest.step)
        except Exception as error:
            why = getattr(error, "strerror", None) or error
            self._fails, said = True, f"none of step {manifest.step}: {why}"
            if not before:
                text = "no checkpoint of step %d: %s (%s). The last good one stays, training goes on"
                log.warning(text, manifest.step, why, self.home)
        self._counts["failed" if self._fails else "done"] += 1
        self._notice("checkpoint", manifest.rank, said)
        try:
            tidy(self.home, [manifest.rank], manifest.set)
            self._retire()
        except OSError as error:  # what cannot be removed stays
            log.warning("older checkpoints in %s cannot be cleared away: %s", self.home, error)

    def _retire(self) -> None:
        """Remove its ranks' shards older than its last `keep`, except those of the newest whole set."""
        found = [one for one in find(self.home)[0] if one.origin == self._manifest.origin]
        mine = sorted(one.time for one in found if one.rank == self._manifest.rank)
        if len(mine) <= self.keep:
            return
        count = collections.Counter(one.set for one in found)
        whole = {one.time: one.set for one in found if count[one.set] == one.world_size}
        newest = whole.get(max(whole, default=0.0))
        for one in found:
            if one.rank in self._ranks and one.time < mine[-self.keep] and one.set != newest:
                one.delete()
