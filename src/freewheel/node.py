"""What a strategy may see of its worker and of the others.

A node is the same in virtual and in real time; only its fabric differs. Its methods are of four kinds: the
replica (snapshot, correct, gradient), steps (next_step, beside), communication (send to exchange), and the
record (stale).
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.errors import Diverged
from freewheel.fabric import server
from freewheel.fabric.base import Fabric, Message, Note, Spawn, Tag, hear
from freewheel.fabric.calls import FreeMerges
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.farewell import Farewells
from freewheel.fabric.merges import Group, Merge, View
from freewheel.fabric.views import Merges, Views
from freewheel.moments import Moments
from freewheel.patience import Patience
from freewheel.replica import Replica
from freewheel.topology import Topology

T = TypeVar("T")
LATE = 0.85  # how much of a step has passed when an exchange should be over: it may be shorter than others


class Node:
    """One worker, as its strategy sees it; its driver sees a NodeDriver (freewheel/node_driver.py)."""

    moments: Moments
    """The optimizer's moments, while training waits for the strategy; see freewheel/moments.py."""
    _exchanges: Exchanges
    farewells: Farewells
    views: Views
    _merges: Merges

    def __init__(self, fabric: Fabric, replica: Replica, random: random.Random, spawn: Spawn) -> None:
        self.rank, self.world_size, self.counters = fabric.rank, fabric.world_size, fabric.counters
        self.random = random
        self.loss = 0.0
        """The training loss of the last step."""
        self.momentum = 0.0
        """The optimizer's momentum, 0 where it has none."""
        self.rate_left = 1.0
        """Its learning rate in the last step, as a share of the highest so far; 1 where that is not known."""
        self.step_s = 0.0
        """How long this worker's gradients take, a running mean."""
        self._recent_s: deque[float] = deque(maxlen=8)  # how long the last few took
        self._stepped_s = 0.0  # when `next_step` last returned
        self.rejoined = False
        """Whether this worker came back into a run that went on without it."""
        self._fabric, self._replica, self._spawn = fabric, replica, spawn
        self.judge: Callable[[], float] | None = None
        """The loss of this worker's model on data common to all."""
        self._client: server.Client | None = None
        self._ahead = self._seen_steps = self._awaited_step = self._snapshot_steps = self._merged_steps = 0
        self._stepped: asyncio.Future[None] | None = None
        self._merged = False  # whether the next correction comes from a merge
        self._called_step = 0  # at which step the merge under way was called; steps may go on

    # -- who is there --

    @property
    def members(self) -> tuple[int, ...]:
        """The workers within reach, this one included."""
        return self._fabric.members

    @property
    def view(self) -> View:
        """The workers that merge together now; see fabric/views.py."""
        return self.views.view

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
        peers = topology.neighbours(self.rank, self.steps)
        there: dict[int, int] = {}  # who has come to another's place; a copy of thousands takes longer
        for last in range(len(peers) - 1, -1, -1):
            at = self.random.randrange(last + 1)
            drawn, there[at] = there.get(at, at), there.get(last, last)
            if self._fabric.reaches(peer := peers[drawn]):
                yield peer

    def score(self) -> float:
        """The loss workers compare themselves by: on common data where the run has some, else their own."""
        return self.judge() if self.judge else self.loss

    # -- the replica --

    async def snapshot(self, keep: bool = False) -> Tensor:
        """A copy of the weights, corrections that are still pending included; waits while the weights move.

        `keep`: the strategy keeps it, so it lies in memory of its own, not where others can see it.
        """
        self._snapshot_steps = self.steps
        with self._diverging(self.steps):
            return await self._replica.snapshot(keep)

    async def snapshot_soon(self) -> Tensor | None:
        """A snapshot for an exchange; None if the weights will be moving for long."""
        self._snapshot_steps = self.steps
        with self._diverging(self.steps):
            return await self._replica.snapshot_soon()

    async def weights(self) -> Tensor:
        """A copy of the weights that is not going to be merged."""
        with self._diverging(self.steps):
            return await self._replica.snapshot(keep=True)

    @contextlib.contextmanager
    def _diverging(self, step: int) -> Iterator[None]:
        try:
            yield
        except Diverged as error:
            raise Diverged(
                f"worker {self.rank} diverged at step {step}: {error}. Lower the learning rate, or clip the "
                "gradients."
            ) from None

    def correct(self, vector: Tensor, own: bool = False) -> None:
        """Add a vector to the weights at the next boundary. It is handed over: do not change it later.

        `own`: no other worker holds it either, so its memory may be used again.
        """
        self._merged_steps = self._snapshot_steps
        if self._merged and self.counters.measure:
            self.counters.measured(self._norm(vector))
        self._merged = False
        self._replica.correct(vector, own)

    def gradient(self) -> Tensor:
        """The gradient of this step, in `before_step`."""
        with self._diverging(self.steps + 1):
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
        self._stepped_s = asyncio.get_running_loop().time()

    async def late(self, share: float = 1.0) -> None:
        """After `next_step`, wait until this share of the next step has passed, less the time of an exchange.

        An exchange counts from the next boundary on. One that begins late in the step brings fresher weights.
        """
        if self._recent_s and self._exchanges.took_s:
            now_s = asyncio.get_running_loop().time()
            ready_s = LATE * share * min(self._recent_s) - 2 * self._exchanges.took_s
            if (left_s := self._stepped_s + ready_s - now_s) > 0:
                await asyncio.sleep(left_s)

    async def linger(self, patience: Patience, work: Coroutine[Any, Any, Any]) -> None:
        """In `after_step`: let training wait for communication while there is patience; then both go on."""
        patience.under_way = task = self._spawn(work)
        most_s, loop = patience.most * max(self._recent_s, default=0.0), asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.wait({task}, timeout=most_s)
        patience.learn((loop.time() - began_s) / most_s if task.done() and most_s else 1.0)

    def beside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start communication that training does not wait for; await what is returned to get its result."""
        return self._spawn(work)

    # -- communication --

    async def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send a vector, a few numbers, or both; wait until the last byte has left."""
        await self._fabric.send(peer, tag, vector, note)

    def hear(self, tag: Tag, act: Callable[[Message], Awaitable[None] | None]) -> Coroutine[Any, Any, None]:
        """Hand every message with a tag to `act`, for ever."""
        return hear(self._fabric, tag, act)

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
        """Merge once; not at all if `group` returns None. None: it counts for nobody."""
        self._called_step = self.steps
        merge = await self._merges.attempt(act, group)
        return merge.result if merge is not None and merge.counts else None

    async def merge_beside(
        self, act: Callable[[Merge, Tensor], Awaitable[T]], keep: bool = False
    ) -> asyncio.Task[T]:
        """Take a snapshot now and `merge` it while training goes on; await what is returned for the result.

        A merge that failed has used the snapshot up, and is done again from a new one.
        """
        first = [await self.snapshot(keep)]

        async def again(merge: Merge) -> T:
            return await act(merge, first.pop() if first else await self.snapshot(keep))

        return self.beside(self.merge(again))

    async def view_change(self) -> None:
        """Wait until there is another view."""
        await self.views.changed()

    def free_merges(self, act: Callable[[Merge], Awaitable[Tensor]]) -> FreeMerges:
        """Merges of all workers, which any of them may call for at any step; `act` returns a correction."""

        def decided(merge: Merge, outcome: str) -> None:
            self._count_merge(outcome, merge.members)
            if outcome == "done":
                self.correct(merge.result, own=True)

        return FreeMerges(self._fabric, self._spawn, act, decided)

    @property
    def exchanges(self) -> int:
        """How many exchanges this worker has taken part in, whoever began them."""
        return self.counters.exchanges["done"]

    async def exchange(self, peer: int) -> bool:
        """Swap snapshots with a peer; both add `Strategy.meet` of the two. False: busy, or gone."""
        return await self._exchanges.call(peer)

    async def exchange_over(self) -> None:
        """Wait until this worker is in no exchange."""
        await self._exchanges.over()

    async def hand_over(self) -> None:
        """Before leaving: correct the others so that their mean becomes that of all, this one included."""
        await self.farewells.hand_over()

    def serve(self, centre: Tensor, apply: server.Apply) -> Coroutine[Any, Any, None]:
        """Be the parameter server; run this in `background`, it never ends."""
        return server.serve(self._fabric, centre, apply)

    async def ask(self, host: int, vector: Tensor | None) -> server.Answer:
        """Send a vector to the parameter server (None: only read) and wait for its answer."""
        if self._client is None or self._client.server != host:
            self._client = server.Client(self._fabric, host, self._replica.size)
        answer = await self._client.ask(vector)
        if host != self.rank and vector is not None:
            self.counters.exchanges["done"] += 1
            self.counters.met_all((host,), asyncio.get_running_loop().time())
        return answer

    # -- the record --

    def stale(self, value: float) -> None:
        """Record a staleness in the strategy's own measure (then `Strategy.staleness` says which)."""
        self.counters.stale(value)

    def _count_merge(self, outcome: str, members: Sequence[int]) -> None:
        self.counters.merges[outcome] += 1
        if outcome == "done":
            self._merged = True
            others = tuple(peer for peer in members if peer != self.rank)
            self.counters.met_all(others, asyncio.get_running_loop().time())
        elif outcome == "half":
            self._fabric.notice("half", self.rank, "a merge may have counted for others only")

    def _norm(self, vector: Tensor) -> float:
        # It takes a pass over the vector, so one is enough for each sample.
        self.counters.measure = self.counters.measure_always
        return float(torch.linalg.vector_norm(vector))
