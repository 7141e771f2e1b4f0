"""A connection in use: with whom, how vectors travel over it, and what waits to leave."""

from __future__ import annotations

import asyncio
from collections import deque

from torch import Tensor

from freewheel.fabric.secret import Seals
from freewheel.fabric.transfers import Landing, Outgoing
from freewheel.fabric.transport import Transport
from freewheel.fabric.windows import STREAM


class Connection:
    """A connection with a peer that has said who it is."""

    def __init__(
        self,
        transport: Transport,
        peer: int,
        incarnation: int,
        address: str,
        caller: int,
        seals: tuple[Seals, Seals],
    ) -> None:
        self.ours, self.theirs = seals
        self.transport, self.peer, self.incarnation, self.address = transport, peer, incarnation, address
        self.caller = caller
        self.kind = STREAM
        """How vectors travel: through windows of the device or the host, or as a stream of bytes."""
        self.pid = 0
        """The peer's process, where windows are shared."""
        self.queue: deque[Outgoing] = deque()
        self.wake = asyncio.Event()
        self.writing = False
        self.spoke_s = 0.0
        self.sent = self.got = 0
        """Messages of the strategy, for telling whether any is still under way."""
        self.landings: dict[tuple[str | int, ...], Landing] = {}
        """Vectors that are awaited in place, by their tag."""
        self.shown: dict[int, tuple[Outgoing, Tensor]] = {}
        """Windows the peer has not read yet, by number: the message, and the vector."""
        self.task: asyncio.Task[None] | None = None

    def put(self, outgoing: Outgoing) -> None:
        """Let a message leave after those before it; a short one leaves at once if nothing is before it."""
        if not self.queue and not self.writing and outgoing.vector is None:
            whole = outgoing.head + self.ours.next(outgoing.head)
            if written := self.transport.write_now(whole):
                self.ours.advance()
                outgoing.head, outgoing.begun = whole[written:], True
                if not outgoing.head:
                    outgoing.set_result(None)
                    return
        self.queue.append(outgoing)
        self.wake.set()

    def sealed(self, head: bytes) -> bytes:
        """A frame that leaves now."""
        whole = head + self.ours.next(head)
        self.ours.advance()
        return whole
