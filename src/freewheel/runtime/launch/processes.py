"""Processes whose output comes in whole lines, and whose children end with them."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from freewheel.errors import ConfigError

# Takes one whole line: whose it is (a rank; None: the launcher's), the text, whether it came on stderr.
Output = Callable[[int | None, str, bool], None]
Tell = Callable[[str], None]  # takes a line: a process group, after a plus or a minus
LONGEST_LINE = 1 << 20
PROGRESS_S = 5.0  # how often an unfinished line that is overwritten, as by a progress bar, is shown


class Process:
    """One rank on this host: a process that leads its own group, restarted in place, and its two pipes."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: Output,
        keeper: Tell,
        selector: selectors.BaseSelector,
    ) -> None:
        self.rank, self.restarts = rank, 0
        self._command, self._env = command, env
        self._output, self._keeper, self._selector = output, keeper, selector
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[_Pipe] = []

    def start(self) -> None:
        try:
            process = self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot start {self._command[0]!r}: {error.strerror or error}. Name a program that exists."
            ) from None
        self._keeper(f"+{process.pid}\n")
        assert process.stdout is not None
        assert process.stderr is not None
        self._pipes = [
            _Pipe(process.stdout, lambda text: self._output(self.rank, text, False), self._selector),
            _Pipe(process.stderr, lambda text: self._output(self.rank, text, True), self._selector),
        ]

    def signal(self, number: int) -> None:
        """Signal the whole group; SIGTERM, the notice to leave, only the worker, which needs its children."""
        if self._process is not None:
            send = os.kill if number == signal.SIGTERM else os.killpg
            with contextlib.suppress(ProcessLookupError):
                send(self._process.pid, number)

    def ended(self) -> int | None:
        """Its exit code (minus a signal's number) once it has ended; its children are then gone, too."""
        process = self._process
        if process is None:
            return None
        # A dead process that nobody has waited for keeps its group's number from being reused.
        with contextlib.suppress(ChildProcessError):  # SIGCHLD may have been ignored by who started us
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        self.kill()
        return process.returncode

    def kill(self) -> None:
        """End the group now, show what is left in the pipes, forget the process."""
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        self._keeper(f"-{self._process.pid}\n")
        self._process.wait()
        self._process = None
        try:
            for pipe in self._pipes:
                for _ in range(32):  # more than a pipe holds; another process may write into it for ever
                    if not pipe.read():
                        break
                pipe.finish()
        finally:
            for pipe in self._pipes:
                pipe.close()


class _Pipe:
    """Cuts output into whole lines; of a line that is overwritten it shows the newest state."""

    def __init__(self, pipe: IO[bytes], say: Callable[[str], None], selector: selectors.BaseSelector) -> None:
        self._stream, self._show, self._selector = pipe, say, selector
        self._rest, self._shown_at_s = b"", time.monotonic()
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, self)

    def read(self) -> bytes | None:
        """Read what is there and show its whole lines; b"" at the end, None if there is nothing now."""
        if self._stream.closed:
            return b""
        try:
            data = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        *lines, rest = (self._rest + data).split(b"\n")
        before, _, after = rest.rpartition(b"\r")
        if before.strip() and time.monotonic() > self._shown_at_s + PROGRESS_S:
            self._shown_at_s, rest = time.monotonic(), after
            lines.append(before)
        if len(rest) > LONGEST_LINE:
            lines.append(rest)
            rest = b""
        self._rest = rest
        for line in lines:
            self._say(line)
        return data

    def _say(self, line: bytes) -> None:
        states = [state for state in line.split(b"\r") if state.strip()]
        self._show((states or [b""])[-1].decode("utf-8", "replace"))

    def finish(self) -> None:
        """Show a last line that has no end, and let go of the pipe."""
        rest, self._rest = self._rest, b""
        self.close()
        if rest.strip():
            self._say(rest)

    def close(self) -> None:
        if not self._stream.closed:
            self._selector.unregister(self._stream)
            self._stream.close()


_KEEPER = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@contextlib.contextmanager
def keeper() -> Iterator[Tell]:
    """Kills the process groups it is told of when this process is gone, however it ended.

    It is a process that reads a pipe to its end: PR_SET_PDEATHSIG reaches only direct children, and follows a
    thread rather than a process.
    """
    quiet = subprocess.DEVNULL
    command, pipe = [sys.executable, "-I", "-S", "-c", _KEEPER], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=quiet, stderr=quiet, bufsize=0, start_new_session=True
    ) as process:  # which closes the pipe, and waits
        stdin = process.stdin
        assert stdin is not None

        def tell(line: str) -> None:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(line.encode())

        yield tell


@contextlib.contextmanager
def ending_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; in the main thread only."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    ending = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda number, _: caught.append(number)) for one in ending}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
