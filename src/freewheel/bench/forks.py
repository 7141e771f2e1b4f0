"""Worker processes that are forked off one that has imported torch: a start takes milliseconds, not seconds.

What a benchmark that kills and starts workers a hundred times would otherwise measure is imports. Each is a
process of its own all the same, with memory, threads, sockets and a session of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from freewheel.bench.processes import Place

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def import_before(modules: Sequence[str]) -> None:
    """Let the process that others are forked off import these; once it is there, it imports no more."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class Forked:
    """One of them, with as much of a Popen as a life needs."""

    def __init__(
        self, module: str, asked: str, place: Place, environment: Mapping[str, str], errors: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        read, self._write = context.Pipe(duplex=False)
        heard, write = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_live, args=(module, asked, place, dict(environment), errors, read, write), daemon=True
        )
        self._process.start()
        read.close()
        write.close()
        pid = self._process.pid
        assert pid is not None
        self.pid = pid
        self.stdout: IO[str] = os.fdopen(os.dup(heard.fileno()), "r")
        heard.close()

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number, once it has ended."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self) -> Any:
        """Until it has ended."""
        self._process.join()
        self._write.close()
        return self._process.exitcode


def _live(
    module: str,
    asked: str,
    place: Place,
    environment: dict[str, str],
    errors: Path,
    read: Connection,
    write: Connection,
) -> None:
    """What `python -m MODULE ASKED` does, in the place it is given."""
    os.setsid()
    with errors.open("w") as file:
        for ours, theirs in ((read.fileno(), 0), (write.fileno(), 1), (file.fileno(), 2)):
            os.dup2(ours, theirs)
    read.close()
    write.close()
    if place.namespace is not None:
        _enter(place.namespace)
    os.environ.update(environment)
    sys.argv = [module, asked]
    importlib.import_module(module).main()


def _enter(namespace: str) -> None:
    """Move to a network namespace; `ip netns exec` would need a process that is started anew."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(handle, NEW_NETWORK) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    finally:
        os.close(handle)
