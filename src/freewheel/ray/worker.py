"""One worker as an actor: Ray starts it again, on the same node or another, and it copies a living worker."""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from freewheel.ray.book import BOOK_S, Line, take_place
from freewheel.ray.records import sending
from freewheel.runtime.membership.generation import Outlived, TooLate
from freewheel.runtime.worker.leaving import Left

log = logging.getLogger("freewheel")


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    """One rank of a run. The secret comes as an argument: Ray keeps it where its other users cannot read."""

    def __init__(self, book: str, run: str, rank: int, most: int, secret: bytes, records: bool) -> None:
        self.rank, self.line = rank, Line(book, BOOK_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of its own use of itself
            again = ray.get_runtime_context().was_current_actor_reconstructed
        self.life = int(self.line.ask("started", rank, 2 if again else 1))
        self.folder = Path(tempfile.mkdtemp(prefix="freewheel-")) if records else None
        folder = str(self.folder) if self.folder else None
        take_place(self.line, run, rank, most, secret, self.life, folder)
        self.used = False

    def __repr__(self) -> str:  # what Ray writes before each of its lines
        return f"worker {self.rank}"

    def run(self, target: Callable[[], Any] | list[str], home: str) -> list[Any]:
        """Run the script or the function; what it returned, or nothing where this worker has left its run.

        Once in a process: asked again, it lets Ray start another and ask that.
        """
        if self.used:
            os._exit(1)
        self.used = True
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler leaves no time to leave
        with contextlib.suppress(OSError):
            os.chdir(home)
        sends: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.folder is not None:
            sends = sending(self.folder, self.rank, self.life, self.line)
        try:
            with sends:
                if callable(target):
                    return [target()]
                run_script(target)
                return [None]
        except (Left, TooLate):  # the others have ended well
            return []
        except Outlived as error:  # what is said of this rank is the later life's to say
            log.error("%s", error)
            os._exit(1)
        except (SystemExit, Exception) as error:
            if isinstance(error, SystemExit) and not error.code:
                return [None]
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def run_script(words: list[str]) -> None:
    """Run a script as `python` would."""
    sys.argv = words
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
