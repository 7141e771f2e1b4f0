"""A port that all messages pass at once, each as fast as any other: as TCP shares a link among connections.

A message that needs b bytes is through when b bytes of each have passed, so the port only counts how much of
each has passed, and keeps the messages in the order in which they will be through.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from freewheel.sim.clock import Callback, VirtualLoop
from freewheel.sim.links import Port


class Fair:
    """Shares a port's speed equally among the messages that pass it; a new speed counts from the next on."""

    def __init__(self, loop: VirtualLoop, port: Port) -> None:
        self._loop, self._port = loop, port
        self._passed, self._since = 0.0, 0.0
        """Bytes of each message that have passed by a moment; only differences of it matter."""
        self._messages: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._timer: Callback | None = None

    def join(self, size: int, through: Callable[[], None]) -> None:
        """Begin to pass a message; say when it is through."""
        self._advance()
        heapq.heappush(self._messages, (self._passed + size, next(self._numbers), through))
        self._wait()

    def _advance(self) -> None:
        now = self._loop.time()
        if self._messages:
            self._passed += (now - self._since) * self._port.bytes_per_s / len(self._messages)
        self._since = now

    def _wait(self) -> None:
        """Wake up when the next one is through."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._messages:
            left = max(0.0, self._messages[0][0] - self._passed)
            at = self._loop.time() + left * len(self._messages) / self._port.bytes_per_s
            self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        first = self._messages[0][0]
        self._passed, self._since = first, self._loop.time()
        done = []
        while self._messages and self._messages[0][0] <= first * (1 + 1e-12):
            done.append(heapq.heappop(self._messages)[2])
        self._wait()
        for through in done:
            through()
