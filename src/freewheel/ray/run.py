"""The driver of a run on Ray: it makes the actors, collects records and answers, and ends all of it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from freewheel.errors import ConfigError, WorkerLost, at_least, first_line
from freewheel.fabric import secret
from freewheel.ray.book import NAMESPACE, Line, connect, open_book, room
from freewheel.ray.records import Collector
from freewheel.ray.worker import Worker
from freewheel.records.journal import Journal
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options
from freewheel.runtime.membership.generation import STARTS

FIRST = "freewheel/0/0/begun"
"""What lies in the book once a worker trains."""
POLL_S = 0.5
BOOK_S = 5.0
COMING_S = 10.0
"""How long others are waited for when one has ended: all who train end together; who starts now is late."""

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
    restarts: how often a worker whose script raises is started again; not where the scripts of all raise the
        same before any of them trains. One whose process or machine is lost is started again always.
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
    """What owns a run."""

    def __init__(
        self, name: str, target: Callable[[], Any] | list[str], restarts: int, folder: Path | None
    ) -> None:
        self.name, self.target, self.restarts = name, target, restarts
        self.number, self.secret = secrets.token_hex(16), secret.make()
        self.line = Line(f"{name}-book", BOOK_S)
        self.entries = Entries(self.line, self.secret)
        self.actors: dict[int, Any] = {}
        self.left: dict[Any, int] = {}
        self.later: list[Callable[[], None]] = []
        """Make those who come after those the run begins with, lest they take the room of one of these."""
        self.lives: dict[int, int] = {}
        self.raised: list[tuple[int, str]] = []
        """Whose scripts have raised, and what."""
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
        """Ask Ray for all workers; begin with as many as there is room for."""
        each = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **(options.get("resources") or {})}
        takes = {key: need for key, need in each.items() if need}
        begin = min(workers, max(1, room(takes, workers)))
        if begin < workers:
            log.warning("room for %d of %d workers now (each: %s); others join later", begin, workers, takes)
        self.entries.set(OPTIONS, Options(self.number, workers=begin, most=most).text)
        options = {"scheduling_strategy": "SPREAD", **options, "namespace": NAMESPACE}

        def create(rank: int) -> None:
            make = Worker.options(**options, name=f"{self.name}-{rank}").remote  # type: ignore[attr-defined]
            records = self.collector is not None
            self.actors[rank] = make(f"{self.name}-book", self.number, rank, most, self.secret, records)
            self._ask(rank)

        self.later = [partial(create, rank) for rank in range(begin, most)]
        for rank in range(begin):
            create(rank)

    def _ask(self, rank: int) -> None:
        self.left[self.actors[rank].run.remote(self.target, os.getcwd())] = rank

    def wait(self) -> dict[int, Any]:
        """What each worker that came returned, when all have ended."""
        end_s = float("inf")
        while self.left and time.monotonic() < end_s:
            done, _ = ray.wait(list(self.left), timeout=POLL_S)
            self._look()
            for ref in done:
                self._take(self.left.pop(ref), ref)
            if self.answers:  # all who train end together
                end_s = min(end_s, time.monotonic() + COMING_S)
            if len(self.left) < len(self.actors) and not self.lives.keys() & set(self.left.values()):
                break  # those without room never came
        self._look()
        if self.failed and not self.answers:
            raise WorkerLost("; ".join(f"worker {rank} failed: {why}" for rank, why in self.failed.items()))
        return self.answers

    def _take(self, rank: int, ref: Any) -> None:
        """What a worker returned; one whose script has raised is asked again, so often."""
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
        """Whether a worker whose script has raised this is to try once more."""
        if why not in {one for _, one in self.raised}:
            log.error("worker %d:\n%s", rank, error)
        self.raised.append((rank, why))
        with contextlib.suppress(OSError):
            if alike(self.raised) == self.actors.keys() and not self.entries.check(FIRST):
                raise WorkerLost(f"all workers failed alike before they began: {why}")
        return [one for one, _ in self.raised].count(rank) <= self.restarts

    def _look(self) -> None:
        """Take what workers say of themselves, and their records."""
        with contextlib.suppress(OSError):
            lives, records = self.line.ask("news")
            for rank, life in lives.items():
                if life > max(1, self.lives.get(rank, 1)):
                    self._note("restarted", rank, "Ray has started it again", life)
                self.lives[rank] = max(life, self.lives.get(rank, 0))
            for life, piece in records:
                if self.collector is not None:
                    self.collector.write(life, piece)
        if len(self.lives) == len(self.actors):  # all it begins with have their room
            for create in self.later:
                create()
            self.later = []

    def _note(self, what: str, rank: int, text: str, life: int | None = None) -> None:
        log.warning("worker %d: %s", rank, text)
        if self.journal is not None:
            self.journal.event(time.time(), what, rank, life or self.lives.get(rank, 1), text)

    def end(self) -> None:
        """End all of it."""
        for actor in (*self.actors.values(), self.book):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)
        if self.journal is not None:
            self.journal.close()


def alike(raised: list[tuple[int, str]]) -> set[int]:
    """Which workers' scripts have raised, where all of them raised the same."""
    return {rank for rank, _ in raised} if len({why for _, why in raised}) == 1 else set()
