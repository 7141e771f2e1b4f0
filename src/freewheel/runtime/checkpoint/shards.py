"""Checkpoints on disk: a folder for each set, and in it a shard and a manifest for each worker.

    PATH/step-00000100-3f2a9c01/worker-0-5d41402abc4b.pt     what worker 0 had after step 100, by torch.save
    PATH/step-00000100-3f2a9c01/worker-0.json                its manifest: of which run and model, its digest

The set is named by the step and the run, so that a run never writes over another's. A shard counts from the
moment its manifest has its name; before that it is written, flushed to the disk and renamed. What was there
before is untouched until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import torch

from freewheel.errors import first_line

FORMAT = 2
TEMPORARY = ".tmp"
TRIES = 10
PARTS = {"weights", "buffers", "optimizer", "random", "loaders", "strategy", "extra"}
"""What a shard holds, by name."""


class Damaged(Exception):
    """A file is not what its manifest says."""

    def __init__(self, shard: Manifest, why: str) -> None:
        super().__init__(f"{shard.tensors} {why}")
        self.shard = shard


@dataclass(frozen=True)
class Manifest:
    """What is to be known of a shard without reading it.

    `version` is Freewheel's. `origin` is the run that began this training: one that resumes another has its
    origin. `model` has name, shape and type of every trainable parameter; `names`, of every entry of the
    model's state_dict, the first name of the parameter or buffer it is. `time` is in seconds since 1970;
    `path` is where it was found, and is not written down.
    """

    version: str
    run: str
    origin: str
    rank: int
    world_size: int
    strategy: str
    settings: dict[str, str]
    optimizer: str
    model: list[list[Any]]
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    step: int = 0
    time: float = 0.0
    file: str = ""
    size: int = 0
    sha256: str = ""
    format: int = FORMAT
    path: Path = Path()

    @property
    def set(self) -> str:
        """The name of the set the shard belongs to."""
        return f"step-{self.step:08d}-{self.run[:8]}"

    @property
    def tensors(self) -> Path:
        """Where the shard is."""
        return self.path.parent / self.file

    def delete(self) -> None:
        """Remove it, manifest first: what is left of it never counts."""
        self.path.unlink(missing_ok=True)
        self.tensors.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other workers' shards are still there
            self.path.parent.rmdir()


def write(home: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Write a shard and, when it is safe on the disk, its manifest. What a failure leaves, `tidy` removes."""
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
    """Remove what these workers have written that no manifest names: they failed, or wrote it again."""
    for rank in ranks:
        left = _each(home, f"worker-{rank}{TEMPORARY}", sets)
        for path in _each(home, f"worker-{rank}-*.pt", sets):
            manifest = _read(path.parent / f"worker-{rank}.json")
            if isinstance(manifest, str) or manifest.file != path.name:
                left.append(path)
        for path in left:
            path.unlink(missing_ok=True)
    for folder in home.glob(sets):
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty


def find(home: Path) -> tuple[list[Manifest], list[str]]:
    """The shards below a folder, and what is wrong with those that do not count."""
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
    """Read a shard; nothing in it is run. Raises Damaged."""
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
    """The files of some sets; a worker may clear one away meanwhile."""
    found: list[Path] = []
    for folder in home.glob(sets):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found += folder.glob(pattern)
    return found


def _open_in(folder: Path, file: Path) -> BufferedRandom:
    """Make a folder and a file in it; another worker may take the folder for one that is not needed."""
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
    """A manifest, or what is wrong with it."""
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
