"""A run with real sockets and threads inside one process: every worker is a thread of its own.

Workers share nothing but loopback; what they miss of a real run is only that processes are dear to start.
"""

from __future__ import annotations

import gc
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from freewheel import strategies
from freewheel.fabric import secret
from freewheel.fabric.tcp import TcpFabric
from freewheel.runtime.membership import rendezvous
from freewheel.runtime.membership.entries import Entries
from freewheel.runtime.membership.generation import STARTS
from freewheel.runtime.membership.hosts import host_store
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.rendezvous import OPTIONS
from freewheel.runtime.worker import answers, ending, joining
from freewheel.runtime.worker.attach import Worker
from freewheel.runtime.worker.settings import Settings

LOOK_S = 0.005
"""How often workers that are threads look whether others are there: short runs are mostly waiting else."""


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def places(n: int) -> list[Place]:
    """The places of a run on this machine."""
    port = free_port()
    shared = secret.make()
    return [Place(rank, n, n, "127.0.0.1", port, secret=shared) for rank in range(n)]


def worker(
    place: Place,
    model: torch.nn.Module,
    strategy: str = "adpsgd",
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
):
    """A worker and its optimizer, by default plain SGD."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    chosen = Settings(**{"join_timeout_s": 30.0, **settings})
    return Worker(model, optimizer, strategies.resolve(strategy), chosen, place), optimizer


def together(n: int | Sequence[Place], work: Callable[[Place], Any], deadline_s: float = 90.0) -> list[Any]:
    """Run `work` once for every worker of a run, each in its own thread; its results, in order of rank.

    `n`: how many, on this machine; or their places. The first failure is raised once all have ended.
    """
    ended = outcomes(n, work, deadline_s)
    for one in ended:
        if isinstance(one, BaseException):
            raise one
    return ended


def outcomes(n: int | Sequence[Place], work: Callable[[Place], Any], deadline_s: float = 90.0) -> list[Any]:
    """The same, with the exception of each worker that failed in place of its result."""
    everywhere = places(n) if isinstance(n, int) else n
    ended: list[Any] = [None] * len(everywhere)

    def run(place: Place) -> None:
        try:
            ended[place.rank] = work(place)
        except BaseException as error:
            ended[place.rank] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in everywhere]
    end_s = time.monotonic() + deadline_s
    with pytest.MonkeyPatch.context() as patch:
        for module in (rendezvous, joining, answers, ending):
            patch.setattr(module, "POLL_S", LOOK_S)
        threads[0].start()
        _await_store(everywhere[0], threads[0])
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
    stuck = [k for k, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"workers {stuck} hang; what became of the others: {ended}"
    forget(*everywhere)
    return ended


def _await_store(first: Place, thread: threading.Thread) -> None:
    """Let the first worker hold its store before the others look for it.

    Who looks too early looks again only after half a second or more. A test that lets the first one come
    late is not held up: nobody is waited for longer than that would take.
    """
    end_s = time.monotonic() + 0.2
    while first not in rendezvous._stores and thread.is_alive() and time.monotonic() < end_s:
        time.sleep(1e-3)


def next_life(place: Place) -> Place:
    """The same place for a worker that comes back, as a new process would see it."""
    forget(place)
    return place


def forget(*places: Place) -> None:
    """Let go of the stores of places: a process has one and keeps it; this one has had many."""
    for place in places:
        rendezvous._stores.pop(place, None)


def cut(fabric: TcpFabric, peer: int) -> None:
    """Break the connection with a peer, as the network between them would: both sides hear of it."""
    fabric._connections[peer].transport._socket.shutdown(socket.SHUT_RDWR)


class Launcher:
    """A store such as our launcher hosts it, which can be lost, on a port that stays the same."""

    def __init__(self, workers: int) -> None:
        self.options = json.dumps({"run": secrets.token_hex(16), "workers": workers})
        self.store, host, self.port = host_store(None)
        self.secret = secret.make()
        self.entries.set(OPTIONS, self.options)
        self.places = [
            Place(rank, workers, workers, host, self.port, hosted=True, launched=True, secret=self.secret)
            for rank in range(workers)
        ]

    @property
    def of_run(self) -> Entries:
        """What belongs to this run alone."""
        return self.entries.of_run(json.loads(self.options)["run"])

    @property
    def entries(self) -> Entries:
        """The store as the run writes it."""
        return Entries(self.store, self.secret)

    def lose(self) -> None:
        """The store is gone."""
        del self.store
        gc.collect()

    def host_again(self, options: str = "") -> None:
        """It is there again, empty."""
        self.store, *_ = host_store(f"127.0.0.1:{self.port}")
        if options:
            self.entries.set(OPTIONS, options)

    def give_up(self, rank: int) -> None:
        """Say that a worker is not started again."""
        self.of_run.set(f"{STARTS}/{rank}", "0")

    def forget(self) -> None:
        """Let this process forget the stores of its workers, who are no more."""
        forget(*self.places)

    def run(self, work: Callable[[Place], object]) -> list[threading.Thread]:
        """Let every worker do this, in a thread of its own."""
        threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in self.places]
        for thread in threads:
            thread.start()
        return threads
