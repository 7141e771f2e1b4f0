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

from freewheel.errors import ConfigError, FreewheelError, WorkerLost, at_least, first_line
from freewheel.fabric import secret
from freewheel.ray.book import NAMESPACE, Line, connect, open_book, room
from freewheel.ray.worker import Collector, Gone, Worker
from freewheel.records.journal import Journal
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options

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
    most = most or workers
    connect(address)
    driver = Driver(name or f"freewheel-{uuid.uuid4().hex[:8]}", folder)
    try:
        words = target if callable(target) else [str(word) for word in target]
        driver.start(words, workers, most, restarts, {"num_cpus": cpus, "num_gpus": gpus, **options})
        return driver.wait()
    finally:
        driver.end()


class Driver:
    """What owns a run."""

    def __init__(self, name: str, folder: str | Path | None) -> None:
        self.name, self.folder = name, Path(folder) if folder is not None else None
        self.actors: dict[int, Any] = {}
        self.left: dict[Any, int] = {}
        self.lives: dict[int, int] = {}
        self.later: list[Callable[[], None]] = []
        """Make those who come after those the run begins with, lest they take the room of one of these."""
        self.told: set[str] = set()
        """Errors of scripts whose traceback was shown."""
        self.errors: dict[int, str] = {}
        """The first error of each worker's script."""
        self.begun: Callable[[], bool] = lambda: False
        try:
            self.book = open_book(f"{name}-book")
            ray.get(self.book.check.remote([]))  # it is there, and has its name
        except ValueError:
            raise ConfigError(
                f"a run named {name!r} is on this cluster already; give another name."
            ) from None
        self.line = Line(f"{name}-book", BOOK_S)
        self.collector = Collector(self.folder) if self.folder is not None else None
        self.journal = Journal(self.folder, "launcher") if self.folder is not None else None

    def start(
        self,
        target: Callable[[], Any] | list[str],
        workers: int,
        most: int,
        restarts: int,
        options: dict[str, Any],
    ) -> None:
        """Ask Ray for all workers; begin with as many as there is room for."""
        number, shared = secrets.token_hex(16), secret.make()
        each = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **(options.get("resources") or {})}
        takes = {key: need for key, need in each.items() if need}
        fit = room(takes, workers)
        begin = min(workers, max(1, fit))
        if fit < workers:
            said = ", ".join(f"{need:g} {key}" for key, need in takes.items())
            log.warning(
                "%d of %d workers have room now (each takes %s); the others join when there is more",
                fit, workers, said,
            )  # fmt: skip
        entries = Entries(self.line, shared)
        entries.set(OPTIONS, Options(number, workers=begin, most=most).text)
        self.begun = lambda: entries.check(FIRST)
        options = {"scheduling_strategy": "SPREAD", **options, "namespace": NAMESPACE}

        def create(rank: int) -> None:
            make = Worker.options(**options, name=f"{self.name}-{rank}").remote  # type: ignore[attr-defined]
            actor = make(f"{self.name}-book", number, rank, most, shared, self.folder is not None)
            self.actors[rank] = actor
            self.left[actor.run.remote(target, os.getcwd(), restarts)] = rank

        self.later = [partial(create, rank) for rank in range(begin, most)]
        for rank in range(begin):
            create(rank)

    def wait(self) -> dict[int, Any]:
        """What each worker that came returned, when all have ended."""
        answers: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        gone: set[int] = set()
        end_s = float("inf")
        while self.left and time.monotonic() < end_s:
            done, _ = ray.wait(list(self.left), timeout=POLL_S)
            self._look()
            if why := self._all_alike():
                raise WorkerLost(f"all workers failed alike before they began: {why[:150]}")
            for ref in done:
                rank = self.left.pop(ref)
                try:
                    answer = ray.get(ref)
                    if isinstance(answer, Gone):
                        gone.add(rank)
                    else:
                        answers[rank] = answer
                except ray.exceptions.RayError as error:
                    failed[rank] = error
                    if not isinstance(error, ray.exceptions.RayTaskError):  # its script has raised nothing
                        self._note("failed", rank, first_line(error, 200))
            coming = any(rank in self.lives for rank in self.left.values())
            if answers:  # all who train end together; those without room never came
                end_s = min(end_s, time.monotonic() + (COMING_S if coming else 0.0))
            elif (failed or gone) and not coming:
                break
        self._look()
        if not answers and (failed or not gone):
            raise self._failure(failed)
        return answers

    def _all_alike(self) -> str:
        """With which error the scripts of all workers ended before any of them trained: no restart helps."""
        alike = len(set(self.errors.values())) == 1 and len(self.errors) == len(self.actors)
        with contextlib.suppress(OSError):
            return self.errors[0] if alike and not self.begun() else ""
        return ""

    def _failure(self, failed: dict[int, BaseException]) -> FreewheelError:
        if not failed:
            return WorkerLost("no worker has come: the cluster has room for none.")
        rank, error = min(failed.items())
        cause = getattr(error, "cause", None) or error
        more = len(failed) - 1
        others = f" and {more} other{'s' * (more > 1)}" if more else ""
        return WorkerLost(f"worker {rank}{others} failed: {first_line(cause, 150)}")

    def _look(self) -> None:
        """Take what workers say of themselves, and their records."""
        with contextlib.suppress(OSError):
            lives, nodes, failures, pieces = self.line.ask("news")
            for rank, text in failures:
                self._failed(rank, text)
            for rank, life in lives.items():
                if life > max(1, self.lives.get(rank, 1)):
                    self._note("restarted", rank, f"Ray has started it again, on {nodes[rank]}", life)
                self.lives[rank] = max(life, self.lives.get(rank, 0))
            if self.collector is not None:
                self.collector.write(pieces)
        if self.later and len(self.lives) == len(self.actors):  # all it begins with have their room
            for create in self.later:
                create()
            self.later = []

    def _failed(self, rank: int, text: str) -> None:
        """A script has raised; where several do so in the same way, one traceback says it."""
        why = text.strip().splitlines()[-1][:200]
        self.errors.setdefault(rank, why)
        if why not in self.told:
            self.told.add(why)
            log.error("worker %d:\n%s", rank, text)
        self._note("failed", rank, why)

    def _note(self, what: str, rank: int, text: str, life: int = 0) -> None:
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
