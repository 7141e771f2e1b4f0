"""The fabric: how one worker reaches the others. The only thing with a virtual and a real form.

What a fabric guarantees:
- Messages of one sender with one tag arrive in the order they were sent, or not at all.
- A connection that broke is over: a message sent before a peer was lost never arrives after it, nor one from
  a worker's earlier life.
- `receive` from a named peer ends: with the message, or with PeerLost once the peer is known to be gone.
- Vectors are handed over, not copied: a sender does not change a vector it has sent, a receiver does not
  change a vector it has received. `swap` and `reduce` use up what they are given, and may overwrite it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from freewheel.errors import PeerLost

Tag: TypeAlias = tuple[str | int, ...]
Note: TypeAlias = tuple[float, ...]
EXCHANGE = "exchange"
"""The first word of tags of exchanges, whose vectors may travel in a coarser format."""
REDUCTION: tuple[Tag, ...] = ((), ("ready",), ("go",), ("ring",), ("done",))
"""What follows the tag of a reduction in the tags of its messages."""
RUNTIME = "run"
"""The first word of tags that are not a strategy's."""
BYTES = "bytes"
"""The last word of those whose vector is bytes: they are not looked at, and travel as they are."""
BYTES_PIECE = 1 << 22
"""How many of them one message may have."""
LARGEST = 2**53
"""Whole numbers beyond it are not exact in a note."""
Notice: TypeAlias = Callable[[str, int | None, str], None]
"""Hears what happened (a word of docs/RECORDS.md), to whom (None: to all), and more about it in words."""
Meet: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Makes a correction of one's own weights and another's, element by element; may overwrite the other's."""


@dataclass(frozen=True)
class Pull:
    """The usual correction: a share of the way to the other."""

    share: float

    def __call__(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """share·(theirs - mine)."""
        return theirs.sub_(mine).mul_(self.share)

    def over_mine(self, mine: Tensor, theirs: Tensor) -> None:
        """The same, written over mine in two passes."""
        mine.sub_(theirs).mul_(-self.share)


Each: TypeAlias = Callable[[int, Tensor], None]
"""Is handed each piece of a vector that arrives, with its place; may run in another thread."""


def _nothing(why: str) -> None:
    """Where all messages are one's own."""


@dataclass(slots=True)
class Message:
    """A vector, or a few numbers (the note), or both.

    What it has is looked at before it is used: by `payload`, `of` and `numbers`. A sender of what
    cannot be used is cut off, and whoever wanted to use it gets PeerLost.
    """

    sender: int
    tag: Tag
    vector: Tensor | None
    note: Note
    offend: Callable[[str], None] = _nothing
    """Cuts the sender off."""

    def bad(self, what: str) -> PeerLost:
        """This message cannot be used: what to raise."""
        why = f"it sent {what} with {self.tag[0]!r}" if self.tag else f"it sent {what}"
        self.offend(why)
        return PeerLost(self.sender, why)

    @property
    def payload(self) -> Tensor:
        """The vector of a message that must have one."""
        if self.vector is None:
            raise self.bad("no vector")
        return self.vector

    def of(self, numel: int) -> Tensor:
        """The vector of a message that must have one of so many numbers."""
        if self.payload.numel() != numel:
            raise self.bad(f"a vector of {self.payload.numel()} numbers, not {numel}")
        return self.payload

    def numbers(self, least: int, most: int | None = None) -> tuple[int, ...]:
        """The note of a message that must be so many whole numbers."""
        if len(self.note) < least or (most is not None and len(self.note) > most):
            raise self.bad(f"a note of {len(self.note)} numbers")
        if not all(-LARGEST < number < LARGEST and number == int(number) for number in self.note):
            raise self.bad("numbers that are not whole")
        return tuple(map(int, self.note))


class NotNow(Exception):
    """One of two that were to swap has weights that move for too long."""


class Fabric(Protocol):
    """One worker's end of the network."""

    rank: int
    world_size: int
    notice: Notice
    """Hears of what happens to peers, and in views."""

    @property
    def silence_s(self) -> float:
        """How long a peer may give no sign of life before it counts as lost."""

    @property
    def members(self) -> tuple[int, ...]:
        """The workers within reach now, this one included, in ascending order."""

    def send(
        self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()
    ) -> asyncio.Future[None]:
        """Begin to send; await what is returned to know that the last byte has left.

        Raises PeerLost, here or there, when the peer is known to be gone.
        """

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send without waiting; a message to a peer that is gone is dropped and counted."""

    async def receive(self, tag: Tag, peer: int | None = None, among: Sequence[int] = ()) -> Message:
        """Wait for the next message with this tag: from one peer, from anybody, or from anybody `among`.

        Raises PeerLost when the peer, or one of those among whom it is awaited, is gone.
        """

    async def swap(
        self, peer: int, tag: Tag, mine: Tensor | None, meet: Meet, told: Callable[[], None]
    ) -> Tensor:
        """Exchange vectors with a peer, which calls it too: meet(mine, theirs), and its negative there.

        NotNow, if either side has None to give.

        `told` is called once the peer has all it needs. A real fabric lets each side combine one half for
        both, piece by piece, and writes the result over mine.
        """

    def laid(self, peer: int, mine: Tensor) -> Note:
        """Where a caller may combine a short vector with its own for both; nothing, if both must swap."""

    async def combine(self, peer: int, where: Note, mine: Tensor, meet: Meet) -> Tensor:
        """What `swap` does, by one side alone, with a vector the peer has laid."""

    def short(self, peer: int) -> bool:
        """Whether vectors are so short, and so near, that laying one beats a swap."""

    async def reduce(
        self,
        members: Sequence[int],
        tag: Tag,
        vector: Tensor,
        weights: Sequence[float] | None = None,
        offset: bool = False,
    ) -> Tensor:
        """The weighted sum of all members' vectors (weights 1), or how far it is from this one.

        All members call it alike. PeerLost if one is lost.
        """

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        """Wait for a vector and take it piece by piece, or straight into a tensor."""

    def lend(self, vector: Tensor) -> Tensor:
        """A vector that may be changed once it has left, as it is to be sent."""

    def forget(self, tag: Tag) -> None:
        """Drop what has arrived with this tag and nobody received, and what still arrives."""

    async def changed(self) -> None:
        """Wait until a peer comes or goes."""

    def reaches(self, peer: int) -> bool:
        """Whether a peer is within reach."""

    def epoch(self, peer: int) -> int:
        """How often a peer has been lost."""
