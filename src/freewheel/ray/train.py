"""Freewheel inside Ray Train: with `FreewheelConfig` its `TorchTrainer` replaces a lost worker alone.

Ray Train's controller makes the book where workers meet and tells each its place, before the train function
runs in it. No process group is made: `fw.attach` in the train function connects the workers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from freewheel.errors import ConfigError
from freewheel.fabric import secret
from freewheel.ray.book import BOOK_S, Line, open_book, take_place
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options
from freewheel.runtime.worker import checks
from freewheel.runtime.worker.leaving import Left


class FreewheelBackend(Backend):  # type: ignore[misc]
    """In Ray Train's controller: makes the book, and counts how often each worker was started."""

    has_replica_groups = True  # each worker is one: Ray replaces it, and nobody else
    book: Any = None

    def on_start(self, worker_group: Any, backend_config: FreewheelConfig) -> None:
        """Tell workers their places: all of them at the beginning, one where it is replaced."""
        workers = worker_group.get_workers()
        if hasattr(worker_group, "get_replica_groups"):  # all, who have nobody to copy: another run
            self.end()
            self.number, self.secret = secrets.token_hex(16), secret.make()
            self.lives: dict[int, int] = {}
            self.name = f"freewheel-{self.number[:8]}-book"
            self.book = open_book(self.name)
            given = Options(self.number, workers=len(workers), most=len(workers))
            Entries(Line(self.name, BOOK_S), self.secret).set(OPTIONS, given.text)
        for worker in workers:
            rank = worker.distributed_context.world_rank
            self.lives[rank] = self.lives.get(rank, 0) + 1
        worker_group.execute(begin, self.name, self.number, self.secret, self.lives, backend_config.folder)

    def on_shutdown(self, worker_group: Any, backend_config: FreewheelConfig) -> None:
        if hasattr(worker_group, "get_replica_groups"):
            self.end()

    def end(self) -> None:
        if self.book is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.book)
            self.book = None


def begin(name: str, run: str, shared: bytes, lives: dict[int, int], folder: str | None) -> None:
    """In a worker's process, before the train function: which worker of which run it is."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    take_place(Line(name, BOOK_S), run, rank, context.get_world_size(), shared, lives[rank], folder)
    with contextlib.suppress(ImportError, AttributeError):  # Ray's inside: without it nothing is noticed
        from ray.train.v2._internal.execution.context import get_train_context
        from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

        watch_reports(get_train_fn_utils(), lambda: get_train_context().report_call_index)


@contextlib.contextmanager
def leaving_well() -> Iterator[None]:
    """A worker that left well, or came when the others had ended, is done: to Ray its exit is a failure.

    The others' reports wait for all workers, so it goes on to report nothing until the process ends.
    """

    def report_nothing() -> None:
        with contextlib.suppress(Exception):
            while True:
                ray.train.report({})

    try:
        yield
    except Left:
        threading.Thread(target=report_nothing, name="freewheel-reports", daemon=True).start()


def watch_reports(functions: Any, reported: Callable[[], int]) -> None:
    """Refuse `ray.train.report` in the with-block: it waits for all workers, and one that is replaced has
    reported less often than the others. Ray drops a report during which a worker is lost: it is made again
    until `reported`, this worker's count, has grown."""
    report = functions.report
    if getattr(report, "watched", False):  # Ray uses a process for a second worker
        return

    def outside(*words: Any, **options: Any) -> Any:
        if checks.attached:
            raise ConfigError(
                "ray.train.report waits for all workers: inside the with-block each would go at the slowest "
                "one's pace. Call it once, after the block; use worker.record and worker.checkpoint inside."
            )
        before, answer = reported(), None
        while reported() == before:
            answer = report(*words, **options)
        return answer

    outside.watched = True  # type: ignore[attr-defined]
    functions.report = outside


class FreewheelConfig(BackendConfig):  # type: ignore[misc]
    """Give it to a `TorchTrainer` as `torch_config`; the train function calls `fw.attach`.

    folder: where workers write records; all nodes must see it. Default: none are written.
    """

    backend = "freewheel"  # a TorchTrainer asks for it
    backend_cls = FreewheelBackend
    train_func_context = staticmethod(leaving_well)

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = str(Path(folder).absolute()) if folder is not None else None
