"""A run with real sockets and threads inside one process: every worker is a thread of its own.

Workers share nothing but loopback; what they miss of a real run is only that processes are dear to start.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from freewheel import strategies
from freewheel.runtime.attach import Worker
from freewheel.runtime.rendezvous import Place


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def places(n: int) -> list[Place]:
    """The places of a run on this machine."""
    port = free_port()
    return [Place(rank, n, n, "127.0.0.1", port) for rank in range(n)]


def worker(place: Place, model: torch.nn.Module, strategy: str = "adpsgd", lr: float = 0.1, **settings: Any):
    """A worker with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"version": "test", "join_timeout_s": 30.0, **settings}
    made = Worker(model, optimizer, strategies.resolve(strategy), place=place, **settings)
    return made, optimizer


def together(n: int, work: Callable[[Place], Any], deadline_s: float = 90.0) -> list[Any]:
    """Run `work` once for every worker of a run, each in its own thread; its results, in order of rank.

    The first failure is raised once all have ended.
    """
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def run(place: Place) -> None:
        try:
            results[place.rank] = work(place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    stuck = [k for k, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"workers {stuck} hang; errors of the others: {errors}"
    if errors:
        raise errors[0]
    return results
