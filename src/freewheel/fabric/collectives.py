"""What several workers do together, written once on top of send and receive.

Nobody types in what a ring or a tree costs: it comes out of the fabric below, virtual or real. Every
function is called by all members with the same tag; a lost member raises PeerLost in those who need it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from freewheel.fabric.base import Fabric, Message, Note, Tag

PIECE = 1 << 20
"""How many numbers go round a ring at once: what is under way needs little memory with any model."""


async def send_and_receive(
    fabric: Fabric, to: int, source: int, tag: Tag, vector: Tensor | None, note: Note = ()
) -> Message:
    """Send to one peer while receiving from another (or the same): both directions at once."""
    sending = fabric.send(to, tag, vector, note)
    try:
        message = await fabric.receive(tag, source)
        await sending
    finally:
        sending.cancel()
    return message


async def ring_sum(fabric: Fabric, members: Sequence[int], vector: Tensor, tag: Tag) -> Tensor:
    """Sum the members' vectors; each sends 2(n-1)/n of a vector. The given vector is left alone."""
    total = vector.clone()
    for at in range(0, total.numel(), PIECE):
        await _ring(fabric, members, total[at : at + PIECE], tag)
    return total


async def ring_offset(fabric: Fabric, members: Sequence[int], vector: Tensor, tag: Tag) -> Tensor:
    """Replace a vector by the mean of the members' vectors less itself: what a merge adds to the weights.

    Needs no memory for the mean. If a member is lost half-way the vector is of no use any more.
    """
    for at in range(0, vector.numel(), PIECE):
        mine = vector[at : at + PIECE]
        total = mine.clone()
        await _ring(fabric, members, total, tag)
        mine.copy_(total.div_(len(members)).sub_(mine))
    return vector


async def _ring(fabric: Fabric, members: Sequence[int], total: Tensor, tag: Tag) -> None:
    """Replace a vector by the sum of the members' vectors."""
    n = len(members)
    if n == 1:
        return
    me = members.index(fabric.rank)
    right, left = members[(me + 1) % n], members[(me - 1) % n]
    parts = total.tensor_split(n)
    for hop in range(n - 1):  # reduce-scatter: the sums travel round and grow
        mine = parts[(me - hop) % n].clone()  # what is sent belongs to the receiver
        parts[(me - hop - 1) % n].add_((await send_and_receive(fabric, right, left, tag, mine)).payload)
    for hop in range(n - 1):  # all-gather: the finished sums travel round
        mine = parts[(me + 1 - hop) % n].clone()
        parts[(me - hop) % n].copy_((await send_and_receive(fabric, right, left, tag, mine)).payload)


async def broadcast(
    fabric: Fabric, members: Sequence[int], root: int, vector: Tensor | None, tag: Tag, note: Note = ()
) -> Message:
    """Hand the root's vector and note to all members along a binomial tree."""
    n = len(members)
    place = (members.index(fabric.rank) - members.index(root)) % n
    at = [members[(members.index(root) + k) % n] for k in range(n)]
    span = 1
    message = Message(root, tag, vector, note)
    if place:
        while span * 2 <= place:
            span *= 2
        message = await fabric.receive(tag, at[place - span])
        span *= 2
    while span < n:
        if place + span < n and place < span:
            await fabric.send(at[place + span], tag, message.vector, message.note)
        span *= 2
    return message


async def gather(fabric: Fabric, members: Sequence[int], note: Note, tag: Tag) -> dict[int, Note]:
    """Let every member know every member's note: collected by the first, handed out along the tree."""
    root = members[0]
    notes: dict[int, Note] = {fabric.rank: note}
    if fabric.rank == root:
        for peer in members[1:]:
            notes[peer] = (await fabric.receive((*tag, "in"), peer)).note
    else:
        await fabric.send(root, (*tag, "in"), None, note)
    width = len(note)
    flat = tuple(value for peer in members for value in notes[peer]) if fabric.rank == root else ()
    everything = (await broadcast(fabric, members, root, None, (*tag, "out"), flat)).note
    return {peer: everything[k * width : (k + 1) * width] for k, peer in enumerate(members)}
