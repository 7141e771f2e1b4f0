"""What two or more workers make of their vectors together, through windows and streams.

Two (`swap`). Both publish their snapshots. The worker of lower rank combines the first half for both, the
other the second half; each tells the other when it is done. Over a stream each sends the half that the other
combines, and gets its corrections back in its place.

More (`reduce`). Every member publishes its vector and tells the first one, which puts those that see each
other's windows into one group and tells all. In a group each worker adds up its share of the numbers over all
vectors of the group; workers with the same share in different groups, on different hosts, add up these sums
in a ring; then each writes the result over its share of all vectors of its group. So each host sends about
two vectors, however many workers it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from freewheel.fabric import collectives
from freewheel.fabric.base import Meet, Message, Note, NotNow, Pull, Tag
from freewheel.fabric.transfers import (
    LONG,
    Outgoing,
    add_up,
    combine_all,
    combine_two,
    shares,
    spread,
)
from freewheel.fabric.windows import DEVICE, HOST, KINDS, STREAM

if TYPE_CHECKING:
    from freewheel.fabric.tcp import TcpFabric

Shown: TypeAlias = tuple[int, Note]
"""A member, and where its vector lies: the locator of a window, or nothing."""


class Together:
    """One worker's part in what several do together."""

    def __init__(self, fabric: TcpFabric) -> None:
        self._fabric, self._windows, self._work = fabric, fabric.windows, fabric.transfers.work
        self._counters = fabric.transfers.counters

    def in_window(self, vector: Tensor, kind: str) -> bool:
        """Whether a vector fills a window of this kind: then it can be shown as it is."""
        window = self._windows.of(vector)
        whole = vector.nbytes == vector.untyped_storage().nbytes()
        return window is not None and window.kind == kind and whole

    async def published(self, vector: Tensor, kind: str) -> Tensor:
        """A vector where peers of this kind can see it; one that lies elsewhere is copied."""
        if self.in_window(vector, kind) or (kind == STREAM and not vector.is_cuda):
            if vector.is_cuda:  # the device may still be writing it
                await self._work(vector.numel(), lambda: None)
            return vector
        shown = self._windows.borrow(vector, HOST if kind == STREAM else kind)
        await self._work(vector.numel(), lambda: shown.copy_(vector))
        return shown

    @contextlib.asynccontextmanager
    async def _lent(self, vector: Tensor, kind: str, peers: Sequence[int]) -> AsyncIterator[Tensor]:
        """The same, for peers that write the result over it."""
        shown = await self.published(vector, kind)
        writers = [peer for peer in peers if kind != STREAM and self._fabric.kind(peer) == kind]
        try:
            yield shown
        except NotNow:
            if shown is not vector:
                self._windows.give_back(shown)
            raise
        except BaseException:
            self._windows.retire(shown, writers)  # they may still be writing
            raise
        if shown is not vector:
            await self._work(vector.numel(), lambda: vector.copy_(shown))
            self._windows.give_back(shown)

    def _locator(self, shown: Tensor, kind: str) -> Note:
        window = self._windows.of(shown)
        return window.locator if window is not None and kind != STREAM else ()

    # -- two --

    async def swap(
        self, peer: int, tag: Tag, mine: Tensor | None, meet: Meet, told: Callable[[], None]
    ) -> Tensor:
        """See Fabric.swap; both begin by saying whether they have a vector, and where it lies."""
        fabric, kind = self._fabric, self._fabric.kind(peer)
        if mine is None:
            fabric.post(peer, tag)
            raise NotNow
        halves = shares(mine.numel(), 2)
        own, other = halves if fabric.rank < peer else reversed(halves)
        async with self._lent(mine, kind, (peer,)) as shown:
            if kind == STREAM:
                await self._swap_streams(peer, tag, shown[own], shown[other], meet, told)
                return mine
            fabric.post(peer, tag, note=self._locator(shown, kind))
            if not (where := (await fabric.receive(tag, peer)).note):
                raise NotNow
            theirs = await fabric.opened(peer, where, mine.numel())
            await self._work(mine.numel() // 2, lambda: combine_two(shown[own], theirs[own], meet))
            fabric.post(peer, tag)
            told()
            await fabric.receive(tag, peer)
            self._counters.bytes_out += mine.nbytes
            self._counters.bytes_in += mine.nbytes
        return mine

    def laid(self, peer: int, mine: Tensor) -> Note:
        """See Fabric.laid."""
        kind = self._fabric.kind(peer)
        return self._locator(mine, kind) if self.in_window(mine, kind) else ()

    async def combine(self, peer: int, where: Note, mine: Tensor, meet: Meet) -> Tensor:
        """See Fabric.combine."""
        theirs = await self._fabric.opened(peer, where, mine.numel())
        await self._work(mine.numel(), lambda: combine_two(mine, theirs, meet))
        self._counters.bytes_out += mine.nbytes
        self._counters.bytes_in += mine.nbytes
        return mine

    async def _swap_streams(
        self, peer: int, tag: Tag, own: Tensor, other: Tensor, meet: Meet, told: Callable[[], None]
    ) -> None:
        """Send one half, combine the other as it comes, send its corrections back, get those of the first."""
        fabric, wire = self._fabric, self._fabric.wire

        def combine(at: int, theirs: Tensor) -> None:
            mine = own[at : at + theirs.numel()]
            if wire == mine.dtype and isinstance(meet, Pull):
                meet.over_mine(mine, theirs)
            elif wire == mine.dtype:
                mine.copy_(meet(mine, theirs))
            else:  # both sides correct by what travels, so that the mean is kept
                rounded = mine.to(wire).to(mine.dtype)
                mine.copy_(meet(rounded, theirs).to(wire))

        fabric.post(peer, tag, note=(1.0,))
        out = fabric.send(peer, tag, other, stream=True)
        back: Outgoing | None = None
        try:
            if not (await fabric.receive(tag, peer)).note:
                raise NotNow
            await fabric.land(peer, tag, own.numel(), combine)
            back = fabric.send(peer, tag, own, stream=True, negated=True)
            await fabric.land(peer, tag, other.numel(), other)
            await out
            await back
        finally:
            if back is not None and back.done() and not back.cancelled() and not back.exception():
                told()
            for one in (out, back):
                if one is not None:
                    one.cancel()

    # -- all --

    async def reduce(
        self,
        members: Sequence[int],
        tag: Tag,
        vector: Tensor,
        weights: Sequence[float] | None = None,
        offset: bool = False,
    ) -> Tensor:
        """See Fabric.reduce; the result is written over the vector."""
        weight = dict(zip(members, weights or [1.0] * len(members), strict=True))
        others = [peer for peer in members if peer != self._fabric.rank]
        kind = self._kind(others, vector)
        async with self._lent(vector, kind, others) as shown:
            groups = await self._groups(members, tag, kind, shown)
            group = next(group for group in groups if any(rank == self._fabric.rank for rank, _ in group))
            await self._share(groups, group, tag, shown, weight, offset)
        return vector

    def _kind(self, others: Sequence[int], vector: Tensor) -> str:
        """How this worker shows a vector to the others of a merge."""
        kinds = {self._fabric.kind(peer) for peer in others}
        where = {DEVICE} if vector.is_cuda else set()
        where |= {HOST} if vector.is_cuda or self._windows.native == HOST else set()
        usable = [kind for kind in KINDS if kind in kinds & where]
        return usable[-1] if usable and vector.numel() >= LONG else STREAM

    async def _groups(self, members: Sequence[int], tag: Tag, kind: str, shown: Tensor) -> list[list[Shown]]:
        """Who sees whose windows: found out by the first member, once all have published their vectors."""
        fabric, (first, *others) = self._fabric, members
        sees = [peer for peer in members if peer != fabric.rank and fabric.kind(peer) == kind]
        mine = (KINDS.index(kind), len(sees), *sees, *self._locator(shown, kind))
        if kind == STREAM:
            mine = (KINDS.index(kind), 0)
        if fabric.rank != first:
            fabric.post(first, (*tag, "ready"), note=mine)
            return _unpack(await fabric.receive((*tag, "go"), first), members)
        ready = {first: _read_ready(Message(first, tag, None, mine))}
        for peer in others:
            ready[peer] = _read_ready(await fabric.receive((*tag, "ready"), peer))
        groups = _cliques(ready)
        for peer in others:
            fabric.post(peer, (*tag, "go"), note=_pack(groups))
        return groups

    async def _share(
        self,
        groups: list[list[Shown]],
        group: list[Shown],
        tag: Tag,
        shown: Tensor,
        weight: dict[int, float],
        offset: bool,
    ) -> None:
        """Do this worker's share for its group, and wait until all shares of its group are done."""
        fabric, ranks = self._fabric, [rank for rank, _ in group]
        lanes, lane = min(map(len, groups)), ranks.index(fabric.rank)
        mates = [rank for rank in ranks if rank != fabric.rank]
        if lane < lanes:
            share = shares(shown.numel(), lanes)[lane]
            parts = [shown[share]]  # one's own first: it lies where the work is done
            for rank, locator in group:
                if rank != fabric.rank:
                    parts.append((await fabric.opened(rank, locator, shown.numel()))[share])
            weights = [weight[rank] for rank in (fabric.rank, *mates)]
            if len(groups) == 1:
                await self._work(shown.numel(), lambda: combine_all(parts, weights, offset))
            else:
                ring = [one[lane][0] for one in groups]
                await self._ring(ring, (*tag, "ring"), parts, weights, offset)
            moved = len(mates) * parts[0].nbytes
            self._counters.bytes_in += moved
            self._counters.bytes_out += moved
            for rank in mates:
                fabric.post(rank, (*tag, "done"))
        for rank in ranks[:lanes]:
            if rank != fabric.rank:
                await fabric.receive((*tag, "done"), rank)

    async def _ring(
        self, ring: Sequence[int], tag: Tag, parts: list[Tensor], weights: list[float], offset: bool
    ) -> None:
        """Add up the group's sums with those of other groups, chunk by chunk."""
        home, chunk = parts[0], collectives.CHUNK
        total = torch.empty(min(chunk, home.numel()), dtype=home.dtype, device=home.device)
        travels = torch.empty(total.shape, dtype=home.dtype, pin_memory=True) if home.is_cuda else total
        for at in range(0, home.numel(), chunk):
            pieces = [part[at : at + chunk] for part in parts]
            size = pieces[0].numel()

            def gather(pieces: list[Tensor] = pieces, size: int = size) -> None:
                travels[:size].copy_(add_up(total[:size], pieces, weights))

            def hand_out(pieces: list[Tensor] = pieces, size: int = size) -> None:
                spread(total[:size].copy_(travels[:size]), pieces, offset)

            await self._work(size, gather)
            await collectives.ring(self._fabric, ring, travels[:size], tag)
            await self._work(size, hand_out)


Ready: TypeAlias = tuple[int, frozenset[int], Note]
"""Which kind of window a member's vector lies in, whose windows of that kind it sees, and where it lies."""


def _read_ready(message: Message) -> Ready:
    kind, count, *rest = message.numbers(2)
    if not 0 <= kind < len(KINDS) or not 0 <= count <= len(rest):
        raise message.bad("what makes no sense")
    return kind, frozenset(rest[:count]), message.note[2 + count :]


def _cliques(ready: dict[int, Ready]) -> list[list[Shown]]:
    """Groups of members that all see each other's windows of one kind; who sees nobody is alone."""
    kinds = {rank: kind for rank, (kind, _, _) in ready.items()}
    sees = {rank: seen for rank, (_, seen, _) in ready.items()}
    locators = {rank: locator for rank, (_, _, locator) in ready.items()}
    groups: list[list[int]] = []
    for rank in ready:
        for group in groups:
            if all(kinds[p] == kinds[rank] and p in sees[rank] and rank in sees[p] for p in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [[(rank, locators[rank]) for rank in group] for group in groups]


def _pack(groups: list[list[Shown]]) -> Note:
    """Groups as numbers."""
    flat: list[float] = []
    for group in groups:
        flat.append(len(group))
        for rank, locator in group:
            flat += [rank, len(locator), *locator]
    return tuple(flat)


def _unpack(message: Message, members: Sequence[int]) -> list[list[Shown]]:
    """The way back: every member is in one group."""
    note, groups, at = message.numbers(0), [], 0
    try:
        while at < len(note):
            group, at, size = [], at + 1, note[at]
            for _ in range(size):
                rank, length = note[at], note[at + 1]
                group.append((rank, message.note[at + 2 : at + 2 + length]))
                at += 2 + length if length >= 0 else len(note)
            groups.append(group)
    except IndexError:
        raise message.bad("groups that have no end") from None
    if sorted(rank for group in groups for rank, _ in group) != sorted(members) or not all(groups):
        raise message.bad("groups of others")
    return groups
