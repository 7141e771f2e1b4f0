"""Leaving before the others: SIGTERM, or `worker.leave()`, and the time there is for it.

A cloud, Slurm or Kubernetes gives notice with SIGTERM and kills later. The worker goes on to the next moment
at which nothing is half done (Life._between), leaves there, and the script ends with exit code 0. If no such
moment comes in half of the time, as in a step that takes minutes, it leaves where it is.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from freewheel.errors import ConfigError, at_least

LEAVE_S = 10.0  # how long leaving may take; clouds give 30 s
VARIABLE = "FREEWHEEL_LEAVE_S"  # the environment variable that overrides it, for workers and the launcher
AGAIN_S = 0.05  # when weights move, how long to wait before the next try to interrupt
LAST_S = 1.0  # how much of it is kept for the goodbye


class Left(SystemExit):
    """This worker has left its run in good order: the script ends here, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def patience(given: float | None = None) -> float:
    """How long leaving may take: as given, or by the environment."""
    if given is None:
        text = os.environ.get(VARIABLE) or str(LEAVE_S)
        try:
            given = float(text)
        except ValueError:
            raise ConfigError(f"{VARIABLE} must be a number of seconds, not {text!r}.") from None
    at_least("leave_s", given, 0.0)
    return given


class Leaving:
    """Whether this worker is to leave. `busy`: weights move at this moment; `tell` informs the others."""

    def __init__(self, leave_s: float | None, busy: Callable[[], bool], tell: Callable[[], None]) -> None:
        self.seconds = patience(leave_s)
        self.going = False
        self._busy, self._tell = busy, tell
        self.asked, self._asked_s = False, 0.0
        self._timer: threading.Timer | None = None
        self._taken: dict[int, tuple[Any, Any]] = {}  # by signal: the handler set here, and the one before
        self._pid = os.getpid()

    @property
    def half_over(self) -> bool:
        return self.asked and time.monotonic() >= self._asked_s + self.seconds / 2

    @property
    def left_s(self) -> float:
        """The time left, without what is kept for the goodbye."""
        return max(0.0, (self._asked_s or time.monotonic()) + self.seconds - LAST_S - time.monotonic())

    def ask(self) -> None:
        if not self.asked:
            self._asked_s, self.asked = time.monotonic(), True
            self._tell()
            if signal.SIGTERM in self._taken:
                self._wake(self.seconds / 2)

    def watch(self) -> None:
        """Take SIGTERM as notice from now on, if called in the main thread and the signal is not ignored."""
        if signal.getsignal(signal.SIGTERM) not in (None, signal.SIG_IGN):
            self._let(signal.SIGTERM, self._noticed)

    def go(self) -> None:
        """From now on no signal interrupts: neither the notice nor the end of DataLoader's processes."""
        self.going = True
        if callable(signal.getsignal(signal.SIGCHLD)):  # DataLoader's raises wherever the main thread is
            self._let(signal.SIGCHLD, signal.SIG_DFL)

    def unwatch(self) -> None:
        """Restore the signals' handlers, except those that the script has changed since."""
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(ValueError):  # not in the main thread: the script ends
            for number, (act, before) in self._taken.items() if os.getpid() == self._pid else ():
                if signal.getsignal(number) == act:
                    signal.signal(number, before)
        self._taken = {}

    def _let(self, number: int, act: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._taken[number] = act, signal.signal(number, act)

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        _, before = self._taken.get(number, (None, signal.SIG_DFL))
        if os.getpid() != self._pid:  # a child of the script's: the notice is not this worker's
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        elif not self.asked:
            self.ask()
            if callable(before):  # the script has its own way to take notice
                before(number, frame)
        elif self.half_over and not self.going:  # interrupt what the main thread does
            if not self._busy():
                raise Left
            self._wake(AGAIN_S)

    def _wake(self, after_s: float) -> None:
        def wake() -> None:
            with contextlib.suppress(OSError, RuntimeError):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

        self._timer = threading.Timer(after_s, wake)
        self._timer.daemon = True
        self._timer.start()
