"""The fabric: how one worker reaches the others. The only thing with a virtual and a real form.

What a fabric guarantees:
- Messages of one sender with one tag arrive in the order they were sent, or not at all.
- A connection that broke is over: a message sent before a peer was lost never arrives after it, nor one from
  a worker's earlier life.
- `receive` from a named peer ends: with the message, or with PeerLost once the peer is known to be gone.
- Vectors are handed over, not copied: a sender does not change a vector it has sent, a receiver does not
  change a vector it has received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

Tag: TypeAlias = tuple[str | int, ...]
Note: TypeAlias = tuple[float, ...]


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

    def forget(self, tag: Tag) -> None:
        """Drop what has arrived with this tag and nobody received, and what still arrives."""

    async def changed(self) -> None:
        """Wait until a peer comes or goes."""

    def epoch(self, peer: int) -> int:
        """How often a peer has been lost."""
