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
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import collectives, server
from freewheel.fabric.base import Fabric, Message, Note, Tag
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.lineage import View
from freewheel.fabric.merges import Group, Merge, Merges
from freewheel.fabric.views import Views
from freewheel.observe.counters import Counters
from freewheel.replica import Replica
from freewheel.strategy import Strategy
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
        strategy: Strategy,
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
        self._strategy = strategy
        self._client: server.Client | None = None
        self._exchanges = Exchanges(fabric, self, spawn, random)
        self._seen_steps = self._awaited_step = 0
        self._snapshot_steps = 0
        self._merged_steps = 0
        self._stepped: asyncio.Future[None] | None = None
        self._ahead = 0
        self._joining = False
        self._merged = False
        """Whether what is corrected next comes of a merge."""
        self._called_step = 0
        """At which step the merge under way was called; it may run beside further ones."""
        self._views = Views(fabric, spawn, self._donor)
        self._merges = Merges(self._views, self._give, self._take, self.count_merge)
        self.apart = 0.0
        """How far apart the two snapshots of an exchange are, as far as this side has seen both."""
        self._scratch = torch.empty(0)

    # -- who is there --

    @property
    def members(self) -> tuple[int, ...]:
        """The workers within reach, this one included."""
        return self._fabric.members

    @property
    def view(self) -> View:
        """The workers that merge together now; see fabric/views.py."""
        return self._views.view

    @property
    def steps(self) -> int:
        """How many optimizer steps this worker has made; one that copied another counts on from its steps."""
        return self.counters.steps + self._ahead

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
        if self._merged and self.counters.measure:
            self._measure(vector)
        self._merged = False
        self._replica.correct(vector, own)

    def gradient(self) -> Tensor:
        """The gradient of this step, in `before_step`."""
        return self._replica.gradient

    def set_gradient(self, vector: Tensor) -> None:
        """Let the optimizer use this gradient instead, in `before_step`."""
        self._merged_steps = self.steps + 1
        self._merged = False  # it was of gradients
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

    async def merge(
        self, act: Callable[[Merge], Awaitable[T]], group: Callable[[View], Group] | None = None
    ) -> T:
        """Do something with all members of the view, or a group of them, so that it counts for all or none.

        All of them must call it. If a member is lost, `act` is called again in the next view; what it
        returned in the one that counts is returned.
        """
        self._called_step = self.steps
        return await self._merges.merge(act, group)

    async def try_merge(
        self, act: Callable[[Merge], Awaitable[T]], group: Callable[[View], Group | None]
    ) -> T | None:
        """The same, once, and not at all where `group` says None; None: it was dropped on all sides."""
        self._called_step = self.steps
        merge = await self._merges.attempt(act, group)
        return merge.result if merge is not None and merge.counts else None

    async def view_change(self) -> None:
        """Wait until there is another view."""
        await self._views.changed()

    async def sum(self, vector: Tensor) -> Tensor:
        """The sum of the vectors of all members of the view (a ring); all of them must call it."""
        return await self.merge(lambda merge: merge.sum(vector))

    async def mean(self, vector: Tensor) -> Tensor:
        """The mean of the vectors of all members of the view (a ring); all of them must call it."""
        return await self.merge(lambda merge: merge.mean(vector))

    async def offset(self, vector: Tensor, members: Sequence[int], tag: Tag) -> Tensor:
        """How far the mean of the members' vectors is from this one, written over this one.

        Outside of views: raises PeerLost when a member is lost.
        """
        return await collectives.ring_offset(self._fabric, members, vector, ("offset", *tag))

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
        if self._client is None or self._client.server != host:
            self._client = server.Client(self._fabric, host)
        answer = await self._client.ask(vector)
        if host != self.rank and vector is not None:
            self.counters.exchanges["done"] += 1
            self.counters.met_all((host,))
        return answer

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
        return self._strategy.meet(mine, theirs)

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

    def met(self, peer: int, correction: Tensor, apart: float | None = None) -> None:
        """An exchange is complete; `apart` is what the other side has measured.

        Both sides have met every piece once, or each has met one half for both, twice: the mean square is
        the square of the distance either way. Who called has only its own measure, which is the distance or
        an estimate of it.
        """
        distance = self.apart
        if apart is not None:
            distance = math.hypot(self.apart, apart) / math.sqrt(2)
        self.counters.met(peer, distance, known=apart is not None)
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

    # -- views --

    def begin_views(self, members: Sequence[int]) -> None:
        """Be ready for merges: these workers begin together."""
        self._views.begin(members)

    @property
    def source(self) -> int | None:
        """Whose weights this worker has copied to come into its view."""
        return None if self._views.source < 0 else self._views.source

    async def join(self) -> None:
        """Come into a run that went on without this worker: into its view, with a member's weights."""
        self.rejoined = self._joining = True
        self._views.begin((self.rank,), newborn=True)
        await self._merges.enter()
        self._joining = False

    def leave(self) -> None:
        """This worker's loop has ended: the others go on without it."""
        if self._views.begun:
            self._spawn(self._leave())  # after a merge that the last step has begun

    async def _leave(self) -> None:
        self._views.leave(self._merges.called)

    def _donor(self, joiner: int, among: Sequence[int]) -> int:
        return self._strategy.donor(joiner, among, self.world_size)

    def _give(self) -> tuple[Tensor, Note]:
        return self._strategy.handover(self), (self._called_step,)

    def _take(self, vector: Tensor, note: Note) -> None:
        """Go on with another worker's weights, from its step."""
        more = int(note[0]) - self._called_step
        self._ahead += more
        self._called_step += more
        self._seen_steps, self._awaited_step = self._seen_steps + more, self._awaited_step + more
        self._snapshot_steps = self._merged_steps = self.steps
        self._replica.take_over(vector)
        if not self._joining:
            self._strategy.entered(self)

    def count_merge(self, outcome: str, members: Sequence[int]) -> None:
        """Count a merge by its outcome."""
        self.counters.merges[outcome] += 1
        if outcome == "done":
            self._merged = True
            self.counters.met_all(tuple(peer for peer in members if peer != self.rank))
        elif outcome == "half":
            self._fabric.notice("half", self.rank, "a merge may have counted for others only")

    def _measure(self, correction: Tensor) -> None:
        """How far the mean is: a pass over the vector, so only when somebody asks."""
        counters = self.counters
        counters.measure = False
        counters.discrepancy = torch.linalg.vector_norm(correction).item()
        counters.mean_apart_max = max(counters.mean_apart_max, counters.discrepancy)
