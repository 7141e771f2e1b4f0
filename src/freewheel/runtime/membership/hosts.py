"""The store where the workers of a run meet: hosting it, reaching it, and claiming places in the run.

A TCPStore waits for ever for a process that is stopped or a host that is cut off; its own timeout is only for
missing keys. So each call runs in a thread that can be left behind. Nor does a TCPStore notice that its
server has gone before it is asked, and then it logs at length. So an idle plain connection beside it tells.
"""

import atexit
import concurrent.futures
import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from freewheel.errors import ConfigError, first_line
from freewheel.fabric import transport
from freewheel.runtime.membership.entries import OPTIONS, Asked, Entries, Store
from freewheel.runtime.membership.place import parse_address

T = TypeVar("T")
FREE = "free"  # the entry of a place that a worker has had and has left
STORE_S = 5.0  # how long a store may take to answer once training has begun
HANGS_S = 60.0  # how long a store that hangs is left alone, unless it answers: each call costs a thread

left_behind: set[concurrent.futures.Future[Any]] = set()  # calls that nobody waits for any more


class Hangs(DistNetworkError):
    """A store did not answer in time."""

    def __init__(self, timeout_s: float, call: concurrent.futures.Future[Any]) -> None:
        super().__init__(f"no answer within {timeout_s:.3g} s")
        self.call = call


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Call in a thread; Hangs: it takes too long, and the thread is left behind."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the caller's to handle
            future.set_exception(error)

    threading.Thread(target=run, name="freewheel-store", daemon=True).start()
    if not concurrent.futures.wait([future], timeout_s).done:
        left_behind.add(future)
        future.add_done_callback(left_behind.discard)
        raise Hangs(timeout_s, future)
    return future.result()


@atexit.register
def _let_end() -> None:
    """A call that returns while the interpreter shuts down would crash the process."""
    concurrent.futures.wait(list(left_behind), timeout=0.5)


class BoundedStore(Asked):
    """A store whose calls end within `timeout_s`; `at` is the address of the plain connection beside it."""

    def __init__(self, make: Callable[[float], Store], at: tuple[str, int] | None, timeout_s: float) -> None:
        self._make, self._at, self.timeout_s = make, at, timeout_s
        self._line: int | None = None
        self._hangs: concurrent.futures.Future[Any] | None = None
        self._until_s = 0.0
        self._open()

    def ask(self, call: str, *words: object) -> Any:
        if not self.alive():  # a TCPStore would log at length
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
        """Whether the connection still reaches the store that it was made with."""
        try:
            return not self._broken and (self._line is None or bool(os.read(self._line, 1)))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def renew(self) -> None:
        """Connect again if the connection is over; OSError or RuntimeError: the store does not answer."""
        if not self.alive():
            self._try(self._open)

    def _open(self) -> None:
        self.close()
        if self._at is not None:  # first, since TCPStore's attempt is noisy and cannot be interrupted
            with socket.create_connection(self._at, timeout=self.timeout_s) as sock:
                sock.setblocking(False)
                self._line = sock.detach()
        self._store = within(self.timeout_s, lambda: self._make(self.timeout_s))
        self._broken = False

    def close(self) -> None:
        """Close the plain connection; the store's own closes with the store."""
        line, self._line = self._line, None
        if line is not None:
            os.close(line)

    __del__ = close


def reach(host: str, port: int, timeout_s: float) -> BoundedStore:
    """Connect with a store that is there already; OSError or RuntimeError: it does not answer."""

    def connect(within_s: float) -> Store:
        return TCPStore(host, port, None, False, timedelta(seconds=within_s), wait_for_workers=False)

    return BoundedStore(connect, (host, port), timeout_s)


def listen(host: str, port: int, option: str) -> socket.socket:
    try:
        listener = transport.listen(host, port)
    except OSError as error:
        why = {
            errno.EADDRINUSE: f"port {port} is in use",
            errno.EADDRNOTAVAIL: f"this machine has no address {host}",
        }.get(error.errno or 0, error.strerror or error)
        raise ConfigError(
            f"{option}: cannot listen on {host}: {why}. Give an address that `ip address` lists, and a free "
            "port."
        ) from None
    listener.setblocking(True)
    return listener


def host_store(master: str | None) -> tuple[TCPStore, str, int]:
    """Host the store in this process, on ``master`` or a free port of loopback."""
    host, port = parse_address(master) if master is not None else ("127.0.0.1", 0)
    listener = listen(host, port, "master")
    port = listener.getsockname()[1]
    # The store takes over the socket; without one it would listen on every address of the machine.
    store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=listener.detach())
    return store, host, port


def reach_store(master: str, wait_s: float, say: Callable[[str], None]) -> tuple[BoundedStore, str, int]:
    """Reach the store of a run that may start later than we do; `say` is told what is waited for."""
    host, port = parse_address(master)
    end_s, store, told = time.monotonic() + wait_s, None, ""
    hint = f"Start the run first, and let its port {port} be reached from here."
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            store = store or reach(host, port, min(STORE_S, max(1.0, left_s)))
            if store.check([OPTIONS]):
                store.timeout_s = STORE_S
                return store, host, port
            why = "there is no run there"
        except RuntimeError as error:
            raise ConfigError(f"{master} is no rendezvous: {first_line(error)}. {hint}") from None
        except OSError as error:
            why = str(error.strerror or error)
        if why != told:
            told = why
            say(
                f"waiting up to {left_s:.0f} s for a run at {master}: {why}. Is it up, is this the address "
                "it printed, does a firewall let its port through?"
            )
        time.sleep(0.1)
    raise ConfigError(f"cannot reach the rendezvous at {master} within {wait_s:g} s ({told}). {hint}")


def claim(store: Entries, workers: int, begun: int, most: int, ends: contextlib.ExitStack) -> list[int]:
    """Claim places of a run that may have up to `most` workers; `ends` frees them again."""
    token = uuid.uuid4().hex
    found: list[int] = []
    for rank in range(most):
        if len(found) == workers:
            break
        place = f"freewheel/place/{rank}"
        free = FREE if rank < begun or store.check(place) else ""  # the first ones have theirs already
        if store.compare_set(place, free, token) == token:
            found.append(rank)
            ends.callback(_let_go, store, place)
    if len(found) < workers:
        raise ConfigError(
            f"the run takes up to {most} workers at once and has room for {len(found)}, not for {workers}. "
            "Start it with a larger --max, or wait until one leaves."
        )
    return found


def _let_go(store: Entries, place: str) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the run may have ended before
        store.set(place, FREE)
