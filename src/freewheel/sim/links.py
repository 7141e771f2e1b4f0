"""The network as ports: who can send how fast to whom.

A message passes the sender's port out, the shared backbone (if there is one), and the receiver's port in.
Each port serves one message at a time, first come first served, so a parameter server's port really becomes a
bottleneck; only messages of one packet slip in between. Ports cut messages through: an uncontended transfer
costs latency + bytes / (slowest port), not the sum over the ports.

With ``fair`` a port passes all its messages at once instead, each as fast as any other, as TCP shares a link
among connections. It makes a difference where many talk to one and wait for the answer.

Workers of one machine (``workers_per_node``) talk over a faster local path, without the backbone. Buffers
between ports are unlimited, but a sender feels a full receiver: see VirtualFabric.send.
"""

import heapq
import itertools
from collections.abc import Callable

from freewheel.sim.clock import Callback, VirtualLoop
from freewheel.sim.scenario import Links

PACKET_BYTES = 1500  # a message that fits into one does not wait for a long one of another connection


class Port:
    """A place that passes one message at a time."""

    __slots__ = ("bytes_per_s", "free_at")

    def __init__(self, mbit: float) -> None:
        self.bytes_per_s = mbit * 1e6 / 8
        self.free_at = 0.0

    def take(self, first_byte: float, last_byte: float, size: int) -> tuple[float, float]:
        """Reserve the port for a message whose bytes reach it between two moments; when it passes."""
        takes = size / self.bytes_per_s
        if size <= PACKET_BYTES and first_byte < self.free_at:
            self.free_at += takes
            return first_byte, max(first_byte + takes, last_byte)
        start = max(first_byte, self.free_at)
        self.free_at = max(start + takes, last_byte)
        return start, self.free_at


class Fair(Port):
    """Shares its speed equally among the messages that pass it; a new speed counts from the next on.

    A message of b bytes is through when b more bytes of each have passed: the port counts how much of each
    has passed, and keeps the messages in the order in which they will be through.
    """

    def __init__(self, mbit: float) -> None:
        super().__init__(mbit)
        self._passed = self._since = 0.0  # bytes of each that had passed by a moment; differences count
        self._speed = self.bytes_per_s  # since then
        self._messages: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._timer: Callback | None = None

    def join(self, loop: VirtualLoop, size: int, through: Callable[[], None]) -> None:
        """Begin to pass a message; `through` is called when it is through."""
        if self._messages:
            self._passed += (loop.time() - self._since) * self._speed / len(self._messages)
        heapq.heappush(self._messages, (self._passed + size, next(self._numbers), through))
        self._wait(loop)

    def _wait(self, loop: VirtualLoop) -> None:
        self._since, self._speed = loop.time(), self.bytes_per_s
        if self._timer is not None:
            self._timer.cancel()
        if self._messages:
            left = max(0.0, self._messages[0][0] - self._passed)
            at = self._since + left * len(self._messages) / self.bytes_per_s
            self._timer = loop.call_at(at, self._wake, loop)

    def _wake(self, loop: VirtualLoop) -> None:
        self._passed = first = self._messages[0][0]
        done = []
        while self._messages and self._messages[0][0] <= first * (1 + 1e-12):
            done.append(heapq.heappop(self._messages)[2])
        self._wait(loop)
        for through in done:
            through()


class Network:
    """The ports of one run."""

    def __init__(self, links: Links, workers: int) -> None:
        self.links = links
        port = Fair if links.fair else Port
        slow = [links.slow.get(rank, 1.0) for rank in range(workers)]
        self.out = [port((links.out_mbit or links.mbit) / factor) for factor in slow]
        self.into = [port(links.mbit / factor) for factor in slow]
        self.local_out, self.local_into = ([port(links.node_mbit) for _ in slow] for _ in range(2))
        self.backbone = port(links.backbone_mbit) if links.backbone_mbit else None
        self.latency_s = links.latency_ms / 1e3
        self.node_latency_s = links.node_latency_ms / 1e3

    def path(self, source: int, target: int) -> tuple[Port, Port | None, Port, float]:
        """The port out, the backbone if it is passed, the port in, and the latency in seconds."""
        size = self.links.workers_per_node
        if size > 1 and source // size == target // size:
            return self.local_out[source], None, self.local_into[target], self.node_latency_s
        return self.out[source], self.backbone, self.into[target], self.latency_s

    def throttle(self, rank: int, factor: float) -> None:
        """Make a worker's ports so many times slower than they are now."""
        for port in (self.out[rank], self.into[rank]):
            port.bytes_per_s /= factor
