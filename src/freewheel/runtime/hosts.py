"""Where the launchers of a run meet: the store of node 0, and what they tell each other through it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from freewheel.errors import ConfigError
from freewheel.fabric.secret import Forged
from freewheel.runtime.bounded import within
from freewheel.runtime.entries import Entries
from freewheel.runtime.place import parse_address

At = tuple[str, int]
"""Where a store is."""

FREE = "free"
"""What a place of the run says that a worker has had and has left."""
BEAT_S = 1.0  # between two signs of life of a launcher
SLOW_S = 1.0  # an answer that takes longer is worth a word
SILENT_S = 30.0  # a node whose launcher gave no sign of life for so long is dead


def listen(host: str, port: int, option: str) -> socket.socket:
    """A listening socket on one address of this machine; port 0 takes a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{option}: port {port} of {host} is in use; give another one.") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{option}: this machine has no address {host}; give one that `ip address` lists."
            ) from None
        why = error.strerror or error
        raise ConfigError(
            f"{option}: cannot listen on {host!r}: {why}. Give an address of this machine."
        ) from None
    return listener


def host_store(master: str | None, nodes: int) -> tuple[TCPStore, str, int]:
    """Host the store in this process, on one address only: ``master``, or a free port of loopback."""
    host, port = parse_address(master) if master is not None else ("127.0.0.1", 0)
    listener = listen(host, port, "master")
    address, port = listener.getsockname()[:2]
    if nodes > 1 and host not in (address, "localhost") and ipaddress.ip_address(address).is_loopback:
        listener.close()
        raise ConfigError(
            f"master: {host} means {address} on this machine, where no other host gets to; give its address."
        )
    # The store takes the socket over; handed none, it would listen on every address of the machine.
    store = TCPStore(host, port, None, True, timedelta(seconds=60), False, master_listen_fd=listener.detach())
    return store, host, port


def reach_store(master: str, wait_s: float, say: Callable[[str], None]) -> tuple[TCPStore, str, int]:
    """Reach the store of a run, which may come up later than we do; `say` is told what is waited for."""
    host, port = parse_address(master)
    until_s = time.monotonic() + wait_s
    hint = f"Start the run first, and let its port {port} be reached from here."
    told = ""

    def retry(what: Callable[[], bool]) -> None:
        nonlocal told
        why = "no answer"
        while time.monotonic() < until_s:
            try:
                if what():
                    return
                why = "there is no run there"
            except (OSError, RuntimeError) as error:
                why = str(getattr(error, "strerror", None) or error).splitlines()[0]
            if why != told:
                told, left_s = why, max(0.0, until_s - time.monotonic())
                say(
                    f"waiting up to {left_s:.0f} s for a run at {master}: {why}. "
                    "Is it up, is this the address it printed, does a firewall let its port through?"
                )
            time.sleep(0.1)
        raise ConfigError(f"cannot reach the rendezvous at {master} within {wait_s:g} s ({why}). {hint}")

    def reachable() -> bool:
        # Tried with a plain socket: the store's own way of waiting cannot be interrupted and is noisy.
        socket.create_connection((host, port), timeout=2).close()
        return True

    retry(reachable)
    left_s = max(1.0, until_s - time.monotonic())
    silent = f"waiting up to {left_s:.0f} s for a run at {master}: a connection is made, nobody answers yet"
    slow = threading.Timer(SLOW_S, say, [silent])
    slow.start()
    try:
        # A second more than the store gives itself: what it has to say is better than that it hangs.
        store = within(left_s + 1, lambda: TCPStore(host, port, None, False, timedelta(seconds=left_s)))
    except RuntimeError as error:
        raise ConfigError(f"{master} is no rendezvous: {str(error).splitlines()[0]}. {hint}") from None
    finally:
        slow.cancel()
    retry(lambda: bool(within(left_s, lambda: store.check(["freewheel/options"]))))
    return store, host, port


def claim(
    store: Entries, at: At, workers: int, begun: int, most: int, ends: contextlib.ExitStack
) -> list[int]:
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
            ends.callback(_let_go, store, at, place)
    if len(found) < workers:
        raise ConfigError(
            f"the run takes up to {most} workers at once and has room for {len(found)}, not for {workers}. "
            "Start it with a larger --max, or wait until one leaves."
        )
    return found


def _let_go(store: Entries, at: At, place: str) -> None:
    with contextlib.suppress(RuntimeError, OSError):  # the run may have ended before
        socket.create_connection(at, timeout=1).close()
        store.set(place, FREE)


def take_node(store: Entries, node: int) -> None:
    """Be a node of a run, unless another launcher is."""
    seen = store.number(f"freewheel/beat/{node}")
    if seen:
        time.sleep(2 * BEAT_S)
        if store.number(f"freewheel/beat/{node}") != seen:
            raise ConfigError(f"node {node} is in this run already; give every host a node of its own.")
    store.delete_key(f"freewheel/ended/{node}")


class Beat:
    """Shows node 0 that this node's launcher lives, and at the end how its workers ended.

    In a thread: where the network is cut, a call of the store hangs.
    """

    def __init__(self, store: Entries, at: At, node: int) -> None:
        self._store, self._at, self._node = store, at, node
        self._code = 1
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-beat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Without node 0 the workers here go on; there is nobody left to tell.
        with contextlib.suppress(RuntimeError, OSError, Forged):
            while not self._end.is_set():
                self._store.add(f"freewheel/beat/{self._node}", 1)
                self._end.wait(BEAT_S)
                # The store would say at length that it has gone; a plain socket finds out quietly.
                socket.create_connection(self._at, timeout=5).close()
            self._store.set(f"freewheel/ended/{self._node}", str(self._code))

    def end(self, code: int = 1, *, hurry: bool = False) -> None:
        """Report the exit code of this node and stop; a second call changes nothing."""
        if not self._end.is_set():
            self._code = code
            self._end.set()
            self._thread.join(0.2 if hurry else 5.0)


class Others:
    """What node 0 knows of the other nodes' launchers. Asked from the moment its own workers have ended."""

    def __init__(self, store: Entries, nodes: int) -> None:
        self._store = store
        self._signs = dict.fromkeys(range(1, nodes), (-1, 0.0))  # beats seen, and when the last one was
        self.failure = 0

    def missing(self, say: Callable[[str], None]) -> bool:
        """Whether the store is still needed: some node has neither reported its end nor gone silent."""
        now_s = time.monotonic()
        for node, (beats, since_s) in list(self._signs.items()):
            if (ended := self._store.number(f"freewheel/ended/{node}")) is not None:
                self.failure = self.failure or ended
                del self._signs[node]
                continue
            seen = self._store.number(f"freewheel/beat/{node}") or 0
            if seen != beats:
                self._signs[node] = (seen, now_s)
            elif now_s > since_s + SILENT_S:
                say(f"node {node} has given no sign of life for {SILENT_S:g} s; not waiting for it")
                self.failure = self.failure or 1
                del self._signs[node]
        return bool(self._signs)
