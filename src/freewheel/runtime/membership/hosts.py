"""Where the workers of a run meet: the store that one process holds, and how others reach it and join."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from freewheel.errors import ConfigError, first_line
from freewheel.fabric import transport
from freewheel.runtime.membership.entries import OPTIONS, Entries
from freewheel.runtime.membership.place import parse_address
from freewheel.runtime.membership.store_client import STORE_S, BoundedStore, reach

FREE = "free"
"""What a place of the run says that a worker has had and has left."""


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
