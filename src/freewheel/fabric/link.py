"""A connection in use: with whom, and what waits to leave."""

from __future__ import annotations

import asyncio
from collections import deque

from freewheel.fabric.line import Line
from freewheel.fabric.vectors import Sending


class Link:
    """A connection with a peer that has said who it is."""

    def __init__(self, line: Line, peer: int, incarnation: int, address: str, caller: int) -> None:
        self.line, self.peer, self.incarnation, self.address = line, peer, incarnation, address
        self.caller = caller
        self.near = False
        """Whether both see each other's windows."""
        self.deaf = False
        """Whether what the peer says is not being read, for this worker's own reasons."""
        self.queue: deque[Sending] = deque()
        self.wake = asyncio.Event()
        self.spoke_s = 0.0
        self.sent = self.got = 0
        """Messages of the strategy, for telling whether any is still under way."""
        self.task: asyncio.Task[None] | None = None

    def put(self, sending: Sending) -> None:
        """Let a message leave after those before it."""
        self.queue.append(sending)
        self.wake.set()
