"""A Ray cluster: how many workers it has room for, and where they meet.

They meet at an actor that is a dictionary, which no worker's end touches. Ray starts it again, here or
elsewhere; it is empty then, and those who train enter themselves again. Its name, unlike an address, stays.
"""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta
from typing import Any

import ray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from freewheel.errors import ConfigError, first_line
from freewheel.runtime.membership import place
from freewheel.runtime.membership.entries import CALLS, Asked, Entries
from freewheel.runtime.membership.generation import STARTS

# -- the cluster --
ANSWER_S = 5.0
FREED_S = 3.0  # how long after its use a resource may be counted as taken


def connect(address: str | None) -> None:
    if ray.is_initialized():
        return
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # where nobody listens Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except (Exception, SystemExit) as error:  # whatever Ray says; SystemExit: it has tried for minutes
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine'}: {first_line(error)}. Start one with "
            "`ray start --head`, or leave the address out."
        ) from None


def room(needs: dict[str, float], wanted: int) -> int:
    """How many workers fit the nodes, beside what others use of them."""
    end_s = time.monotonic() + FREED_S
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit, free = sum(_fits(has, needs) for has in nodes), _fits(ray.available_resources(), needs)
        if free >= min(fit, wanted) or time.monotonic() > end_s:
            return min(fit, free)
        time.sleep(0.1)


def _fits(has: dict[str, float], needs: dict[str, float]) -> int:
    return min((int(has.get(key, 0) / need + 1e-6) for key, need in needs.items()), default=1 << 20)


# -- the book --
NAMESPACE = "freewheel"
BOOK_S = 30.0  # how long a worker that starts waits for a lost book, before it gives up and is started again
Piece = tuple[str, int, bytes]  # of a worker's records: a file, a place in it, and its content from there on


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Book:
    """A store; and what workers say of their lives and records, on its way to the driver."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.store.set_timeout(timedelta(milliseconds=1))  # what is not there is not waited for
        self.lives: dict[int, int] = {}
        self.ends: dict[tuple[int, str], int] = {}  # by life and file: how much of it is here
        self.pieces: list[tuple[int, Piece]] = []  # records, and the life each is of

    def ask(self, call: str, *words: Any) -> Any:
        """Call the store or the book."""
        return getattr(self.store if call in CALLS else self, call)(*words)

    def started(self, rank: int, least: int) -> int:
        """Count a worker's process that has started; its life, from 1 on, is at least so much."""
        self.lives[rank] = max(self.lives.get(rank, 0) + 1, least)
        return self.lives[rank]

    def tell(self, rank: int, life: int, pieces: list[Piece]) -> bool:
        """Take pieces of a life's records; False where what comes before one is missing: send all again."""
        self.lives[rank] = max(self.lives.get(rank, 0), life)
        if any(at and at != self.ends.get((life, name)) for name, at, _ in pieces):
            return False
        self.ends |= {(life, name): at + len(data) for name, at, data in pieces}
        self.pieces += [(life, piece) for piece in pieces]
        return True

    def news(self) -> tuple[dict[int, int], list[tuple[int, Piece]]]:
        """Each worker's life, and the records that came since the last call."""
        pieces, self.pieces = self.pieces, []
        return self.lives, pieces


class Line(Asked):
    """Calls of the book, which raise OSError after a time; it is the workers' `Meeting` (place.py)."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._book: Any = None

    def __str__(self) -> str:
        return f"the actor {self._name}"

    def connect(self, timeout_s: float) -> Line:
        line = Line(self._name, timeout_s)
        line.check([])
        return line

    def ask(self, call: str, *words: Any) -> Any:
        try:
            if self._book is None:
                self._book = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(self._book.ask.remote(call, *words), timeout=self._timeout_s)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor has this name
            raise ConnectionError(f"the book does not answer ({type(error).__name__})") from None


def open_book(name: str) -> Any:
    return Book.options(name=name, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]


def take_place(
    line: Line, run: str, rank: int, world_size: int, secret: bytes, life: int, folder: str | None
) -> None:
    """Make this process one worker of a run, before its script runs."""
    if life > 1:  # the others wait for it at the end
        Entries(line, secret).of_run(run).set(f"{STARTS}/{rank}", str(life))
    place.give(
        place.Place(
            rank,
            world_size,
            hosted=True,
            launched=True,
            secret=secret,
            bind=ray.util.get_node_ip_address(),
            folder=folder,
            life=life,
            meeting=line,
        )
    )
