"""Calls of a store that end, also where the store hangs: each runs in a thread that can be left behind.

A TCPStore waits for ever for a process that is stopped, or for a host that the network has lost; its own
timeout is only about keys that are not there yet.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")
STORE_THREAD = "freewheel-store"
LAST_S = 0.5


class Hangs(DistNetworkError):
    """A store did not answer in time. `thread` still waits for it."""

    def __init__(self, timeout_s: float, thread: threading.Thread) -> None:
        super().__init__(f"no answer within {timeout_s:.3g} s")
        self.thread = thread


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; Hangs if that takes too long. Nobody waits for its thread then."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the caller's to handle
            future.set_exception(error)

    thread = threading.Thread(target=run, name=STORE_THREAD, daemon=True)
    thread.start()
    if not concurrent.futures.wait([future], timeout_s).done:
        raise Hangs(timeout_s, thread)
    return future.result()


def left_behind() -> list[threading.Thread]:
    """Calls that nobody waits for any more."""
    return [thread for thread in threading.enumerate() if thread.name == STORE_THREAD]


@atexit.register
def _let_end() -> None:
    """A call that is answered while the interpreter shuts down would end the process badly."""
    for thread in left_behind():
        thread.join(LAST_S)


class BoundedStore:
    """A store whose every call ends within `timeout_s`."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._root = store, self
        self.timeout_s = timeout_s

    def under(self, prefix: str) -> BoundedStore:
        """The same store, all names beginning with a prefix; it takes its time from this one."""
        made = BoundedStore(PrefixStore(prefix, self._store), 0.0)
        made._root = self._root
        return made

    def _within(self, call: Callable[[], T]) -> T:
        return within(self._root.timeout_s, call)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._within(lambda: self._store.check(keys)))

    def get(self, key: str) -> bytes:
        """What is there."""
        return self._within(lambda: bytes(self._store.get(key)))

    def set(self, key: str, text: str) -> None:
        """Write."""
        self._within(lambda: self._store.set(key, text))

    def add(self, key: str, number: int) -> int:
        """Count; the sum."""
        return int(self._within(lambda: self._store.add(key, number)))

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        """Write where this is there; what is there then."""
        return self._within(lambda: bytes(self._store.compare_set(key, expected, text)))

    def delete_key(self, key: str) -> None:
        """Remove."""
        self._within(lambda: self._store.delete_key(key))


def reach(host: str, port: int, timeout_s: float) -> BoundedStore:
    """A new connection with a store that is there already; OSError or RuntimeError if it does not answer."""
    # Tried with a plain socket first: the store's own way of trying is noisy and cannot be interrupted.
    socket.create_connection((host, port), timeout=timeout_s).close()
    given_s = timedelta(seconds=timeout_s)
    store = within(timeout_s, lambda: TCPStore(host, port, None, False, given_s, wait_for_workers=False))
    return BoundedStore(store, timeout_s)
