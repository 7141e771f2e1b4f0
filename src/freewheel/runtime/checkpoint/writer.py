"""The thread that writes a worker's shards, one at a time, and removes those that are old.

What goes wrong here costs a checkpoint, with one warning, and never the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import threading
import time
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.fabric.base import Notice
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Manifest

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write fails with for want of room."""

log = logging.getLogger("freewheel")


class Writer:
    """Writes one shard at a time, in a thread of its own, and removes those that are old."""

    def __init__(
        self, home: Path, manifest: Manifest, counts: dict[str, int], notice: Notice, together: bool
    ) -> None:
        self.home, self.keep = home, 1
        self._manifest, self._counts, self._notice = manifest, counts, notice
        self._together = together
        """Whether a run goes on from a whole set; else each worker does from its own newest shard."""
        self._thread: threading.Thread | None = None
        self._tidy = False
        self._trouble = ""
        """What the user was last told: nothing, "short" of room, or that a write "failed"."""
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {home}: {error.strerror or error}. Give a folder."
            ) from None
        others = {one.origin for one in shards.find(home)[0]} - {manifest.origin}
        if others and manifest.rank == 0:
            log.warning("%s holds checkpoints of another training, too: they stay", home)

    @property
    def busy(self) -> bool:
        """Whether a shard is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Write a shard beside training; it must not change until that is done."""
        manifest = dataclasses.replace(self._manifest, step=step, time=time.time())
        self._thread = threading.Thread(
            target=self._run, args=(manifest, state), name="freewheel-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the shard that is being written."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the last checkpoint is not written after %g s: %s", timeout_s, self.home)

    def _run(self, manifest: Manifest, state: dict[str, Any]) -> None:
        try:
            if not self._tidy:
                for path in shards.leftovers(self.home, self._ranks()):
                    path.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()
                self._tidy = True
            given_up = self._write(manifest, state)
            self._counts["done"] += 1
            instead = ", ".join(map(str, given_up))
            room = f", for want of room in place of step {instead}" if given_up else ""
            self._notice("checkpoint", manifest.rank, f"of step {manifest.step}{room}")
            before, self._trouble = self._trouble, "short" if given_up else ""
            if before == "failed" or (before and not given_up):
                safe = "checkpoints are written again: that of step %d is safe (%s)"
                log.warning(safe, manifest.step, self.home)
            if given_up and before != "short":
                log.warning(
                    "the disk is full: the checkpoint of step %s was given up for that of step %d (%s). "
                    "Make room, or keep fewer",
                    instead, manifest.step, self.home,
                )  # fmt: skip
        except Exception as error:
            self._counts["failed"] += 1
            why = getattr(error, "strerror", None) or error
            self._notice("checkpoint", manifest.rank, f"none of step {manifest.step}: {why}")
            if self._trouble != "failed":
                self._trouble = "failed"
                log.warning(
                    "no checkpoint of step %d: %s (%s). The last good one stays, training goes on",
                    manifest.step, why, self.home,
                )  # fmt: skip

        try:
            self._retire()
        except OSError as error:
            log.warning("older checkpoints in %s cannot be cleared away: %s", self.home, error)

    def _write(self, manifest: Manifest, state: dict[str, Any]) -> list[int]:
        """Write a shard; on a full disk give up older ones for it. Returns the steps of those."""
        given_up: list[int] = []
        while True:
            try:
                shards.write(self.home, manifest, state)
                return given_up
            except OSError as error:
                spare = self._spare(manifest.set) if error.errno in FULL else []
                if not spare:
                    raise
                spare[0].delete()
                given_up.append(spare[0].step)

    def _ranks(self) -> range:
        """Whose shards this worker cleans up: its own, and those of workers that a larger run had."""
        most = max((one.world_size for one in shards.find(self.home)[0]), default=0)
        return range(self._manifest.rank, max(most, self._manifest.world_size), self._manifest.world_size)

    def _found(self) -> list[Manifest]:
        """The shards of this training, the newest first."""
        found = [one for one in shards.find(self.home)[0] if one.origin == self._manifest.origin]
        return sorted(found, key=lambda one: one.time, reverse=True)

    def _spare(self, writing: str) -> list[Manifest]:
        """Which shards of this worker nobody needs while a set is being written, the oldest first.

        Where a whole set is resumed: those older than the newest whole one. Who sees such a set never loses
        it: to give up a part of it a worker must have seen a newer one. Partial sets that are newer stay, for
        the others may be about to complete them. Else, where each resumes its own: all but its newest.
        """
        found = [one for one in self._found() if one.set != writing]
        if self._together:
            taken = {one.rank: one.time for one in shards.newest_whole(found)}
            first = min(taken.values(), default=0.0)  # clocks of other hosts may be wrong: prefer its own
            ranks = self._ranks()
            older = [one for one in found if one.time < taken.get(one.rank, first)]
            spare = [one for one in older if one.rank in ranks]
        else:
            me = self._manifest.rank, self._manifest.world_size
            spare = [one for one in found if (one.rank, one.world_size) == me][1:]
        return spare[::-1]

    def _retire(self) -> None:
        """Remove what is older than the last few, but not the newest set that is whole."""
        found = self._found()
        mine = [one for one in found if one.rank == self._manifest.rank]
        if len(mine) <= self.keep:
            return
        oldest, ranks = mine[self.keep - 1].time, self._ranks()
        whole = shards.newest_whole(found)
        for one in found:
            if one.rank in ranks and one.time < oldest and one not in whole:
                one.delete()
