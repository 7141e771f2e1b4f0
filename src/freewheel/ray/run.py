"""A run on Ray: its driver makes the actors, collects records and answers, and ends all of it.

Each worker is an actor: Ray starts it again, on the same node or another, and it copies a living worker.
"""

import contextlib
import logging
import os
import runpy
import secrets
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from freewheel.errors import ConfigError, WorkerLost, at_least, first_line
from freewheel.fabric import secret
from freewheel.ray.book import BOOK_S, NAMESPACE, Line, Piece, connect, open_book, room, take_place
from freewheel.records.journal import Journal
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options
from freewheel.runtime.membership.generation import STARTS, Outlived, TooLate
from freewheel.runtime.worker.leaving import Left

Target = Callable[[], Any] | list[str]  # a function, or a script and its words
FIRST = "freewheel/0/0/begun"  # what lies in the book once a worker trains
POLL_S = 0.5
DRIVER_S = 5.0  # how long the driver waits for the book
SEND_S = 1.0
COMING_S = 10.0  # how long the others may take when one has ended: all who train end together

log = logging.getLogger("freewheel")


def run(
    target: Callable[[], Any] | Sequence[str],
    workers: int,
    most: int | None = None,
    *,
    restarts: int = 3,
    cpus: float = 1,
    gpus: float = 0,
    folder: str | Path | None = None,
    address: str | None = None,
    name: str = "",
    **options: Any,
) -> dict[int, Any]:
    """Run a function, or a script (its words), as workers on Ray; what each worker's function returned.

    workers: how many begin; fewer, from 1, where there is no room for more; the others come when there is.
    most: how many there may be: actors beyond `workers` wait for room, which an autoscaler sees, and join.
    restarts: how often a worker whose script raises is started again; not where all scripts raise the same
        before any of them trains. One whose process or machine is lost is always started again.
    cpus, gpus: what each worker takes.
    folder: where the records of all workers are collected.
    address: of the cluster; default: the one this process is connected with, or a new one of this machine.
    name: of the run, as its actors are called; two runs of one name are refused.
    options: any others of Ray's actors: resources={"disk": 1}, what each worker takes of what a cluster names
        itself; runtime_env={"working_dir": "."}, to take the script along to other machines.
    """
    at_least("workers", workers, 1)
    at_least("restarts", restarts, 0)
    at_least("most", most, workers)
    connect(address)
    name = name or f"freewheel-{uuid.uuid4().hex[:8]}"
    words = target if callable(target) else [str(word) for word in target]
    driver = Driver(name, words, restarts, Path(folder) if folder is not None else None)
    try:
        driver.start(workers, most or workers, {"num_cpus": cpus, "num_gpus": gpus, **options})
        return driver.wait()
    finally:
        driver.end()


class Driver:
    """Owns a run: its book, its actors, what they return and their records."""

    def __init__(self, name: str, target: Target, restarts: int, folder: Path | None) -> None:
        self.name, self.target, self.restarts = name, target, restarts
        self.number, self.secret = secrets.token_hex(16), secret.make()
        self.line = Line(f"{name}-book", DRIVER_S)
        self.entries = Entries(self.line, self.secret)
        self.actors: dict[int, Any] = {}
        self.left: dict[Any, int] = {}  # whose answers are still to come
        self.lives: dict[int, int] = {}
        self.raised: list[tuple[int, str]] = []  # whose scripts have raised, and what
        self.answers: dict[int, Any] = {}
        self.failed: dict[int, str] = {}
        try:
            self.book = open_book(f"{name}-book")
            ray.get(self.book.ask.remote("check", []))  # it is there, and has its name
        except ValueError:
            raise ConfigError(
                f"a run named {name!r} is on this cluster already; give another name."
            ) from None
        self.collector = Collector(folder) if folder is not None else None
        self.journal = Journal(folder, "launcher") if folder is not None else None

    def start(self, workers: int, most: int, options: dict[str, Any]) -> None:
        """Begin with as many workers as there is room for; ask Ray for the others when these are there."""
        each = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **(options.get("resources") or {})}
        takes = {key: need for key, need in each.items() if need}
        begin = min(workers, max(1, room(takes, workers)))
        if begin < workers:
            log.warning("room for %d of %d workers now (each: %s); others join later", begin, workers, takes)
        self.entries.set(OPTIONS, Options(self.number, workers=begin, most=most).text)
        self.most = most
        self.options = {"scheduling_strategy": "SPREAD", **options, "namespace": NAMESPACE}
        for rank in range(begin):
            self._create(rank)

    def _create(self, rank: int) -> None:
        make = Worker.options(**self.options, name=f"{self.name}-{rank}").remote  # type: ignore[attr-defined]
        records = self.collector is not None
        self.actors[rank] = make(f"{self.name}-book", self.number, rank, self.most, self.secret, records)
        self._ask(rank)

    def _ask(self, rank: int) -> None:
        self.left[self.actors[rank].run.remote(self.target, os.getcwd())] = rank

    def wait(self) -> dict[int, Any]:
        """Wait until all have ended; what each worker that came returned."""
        end_s = float("inf")
        while self.left and time.monotonic() < end_s:
            done, _ = ray.wait(list(self.left), timeout=POLL_S)
            self._look()
            for ref in done:
                self._take(self.left.pop(ref), ref)
            if self.answers:  # all who train end together
                end_s = min(end_s, time.monotonic() + COMING_S)
            if len(self.left) < len(self.actors) and not self.lives.keys() & set(self.left.values()):
                break  # the others have never had room
        self._look()
        if self.failed and not self.answers:
            raise WorkerLost("; ".join(f"worker {rank} failed: {why}" for rank, why in self.failed.items()))
        return self.answers

    def _take(self, rank: int, ref: Any) -> None:
        """Take what a worker returned; ask it again if its script has raised and it may try once more."""
        try:
            for answer in ray.get(ref):
                self.answers[rank] = answer
        except ray.exceptions.RayError as error:
            why = first_line(getattr(error, "cause", None) or error, 200)
            self._note("failed", rank, why)
            if isinstance(error, ray.exceptions.RayTaskError) and self._again(rank, why, error):
                self._ask(rank)
                return
            self.failed[rank] = why
        with contextlib.suppress(OSError):
            self.entries.of_run(self.number).set(f"{STARTS}/{rank}", "0")

    def _again(self, rank: int, why: str, error: Exception) -> bool:
        if why not in {one for _, one in self.raised}:
            log.error("worker %d:\n%s", rank, error)
        self.raised.append((rank, why))
        ranks = [one for one, _ in self.raised]
        if set(ranks) == self.actors.keys() and {one for _, one in self.raised} == {why}:
            with contextlib.suppress(OSError):
                if not self.entries.check(FIRST):
                    raise WorkerLost(f"all workers failed alike before they began: {why}")
        return ranks.count(rank) <= self.restarts

    def _look(self) -> None:
        """Take the workers' lives and records from the book."""
        with contextlib.suppress(OSError):
            lives, records = self.line.ask("news")
            for rank, life in lives.items():
                if life > max(1, self.lives.get(rank, 1)):
                    self._note("restarted", rank, "Ray has started it again", life)
                self.lives[rank] = max(life, self.lives.get(rank, 0))
            for life, piece in records:
                if self.collector is not None:
                    self.collector.write(life, piece)
        if len(self.lives) == len(self.actors):  # all it begins with have their room: now ask for the others
            for rank in range(len(self.actors), self.most):
                self._create(rank)

    def _note(self, what: str, rank: int, text: str, life: int | None = None) -> None:
        log.warning("worker %d: %s", rank, text)
        if self.journal is not None:
            self.journal.event(time.time(), what, rank, life or self.lives.get(rank, 1), text)

    def end(self) -> None:
        for actor in (*self.actors.values(), self.book):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        if self.journal is not None:
            self.journal.close()


class Collector:
    """Writes the records that workers send into one folder: each life's part behind those before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begins: dict[str, tuple[int, int]] = {}  # by file: the newest life and where its part begins
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, life: int, piece: Piece) -> None:
        name, at, data = piece
        path = self._folder / Path(name).name
        path.touch()
        size = path.stat().st_size
        newest, begin = self._begins.get(name, (0, 0))
        if life > newest:
            newest, begin = self._begins[name] = life, size if path.suffix == ".jsonl" else 0
        if life == newest and begin + at == size:
            with path.open("ab") as file:
                file.write(data)
        elif life == newest:
            new = path.with_name(f".{name}.new")  # a reader finds the old one or the new one
            new.write_bytes(path.read_bytes()[: begin + at] + data)
            new.replace(path)


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Worker:
    """One rank of a run. The secret is an argument: Ray keeps those where its other users cannot read."""

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

    def run(self, target: Target, home: str) -> list[Any]:
        """Run the script or the function; what it returned, or nothing where this worker has left its run."""
        if self.used:  # once in a process: Ray starts another and asks that
            os._exit(1)
        self.used = True
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler leaves no time to leave
        with contextlib.suppress(OSError):
            os.chdir(home)
        try:
            with sending(self.folder, self.rank, self.life, self.line):
                if callable(target):
                    return [target()]
                run_script(target)
                return [None]
        except (Left, TooLate):  # the others have ended well
            return []
        except Outlived as error:  # the later life speaks for this rank
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


@contextlib.contextmanager
def sending(folder: Path | None, rank: int, life: int, line: Line) -> Iterator[None]:
    """Send a worker's folder, where it has one, to the book while it works, and the rest in the end.

    Nobody may have read what a lost book had: its successor wants all of it again.
    """
    if folder is None:
        yield
        return
    sent, end = dict[str, bytes](), threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not line.ask("tell", rank, life, list(unsent(folder, sent))):
                sent.clear()  # another book

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


def unsent(folder: Path, sent: dict[str, bytes]) -> Iterator[Piece]:
    """What was added to files since they were sent; all of one that was written anew, as run.json is."""
    for file in sorted(folder.glob("[!.]*")):
        data, before = file.read_bytes(), sent.get(file.name, b"")
        if data != before:
            at = len(before) if file.suffix == ".jsonl" and data.startswith(before) else 0
            sent[file.name] = data
            yield file.name, at, data[at:]
