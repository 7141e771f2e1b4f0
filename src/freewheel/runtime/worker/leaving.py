"""Leaving before the others: SIGTERM, or `worker.leave()`, and the time there is for it.

A cloud, Slurm or Kubernetes gives notice with SIGTERM and kills later. The worker goes on to the next moment
at which nothing is half done (Life._between), leaves there, and the script ends with exit code 0. Where no
such moment comes in half of the time, as in a step that takes minutes, it leaves where it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from freewheel.errors import ConfigError, at_least

LEAVE_S = 10.0
"""How long leaving may take; clouds give 30 s."""
VARIABLE = "FREEWHEEL_LEAVE_S"
"""The environment variable that says otherwise, to workers and to the launcher."""
AGAIN_S = 0.05
"""How long after a moment in which weights move it is tried again to interrupt."""
LAST_S = 1.0
"""How much of it is kept for the goodbye."""


class Left(SystemExit):
    """This worker has left its run, and left it well: the script ends here, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def patience(given: float | None = None) -> float:
    """How long leaving may take: as given, or as the environment says."""
    if given is None:
        text = os.environ.get(VARIABLE) or str(LEAVE_S)
        try:
            given = float(text)
        except ValueError:
            raise ConfigError(f"{VARIABLE} must be a number of seconds, not {text!r}.") from None
    at_least("leave_s", given, 0.0)
    return given


class Leaving:
    """Whether this worker is to leave, and how much time is left for it."""

    def __init__(self, leave_s: float | None, busy: Callable[[], bool], tell: Callable[[], None]) -> None:
        self.seconds = patience(leave_s)
        self.going = False
        """Whether it is on its way out: nothing interrupts that."""
        self._busy, self._tell = busy, tell
        """Whether weights move just now; tells the others."""
        self.asked, self._asked_s = False, 0.0
        """Whether somebody has said so, and when."""
        self._timer: threading.Timer | None = None
        self._poked = False
        self._before: object = None
        self._children: object = None
        self._watching = False
        self._pid = os.getpid()

    @property
    def half_over(self) -> bool:
        """Whether half of the time is over."""
        return self.asked and time.monotonic() >= self._asked_s + self.seconds / 2

    @property
    def left_s(self) -> float:
        """How much time there is, but for the goodbye."""
        return max(0.0, (self._asked_s or time.monotonic()) + self.seconds - LAST_S - time.monotonic())

    def ask(self) -> None:
        """Let this worker leave soon."""
        if self.asked:
            return
        self._asked_s, self.asked = time.monotonic(), True
        self._tell()
        if self._watching:
            self._wake(self.seconds / 2)

    def watch(self) -> None:
        """Take SIGTERM as notice from now on, where the main thread asks and it is not ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGTERM)
        if self._before not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, self._noticed)
            self._watching = True

    def go(self) -> None:
        """Nothing interrupts a worker on its way out, nor do processes that load its data and were told, too.

        DataLoader raises the end of such a process wherever the main thread is.
        """
        self.going = True
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGCHLD)
            if callable(before):  # others raise nothing
                self._children = before
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def unwatch(self) -> None:
        """Let signals mean what they meant before."""
        if self._children is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, self._children)  # type: ignore[arg-type]
            self._children = None
        if self._timer is not None:
            self._timer.cancel()
        if self._watching and os.getpid() == self._pid:
            self._watching = False
            with contextlib.suppress(ValueError):  # not in the main thread: the script ends
                if signal.getsignal(signal.SIGTERM) == self._noticed:
                    signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A child of the script's: the notice is not this worker's.
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]
            os.kill(os.getpid(), number)
            return
        poked, self._poked = self._poked, False
        if poked:
            if self._watching and not self.going:
                if not self._busy():
                    raise Left
                self._wake(AGAIN_S)
            return
        self.ask()
        if callable(self._before):  # the script has its own way to take notice
            self._before(number, frame)

    def _wake(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, self._poke)
        self._timer.daemon = True
        self._timer.start()

    def _poke(self) -> None:
        """Half of the time is over: interrupt what the main thread does."""
        self._poked = True
        with contextlib.suppress(OSError, RuntimeError):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def exits_well(error: BaseException) -> bool:
    """Whether an exception is the script's exit, with code 0."""
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def ends(error: BaseException) -> bool:
    """Whether an exception of a worker that is to leave is the end of it, and no mistake of its own.

    It is where a handler of the script's exits, and where the processes that load its data were told, too.
    """
    loads = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
    return isinstance(error, SystemExit) or loads
