"""The fabric: how one worker reaches the others. The only thing with a virtual and a real form.

What a fabric guarantees:
- Messages of one sender with one tag arrive in the order they were sent, or not at all.
- A connection that broke is over: a message sent before a peer was lost never arrives after it, nor one from
  a worker's earlier life.
- `receive` from a named peer ends: with the message, or with PeerLost once the peer is known to be gone.
- Vectors are handed over, not copied: a sender does not change a vector it has sent, a receiver does not
  change a vector it has received. The one exception is `blend`, which may overwrite what it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

Tag: TypeAlias = tuple[str | int, ...]
Note: TypeAlias = tuple[float, ...]
EXCHANGE = "exchange"
"""The first word of tags whose vectors are swapped by `send` and `blend`, and by nothing else."""
RUNTIME = "run"
"""The first word of tags that are not a strategy's."""
Notice: TypeAlias = Callable[[str, int | None, str], None]
"""Hears what happened (a word of docs/RECORDS.md), to whom (None: to all), and more about it in words."""
Meet: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Makes a correction of one's own weights and another's, element by element; may overwrite the other's."""


@dataclass(slots=True)
class Message:
    """A vector, or a few numbers (the note), or both."""

    sender: int
    tag: Tag
    vector: Tensor | None
    note: Note

    @property
    def payload(self) -> Tensor:
        """The vector of a message that must have one."""
        assert self.vector is not None, f"message {self.tag} of worker {self.sender} has no vector"
        return self.vector


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

    def rounded(self, tag: Tag, vector: Tensor) -> Tensor:
        """The vector as the others will see it (a wire format may be coarser), in place."""

    async def blend(
        self, peer: int, tag: Tag, mine: Tensor, meet: Meet, sending: asyncio.Future[None]
    ) -> Tensor:
        """Receive a vector and return meet(mine, theirs), while `sending` takes mine to the same peer.

        A real fabric does it piece by piece as the bytes come and go, and writes the result over mine: one
        pass through the cache instead of several through memory, and no vector for theirs.
        """

    def forget(self, tag: Tag) -> None:
        """Drop what has arrived with this tag and nobody received, and what still arrives."""

    async def changed(self) -> None:
        """Wait until a peer comes or goes."""

    def epoch(self, peer: int) -> int:
        """How often a peer has been lost."""
