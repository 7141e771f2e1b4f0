"""What two or more workers make of their vectors together, through windows and streams.

Two (`swap`). Both publish their snapshots. The worker of lower rank combines the first half for both, the
other the second half; each tells the other when it is done. Over a stream each sends the half that the other
combines, and gets its corrections back in its place.

More (`reduce`). Every member publishes its vector and tells the first one, which puts those that see each
other's windows into one group and tells all. In a group each worker adds up its share of the numbers over all
vectors of the group; workers with the same share in different groups, on different hosts, add up these sums
in a ring; then each writes the result over its share of all vectors of its group. So each host sends about
two vectors, however many workers it has. Where there is one group and vectors are short, the first member
adds up all: a GPU that all share does it at once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import Left, Meet, Message, Note, NotNow, Tag, Weights
from freewheel.fabric.connection import Connection, Vectors
from freewheel.fabric.frames import BadFrame, Kind
from freewheel.fabric.notes import pack
from freewheel.fabric.transfers import LONG, SHORT, combine_all, combine_two, correct, hand_out, shares, tally
from freewheel.fabric.windows import DEVICE, HOST, KINDS, LONGEST_LOCATOR, STREAM

GOODBYE_S = 0.2  # the goodbye of a worker may come so much later than it closes its windows
# Which kind of window a member's vector lies in, whose windows of that kind it sees, and where it lies.
Ready: TypeAlias = tuple[int, list[int], list[float]]
Shown: TypeAlias = tuple[int, list[float]]  # a member, and where its vector lies: a locator, or nothing
READY, GROUPS = (int, [int], [int]), [[(int, [int])]]  # both as the numbers of a note


class Together(Vectors):
    """A fabric that swaps and reduces vectors."""

    _connections: dict[int, Connection]

    def kind(self, peer: int) -> str:
        link = self._connections.get(peer)
        return STREAM if link is None else link.kind

    def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> Left:
        """See Fabric.send; a vector in a window has left when the peer has read it."""
        self.need(peer)
        if peer == self.rank:
            left: Left = asyncio.get_running_loop().create_future()
            left.set_result(None)
            left.get_loop().call_soon(self.deliver, Message(peer, tag, vector, note))
            return left
        sending = self._connections[peer].send(Kind.MESSAGE, tag, vector, note)
        self.leaving(peer, sending)
        return sending

    async def opened(self, peer: int, locator: Note, numel: int) -> Tensor:
        """A peer's vector where it lies; a peer whose window cannot be opened is cut off, then streams."""
        self.need(peer)
        link = self._connections[peer]
        try:
            return await link.open(locator, numel)
        except (BadFrame, ProcessLookupError) as error:
            await asyncio.sleep(GOODBYE_S)
            self.need(peer)
            link.offended(link, error)
            raise PeerLost(peer, str(error)) from None

    def _moved(self, nbytes: int) -> None:
        self.counters.bytes_out += nbytes
        self.counters.bytes_in += nbytes

    @contextlib.asynccontextmanager
    async def _lent(self, vector: Tensor, kind: str, peers: Sequence[int]) -> AsyncIterator[Tensor]:
        """A vector where peers see it, and write the result over it."""
        shown = await self.published(vector, kind)
        writers = [peer for peer in peers if kind != STREAM and self.kind(peer) == kind]
        try:
            yield shown
        except NotNow:
            if shown is not vector:
                self.windows.give_back(shown)
            raise
        except BaseException:
            self.windows.retire(shown, writers)  # they may still be writing
            raise
        if shown is not vector:
            await self.transfers.work(vector.numel(), lambda: vector.copy_(shown))
            self.windows.give_back(shown)

    def _locator(self, shown: Tensor, kind: str) -> Note:
        window = self.windows.of(shown)
        return window.locator if window is not None and kind != STREAM else ()

    # -- two --

    async def swap(self, peer: int, tag: Tag, mine: Tensor, meet: Meet, told: Callable[[], None]) -> Tensor:
        """See Fabric.swap; both begin by saying where their vectors lie."""
        kind, epoch = self.kind(peer), self.epoch(peer)
        halves = shares(mine.numel(), 2)
        own, other = halves if self.rank < peer else reversed(halves)
        async with self._lent(mine, kind, (peer,)) as shown:
            self.need(peer, epoch)  # a peer that was lost meanwhile has forgotten this swap
            if kind == STREAM:
                await self._swap_streams(peer, tag, shown[own], shown[other], meet, told)
                return mine
            self.post(peer, tag, note=self._locator(shown, kind))
            if not any(where := (await self.receive(tag, peer)).note):
                raise NotNow
            theirs = await self.opened(peer, where, mine.numel())
            await self.transfers.work(mine.numel() // 2, lambda: combine_two(shown[own], theirs[own], meet))
            self.need(peer, epoch)
            self.post(peer, tag)
            told()
            await self.receive(tag, peer)
            self._moved(mine.nbytes)
        return mine

    async def laid(self, peer: int, give: Callable[[], Awaitable[Tensor]]) -> Note:
        """See Fabric.laid: a short vector is combined by one side, as messages take longer than the work."""
        if self.me.longest > SHORT[self.kind(peer)]:
            return ()
        mine, kind = await give(), self.kind(peer)
        return self._locator(mine, kind) if self.in_window(mine, kind) else ()

    def withdraw(self, peer: int, mine: Tensor) -> None:
        self.windows.retire(mine, (peer,))

    async def combine(self, peer: int, where: Note, mine: Tensor, meet: Meet) -> Tensor:
        theirs = await self.opened(peer, where, mine.numel())
        await self.transfers.work(mine.numel(), lambda: combine_two(mine, theirs, meet))
        self._moved(mine.nbytes)
        return mine

    async def _swap_streams(
        self, peer: int, tag: Tag, own: Tensor, other: Tensor, meet: Meet, told: Callable[[], None]
    ) -> None:
        """Send one half, combine the other as it comes, send its corrections back, get those of the first.

        What comes back is the peer's correction: this worker's is its negative.
        """
        wire = self.wire

        def combine(at: int, theirs: Tensor) -> None:
            mine = own[at : at + theirs.numel()]
            if wire == mine.dtype:
                correct(mine, theirs, meet)
            else:  # both sides correct by what travels, so that the mean is kept
                rounded = mine.to(wire).to(mine.dtype)
                mine.copy_(meet(rounded, theirs).to(wire))

        def take(at: int, theirs: Tensor) -> None:
            torch.neg(theirs, out=other[at : at + theirs.numel()])

        self.post(peer, tag, note=(1.0,))
        sending = [self.send(peer, tag, other)]
        try:
            if not any((await self.receive(tag, peer)).note):
                raise NotNow
            await self.land(peer, tag, own.numel(), combine)
            sending.append(self.send(peer, tag, own))
            await self.land(peer, tag, other.numel(), take)
            for one in sending:
                await one
        finally:
            for one in sending:
                one.cancel()
            if sending[1:] and not sending[1].cancelled() and not sending[1].exception():
                told()

    # -- all --

    async def reduce(self, tag: Tag, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """See Fabric.reduce; the result is written over the vector."""
        others = [peer for peer in weights if peer != self.rank]
        usable = {DEVICE, HOST} if vector.is_cuda else {HOST} & {self.windows.native}
        usable &= {self.kind(peer) for peer in others} if vector.numel() >= LONG else set()
        kind = max(usable, key=KINDS.index, default=STREAM)
        async with self._lent(vector, kind, others) as shown:
            groups = await self._groups(tuple(weights), tag, kind, shown)
            await self._share(groups, tag, kind, shown, weights, part)
        return vector

    async def _groups(self, members: Sequence[int], tag: Tag, kind: str, shown: Tensor) -> list[list[Shown]]:
        """Who sees whose windows: the first member finds out, once all have published their vectors."""
        first, *others = members
        sees = [peer for peer in members if peer != self.rank and self.kind(peer) == kind]
        mine = KINDS.index(kind), [] if kind == STREAM else sees, list(self._locator(shown, kind))
        if self.rank != first:
            self.post(first, (*tag, "ready"), note=pack(*mine))
            return _read_groups(await self.receive((*tag, "go"), first), members)
        ready = {first: mine}
        for peer in others:
            ready[peer] = _read_ready(await self.receive((*tag, "ready"), peer))
        groups = _cliques(ready)
        for peer in others:
            self.post(peer, (*tag, "go"), note=pack(groups))
        return groups

    async def _share(
        self, groups: list[list[Shown]], tag: Tag, kind: str, shown: Tensor, weights: Weights, part: float
    ) -> None:
        group = next(group for group in groups if any(rank == self.rank for rank, _ in group))
        alone = len(groups) == 1 and len(group) * shown.numel() <= SHORT[kind]
        lanes = 1 if alone else min(map(len, groups))
        ranks = [rank for rank, _ in group]
        lane = ranks.index(self.rank)
        mates = [rank for rank in ranks if rank != self.rank]
        if lane < lanes:
            share = shares(shown.numel(), lanes)[lane]
            parts = [shown[share]]  # one's own first: it lies where the work is done
            for rank, locator in group:
                if rank != self.rank:
                    parts.append((await self.opened(rank, tuple(locator), shown.numel()))[share])
            each = [weights[rank] for rank in (self.rank, *mates)]
            if len(groups) == 1:
                await self.transfers.work(shown.numel(), lambda: combine_all(parts, each, part))
            else:
                await self._ring([one[lane][0] for one in groups], (*tag, "ring"), parts, each, part)
            self._moved(len(mates) * parts[0].nbytes)
            for rank in mates:
                self.post(rank, (*tag, "done"))
        for rank in ranks[:lanes]:
            if rank != self.rank:
                await self.receive((*tag, "done"), rank)

    async def _ring(
        self, ring: Sequence[int], tag: Tag, parts: list[Tensor], weights: list[float], part: float
    ) -> None:
        """Add up the group's sums with those of other groups, chunk by chunk."""
        home, chunk = parts[0], collectives.CHUNK
        total = torch.empty(min(chunk, home.numel()), dtype=home.dtype, device=home.device)
        travels = torch.empty(total.shape, dtype=home.dtype, pin_memory=True) if home.is_cuda else total
        for at in range(0, home.numel(), chunk):
            here = [one[at : at + chunk] for one in parts]
            size = here[0].numel()
            both = total[:size], travels[:size]
            await self.transfers.work(size, partial(tally, here, weights, *both))
            await collectives.ring(self, ring, both[1], tag)
            await self.transfers.work(size, partial(hand_out, here, part, *both))


def _cliques(ready: dict[int, Ready]) -> list[list[Shown]]:
    """Groups of members that all see each other's windows of one kind, found greedily."""
    groups: list[list[int]] = []
    for rank, (kind, sees, _) in ready.items():
        for group in groups:
            if all(ready[p][0] == kind and p in sees and rank in ready[p][1] for p in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [[(rank, ready[rank][2]) for rank in group] for group in groups]


def _read_ready(message: Message) -> Ready:
    ready: Ready = message.read(READY)
    kind, sees, locator = ready
    if not 0 <= kind < len(KINDS) or len(locator) > LONGEST_LOCATOR:
        raise message.bad("a window of no kind")
    return kind, list(set(sees)), locator


def _read_groups(message: Message, members: Sequence[int]) -> list[list[Shown]]:
    groups: list[list[Shown]] = message.read(GROUPS)
    if sorted(rank for group in groups for rank, _ in group) != sorted(members) or not all(groups):
        raise message.bad("groups of others")
    return groups
