"""A script that ends without the run's answer though it trained: it is told so, and its exit code is not 0.

It has not called `worker.finish()`, or has trained and never begun its worker.

It is not finished for it: what such a script has saved is one worker's own weights, not the run's answer.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from freewheel.errors import RunStopped

ENDED = "the script ended without worker.finish()"
begun = False
"""Whether any worker of this process has begun."""
OUTSIDE = "the script trained outside of `with fw.attach(…)`, where nothing is merged"


def watch(rank: int, leave: Callable[[RunStopped], bool], why: str = ENDED) -> None:
    """When the script ends, let the worker leave; `leave` says whether it has no answer."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() != process or not leave(RunStopped(why)):
            return
        if getattr(sys, "last_value", None) is None:  # else Python has said why, and exits with 1
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(
                    f"freewheel: {why}: worker {rank} has no consensus; what it saved is one worker's "
                    f"weights. {'Call worker.finish() at its end.' if why is ENDED else 'Train inside.'}\n"
                )
            sys.stdout = Refusing(sys.stdout)

    atexit.register(end)


class Refusing:
    """In the place of standard output at the very end: Python exits with 120 where it cannot be flushed.

    Nothing else changes the exit code then and lets files be written and other libraries clean up, as ever.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Write what is left, then fail, without a traceback."""
        sys.stdout, sys.unraisablehook = self._stream, lambda _: None
        if self._stream is not None:
            self._stream.flush()
        raise RunStopped(ENDED)
