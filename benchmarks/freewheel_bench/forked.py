"""Worker processes that are forked off one that has imported torch: a start takes milliseconds, not seconds.

A benchmark that kills and starts workers a thousand times would otherwise measure imports. Each is a process
of its own all the same, with memory, threads, sockets and a session of its own.
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
from typing import IO

NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def import_before(modules: Sequence[str]) -> None:
    """Let the process that others are forked off import these; once it is there, it imports no more."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class Forked:
    """One of them, with as much of a Popen as a life needs."""

    def __init__(
        self, module: str, asked: str, namespace: str | None, environment: Mapping[str, str], errors: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        read, tell = context.Pipe(duplex=False)
        heard, write = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_live,
            args=(module, asked, namespace, dict(environment), errors, read, write),
            daemon=True,
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._code: int | None = None
        self.stdin: IO[str] = os.fdopen(os.dup(tell.fileno()), "w")
        self.stdout: IO[str] = os.fdopen(os.dup(heard.fileno()), "r")
        for end in (read, tell, heard, write):
            end.close()

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number, once it has ended."""
        if self._code is None and (code := self._process.exitcode) is not None:
            self._process.join()
            self._process.close()  # else each that has ended keeps two descriptors open
            self._code = code
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    def wait(self) -> int | None:
        if self._code is None:
            self._process.join()
        return self.poll()


def _live(
    module: str,
    asked: str,
    namespace: str | None,
    environment: dict[str, str],
    errors: Path,
    read: Connection,
    write: Connection,
) -> None:
    """What `python -m MODULE ASKED` does, in the namespace it is given."""
    os.setsid()
    with errors.open("w") as file:
        for ours, theirs in ((read.fileno(), 0), (write.fileno(), 1), (file.fileno(), 2)):
            os.dup2(ours, theirs)
    read.close()
    write.close()
    if namespace is not None:
        _enter(namespace)
    os.environ.clear()
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
