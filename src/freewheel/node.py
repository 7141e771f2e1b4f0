"""What a strategy may see of its worker and of the others.

A node is the same in virtual and in real time; the fabric it is given makes the difference. Its methods
are of four kinds: the replica (snapshot, correct, gradient), the steps (next_step, beside), communication
(send to exchange), and the record (stale).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives, server
from freewheel.fabric.base import Fabric, Message, Note, Tag
from freewheel.fabric.exchange import Exchanges
from freewheel.observe.counters import Counters
from freewheel.replica import Replica
from freewheel.topology import Topology

T = TypeVar("T")
SCRATCH = 1 << 17


class Node:
    """One worker, as its strategy sees it."""

    def __init__(
        self,
        fabric: Fabric,
        replica: Replica,
        random: random.Random,
        *,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        meet: Callable[[Tensor, Tensor], Tensor],
        score: Callable[[], float] | None = None,
    ) -> None:
        self.rank, self.world_size = fabric.rank, fabric.world_size
        self.random = random
        self.counters = Counters()
        self.loss = 0.0
        """The training loss of the last step."""
        self.momentum = 0.0
        """The optimizer's momentum, 0 where it has none."""
        self.step_s = 0.0
        """How long this worker's gradients take, a running mean."""
        self.rejoined = False
        """Whether this worker came back into a run that went on without it."""
        self._fabric, self._replica, self._spawn, self._score = fabric, replica, spawn, score
        self._meet = meet
        self._client: server.Client | None = None
        self._exchanges = Exchanges(fabric, self, spawn, random)
        self._seen_steps = self._awaited_step = 0
        self._snapshot_steps = 0
        self._merged_steps = 0
        self._stepped: asyncio.Future[None] | None = None
        self._merges = 0
        self.apart = 0.0
        """How far apart the two snapshots of an exchange are, as far as this side has seen both."""
        self._scratch = torch.empty(0)

    # -- who is there --

    @property
    def members(self) -> tuple[int, ...]:
        """The workers within reach, this one included."""
        return self._fabric.members

    @property
    def steps(self) -> int:
        """How many optimizer steps this worker has made."""
        return self.counters.steps

    @property
    def unmerged_steps(self) -> int:
        """Own steps that are in no snapshot another worker has merged."""
        return self.steps - self._merged_steps

    def peers(self, topology: Topology) -> Iterator[int]:
        """This worker's neighbours within reach, in random order, drawn as they are asked for."""
        reach = self._fabric.members
        left = list(topology.neighbours(self.rank, self.steps))
        while left:
            at = self.random.randrange(len(left))
            left[at], left[-1] = left[-1], left[at]
            peer = left.pop()
            if peer in reach:
                yield peer

    def score(self) -> float:
        """The loss workers compare themselves by: on common data where the run has some, else their own."""
        return self._score() if self._score else self.loss

    # -- the replica --

    def snapshot(self) -> Tensor:
        """A copy of the weights, corrections that are still pending included."""
        self._snapshot_steps, self.apart = self.steps, 0.0
        return self._replica.snapshot()

    async def fresh(self) -> Tensor:
        """The same; waits while the weights move, and lets other communication go on meanwhile."""
        self._snapshot_steps, self.apart = self.steps, 0.0
        return await self._replica.fresh()

    def weights(self) -> Tensor:
        """The same for looking at: a copy that is not going to be merged."""
        return self._replica.snapshot()

    def correct(self, vector: Tensor, own: bool = False) -> None:
        """Add a vector to the weights at the next boundary. It is handed over: do not change it later.

        `own` says that no other worker holds it either, so that its memory may be used again.
        """
        self._merged_steps = self._snapshot_steps
        self._replica.correct(vector, own)

    def gradient(self) -> Tensor:
        """The gradient of this step, in `before_step`."""
        return self._replica.gradient

    def set_gradient(self, vector: Tensor) -> None:
        """Let the optimizer use this gradient instead, in `before_step`."""
        self._merged_steps = self.steps + 1
        self._replica.set_gradient(vector)

    # -- steps --

    async def next_step(self, count: int = 1) -> None:
        """Wait until this worker has made so many steps since the last call returned."""
        self._awaited_step = self._seen_steps + count
        while self.steps < self._awaited_step:
            self._stepped = asyncio.get_running_loop().create_future()
            if self.steps < self._awaited_step:  # the step may have come from another thread meanwhile
                await self._stepped
        self._seen_steps = self.steps

    def beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start communication that training does not wait for; await what is returned to get its result."""
        return self._spawn(work)

    # -- communication --

    async def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send a vector, a few numbers, or both; wait until the last byte has left."""
        await self._fabric.send(peer, tag, vector, note)

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send without waiting; what cannot be delivered is dropped and counted."""
        self._fabric.post(peer, tag, vector, note)

    async def send_all(
        self, peers: Sequence[int], tag: Tag, vector: Tensor | None = None, note: Note = ()
    ) -> None:
        """Send to several peers at once and wait until all is out; a peer that is gone is skipped."""
        sending = []
        for peer in peers:
            with self._counted():
                sending.append(self._fabric.send(peer, tag, vector, note))
        for one in sending:
            with self._counted():
                await one

    async def receive(self, tag: Tag, peer: int | None = None, among: Sequence[int] = ()) -> Message:
        """Wait for the next message with this tag: from one peer, from anybody, or from anybody `among`.

        Raises PeerLost when the peer, or one of those among whom it is awaited, is gone.
        """
        return await self._fabric.receive(tag, peer, among)

    def forget(self, tag: Tag) -> None:
        """Drop messages with this tag that nobody received, and those that still arrive."""
        self._fabric.forget(tag)

    async def members_change(self) -> None:
        """Wait until a worker comes within reach or is lost."""
        await self._fabric.changed()

    async def sum(self, vector: Tensor, members: Sequence[int] | None = None, tag: Tag = ()) -> Tensor:
        """The sum of the members' vectors (a ring); all of them must call it."""
        who, tag = self._gathering("sum", members, tag)
        return await collectives.ring_sum(self._fabric, who, vector, tag)

    async def mean(self, vector: Tensor, members: Sequence[int] | None = None, tag: Tag = ()) -> Tensor:
        """The mean of the members' vectors (a ring); all of them must call it."""
        who, tag = self._gathering("mean", members, tag)
        return (await collectives.ring_sum(self._fabric, who, vector, tag)).div_(len(who))

    async def offset(self, vector: Tensor, members: Sequence[int] | None = None, tag: Tag = ()) -> Tensor:
        """How far the mean of the members' vectors is from this one, written over this one."""
        who, tag = self._gathering("offset", members, tag)
        return await collectives.ring_offset(self._fabric, who, vector, tag)

    async def gather(
        self, note: Note, members: Sequence[int] | None = None, tag: Tag = ()
    ) -> dict[int, Note]:
        """Every member's note, known to every member."""
        who, tag = self._gathering("gather", members, tag)
        return await collectives.gather(self._fabric, who, note, tag)

    async def broadcast(
        self, root: int, vector: Tensor | None, members: Sequence[int] | None = None, tag: Tag = ()
    ) -> Tensor:
        """The root's vector, handed to all members."""
        who, tag = self._gathering("broadcast", members, tag)
        return (await collectives.broadcast(self._fabric, who, root, vector, tag)).payload

    @property
    def exchanges(self) -> int:
        """How many exchanges this worker has taken part in, whoever began them."""
        return self.counters.exchanges["done"]

    async def exchange(self, peer: int) -> bool:
        """Swap snapshots with a peer; both add `Strategy.meet` of the two. False: busy, or gone."""
        return await self._exchanges.call(peer)

    def serve(self, centre: Tensor, apply: server.Apply) -> Coroutine[Any, Any, None]:
        """Be the parameter server for ever: run this in `background`."""
        return server.serve(self._fabric, centre, apply)

    async def ask(self, host: int, vector: Tensor | None) -> server.Answer:
        """Send a vector to the parameter server (None: only read) and wait for its answer."""
        if self._client is None:
            self._client = server.Client(self._fabric, host)
        return await self._client.ask(vector)

    # -- the record --

    def stale(self, value: float) -> None:
        """Record a staleness in the strategy's own measure (then `Strategy.staleness` says which)."""
        self.counters.stale(value)

    # -- for those who drive the node --

    def due(self) -> bool:
        """Whether somebody waits for the step that was just made."""
        return self._stepped is not None and self.steps >= self._awaited_step

    def stepped(self) -> None:
        """A step is complete: wake what waits for it."""
        if not self.due():
            return
        waiter, self._stepped = self._stepped, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def idle(self) -> bool:
        """Whether no exchange is under way."""
        return self._exchanges.partner is None

    def begin_at(self, steps: int) -> None:
        """Go on counting where an earlier run ended."""
        self.counters.steps = self._seen_steps = self._snapshot_steps = self._merged_steps = steps

    def hold(self) -> None:
        """Be busy for exchanges until `release`: this worker has no weights yet."""
        self._exchanges.partner = self.rank

    def release(self) -> None:
        """Be free for exchanges again."""
        self._exchanges.partner = None

    def answer_calls(self) -> Coroutine[Any, Any, None]:
        """Answer the others' exchanges for ever."""
        return self._exchanges.serve()

    def meet(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """A piece of an exchange: what the strategy makes of it; on the way, how far apart the two are."""
        self.apart = math.hypot(self.apart, self._distance(mine, theirs))
        return self._meet(mine, theirs)

    def _distance(self, one: Tensor, other: Tensor) -> float:
        """How far two vectors are apart, with little memory of its own."""
        if self._scratch.dtype != one.dtype or self._scratch.numel() < min(one.numel(), SCRATCH):
            self._scratch = torch.empty(min(one.numel(), SCRATCH), dtype=one.dtype)
        apart = 0.0
        for at in range(0, one.numel(), SCRATCH):
            piece = one[at : at + SCRATCH]
            torch.sub(other[at : at + SCRATCH], piece, out=self._scratch[: piece.numel()])
            apart = math.hypot(apart, torch.linalg.vector_norm(self._scratch[: piece.numel()]).item())
        return apart

    def met(self, correction: Tensor, apart: float | None = None) -> None:
        """An exchange is complete; `apart` is what the other side has measured.

        Both sides have met every piece once, or each has met one half for both, twice: the mean square is
        the square of the distance either way.
        """
        if apart is not None:
            distance = math.hypot(self.apart, apart) / math.sqrt(2)
            self.counters.discrepancy_max = max(self.counters.discrepancy_max, distance)
        self._merged_steps = self._snapshot_steps
        self._replica.correct(correction, own=True)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a message to a peer that is gone instead of failing."""
        try:
            yield
        except PeerLost:
            self.counters.messages_dropped += 1

    def count(self, outcome: str) -> None:
        """Count an exchange by its outcome."""
        self.counters.exchanges[outcome] += 1

    def _gathering(self, what: str, members: Sequence[int] | None, tag: Tag) -> tuple[Sequence[int], Tag]:
        """Who takes part, and a tag of its own for each gathering: all make them in the same order."""
        who = range(self.world_size) if members is None else members
        if not tag:
            self._merges += 1
            tag = (self._merges,)
        return who, (what, *tag)
