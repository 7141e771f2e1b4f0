"""Calls of a store that end, also where the store hangs: each runs in a thread that can be left behind.

A TCPStore waits for ever for a process that is stopped, or for a host that the network has lost; its own
timeout is only about keys that are not there yet. Nor does it notice that its store has gone before it is
asked, and then it complains at length. So a plain connection stands beside it, idle: its end tells quietly.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from freewheel.runtime.membership.entries import Store

T = TypeVar("T")
STORE = ("check", "get", "set", "compare_set", "delete_key")
STORE_S = 5.0
"""How long a store may take to answer once training has begun."""
LAST_S = 0.5
HANGS_S = 60.0
"""How long a store that hangs is left alone, unless it answers before: each call leaves a thread behind."""


_hanging: set[concurrent.futures.Future[Any]] = set()


class Hangs(DistNetworkError):
    """A store did not answer in time."""

    def __init__(self, timeout_s: float, call: concurrent.futures.Future[Any]) -> None:
        super().__init__(f"no answer within {timeout_s:.3g} s")
        self.call = call


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; Hangs if that takes too long. Nobody waits for its thread then."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the caller's to handle
            future.set_exception(error)

    threading.Thread(target=run, name="freewheel-store", daemon=True).start()
    if not concurrent.futures.wait([future], timeout_s).done:
        _hanging.add(future)
        future.add_done_callback(_hanging.discard)
        raise Hangs(timeout_s, future)
    return future.result()


def left_behind() -> list[concurrent.futures.Future[Any]]:
    """Calls that nobody waits for any more."""
    return list(_hanging)


@atexit.register
def _let_end() -> None:
    """A call that is answered while the interpreter shuts down would end the process badly."""
    concurrent.futures.wait(left_behind(), LAST_S)


def calls(name: str) -> Any:
    """A call of a store, by a class that has one way for all of them, `ask`."""
    return lambda self, *words: self.ask(name, *words)


class BoundedStore:
    """A store whose every call ends within `timeout_s`; one connection for as long as the store lives.

    `connect` makes the connection, in so many seconds; `at` is where to keep a plain one beside it.
    """

    def __init__(
        self, connect: Callable[[float], Store], at: tuple[str, int] | None, timeout_s: float
    ) -> None:
        self._connect, self._at, self.timeout_s = connect, at, timeout_s
        self._line: int | None = None
        self._hangs: concurrent.futures.Future[Any] | None = None
        self._until_s = 0.0
        self._open()

    check, get, set, compare_set, delete_key = map(calls, STORE)

    def ask(self, call: str, *words: object) -> Any:
        """Call it."""
        if self._broken or self._gone():  # its own way to find out is a long complaint
            raise DistNetworkError("the store is gone")
        return self._try(lambda: within(self.timeout_s, lambda: getattr(self._store, call)(*words)))

    def _try(self, call: Callable[[], T]) -> T:
        if self._hangs is not None and not self._hangs.done() and time.monotonic() < self._until_s:
            raise DistNetworkError("the store hangs")
        try:
            return call()
        except (DistNetworkError, OSError) as error:
            self._broken = True
            if isinstance(error, Hangs):
                self._hangs, self._until_s = error.call, time.monotonic() + HANGS_S
            raise

    def alive(self) -> bool:
        """Whether this is still a connection with the store that it was made with."""
        return not self._broken and not self._gone()

    def _gone(self) -> bool:
        """Whether the connection beside the store's has ended."""
        try:
            return self._line is not None and not os.read(self._line, 1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def renew(self) -> None:
        """Connect again where the connection is over; OSError or RuntimeError if the store is not there."""
        if not self.alive():
            self._try(self._open)

    def _open(self) -> None:
        self.close()
        if self._at is not None:  # tried first: the store's own way is noisy and cannot be interrupted
            with socket.create_connection(self._at, timeout=self.timeout_s) as sock:
                sock.setblocking(False)
                self._line = sock.detach()
        self._store = within(self.timeout_s, lambda: self._connect(self.timeout_s))
        self._broken = False

    def close(self) -> None:
        """Let go of the connection beside the store's; that one closes with the store."""
        line, self._line = self._line, None
        if line is not None:
            os.close(line)

    def __del__(self) -> None:
        self.close()


def reach(host: str, port: int, timeout_s: float) -> BoundedStore:
    """A new connection with a store that is there already; OSError or RuntimeError if it does not answer."""

    def connect(within_s: float) -> Store:
        return TCPStore(host, port, None, False, timedelta(seconds=within_s), wait_for_workers=False)

    return BoundedStore(connect, (host, port), timeout_s)
