"""The fabric: how one worker reaches the others. The only thing with a virtual and a real form.

What a fabric guarantees:
- Messages of one sender with one tag arrive in the order they were sent, or not at all.
- A connection that broke is over: a message sent before a peer was lost never arrives after it, nor one from
  a worker's earlier life.
- `receive` from a named peer ends: with the message, or with PeerLost once the peer is known to be gone.
- Vectors are handed over, not copied: a sender does not change a vector it has sent, a receiver does not
  change a vector it has received. `swap` and `reduce` use up what they are given, and may overwrite it.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.notes import Shape, read_all
from freewheel.records.counters import Counters

T = TypeVar("T")
Tag: TypeAlias = tuple[str | int, ...]
Note: TypeAlias = tuple[float, ...]
EXCHANGE = "exchange"  # the first word of tags of exchanges, whose vectors may travel in a coarser format
RUNTIME = "run"  # the first word of tags that are not a strategy's
BYTES = "bytes"  # the last word of tags whose vector is bytes, which travel as they are
BYTES_PIECE = 1 << 22  # how many bytes one message may have
MESSAGE_BYTES = 1024  # about how much memory a message takes beside its vector and numbers
AGAIN = "it connected again"  # a new connection replaces one of the same life: nobody was lost
LARGEST = 2**53  # whole numbers beyond it are not exact in a note
# Hears what happened (a word of docs/RECORDS.md), to whom (None: to all), and more about it in words.
Notice: TypeAlias = Callable[[str, int | None, str], None]
# Makes a correction of one's own weights and another's, element by element; may overwrite the other's.
Meet: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Weights: TypeAlias = Mapping[int, float]  # the members of a reduction, in order; the weights of their vectors
Left: TypeAlias = asyncio.Future[None]  # is done when the last byte of a message has left
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]  # runs it in this worker's life
# Is handed each piece of a vector that arrives, with its place; may run in another thread.
Each: TypeAlias = Callable[[int, Tensor], object]


@dataclass(frozen=True)
class Pull:
    """The usual correction: a share of the way to the other."""

    share: float

    def __call__(self, mine: Tensor, theirs: Tensor) -> Tensor:
        return theirs.sub_(mine).mul_(self.share)


@dataclass(slots=True)
class Message:
    """A vector, or a few numbers (the note), or both.

    Read it by the properties and methods below: they check what it has. If it does not fit, they cut its
    sender off and raise PeerLost.
    """

    sender: int
    tag: Tag
    vector: Tensor | None
    note: Note
    offend: Callable[[str], None] = lambda why: None  # cuts the sender off, where that is not this worker

    def bad(self, what: str) -> PeerLost:
        """Cut the sender off; what to raise."""
        why = f"it sent {what} with {self.tag[0]!r}"
        self.offend(why)
        return PeerLost(self.sender, why)

    @property
    def payload(self) -> Tensor:
        if self.vector is None:
            raise self.bad("no vector")
        return self.vector

    def of(self, numel: int) -> Tensor:
        if self.payload.numel() != numel:
            raise self.bad(f"a vector of {self.payload.numel()} numbers, not {numel}")
        return self.payload

    def of_length(self, count: int) -> Note:
        if len(self.note) != count:
            raise self.bad(f"a note of {len(self.note)} numbers, not {count}")
        return self.note

    def numbers(self, least: int, most: int | None = None) -> tuple[int, ...]:
        if len(self.note) < least or (most is not None and len(self.note) > most):
            raise self.bad(f"a note of {len(self.note)} numbers")
        if not all(-LARGEST < number < LARGEST and number == int(number) for number in self.note):
            raise self.bad("numbers that are not whole")
        return tuple(map(int, self.note))

    def read(self, shape: Shape, make: Callable[[Any], T] = lambda found: found) -> T:
        """What `make` makes of a note of this shape (fabric/notes.py); it may raise ValueError."""
        try:
            return make(read_all(shape, iter(self.numbers(0))))
        except ValueError as error:
            raise self.bad(f"what makes no sense ({error})") from None


class NotNow(Exception):
    """One of two that were to swap has weights that move for too long."""


class Fabric:
    """One worker's end of the network: who is within reach, what has arrived, who waits for whom."""

    world_size: int
    counters: Counters
    life = 0  # which life of this worker it is
    silence_s: float  # how long a peer may give no sign of life before it counts as lost

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.members: tuple[int, ...] = (rank,)  # who is within reach now, this worker too, in order
        self._reach = frozenset((rank,))  # the same, for looking up
        self._lost: dict[int, str] = {}
        self.left: set[int] = set()  # who has said goodbye and does not come back in this life
        self._boxes: dict[Tag, deque[Message]] = {}
        self._unread: Counter[int] = Counter()  # about how many bytes each has sent that nobody has received
        self._waiters: dict[Tag, list[tuple[Sequence[int], asyncio.Future[Message]]]] = {}
        self._forgotten: dict[Tag, None] = {}
        self._leaving: dict[int, list[Left]] = {}
        self._epochs: Counter[int] = Counter()
        self._kept: list[dict[int, Any]] = []
        self._asked = 0
        self._change: asyncio.Future[None] | None = None
        self.notice: Notice = lambda what, peer, text: None  # hears of what happens to peers, and in views

    # -- for those who want messages --

    async def receive(self, tag: Tag, peer: int | None = None, among: Sequence[int] = ()) -> Message:
        """Wait for the next message with this tag, of one peer, of some (`among`) or of anybody.

        PeerLost when the peer, or one of `among`, is gone.
        """
        whom = among if peer is None else (peer,)
        box = self._boxes.get(tag, deque())
        for at, message in enumerate(box):
            if not whom or message.sender in whom:
                del box[at]
                if not box:
                    del self._boxes[tag]
                self._unread[message.sender] -= _size(message)
                return message
        for needed in whom:
            self.need(needed)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        waiter, waiters = (whom, future), self._waiters.setdefault(tag, [])
        waiters.append(waiter)
        try:
            return await future
        finally:
            waiters.remove(waiter)
            if not waiters:
                del self._waiters[tag]
            del waiter, future  # else an error would keep the vectors of all who waited: it knows this frame

    async def swap(self, peer: int, tag: Tag, mine: Tensor, meet: Meet, told: Callable[[], None]) -> Tensor:
        """Exchange vectors with a peer, which calls this too: meet(mine, theirs), and its negative there.

        NotNow if the peer has none to give. `told` is called once the peer has all it needs. In the real
        fabric each side combines one half for both and writes the result over `mine`.
        """
        sending = self.send(peer, tag, mine)
        try:
            theirs = (await self.receive(tag, peer)).payload
            await sending
        finally:
            if sending.done() and not sending.exception():
                told()
            sending.cancel()
        return meet(mine, theirs.clone())  # it is also the peer's

    async def laid(self, peer: int, give: Callable[[], Awaitable[Tensor]]) -> Note:
        """Give a vector and say where it lies, if the peer alone is to combine both; () if both must swap."""
        return ()

    def withdraw(self, peer: int, mine: Tensor) -> None:
        """Do not use a vector again that was laid for a peer: it is lost, and may still write into it."""

    async def combine(self, peer: int, where: Note, mine: Tensor, meet: Meet) -> Tensor:
        """Do what `swap` does on this side alone, with a vector the peer has laid."""
        raise NotImplementedError

    async def reduce(self, tag: Tag, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """The weighted sum of all members' vectors, or a part of how far it is from this one (0: the sum).

        All members call it alike. PeerLost if one is lost.
        """
        raise NotImplementedError

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        """Wait for a vector and take it piece by piece, or straight into a tensor."""
        raise NotImplementedError

    def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> Left:
        """Begin to send; PeerLost, here or in the future, when the peer is known to be gone."""
        raise NotImplementedError

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send without waiting; a message to a peer that is gone is dropped and counted."""
        if self.reaches(peer):
            self.send(peer, tag, vector, note)
        else:
            self.counters.messages_dropped += 1

    def forget(self, tag: Tag) -> None:
        """Drop unread messages whose tags begin so, now and when they arrive later."""
        for one in [one for one in self._boxes if one[: len(tag)] == tag]:
            for message in self._boxes.pop(one):
                self._unread[message.sender] -= _size(message)
        self._forgotten[tag] = None
        if len(self._forgotten) > 1024:
            del self._forgotten[next(iter(self._forgotten))]

    def clear(self) -> None:
        """Drop all unread messages."""
        self._boxes.clear()
        self._unread.clear()

    async def ask(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> Message:
        """Send a question, whose note begins with its number; the answer's tag must end with that number."""
        self._asked += 1
        answer = (*tag, self._asked)
        try:
            await self.send(peer, tag, vector, (self._asked, *note))
            return await self.receive(answer, peer)
        except BaseException:
            self.forget(answer)
            raise

    async def changed(self) -> None:
        """Wait until a peer comes or goes."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._change)

    def epoch(self, peer: int) -> int:
        """How often a peer has been lost: what was said in one epoch means nothing in the next."""
        return self._epochs.get(peer, 0)

    def by_peer(self) -> dict[int, Any]:
        """A new dictionary with peers as keys; a peer that is lost is removed from it."""
        self._kept.append({})
        return self._kept[-1]

    @property
    def others(self) -> list[int]:
        return [peer for peer in self.members if peer != self.rank]

    def reaches(self, peer: int) -> bool:
        return peer in self._reach

    def waits(self) -> list[tuple[int | None, Tag]]:
        """Whom this worker waits for (None: anybody), and for what."""
        waiting = [(whom, tag) for tag, waiters in self._waiters.items() for whom, _ in waiters]
        return [(peer, tag) for whom, tag in waiting for peer in whom or (None,)]

    # -- for the fabric --

    def why_lost(self, peer: int) -> str:
        return self._lost.get(peer, "not there")

    def need(self, peer: int, epoch: int | None = None) -> None:
        """Raise PeerLost unless a peer is within reach, and has been since an epoch."""
        if peer not in self._reach or epoch not in (None, self.epoch(peer)):
            raise PeerLost(peer, self.why_lost(peer))

    def deliver(self, message: Message) -> None:
        """Hand a message to the first who waits for it, or keep it."""
        for whom, future in self._waiters.get(message.tag, ()):
            if (not whom or message.sender in whom) and not future.done():
                future.set_result(message)
                return
        if any(message.tag[:end] in self._forgotten for end in range(1, len(message.tag) + 1)):
            return
        self._boxes.setdefault(message.tag, deque()).append(message)
        self._unread[message.sender] += _size(message)

    def gain(self, peer: int) -> None:
        if peer not in self._reach and self._lost.get(peer) != AGAIN:
            self.notice("joined", peer, "is within reach" + " again" * (peer in self._lost))
        self._lost.pop(peer, None)
        self.left.discard(peer)
        self._reach |= {peer}
        self._members_changed()

    def lose(self, peer: int, why: str, what: str = "died") -> None:
        """A peer is gone: whoever waits for it, or sends to it, gets PeerLost; unread messages are dropped.

        `what` is how it looks from here: died, cut, left, finished.
        """
        if peer not in self._reach:
            return
        if why != AGAIN:
            self.notice(what, peer, why)
        self._lost[peer] = why
        if what in ("left", "finished"):
            self.left.add(peer)
        self._epochs[peer] += 1
        self._reach -= {peer}
        self._members_changed()
        del self._unread[peer]
        for kept in self._kept:
            kept.pop(peer, None)
        boxes = {tag: deque(one for one in box if one.sender != peer) for tag, box in self._boxes.items()}
        self._boxes = {tag: box for tag, box in boxes.items() if box}
        for left in self._leaving.pop(peer, ()):
            if not left.done():
                left.set_exception(PeerLost(peer, why))
                left.exception()  # now asyncio does not complain if nobody awaits it
        for waiters in list(self._waiters.values()):
            for whom, future in waiters:
                if peer in whom and not future.done():
                    future.set_exception(PeerLost(peer, why))

    def leaving(self, peer: int, left: Left) -> None:
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


async def hear(fabric: Fabric, tag: Tag, act: Callable[[Message], Awaitable[None] | None]) -> None:
    """Hand every message with a tag to `act`, for ever."""
    while True:
        message = await fabric.receive(tag)
        with contextlib.suppress(PeerLost):
            if (work := act(message)) is not None:
                await work


def _size(message: Message) -> int:
    vector_bytes = 0 if message.vector is None else message.vector.nbytes
    return MESSAGE_BYTES + 32 * len(message.note) + vector_bytes
