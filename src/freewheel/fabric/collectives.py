"""Collectives on top of send and receive; what they cost comes out of the fabric below, virtual or real.

All members call a function with the same tag. A lost member raises PeerLost in those who need it.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from freewheel.fabric.base import Each, Fabric, Message, Note, Tag

CHUNK = 1 << 23  # numbers that go round a ring at once: bounds the memory, however large the model


async def ring(fabric: Fabric, members: Sequence[int], total: Tensor, tag: Tag) -> None:
    """All-reduce in place: `total` becomes the sum of the members'; each sends 2(n-1)/n of a vector."""
    n = len(members)
    me = members.index(fabric.rank)
    right, left = members[(me + 1) % n], members[(me - 1) % n]
    parts = total.tensor_split(n)

    def add(sums: Tensor, at: int, piece: Tensor) -> None:
        sums[at : at + piece.numel()].add_(piece)

    async def hop(mine: Tensor, into: Tensor, each: Each | Tensor) -> None:
        sending = fabric.send(right, tag, mine)
        try:
            await fabric.land(left, tag, into.numel(), each)
            await sending
        finally:
            sending.cancel()

    for k in range(n - 1):  # reduce-scatter: the sums travel round and grow
        grows = parts[(me - k - 1) % n]
        await hop(parts[(me - k) % n], grows, partial(add, grows))
    for k in range(n - 1):  # all-gather: the finished sums travel round
        into = parts[(me - k) % n]
        await hop(parts[(me + 1 - k) % n], into, into)


async def broadcast(
    fabric: Fabric, members: Sequence[int], root: int, vector: Tensor | None, tag: Tag, note: Note = ()
) -> Message:
    """Hand the root's vector and note to all members along a binomial tree."""
    first = members.index(root)
    at = [*members[first:], *members[:first]]
    place = at.index(fabric.rank)
    span = 1 << place.bit_length()
    message = Message(root, tag, vector, note)
    if place:
        message = await fabric.receive(tag, at[place - span // 2])
    while place + span < len(at):
        await fabric.send(at[place + span], tag, message.vector, message.note)
        span *= 2
    return message


async def gather(fabric: Fabric, members: Sequence[int], note: Note, tag: Tag) -> dict[int, Note]:
    """All-gather of notes: the first member collects them and broadcasts all."""
    root, width = members[0], len(note)
    if fabric.rank == root:
        for peer in members[1:]:
            note += (await fabric.receive((*tag, "in"), peer)).of_length(width)
    else:
        await fabric.send(root, (*tag, "in"), None, note)
    handed = await broadcast(fabric, members, root, None, (*tag, "out"), note)
    everything = handed.of_length(width * len(members))
    return {peer: everything[k * width : (k + 1) * width] for k, peer in enumerate(members)}
