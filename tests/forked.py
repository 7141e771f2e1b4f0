"""Python processes that begin with torch imported: forked from one that has imported it, in milliseconds.

Each is a process of its own, with its own signals, exit code and end of the interpreter; only the imports,
most of what such a process costs, are done once. Torch has one thread there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import IO, Any

MODULES = (
    "pytest", "freewheel.api", "freewheel.cli.main", "freewheel.cli.run", "freewheel.runtime.launch.launcher",
    "crew", "lab", "torch._dynamo",
)  # fmt: skip
"""What is imported before; the last is what torch imports with the first optimizer."""
FREEWHEEL = "-c", "from freewheel.cli.main import main; main()"
LONGEST = 1 << 18
"""Bytes of a message."""
PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT


class Forked:
    """What `subprocess.Popen` is for others; `stdin`, `stdout` and `stderr` are texts."""

    def __init__(self, parent: Parent, pid: int, ends: list[IO[str] | None]) -> None:
        self._parent, self.pid = parent, pid
        self.stdin, self.stdout, self.stderr = ends
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus its signal; None: it runs."""
        if self.returncode is None:
            self.returncode = self._parent.ended(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended."""
        end_s = time.monotonic() + (timeout or 600.0)
        while self.returncode is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 600.0)
            self.returncode = self._parent.ended(self.pid, 0.1)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As os.kill, while it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it writes until it ends."""
        said = ["", ""]

        def read(which: int, stream: IO[str]) -> None:
            with stream:
                said[which] = stream.read()

        if self.stdin is not None:
            self.stdin.close()
        readers = [
            threading.Thread(target=read, args=(which, stream), daemon=True)
            for which, stream in enumerate((self.stdout, self.stderr))
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        end_s = time.monotonic() + (timeout or 600.0)
        for reader in readers:
            reader.join(max(0.0, end_s - time.monotonic()))
        if any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 600.0)
        self.wait(max(0.1, end_s - time.monotonic()))
        return said[0], said[1]


class Parent:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._lock, self._codes = threading.Lock(), dict[int, int]()
        atexit.register(self.close)

    def start(self, given: dict[str, Any], handles: list[int]) -> int:
        """Fork; the new process's pid."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(given).encode()], handles)
            while "started" not in (told := json.loads(self._control.recv(LONGEST))):
                self._codes[told["ended"]] = told["code"]
            return int(told["started"])

    def ended(self, pid: int, timeout_s: float) -> int | None:
        """How a process has ended; None: it has not."""
        with self._lock:
            while pid not in self._codes and select.select([self._control], [], [], timeout_s)[0]:
                told = json.loads(self._control.recv(LONGEST))
                self._codes[told["ended"]] = told["code"]
            return self._codes.get(pid)

    def close(self) -> None:
        """It sees that nobody asks any more."""
        self._control.close()
        self._process.wait(60.0)


@functools.cache
def parent() -> Parent:
    """Started when it is needed first."""
    return Parent()


def start(
    *words: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int = PIPE,
    stderr: Any = PIPE,
) -> Forked:
    """Start what `python words…` would: a script, or a program after -c."""
    ours: list[IO[str] | None] = []
    theirs: list[int] = []
    for number, what in enumerate((stdin, stdout, stderr)):
        if what == PIPE:
            to_read, to_write = os.pipe()
            mine, other, mode = (to_read, to_write, "r") if number else (to_write, to_read, "w")
            ours.append(open(mine, mode))  # noqa: SIM115 - the test reads it, and lets it go
            theirs.append(other)
        else:
            ours.append(None)
            at = theirs[1] if what == STDOUT else what
            theirs.append(os.dup(at) if at != subprocess.DEVNULL else os.open(os.devnull, os.O_RDWR))
    given = {"words": [*map(str, words)], "cwd": str(cwd or Path.cwd()), "env": env or dict(os.environ)}
    pid = parent().start(given, theirs)
    for handle in theirs:
        os.close(handle)
    return Forked(parent(), pid, ours)


def run(*words: str | Path, timeout: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run`, with all it says."""
    process = start(*words, **settings)
    try:
        said, wrong = process.communicate(timeout)
    finally:
        process.kill()
        code = process.wait(timeout)
    return subprocess.CompletedProcess([*map(str, words)], code, said, wrong)


# -- in the process that forks --


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for everybody who asks; what is to be done, in each process; None when nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is not for this one
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakes, wake = socket.socketpair()
    for one in (wakes, wake):
        one.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready = select.select([control, wakes], [], [])[0]
        if wakes in ready:
            wakes.recv(1000)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    code = os.waitstatus_to_exitcode(ended[1])
                    control.send(json.dumps({"ended": ended[0], "code": code}).encode())
        if control in ready:
            message, handles, *_ = socket.recv_fds(control, LONGEST, 3)
            if not message:
                return None
            if pid := os.fork():
                for handle in handles:
                    os.close(handle)
                control.send(json.dumps({"started": pid}).encode())
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for one in (control, wakes, wake):
                one.close()
            return json.loads(message), handles


def become(given: dict[str, Any], handles: list[int]) -> tuple[types.CodeType, dict[str, Any]]:
    """Be the process that was asked for; the program that is left to run, and where."""
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(given["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(given["env"])
    first, *rest = given["words"]
    folder = "" if first == "-c" else str(Path(first).resolve().parent)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [folder, *filter(None, path), *(one for one in sys.path[1:] if one not in before)]
    source, name = (rest.pop(0), "<string>") if first == "-c" else (Path(first).read_text(), first)
    sys.argv = [first, *rest]
    main = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = first
    sys.modules["__main__"] = main
    return compile(source, name, "exec"), main.__dict__


if __name__ == "__main__":
    for module in MODULES:
        __import__(module)
    gc.freeze()  # what nobody looks at is not copied
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        exec(*become(*asked))  # the end of the program is the end of this one, as everywhere
