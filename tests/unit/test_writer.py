"""Checkpoints on a disk that is full: they are missed, and those that are there stay."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Manifest, Writer

DEADLINE_S = 60.0
STATE = {name: {"part": torch.zeros(4096)} for name in shards.PARTS}  # a shard is far larger than a manifest


class Disk:
    """A folder with room for so many shards: who flushes more is told that there is no room."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home, self.room, self.why = home, float("inf"), errno.ENOSPC
        self._fsync = os.fsync
        self._size = 0
        monkeypatch.setattr(os, "fsync", self._flush)

    def _flush(self, number: int) -> None:
        used = sum(path.stat().st_size for path in self.home.rglob("*") if path.is_file())
        self._size = self._size or used  # the first file that is flushed is a shard
        if used > self.room * self._size:
            raise OSError(self.why, os.strerror(self.why))
        self._fsync(number)

    def steps(self, rank: int = 0) -> list[int]:
        found, wrong = shards.find(self.home)
        assert not wrong
        for one in found:
            shards.load(one)
        assert len(list(self.home.rglob("*.pt"))) == len(found), "a shard that does not count is left"
        assert not list(self.home.rglob("*.tmp"))
        return [one.step for one in found if one.rank == rank]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path / "checkpoints", monkeypatch)


def writer(disk: Disk) -> Writer:
    manifest = Manifest("test", "12345678", "12345678", 0, 1, "sasgd", {}, "SGD", [])
    made = Writer(disk.home, manifest, {"done": 0, "failed": 0}, lambda *_: None)
    made.keep = 100
    return made


def write(one: Writer, *steps: int) -> None:
    for step in steps:
        one.begin(step, STATE)
        one.wait(DEADLINE_S)


def test_the_only_good_one_stays(disk, caplog):
    disk.room = 1.5
    one = writer(disk)
    write(one, 1, 2, 3)
    assert disk.steps() == [1]
    assert one._counts == {"done": 1, "failed": 2}
    assert [message.split(":")[0] for message in caplog.messages] == ["no checkpoint of step 2"]
    disk.room = 2.5
    write(one, 4)
    assert disk.steps() == [1, 4]
    assert "written again: that of step 4" in caplog.messages[1]
    assert len(caplog.messages) == 2


def test_a_shard_without_room_for_its_manifest_leaves_nothing(disk):
    disk.room = 1.0
    write(writer(disk), 1)
    assert disk.steps() == []
    assert not list(disk.home.iterdir())


@pytest.mark.parametrize("manifest", ['{"format": 3, "version": "9.9"}', "half of a manif"])
def test_a_shard_whose_manifest_cannot_be_read_stays(disk, manifest):
    """It may be another Freewheel's, who can read it."""
    write(writer(disk), 1)
    (path,) = disk.home.rglob("*.json")
    path.write_text(manifest)
    write(writer(disk), 2)
    assert len(list(disk.home.rglob("*.pt"))) == 2
    path.unlink()
    write(writer(disk), 3)
    assert disk.steps() == [2, 3]


def test_a_set_that_another_worker_clears_away_while_it_is_looked_for_is_none(disk, monkeypatch):
    write(writer(disk), 1, 2)
    glob = Path.glob

    def looked_for(path: Path, pattern: str):
        if path.name.startswith("step-") and int(path.name.split("-")[1]) == 1:
            for file in list(path.iterdir()):
                file.unlink()
            path.rmdir()
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))  # as glob does between two of its looks
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", looked_for)
    assert [one.step for one in shards.find(disk.home)[0]] == [2]


def test_a_checkpoint_that_is_written_counts_though_older_ones_cannot_be_cleared_away(disk, monkeypatch):
    one = writer(disk)
    monkeypatch.setattr(one, "_retire", lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    write(one, 1)
    assert one._counts == {"done": 1, "failed": 0}
