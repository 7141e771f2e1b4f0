"""Vectors that another process of the same machine reads where they lie, instead of having them sent.

A window is a piece of memory without a name in any file system; a peer of the same user opens it through
/proc. It begins with two numbers: which snapshot lies in it, and how far the peer has read it. So the owner
knows which part it may overwrite, and the reader whether it was overwritten under its eyes.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

HEAD_BYTES = 4096
NAME = "freewheel"
_serials = itertools.count(secrets.randbits(50))
"""No two snapshots of a process have the same number: a window may get the handle of one that is gone."""


class Window:
    """Memory for a vector and its two numbers, shared."""

    def __init__(self, fd: int, numel: int, dtype: torch.dtype) -> None:
        self.fd, self.numel, self.dtype = fd, numel, dtype
        self._map = mmap.mmap(fd, size(numel, dtype))
        self._head = memoryview(self._map)[:16].cast("q")

    def vector(self) -> Tensor:
        """What lies in it."""
        return torch.frombuffer(self._map, dtype=self.dtype, count=self.numel, offset=HEAD_BYTES)

    @classmethod
    def make(cls, numel: int, dtype: torch.dtype) -> Window:
        """A new one, of zeros."""
        fd = os.memfd_create(NAME)
        os.ftruncate(fd, size(numel, dtype))
        return cls(fd, numel, dtype)

    @property
    def serial(self) -> int:
        """Which snapshot lies here."""
        return self._head[0]

    @property
    def read(self) -> int:
        """How many of its numbers the peer has read."""
        return self._head[1]

    @read.setter
    def read(self, numel: int) -> None:
        self._head[1] = numel

    def renew(self) -> int:
        """Another snapshot lies here now, which nobody has read."""
        self._head[1] = 0
        self._head[0] = next(_serials)
        return self.serial

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.fd)


class Windows:
    """A worker's own windows, and those of its peers that it has opened."""

    def __init__(self) -> None:
        self._peers: dict[tuple[int, int], Window] = {}

    def make(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector others can look at."""
        window = Window.make(numel, dtype)
        vector = window.vector()
        vector.window = window  # type: ignore[attr-defined]  # lives as long as the vector
        return vector

    @staticmethod
    def of(vector: Tensor) -> Window | None:
        """The window a vector lies in, if it is one."""
        return getattr(vector, "window", None)

    def open(self, pid: int, fd: int, numel: int, dtype: torch.dtype) -> Window:
        """A peer's window; OSError if this is not one."""
        known = self._peers.get((pid, fd))
        path = Path(f"/proc/{pid}/fd/{fd}")
        fits = known is not None and (known.numel, known.dtype) == (numel, dtype)
        # Numbers of closed handles are given out again: it may be another window by now.
        if known is not None and fits and os.path.samestat(path.stat(), os.fstat(known.fd)):
            return known
        if path.readlink().name != f"memfd:{NAME} (deleted)":
            raise OSError(f"{path} is not a window")
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(handle).st_size != size(numel, dtype):
            os.close(handle)
            raise OSError(f"{path} has another size")
        window = self._peers[pid, fd] = Window(handle, numel, dtype)
        return window

    def forget_peers(self) -> None:
        """Let go of what peers showed: one that comes back shows other windows."""
        self._peers.clear()


def size(numel: int, dtype: torch.dtype) -> int:
    """Bytes of a window."""
    return HEAD_BYTES + numel * dtype.itemsize


def place() -> str:
    """Says whether two processes could see each other's windows: equal on one machine, for one user."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    return ""
