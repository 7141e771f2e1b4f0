"""The thread that writes a worker's shards, one at a time, and removes those that are old.

What goes wrong here costs a checkpoint, with one warning, and never the run.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.fabric.base import Notice
from freewheel.runtime.checkpoint import shards
from freewheel.runtime.checkpoint.shards import Manifest

log = logging.getLogger("freewheel")


class Writer:
    """Writes one shard at a time, in a thread of its own, and removes those that are old."""

    def __init__(self, home: Path, manifest: Manifest, counts: dict[str, int], notice: Notice) -> None:
        self.home, self.keep = home, 1
        self._manifest, self._counts, self._notice = manifest, counts, notice
        self._thread: threading.Thread | None = None
        self._tidy = self._fails = False
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
        before = self._fails
        try:
            if not self._tidy:
                shards.tidy(self.home, self._ranks())
                self._tidy = True
            shards.write(self.home, manifest, state)
            self._fails, said = False, f"of step {manifest.step}"
            if before:
                log.warning("checkpoints are written again: that of step %d is safe", manifest.step)
        except Exception as error:
            why = getattr(error, "strerror", None) or error
            self._fails, said = True, f"none of step {manifest.step}: {why}"
            if not before:
                log.warning(
                    "no checkpoint of step %d: %s (%s). The last good one stays, training goes on",
                    manifest.step,
                    why,
                    self.home,
                )
        self._counts["failed" if self._fails else "done"] += 1
        self._notice("checkpoint", manifest.rank, said)
        try:
            shards.tidy(self.home, [manifest.rank], manifest.set)
            self._retire()
        except OSError as error:  # what cannot be removed stays
            log.warning("older checkpoints in %s cannot be cleared away: %s", self.home, error)

    def _ranks(self) -> range:
        """Whose shards this worker cleans up: its own, and those of workers that a larger run had."""
        most = max((one.world_size for one in shards.find(self.home)[0]), default=0)
        return range(self._manifest.rank, max(most, self._manifest.world_size), self._manifest.world_size)

    def _retire(self) -> None:
        """Remove what is older than the last few, but not the newest set that is whole."""
        found = [one for one in shards.find(self.home)[0] if one.origin == self._manifest.origin]
        mine = sorted(one.time for one in found if one.rank == self._manifest.rank)
        if len(mine) <= self.keep:
            return
        ranks, count = self._ranks(), collections.Counter(one.set for one in found)
        whole = {one.time: one.set for one in found if count[one.set] == one.world_size}
        newest = whole.get(max(whole, default=0.0))
        for one in found:
            if one.rank in ranks and one.time < mine[-self.keep] and one.set != newest:
                one.delete()
