"""One worker as an actor: Ray starts it again, on the same node or another, and it copies a living worker.

Its records reach the driver's folder: it sends what it has written, once a second. What the driver has not
taken when the book is lost is sent again: a worker that finds another edition of the book begins at the
beginning, and the driver writes each piece where it belongs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from freewheel.ray.book import BOOK_S, Line, Piece, take_place
from freewheel.runtime.membership.generation import STARTS, Outlived, TooLate
from freewheel.runtime.worker.leaving import Left

SEND_S = 1.0


@contextlib.contextmanager
def sending(folder: Path, life: int, line: Line) -> Iterator[None]:
    """Send a worker's folder to the book, beside what it does, and what is left when that is done."""
    sent, edition = dict[str, bytes](), ""
    end = threading.Event()

    def send() -> None:
        nonlocal sent, edition
        with contextlib.suppress(OSError):
            for _ in range(2):  # a new edition has nothing: once more, from the beginning
                files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
                found = line.ask("tell", edition, list(_pieces(files, sent, life)))
                if found == edition:
                    sent = files
                    return
                sent, edition = {}, found

    def run() -> None:
        while not end.wait(SEND_S):
            send()

    thread = threading.Thread(target=run, name="freewheel-records", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        send()


def _pieces(files: dict[str, bytes], sent: dict[str, bytes], life: int) -> Iterator[Piece]:
    for name, data in files.items():
        before = sent.get(name, b"")
        if name.endswith(".jsonl") and data.startswith(before):
            if len(data) > len(before):
                yield name, life, len(before), data[len(before) :]
        elif data != before:  # written anew, as run.json is, or a file when thinned
            yield name, life, -1, data


class Collector:
    """Writes what workers send into one folder, in the driver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, dict[int, int]] = {}
        """How much of a file each life has written, one after the other; 0: what was there before."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, pieces: list[Piece]) -> None:
        """Write each piece where it belongs; one that was written before changes nothing."""
        for name, life, at, data in pieces:
            path = self._folder / Path(name).name
            if path.suffix != ".jsonl":
                replace(path, data)
                continue
            path.touch()
            sizes = self._sizes.setdefault(name, {0: path.stat().st_size})
            size = sizes.get(life, 0)
            if at == size and life >= max(sizes):
                with path.open("ab") as file:
                    file.write(data)
                sizes[life] = size + len(data)
            else:  # what this life has written anew, as a file when thinned; others' stays
                begin = sum(others for one, others in sizes.items() if one < life)
                all_of_it = path.read_bytes()
                own = all_of_it[begin : begin + size]
                own = own[:at] + data + own[at + len(data) :] if at >= 0 else data
                replace(path, all_of_it[:begin] + own + all_of_it[begin + size :])
                sizes[life] = len(own)


def replace(path: Path, data: bytes) -> None:
    """Write a file anew; who reads it finds the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


log = logging.getLogger("freewheel")
RUNPY = "<frozen runpy>"


class Gone:
    """Instead of an answer: this worker has left its run."""


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    """One rank of a run. The secret comes as an argument: Ray keeps it where its other users cannot read."""

    def __init__(self, book: str, run: str, rank: int, most: int, secret: bytes, records: bool) -> None:
        self.rank, self.line = rank, Line(book, BOOK_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of its own use of itself
            again = ray.get_runtime_context().was_current_actor_reconstructed
        node = ray.util.get_node_ip_address()
        self.life = int(self.line.ask("started", rank, node, 2 if again else 1))
        self.folder = Path(tempfile.mkdtemp(prefix="freewheel-")) if records else None
        folder = str(self.folder) if self.folder else None
        self.entries = take_place(self.line, run, rank, most, secret, self.life, folder)

    def __repr__(self) -> str:  # what Ray writes before each of its lines
        return f"worker {self.rank}"

    def run(self, target: Callable[[], Any] | list[str], folder: str, restarts: int) -> Any:
        """Run the script or the function; what it returned.

        One that raises is started again in a new process, so often; then its error is the worker's.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            sends = sending(self.folder, self.life, self.line) if self.folder else contextlib.nullcontext()
            with sends, _notice():
                return target() if callable(target) else _script(target)
        except (Left, TooLate):  # the others have ended well
            return Gone()
        except Outlived as error:  # what is said of this rank is the later life's to say
            log.error("%s", error)
            os._exit(1)
        except (SystemExit, Exception) as error:
            if isinstance(error, SystemExit) and not error.code:
                return None
            if self.line.ask("failed", self.rank, _told(error)) <= restarts:
                os._exit(1)  # what it has left in this process is gone
            raise RuntimeError(f"worker {self.rank}: {type(error).__name__}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                self.entries.set(f"{STARTS}/{self.rank}", "0")


def _told(error: BaseException) -> str:
    """A traceback without our own frame and runpy's, for the driver to show."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, RUNPY):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


@contextlib.contextmanager
def _notice() -> Iterator[None]:
    """Ray's own handler of SIGTERM ends the process at once; without it a worker has time to leave."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _script(words: list[str]) -> None:
    sys.argv = words
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
