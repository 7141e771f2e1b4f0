"""Where the workers of a run meet: the store that one process holds, and how others reach it and join.

Calls of a store end, also where it hangs: each runs in a thread that can be left behind. A TCPStore waits
for ever for a process that is stopped, or for a host that the network has lost; its own timeout is only about
keys that are not there yet. Nor does it notice that its store has gone before it is asked, and then it
complains at length. So a plain connection stands beside it, idle: its end tells quietly.
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
FREE = "free"  # what a place of the run says that a worker has had and has left
STORE_S = 5.0  # how long a store may take to answer once training has begun
LAST_S = 0.5
HANGS_S = 60.0  # how long a store that hangs is left alone, unless it answers: each call leaves a thread

left_behind: set[concurrent.futures.Future[Any]] = set()  # calls that nobody waits for any more


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
        left_behind.add(future)
        future.add_done_callback(left_behind.discard)
        raise Hangs(timeout_s, future)
    return future.result()


@atexit.register
def _let_end() -> None:
    """A call that is answered while the interpreter shuts down would end the process badly."""
    concurrent.futures.wait(list(left_behind), LAST_S)


class BoundedStore(Asked):
    """A store whose calls end within `timeout_s`; `at` is where to keep a plain connection beside it."""

    def __init__(self, make: Callable[[float], Store], at: tuple[str, int] | None, timeout_s: float) -> None:
        self._make, self._at, self.timeout_s = make, at, timeout_s
        self._line: int | None = None
        self._hangs: concurrent.futures.Future[Any] | None = None
        self._until_s = 0.0
        self._open()

    def ask(self, call: str, *words: object) -> Any:
        """Call it."""
        if not self.alive():  # its own way to find out is a long complaint
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
        try:
            return not self._broken and (self._line is None or bool(os.read(self._line, 1)))
        except OSError as error:
            return isinstance(error, BlockingIOError)

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
        self._store = within(self.timeout_s, lambda: self._make(self.timeout_s))
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


def listen(host: str, port: int, option: str) -> socket.socket:
    """A listening socket on one address of this machine; port 0 takes a free one."""
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
    """Host the store in this process, on one address only: ``master``, or a free port of loopback."""
    host, port = parse_address(master) if master is not None else ("127.0.0.1", 0)
    listener = listen(host, port, "master")
    port = listener.getsockname()[1]
    # The store takes the socket over; handed none, it would listen on every address of the machine.
    store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=listener.detach())
    return store, host, port


def reach_store(master: str, wait_s: float, say: Callable[[str], None]) -> tuple[BoundedStore, str, int]:
    """Reach the store of a run, which may come up later than we do; `say` is told what is waited for."""
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
    """Take so many places of a run that may have up to `most` workers; they are free again at the end."""
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
