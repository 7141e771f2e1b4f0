"""A Ray cluster: how many workers it has room for, and where they meet.

They meet at an actor that is a dictionary, which no worker's end touches. Ray starts it again, here or
elsewhere; it is empty then, and those who train enter themselves again. Its handle finds it wherever it is,
which no address of a TCPStore would.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from typing import Any

import ray

from freewheel.errors import ConfigError, first_line
from freewheel.runtime.membership import place
from freewheel.runtime.membership.entries import Entries
from freewheel.runtime.membership.generation import STARTS
from freewheel.runtime.membership.store_client import STORE, calls

# -- the cluster --
ANSWER_S = 5.0
FREED_S = 3.0
UNIT = 10_000
"""Ray counts resources in such parts."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins HTTP/2, which gRPC and so Ray speaks: this, and empty settings."""


def connect(address: str | None) -> None:
    """Be connected with a cluster."""
    if ray.is_initialized():
        return
    try:
        check_answer(address)
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except (Exception, SystemExit) as error:  # whatever Ray says; SystemExit: it has tried for minutes
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine'}: {first_line(error)}. Start one with "
            "`ray start --head`, or leave the address out."
        ) from None


def check_answer(address: str | None) -> None:
    """Raise OSError where HOST:PORT is no Ray: Ray itself would try for minutes before it said so."""
    found = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address or "")
    if found is None or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    with socket.create_connection((found[1], int(found[2])), timeout=ANSWER_S) as connection:
        connection.sendall(PREFACE)
        if connection.recv(9)[3:4] != b"\x04":  # its own settings
            raise ConnectionError("what listens there is something else")


def room(needs: dict[str, float], wanted: int) -> int:
    """How many workers fit the nodes that are there, beside what others use of them.

    What was in use a moment ago is not known to be free at once: asked again for a while where it matters.
    """
    end_s = time.monotonic() + FREED_S
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit, free = sum(_fits(has, needs) for has in nodes), _fits(ray.available_resources(), needs)
        if free >= min(fit, wanted) or time.monotonic() > end_s:
            return min(fit, free)
        time.sleep(0.1)


def _fits(has: dict[str, float], needs: dict[str, float]) -> int:
    return min(
        (round(has.get(key, 0) * UNIT) // round(need * UNIT) for key, need in needs.items()), default=1 << 20
    )


# -- the book --
NAMESPACE = "freewheel"
BOOK_S = 30.0
"""How long the book may take to come back before a worker that starts gives up, and is started again."""
Piece = tuple[str, int, int, bytes]
"""Of a worker's records: file, life, where in what that life wrote (-1: the whole file), bytes."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Book:
    """A dictionary; and on their way to the driver, what workers say of themselves and their records."""

    def __init__(self) -> None:
        self.of: dict[str, bytes] = {}
        self.edition = uuid.uuid4().hex
        """Which life of the book this is: what an earlier one was given, nobody may have read."""
        self.lives: dict[int, int] = {}
        self.failures: dict[int, int] = {}
        self.tracebacks: list[tuple[int, str]] = []
        self.nodes: dict[int, str] = {}
        self.pieces: list[Piece] = []

    # -- a store --

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return all(key in self.of for key in keys)

    def get(self, key: str) -> bytes:
        """What is there; nothing, if there is nothing."""
        return self.of.get(key, b"")

    def set(self, key: str, text: str) -> None:
        """Write."""
        self.of[key] = text.encode()

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        """Write where this is there; what is there then."""
        if self.of.get(key, b"") == expected.encode():
            self.of[key] = text.encode()
        return self.of.get(key, expected.encode())

    def delete_key(self, key: str) -> None:
        """Remove."""
        self.of.pop(key, None)

    # -- what workers say --

    def started(self, rank: int, node: str, least: int) -> int:
        """A worker's process has started; its life, from 1 on, and at least so much."""
        self.lives[rank] = max(self.lives.get(rank, 0) + 1, least)
        self.nodes[rank] = node
        return self.lives[rank]

    def failed(self, rank: int, text: str) -> int:
        """A worker's script has raised; how often by now."""
        self.tracebacks.append((rank, text))
        self.failures[rank] = self.failures.get(rank, 0) + 1
        return self.failures[rank]

    def tell(self, edition: str, pieces: list[Piece]) -> str:
        """Pieces of records, taken where they follow what this edition has; which it is."""
        self.pieces += pieces if edition == self.edition else []
        return self.edition

    # -- what the driver asks --

    def news(self) -> tuple[dict[int, int], dict[int, str], list[tuple[int, str]], list[Piece]]:
        """Each worker's life and node; which scripts have raised, and what has come of records since."""
        pieces, self.pieces = self.pieces, []
        failed, self.tracebacks = self.tracebacks, []
        return self.lives, self.nodes, failed, pieces


class Line:
    """The book's calls, each of which ends in time; OSError where it does not answer.

    For workers it is where they meet (runtime/membership/place.py).
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._book: Any = None

    def __str__(self) -> str:
        return f"the actor {self._name}"

    def connect(self, timeout_s: float) -> Line:
        """Another line to it, tried."""
        line = Line(self._name, timeout_s)
        line.check([])
        return line

    def ask(self, call: str, *words: Any) -> Any:
        """Call it."""
        try:
            if self._book is None:
                self._book = ray.get_actor(self._name, namespace=NAMESPACE)
            return ray.get(getattr(self._book, call).remote(*words), timeout=self._timeout_s)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor has this name
            raise ConnectionError(f"the book does not answer ({type(error).__name__})") from None

    check, get, set, compare_set, delete_key = map(calls, STORE)


def open_book(name: str) -> Any:
    """A new one, of this name."""
    return Book.options(name=name, namespace=NAMESPACE).remote()  # type: ignore[attr-defined]


def take_place(
    line: Line, run: str, rank: int, world_size: int, secret: bytes, life: int, folder: str | None
) -> Entries:
    """Let this process be one worker of a run, before its script runs; what the run has in its book."""
    entries = Entries(line, secret).of_run(run)
    if life > 1:  # the others wait for it at the end
        entries.set(f"{STARTS}/{rank}", str(life))
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
    return entries
