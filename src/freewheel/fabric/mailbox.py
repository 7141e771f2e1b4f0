"""Where messages wait for those who want them, and those who want them for messages.

Every fabric has one: who is within reach, what has arrived, who waits for whom. A fabric delivers into it
and tells it when peers come and go; it wakes the right coroutine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from freewheel.errors import PeerLost
from freewheel.fabric.base import Message, Tag


class Mailbox:
    """One worker's arrived messages and waiting receivers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.members: tuple[int, ...] = (rank,)
        self._reach = {rank}  # the same, for looking up
        self._lost: dict[int, str] = {}
        self._boxes: dict[Tag, deque[Message]] = {}
        self._waiters: dict[Tag, list[tuple[int | None, Sequence[int], asyncio.Future[Message]]]] = {}

    # -- for those who want messages --

    async def receive(self, tag: Tag, peer: int | None = None, among: Sequence[int] = ()) -> Message:
        """Wait for the next message with this tag; see Fabric.receive."""
        box = self._boxes.get(tag)
        if box:
            for at, message in enumerate(box):
                if peer is None or message.sender == peer:
                    del box[at]
                    if not box:
                        del self._boxes[tag]
                    return message
        for needed in (peer,) if peer is not None else among:
            self.need(needed)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        waiter = (peer, among, future)
        self._waiters.setdefault(tag, []).append(waiter)
        try:
            return await future
        finally:
            waiters = self._waiters[tag]
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[tag]

    def forget(self, tag: Tag) -> None:
        """Drop what has arrived with this tag and nobody received."""
        self._boxes.pop(tag, None)

    def waits(self) -> list[tuple[int | None, Tag]]:
        """Whom this worker waits for, and for what."""
        return [(peer, tag) for tag, waiters in self._waiters.items() for peer, _, _ in waiters]

    # -- for the fabric --

    def reaches(self, peer: int) -> bool:
        """Whether a peer is within reach."""
        return peer in self._reach

    def need(self, peer: int) -> None:
        """Raise PeerLost unless a peer is within reach."""
        if peer not in self._reach:
            raise PeerLost(peer, self._lost.get(peer, "not there"))

    def deliver(self, message: Message) -> None:
        """Hand a message to who waits for it, or keep it."""
        for peer, _, future in self._waiters.get(message.tag, ()):
            if (peer is None or peer == message.sender) and not future.done():
                future.set_result(message)
                return
        self._boxes.setdefault(message.tag, deque()).append(message)

    def gain(self, peer: int) -> None:
        """A peer is within reach."""
        self._lost.pop(peer, None)
        self._reach.add(peer)
        self.members = tuple(sorted(self._reach))

    def lose(self, peer: int, why: str) -> None:
        """A peer is gone: whoever waits for it is told."""
        if peer not in self._reach:
            return
        self._lost[peer] = why
        self._reach.discard(peer)
        self.members = tuple(sorted(self._reach))
        for waiters in list(self._waiters.values()):
            for awaited, among, future in waiters:
                if (peer == awaited or peer in among) and not future.done():
                    future.set_exception(PeerLost(peer, why))
