"""Where messages wait for those who want them, and those who want them for messages.

Every fabric has one: who is within reach, what has arrived, who waits for whom. A fabric delivers into it
and tells it when peers come and go; it wakes the right coroutine.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import Each, Meet, Message, Note, Notice, Tag

MESSAGE_BYTES = 1024
AGAIN = "it connected again"
"""A connection that took the place of another, of the same life: nobody was lost."""


class Mailbox:
    """One worker's arrived messages and waiting receivers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.members: tuple[int, ...] = (rank,)
        self._reach = frozenset((rank,))  # the same, for looking up
        self._lost: dict[int, str] = {}
        self.left: set[int] = set()
        """Who has said goodbye, and is not coming back in this life."""
        self._boxes: dict[Tag, deque[Message]] = {}
        self._unread: Counter[int] = Counter()
        """About how much memory is held by what each has sent and nobody has received."""
        self._waiters: dict[Tag, list[tuple[int | None, Sequence[int], asyncio.Future[Message]]]] = {}
        self._forgotten: dict[Tag, None] = {}
        self._leaving: dict[int, list[asyncio.Future[None]]] = {}
        self._epochs: dict[int, int] = {}
        self._change: asyncio.Future[None] | None = None
        self.notice: Notice = lambda what, peer, text: None

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
                    self._unread[message.sender] -= _size(message)
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

    async def swap(
        self, peer: int, tag: Tag, mine: Tensor | None, meet: Meet, told: Callable[[], None]
    ) -> Tensor:
        """Receive the whole of theirs, then combine; see Fabric.swap."""
        assert mine is not None, "weights stand still in virtual time"
        sending = self.send(peer, tag, mine)
        try:
            theirs = (await self.receive(tag, peer)).payload
            await sending
        finally:
            if sending.done() and not sending.exception():
                told()
            sending.cancel()
        return meet(mine, theirs.clone())  # it is also the peer's

    def short(self, peer: int) -> bool:
        """Nothing is laid in virtual time."""
        return False

    def laid(self, peer: int, mine: Tensor) -> Note:
        """See Fabric.laid."""
        return ()

    async def combine(self, peer: int, where: Note, mine: Tensor, meet: Meet) -> Tensor:
        """See Fabric.combine."""
        raise NotImplementedError

    async def reduce(
        self,
        members: Sequence[int],
        tag: Tag,
        vector: Tensor,
        weights: Sequence[float] | None = None,
        offset: bool = False,
    ) -> Tensor:
        """A ring of all members; see Fabric.reduce."""
        weight = weights[members.index(self.rank)] if weights is not None else 1.0
        total = vector.clone() if weight == 1 else vector * weight
        for at in range(0, total.numel(), collectives.CHUNK):
            await collectives.ring(self, members, total[at : at + collectives.CHUNK], tag)
        return total.sub_(vector) if offset else total

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        """Take the whole as one piece; see Fabric.land."""
        vector = (await self.receive(tag, peer)).payload
        if isinstance(each, Tensor):
            each.copy_(vector)
        else:
            each(0, vector)

    def lend(self, vector: Tensor) -> Tensor:
        """Vectors are handed over by reference: a copy."""
        return vector.clone()

    def send(
        self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()
    ) -> asyncio.Future[None]:
        """See Fabric.send."""
        raise NotImplementedError

    def forget(self, tag: Tag) -> None:
        """Drop what has arrived with this tag and nobody received, and what still arrives."""
        for message in self._boxes.pop(tag, ()):
            self._unread[message.sender] -= _size(message)
        self._forgotten[tag] = None
        if len(self._forgotten) > 1024:
            del self._forgotten[next(iter(self._forgotten))]

    def forgotten(self, tag: Tag) -> bool:
        """Whether nobody wants what comes with this tag any more."""
        return tag in self._forgotten

    def clear(self) -> None:
        """Drop everything that has arrived and nobody received."""
        self._boxes.clear()
        self._unread.clear()

    async def changed(self) -> None:
        """Wait until a peer comes or goes."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._change)

    def epoch(self, peer: int) -> int:
        """How often a peer has been lost: what was said in one epoch means nothing in the next."""
        return self._epochs.get(peer, 0)

    def waits(self) -> list[tuple[int | None, Tag]]:
        """Whom this worker waits for, and for what."""
        return [
            (whom, tag)
            for tag, waiters in self._waiters.items()
            for peer, among, _ in waiters
            for whom in (among or (peer,))
        ]

    # -- for the fabric --

    def reaches(self, peer: int) -> bool:
        """Whether a peer is within reach."""
        return peer in self._reach

    def why_lost(self, peer: int) -> str:
        """Why a peer is out of reach."""
        return self._lost.get(peer, "not there")

    def need(self, peer: int) -> None:
        """Raise PeerLost unless a peer is within reach."""
        if peer not in self._reach:
            raise PeerLost(peer, self.why_lost(peer))

    def deliver(self, message: Message) -> None:
        """Hand a message to who waits for it, or keep it."""
        for peer, _, future in self._waiters.get(message.tag, ()):
            if (peer is None or peer == message.sender) and not future.done():
                future.set_result(message)
                return
        if self.forgotten(message.tag):
            return
        self._boxes.setdefault(message.tag, deque()).append(message)
        self._unread[message.sender] += _size(message)

    def gain(self, peer: int) -> None:
        """A peer is within reach."""
        if peer not in self._reach and self._lost.get(peer) != AGAIN:
            self.notice("joined", peer, "is within reach" + " again" * (peer in self._lost))
        self._lost.pop(peer, None)
        self.left.discard(peer)
        self._reach |= {peer}
        self._members_changed()

    def lose(self, peer: int, why: str, what: str = "died") -> None:
        """A peer is gone: whoever waits for it, or is sending to it, is told; what it said is void.

        `what` says how it looks from here: it died, it was cut off, it left.
        """
        if peer not in self._reach:
            return
        if why != AGAIN:
            self.notice(what, peer, why)
        self._lost[peer] = why
        if what in ("left", "finished"):
            self.left.add(peer)
        self._epochs[peer] = self.epoch(peer) + 1
        self._reach -= {peer}
        self._members_changed()
        del self._unread[peer]
        for tag in list(self._boxes):
            kept = deque(message for message in self._boxes[tag] if message.sender != peer)
            if kept:
                self._boxes[tag] = kept
            else:
                del self._boxes[tag]
        for left in self._leaving.pop(peer, ()):
            if not left.done():
                left.set_exception(PeerLost(peer, why))
                left.exception()  # whoever awaits it hears of it; nobody has to
        for waiters in list(self._waiters.values()):
            for awaited, among, future in waiters:
                if (peer == awaited or peer in among) and not future.done():
                    future.set_exception(PeerLost(peer, why))

    def leaving(self, peer: int, left: asyncio.Future[None]) -> None:
        """Remember a message on its way out, to fail it when its receiver is lost."""
        ways = self._leaving.setdefault(peer, [])
        ways.append(left)
        if len(ways) > 16:
            self._leaving[peer] = [one for one in ways if not one.done()]

    def _members_changed(self) -> None:
        self.members = tuple(sorted(self._reach))
        if self._change is not None:
            self._change.set_result(None)
            self._change = None


def _size(message: Message) -> int:
    return (
        MESSAGE_BYTES + 32 * len(message.note) + (message.vector.nbytes if message.vector is not None else 0)
    )
