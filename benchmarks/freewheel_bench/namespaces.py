"""A network to measure on: one network namespace per worker, all behind one bridge, each link with a limit.

    namespace 0 ── eth0 ══ fwTAG-0 ──┐
    namespace 1 ── eth0 ══ fwTAG-1 ──┤ bridge fwTAG
    …                                │

Both ends of a worker's link have a token bucket: the worker's for what it sends, the bridge's for what it
receives. Names are new for every network, so that several can stand beside each other, and everything is
taken down again whatever happened in between, short of SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import NoReturn

from freewheel.errors import ConfigError, at_least
from freewheel_bench.workers import Place

INTERFACE = "eth0"
QUEUE_MS = 50


class Network:
    """Network namespaces behind a bridge, as a context; `places` says where workers run."""

    def __init__(self, workers: int, link_mbit: float) -> None:
        at_least("--link-mbit", link_mbit, 0.1)
        if workers > 250:
            raise ConfigError(f"a network of {workers} namespaces is too large; 250 is the most.")
        self.link_mbit = link_mbit
        self.bridge = f"fw{secrets.token_hex(3)}"
        self.places = [
            Place(f"10.83.0.{rank + 1}", INTERFACE, self._namespace(rank)) for rank in range(workers)
        ]

    def _namespace(self, rank: int) -> str:
        return f"freewheel-{self.bridge[2:]}-{rank}"

    def _port(self, rank: int) -> str:
        """The bridge's end of a worker's link."""
        return f"{self.bridge}-{rank}"

    def __enter__(self) -> Network:
        check_possible()
        self._left = contextlib.ExitStack()
        self._left.enter_context(_ended_by_signals())
        try:
            self._build()
        except BaseException:
            self._left.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _build(self) -> None:
        self._do("ip", "link", "add", self.bridge, "type", "bridge")
        self._undo("ip", "link", "delete", self.bridge)
        self._do("ip", "link", "set", self.bridge, "up")
        for rank, place in enumerate(self.places):
            namespace, port = self._namespace(rank), self._port(rank)
            self._do("ip", "netns", "add", namespace)
            self._undo("ip", "netns", "delete", namespace)
            pair = ("type", "veth", "peer", "name", INTERFACE, "netns", namespace)
            self._do("ip", "link", "add", port, *pair)
            # A namespace lives on while a process is in it; the link goes now.
            self._undo("ip", "link", "delete", port)
            self._do("ip", "link", "set", port, "master", self.bridge, "up")
            self._do("ip", "-n", namespace, "address", "add", f"{place.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                self._do("ip", "-n", namespace, "link", "set", interface, "up")
            self._do("tc", "qdisc", "add", "dev", port, *self._bucket())
            self._do("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *self._bucket())

    def _bucket(self) -> list[str]:
        """A token bucket of 2 ms, and a queue such as a router has.

        A bucket smaller than the largest packet (64 kB: network cards cut them up, not processors) would make
        the kernel cut, on the cores that train.
        """
        burst = max(80_000, round(self.link_mbit * 1e6 / 8 * 2e-3))
        limits = f"rate {self.link_mbit:f}mbit burst {burst} latency {QUEUE_MS}ms"
        return ["root", "tbf", *limits.split()]

    def _do(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ConfigError(
                f"cannot make a network to measure on: {' '.join(command)!r} said "
                f"{done.stderr.strip()!r}. Network namespaces need root, iproute2 and a kernel with veth, "
                "bridge and tbf; a container needs to be privileged."
            )

    def _undo(self, *command: str) -> None:
        self._left.callback(subprocess.run, command, capture_output=True)

    def cut(self, rank: int) -> None:
        self._do("ip", "link", "set", self._port(rank), "down")

    def heal(self, rank: int) -> None:
        self._do("ip", "link", "set", self._port(rank), "up")

    def bytes_moved(self) -> list[int]:
        """Bytes sent and bytes received by each worker so far: sent by 0, received by 0, sent by 1 …

        By the count of the token buckets, which charge every segment of a large packet its header.
        """
        counts = []
        for rank in range(len(self.places)):
            counts.append(_counted("-n", self._namespace(rank), dev=INTERFACE))
            counts.append(_counted(dev=self._port(rank)))
        return counts


def _counted(*where: str, dev: str) -> int:
    command = ["tc", *where, "-statistics", "-json", "qdisc", "show", "dev", dev]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return next(int(queue["bytes"]) for queue in shown if queue["kind"] == "tbf")


def check_possible() -> None:
    """Refuse where network namespaces cannot be made, and say what is missing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            f"this benchmark needs iproute2 and there is no {' and no '.join(missing)}. Install iproute2 "
            "and run it as root."
        )
    if os.geteuid() != 0:
        raise ConfigError(
            f"this benchmark needs root to make network namespaces and runs as user {os.geteuid()}. "
            "Run it with sudo."
        )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a polite kill unwind the program, so that what was built is taken down."""

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
