"""A worker's communication thread: an event loop with the fabric, the node and the strategy's coroutines."""

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.data.dealing import Dealing
from freewheel.errors import PeerLost, WorkerLost
from freewheel.fabric.base import RUNTIME, Note, Tag, hear
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import LEFT, TcpFabric
from freewheel.moments import Moments, momentum_of
from freewheel.node_driver import NodeDriver
from freewheel.records.counters import Counters, Noticed
from freewheel.runtime.launch import keys
from freewheel.runtime.membership.generation import Outlived
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker.answers import Answers, Means
from freewheel.runtime.worker.ending import Answer, Ending
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.settings import WIRES, Settings
from freewheel.runtime.worker.tensor_codec import Asking
from freewheel.strategy import Strategy

T = TypeVar("T")
log = logging.getLogger("freewheel")

STOP: Tag = (RUNTIME, "stop")
COMING_S = 60.0  # how long the end of a run waits for a worker that was restarted
GOODBYE_S = 0.5
CLOSE_S = 10.0  # how long `close` waits for the communication thread to end

# A process that DataLoader forks has none of this one's threads: garbage collection of an inherited store or
# event loop would wait for one of them there, or crash.
os.register_at_fork(after_in_child=gc.freeze)


class Agent:
    """The communication thread's side of a worker."""

    def __init__(
        self,
        me: Identity,
        inventory: Inventory,
        strategy: Strategy,
        settings: Settings,
        score: Callable[[], float],
        events: Noticed,
    ) -> None:
        self.me, self.strategy = me, strategy.copy()
        self.inventory, self.replica = inventory, inventory.replica
        self.failure: BaseException | None = None
        self.stopped = False  # whether a worker has asked all to stop
        self.late = False  # whether this worker joins a run that is training already
        self.leaving = False
        self.first: tuple[int, ...] = (me.rank,)  # the ranks that the run begins with
        self.lacking: dict[int, str] = {}  # why workers that belong to the run have no part in it
        tls = keys.contexts(Path(settings.tls)) if settings.tls else None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waited_for = set[int]()  # silent workers that were logged
        self.loaders: dict[str, int] = {}  # how many of a kind there are: all make them in the same order
        self.counters = Counters()
        self.events = events
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._over: asyncio.Future[str] = self.loop.create_future()  # its result is said as goodbye
        self._thread = threading.Thread(target=self._run, name="freewheel", daemon=True)
        self._thread.start()
        self.call(self._make(settings, tls, score))

    # -- from the training thread; coroutines run in the communication thread --

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.begin(work).result()

    def wait(
        self, work: Coroutine[Any, Any, T], given_up: Callable[[], bool] = lambda: False, poll_s: float = 0.2
    ) -> T | None:
        """As `call`, but raise what fails beside training meanwhile; None once `given_up` says so."""
        asked = self.begin(work)
        try:
            while True:
                done = concurrent.futures.wait([asked], poll_s).done
                up = given_up()
                if done or up:
                    return asked.result() if done else None
                self.check()
        finally:
            asked.cancel()

    def check(self, failure: BaseException | None = None) -> None:
        """Raise this failure, or else what failed beside training; a lost peer as WorkerLost."""
        failure = failure or self.failure
        if isinstance(failure, PeerLost):
            raise WorkerLost(
                f"{self.strategy.name} stopped: it lost worker {failure.peer} ({failure.why}), which it "
                "cannot do without: it held the server. Strategies without one go on, such as adpsgd or "
                "allreduce."
            ) from failure
        if failure is not None:
            raise failure

    def close(self, why: str) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._over.set_result, why)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.warning("worker %d: its connections have not closed in %g s", self.me.rank, CLOSE_S)
            self.replica.let_go()

    # -- the thread --

    def _run(self) -> None:
        if self.replica.side is not None:  # what strategies compute here runs beside training
            torch.cuda.set_stream(self.replica.side)
        with self._runner:
            self._runner.run(self._live())

    async def _live(self) -> None:
        why = await self._over
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fabric.close(why)

    async def _make(self, settings: Settings, tls: Any, score: Callable[[], float]) -> None:
        me, replica, wire = self.me, self.replica, WIRES[settings.wire]
        self.fabric = fabric = TcpFabric(
            me, self.counters, replica.dtype, wire, tls, settings.heartbeat_s, replica.side
        )
        fabric.notice, self.events.lives = self.events.note, fabric.lives
        fabric.outlived = self._outlived
        windows = fabric.windows
        if self.strategy.defines("background") and me.world_size > 1:
            replica.keep_close()
        replica.make_vector = windows.make
        replica.reusable = lambda vector: windows.of(vector) is not None
        draw = random.Random(f"node/{settings.seed}/{me.rank}/{me.incarnation}")
        self.node = node = NodeDriver(fabric, replica, draw, self.spawn, self.strategy)
        optimizer = self.inventory.optimizer
        node.judge, node.moments = score, Moments(optimizer, replica)
        node.momentum = momentum_of(optimizer)
        self.dealing = Dealing(fabric, me.incarnation, self.counters, self.spawn)
        asking = Asking(fabric, self.spawn)
        self.answers = answers = Answers(asking, node, self.strategy, self.inventory)

        def under_way() -> Note:
            return float(fabric.quiet() and node.idle), *map(float, fabric.traffic())

        self.ending = Ending(fabric, self.spawn, under_way, answers.mean, replica.size)
        self.means = Means(
            asking,
            replica.dtype,
            self.ending.has_ended,
            lambda: node.views.under_way[2] if node.views.under_way else (),
            lambda: answers.ready or not self.late,
        )
        self.spawn(hear(fabric, STOP, lambda _: setattr(self, "stopped", True)))

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine beside training; a failure of it stops training at its next step."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self.failure is None:
            self.failure = error

    def _outlived(self) -> None:
        """A later incarnation of this worker is in the run, and writes the records."""
        self.events.muted, self.failure = True, Outlived(self.me.rank)

    def lack(self, absent: Mapping[int, str]) -> None:
        """Report once that these workers have no part in the run. Any thread may call it."""
        for peer, why in absent.items():
            if self.lacking.get(peer) != why:
                self.lacking[peer] = why
                log.warning("worker %d: the run goes on without worker %d: %s", self.me.rank, peer, why)
                self.events.note("failed", peer, why)

    def stop(self) -> None:
        self.stopped = True
        for peer in self.fabric.others:
            self.loop.call_soon_threadsafe(self.fabric.post, peer, STOP)

    async def waits_for_finished(self) -> int | None:
        """A peer that is awaited although its loop has ended; it had sent all before it said so."""
        awaited = {peer for peer, _ in self.fabric.waits()}
        return next((peer for peer in awaited if peer is not None and self.ending.has_ended(peer)), None)

    async def hold_still(self, into: Tensor) -> dict[str, Tensor]:
        """While training waits: copy the weights into a vector, and return copies of the strategy's."""
        self.replica.copy_now(into)
        return {name: vector.clone() for name, vector in self.strategy.vectors().items()}

    # -- the end --

    async def finish(self, rendezvous: Rendezvous | None = None) -> Answer:
        """Wait until all loops have ended and nothing is under way; return the mean weights and buffers.

        Waits also for workers that were restarted and are on their way (they would find nobody), and for
        silent ones whose process accepts connections: a long call or a stop holds up one of the two.
        """
        self.node.end_calls()
        self.node.leave(together=True)
        end_s = self.loop.time() + COMING_S

        async def somebody_comes() -> bool:
            if rendezvous is None or self.loop.time() > end_s:
                return False
            return await asyncio.to_thread(self._awaited, rendezvous)

        answer = await self.ending.run(somebody_comes) or await self.answers.consensus()
        self.events.over = True  # who goes now goes with this worker
        if rendezvous is not None:
            self.lack(await asyncio.to_thread(rendezvous.refused, self.fabric.members))
        members, fabric = self.ending.members or self.fabric.members, self.fabric
        gone = {peer for peer in fabric.lives if fabric.why_lost(peer) == LEFT}
        if absent := sorted({*fabric.lives, *self.lacking}.difference(members, gone)):
            of, lacks = (", ".join(map(str, workers)) for workers in (members, absent))
            why = self.lacking.get(absent[0]) or fabric.why_lost(absent[0])
            text = "worker %d: the answer is the mean of worker %s; it lacks worker %s: %s"
            log.warning(text, self.me.rank, of, lacks, why)
        return answer

    async def depart(self, within_s: float, settled: bool) -> str:
        """Leave before the others: return leases, hand over, say goodbye; return in words what was not done.

        `settled`: the strategy has done its part in the last step; without that it cannot hand over.
        """
        self.node.end_calls()
        works = {"what it held of the data": self.dealing.give_back()}
        if settled:
            works["its last steps"] = self.strategy.leave(self.node)
        lacks = [] if settled else ["its last steps"]

        async def hand_over(what: str, work: Coroutine[Any, Any, None]) -> None:
            try:
                await asyncio.wait_for(work, within_s)
            except Exception as error:  # the others are still to hear a goodbye
                lacks.append(what)
                log.warning("worker %d leaves and cannot hand over %s: %r", self.me.rank, what, error)

        await asyncio.gather(*(hand_over(*one) for one in works.items()))
        self.node.leave()
        self.dealing.part()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.node.farewells.goodbye(), GOODBYE_S)
        return " and ".join(lacks)

    def _awaited(self, rendezvous: Rendezvous) -> bool:
        """Whether a worker is on its way, or silent while its process accepts connections."""
        fabric = self.fabric
        for peer in filter(rendezvous.listens, set(fabric.lives).difference(fabric.members, fabric.left)):
            if peer not in self._waited_for:
                text = "worker %d: worker %d is out of reach, but its process is there; waiting"
                log.warning(text, self.me.rank, peer)
            self._waited_for.add(peer)
            return True
        return bool(rendezvous.coming(dict(fabric.lives)))
