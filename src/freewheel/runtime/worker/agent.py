"""A worker's communication thread: an event loop with the fabric, the node and the strategy's coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import math
import os
import random
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.data.dealing import Dealing
from freewheel.errors import ConfigError, PeerLost, WorkerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import RUNTIME, Message, Note, Tag, hear
from freewheel.fabric.handshake import OTHER_KEYS, Identity
from freewheel.fabric.tcp import LEFT, TcpFabric
from freewheel.moments import Moments
from freewheel.node_driver import NodeDriver
from freewheel.records.counters import Counters
from freewheel.runtime.membership.generation import Entry, Orphaned, Outlived
from freewheel.runtime.membership.rendezvous import POLL_S, Rendezvous, Waiting
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.buffers import agree, mean_buffers
from freewheel.runtime.worker.ending import Answer, Ending
from freewheel.runtime.worker.firsts import Firsts
from freewheel.runtime.worker.live_replica import LiveReplica
from freewheel.runtime.worker.means import Means
from freewheel.runtime.worker.peer_copy import Copies, Rest
from freewheel.runtime.worker.records import Events
from freewheel.strategy import Strategy

T = TypeVar("T")
log = logging.getLogger("freewheel")

START: Tag = (RUNTIME, "start")
STOP: Tag = (RUNTIME, "stop")
START_S = 1.0
"""How long the first weights are waited for before they are asked for."""
COMING_S = 60.0
"""How long a worker that was started again is waited for at the end of a run."""
HELD_UP_S = 0.5
"""Between two looks whether the process of a silent worker is there."""
GOODBYE_S = 0.5
"""How long a goodbye may take."""
NO_ANSWER = "no worker that holds the answer is left."

# A process that DataLoader forks has none of this one's threads: whoever destroys an inherited store or event
# loop there waits for one of them, or crashes.
os.register_at_fork(after_in_child=gc.freeze)


class Agent:
    """The communication thread's side of a worker."""

    def __init__(
        self,
        me: Identity,
        replica: LiveReplica,
        strategy: Strategy,
        *,
        seed: int,
        wire: torch.dtype | None,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None,
        score: Callable[[], float],
        rest: Rest,
        heartbeat_s: float,
        events: Events,
    ) -> None:
        self.me, self.replica, self.strategy = me, replica, strategy.copy()
        self.failure: BaseException | None = None
        self.stopped = False
        """Whether a worker has asked all to stop."""
        self.late = False
        """Whether this worker comes into a run that goes on already."""
        self.first: tuple[int, ...] = (me.rank,)
        """Whom the run begins with."""
        self.lacking: dict[int, str] = {}
        """Who was to have a part in the run and was not let in, or has not come, and why."""
        self.ready = False
        """Whether this worker has weights that others may copy."""
        self.leaving = False
        """Whether it is about to leave before the others."""
        self._seed, self._wire, self._tls = seed, wire, tls
        self._score, self._rest, self._heartbeat_s = score, rest, heartbeat_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._parts = 0
        self._asked_s, self._waited_for = -math.inf, list[int]()
        """When it was last looked which silent workers' processes are there, and which are."""
        self.loaders: dict[str, int] = {}
        """How many loaders of the same kind have been made: all workers make them in the same order."""
        self.counters = Counters()
        self.events = events
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="freewheel", daemon=True)
        self._thread.start()
        self.call(self._make())

    # -- from the training thread --

    @property
    def alive(self) -> bool:
        """Whether the communication thread runs."""
        return self._thread.is_alive()

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the communication thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the communication thread and wait for it."""
        return self.begin(work).result()

    def stepped(self) -> None:
        """A step is complete: wake what waits for it, and nobody else: a wake-up costs both threads time."""
        if not self.node.due():
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: this worker has left
            self.loop.call_soon_threadsafe(self.node.stepped)

    def close(self, why: str) -> None:
        """Say goodbye, end everything, end the thread."""
        if not self._thread.is_alive():
            return
        try:
            self.begin(self._close(why)).result(timeout=10.0)
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10.0)

    # -- the thread --

    def _run(self) -> None:
        if self.replica.side is not None:  # what strategies compute here runs beside training
            torch.cuda.set_stream(self.replica.side)
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _make(self) -> None:
        self.fabric = TcpFabric(
            self.me,
            self.counters,
            self.replica.dtype,
            self._wire,
            self._tls,
            self._heartbeat_s,
            self.replica.side,
        )
        self.fabric.notice, self.events.lives = self.events.note, self.fabric.lives
        self.fabric.outlived = self._outlived
        self.copies = Copies(self.fabric, self.replica, self._rest)
        windows = self.fabric.windows
        if self.strategy.defines("background") and self.me.world_size > 1:
            self.replica.keep_close()
        self.replica.make_vector = windows.make
        self.replica.reusable = lambda vector: windows.of(vector) is not None
        self.node = NodeDriver(
            self.fabric,
            self.replica,
            random.Random(f"node/{self._seed}/{self.me.rank}/{self.me.incarnation}"),
            self.spawn,
            self.strategy,
        )
        self.node.judge, self.node.moments = self._score, Moments(self._rest.optimizer, self.replica)
        self.node.momentum = float(self._rest.optimizer.param_groups[0].get("momentum", 0.0) or 0.0)
        self.dealing = Dealing(self.fabric, self.me.incarnation, self.counters, self.spawn)
        self.ending = Ending(
            self.fabric, self.spawn, self.me.incarnation, self._under_way, self._mean, self.replica.size
        )
        self.firsts = Firsts(self.fabric)
        self.means = Means(self.fabric, self.me.longest, self.replica.dtype, self.ending.has_ended)

    async def _close(self, why: str) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fabric.close(why)
        others = asyncio.all_tasks() - {asyncio.current_task()}  # what other threads have begun
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.replica.let_go()

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
        """A later life of this worker is in the run, and writes what is written of it."""
        self.events.muted, self.failure = True, Outlived(self.me.rank)

    # -- joining --

    async def join(
        self, rendezvous: Rendezvous, entry: Entry, bind: str, address: str, timeout_s: float
    ) -> None:
        """Meet the others: those the run begins with; who comes later, those there are."""
        self.late, self.first, self._rendezvous = entry.late, entry.beginning.ranks, rendezvous
        try:
            port = self.fabric.open(bind)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {bind}: {error.strerror or error}. Give bind an address of this machine."
            ) from None
        await asyncio.to_thread(rendezvous.publish, address, port, self.me.incarnation)
        if self.late:
            await self._reach(rendezvous, timeout_s)
            return
        gone, waiting = dict[int, str](), Waiting(self.me.rank, timeout_s)
        end, others = self.loop.time() + timeout_s, [peer for peer in self.first if peer != self.me.rank]
        while missing := [peer for peer in others if peer not in self.fabric.members and peer not in gone]:
            for peer in missing:
                # The higher rank calls; one that comes back calls everybody.
                if peer < self.me.rank or entry.back:
                    await self._call(rendezvous, peer, gone)
                elif (why := await asyncio.to_thread(rendezvous.absent, peer)) is not None:
                    gone[peer] = why
            waiting.say(missing)
            if self.loop.time() > end:
                raise WorkerLost(
                    f"worker {self.me.rank} waited {timeout_s:g} s for worker"
                    f"{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} to join. "
                    "Start all workers, or give attach a longer join_timeout_s."
                )
            await asyncio.sleep(POLL_S)
        needed = [peer for peer in gone if self.strategy.needs(peer) or self.strategy.merges()]
        if needed:
            peer, why = needed[0], gone[needed[0]]
            raise WorkerLost(
                f"{self.strategy.name} needs worker {peer}, which is not coming: {why.rstrip('.')}."
            )
        self.lack(gone)
        # Those who had met an earlier life of this worker may have begun without it.
        self.late = entry.back and await asyncio.to_thread(rendezvous.begun)

    def lack(self, absent: Mapping[int, str]) -> None:
        """Say, once, who has no part in the run. Any thread may."""
        for peer, why in absent.items():
            if self.lacking.get(peer) != why:
                self.lacking[peer] = why
                log.warning("worker %d: the run goes on without worker %d: %s", self.me.rank, peer, why)
                self.events.note("failed", peer, why)

    async def _reach(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Call those who can be copied, until one is reached, then all others; Orphaned: nobody is left.

        One that is out of reach may still train. It is waited for, or its next life.
        """
        end, needed = self.loop.time() + timeout_s, {peer for peer in self.first if self.strategy.needs(peer)}
        while True:
            living = await asyncio.to_thread(rendezvous.living)
            await self._call_all(rendezvous, living)
            if set(living).intersection(self.fabric.members) and needed.issubset(self.fabric.members):
                await self._call_all(rendezvous, range(rendezvous.most))
                return
            if await asyncio.to_thread(rendezvous.lost, self.strategy):
                raise Orphaned("nobody is left to go on from")
            if len(self.fabric.members) == 1 and await asyncio.to_thread(rendezvous.over):
                raise await asyncio.to_thread(rendezvous.too_late, self.me.incarnation)
            if self.loop.time() > end:
                who = ", ".join(map(str, living)) or "those it began with"
                raise WorkerLost(
                    f"worker {self.me.rank} was started again and has reached nobody to go on from for "
                    f"{timeout_s:g} s. Nobody knows whether worker {who} is lost or only out of reach. If "
                    "it is lost, start the run again: with resume it goes on from the last checkpoint."
                )
            await asyncio.sleep(POLL_S)

    async def _call_all(self, rendezvous: Rendezvous, peers: Sequence[int]) -> None:
        for peer in peers:
            if peer not in self.fabric.members:  # this worker is one of them
                await self._call(rendezvous, peer, {})

    async def _call(self, rendezvous: Rendezvous, peer: int, gone: dict[int, str]) -> None:
        if (why := await asyncio.to_thread(rendezvous.absent, peer)) is not None:
            gone[peer] = why
            return
        known = await asyncio.to_thread(rendezvous.look_up, peer)
        try:
            if known is not None:
                await self.fabric.connect(peer, *known)
            elif self.late:
                gone[peer] = "it has not come yet"
        except PeerLost as error:
            if "refused this worker" in error.why and "called already" not in error.why:
                raise ConfigError(f"worker {self.me.rank} cannot join: {error}.") from None
            if OTHER_KEYS in error.why:
                raise ConfigError(
                    f"worker {self.me.rank} cannot join: {error}. Give all workers the same keys, by --tls."
                ) from None
            if self.late:
                gone[peer] = error.why  # it comes back by itself

    async def start(self, resumed: dict[str, Tensor] | None = None) -> None:
        """Begin with worker 0's weights, or a living worker's; then let the strategy run.

        A resumed run begins with the weights each worker has, and with the strategy's vectors as given.
        """
        strategy, node = self.strategy, self.node
        self.spawn(self.copies.hand_out(self._handover, self.spawn))
        self.ending.listen()
        self.spawn(hear(self.fabric, STOP, self._note_stop))
        self.spawn(hear(self.fabric, (RUNTIME, "part"), self._hand_out_part))
        self.spawn(self.means.serve())
        self.spawn(self.firsts.serve())
        node.listen()
        node.hold(joins=self.late)
        if self.late and strategy.merges():
            copied = await self._enter()
            if not copied and not any(self.ending.has_ended(peer) for peer in self.fabric.members):
                await self._begin_uncopied()
        elif self.late:
            node.rejoined = await self.copies.take()
            if not node.rejoined:
                await self._begin_uncopied()
        elif len(self.fabric.members) > 1 and resumed is None:
            await self._begin_alike()
        elif len(self.fabric.members) > 1 and strategy.waits_for == "nobody" and not strategy.keeps_mean:
            # Updates that were under way are lost, and nothing would bring the replicas together again.
            members, resumed = self.fabric.members, {}
            shares = [1 / len(members)] * len(members)
            self.replica.load(await self.fabric.reduce(members, START, await self.replica.snapshot(), shares))
        if strategy.merges():
            node.begin_views(self.first)
        await strategy.start(node)
        for name, vector in strategy.vectors().items():
            if resumed and name in resumed:
                vector.copy_(resumed[name])
        node.release()
        self.ready = True
        if strategy.defines("background"):
            self.spawn(strategy.background(node))

    async def _begin_alike(self) -> None:
        """All begin with the weights of the lowest rank. Somebody may leave in these very moments."""
        while (root := self.fabric.members[0]) != self.me.rank:
            try:
                weights = await asyncio.wait_for(self.fabric.receive(START, root), START_S)
                fixed = await tensor_codec.receive(self.fabric, root, (*START, "fixed"))
                theirs = weights.of(self.replica.size)
            except PeerLost:
                continue
            except TimeoutError:  # it may have begun with a worker that has left since, and sends nothing
                if await self.copies.take_once():
                    return
                continue
            self.replica.load(theirs)
            self._rest.set_fixed(fixed)
            return
        if self.me.rank != self.first[0] and await self.copies.take_once():
            return  # lower ranks have left, and others have begun before
        mine, my_fixed = await self.replica.snapshot(), self._rest.fixed()
        for peer in self.fabric.members[1:]:
            self.fabric.post(peer, START, mine)
            tensor_codec.post(self.fabric, peer, (*START, "fixed"), my_fixed)

    async def _begin_uncopied(self) -> None:
        """Nobody has weights: where others wait for the first ones, begin with one's own; else Orphaned."""
        living = await asyncio.to_thread(self._rendezvous.living)
        if not set(living).intersection(self.fabric.members) - {self.me.rank}:
            raise Orphaned("who could be copied is lost")
        log.warning("worker %d was started again before anybody had weights: it begins anew", self.me.rank)

    async def _enter(self) -> bool:
        """Come into the view of those who train: they wait, so what is copied is of one moment."""
        self.replica.parked = True
        try:
            await self.node.join()
            source = self.node.source
            return source is not None and await self.copies.take(source)
        finally:
            self.replica.parked = False

    async def _handover(self) -> Tensor | None:
        return await self.strategy.handover(self.node) if self.ready else None

    # -- what workers tell each other beside the strategy --

    def _note_stop(self, _message: Message) -> None:
        self.stopped = True

    async def tell_all(self, tag: Tag) -> None:
        """Tell every other worker."""
        for peer in self.fabric.members:
            if peer != self.me.rank:
                self.fabric.post(peer, tag)

    async def waits_for_finished(self) -> int | None:
        """A worker that is waited for although its loop has ended: all it sent before it said so is here."""
        awaited = {peer for peer, _ in self.fabric.waits()}
        return next((peer for peer in awaited if peer is not None and self.ending.has_ended(peer)), None)

    async def hold_still(self, into: Tensor) -> dict[str, Tensor]:
        """For a checkpoint: copy the weights into a vector and return copies of the strategy's vectors.

        Here, in the thread that makes corrections, the two belong together. Training must wait for it.
        """
        self.replica.still(into)
        return {name: vector.clone() for name, vector in self.strategy.vectors().items()}

    # -- the end --

    async def finish(self, rendezvous: Rendezvous | None = None) -> Answer:
        """Wait until all loops have ended and nothing is under way; return the mean weights and buffers.

        One that was started again and is on its way is waited for: it would find nobody. So is one that is
        out of reach though its process is there: held up by a long call, or stopped; or this worker was.
        """
        self.node.end_calls()
        if self.node.view.number:  # else all began together, and must end together
            self.node.leave()
        end_s = self.loop.time() + COMING_S

        async def somebody_comes() -> bool:
            if rendezvous is None or self.loop.time() > end_s:
                return False
            return bool(
                await asyncio.to_thread(rendezvous.coming, dict(self.fabric.lives))
                or await self._held_up(rendezvous)
            )

        answer = await self.ending.run(somebody_comes) or await self.consensus()
        if rendezvous is not None:
            self.lack(await asyncio.to_thread(rendezvous.refused, self.fabric.members))
        self._name_absent(self.ending.members or self.fabric.members)
        return answer

    async def announce(self) -> None:
        """Tell the others that this worker is about to leave."""
        self.node.farewells.announce()

    async def depart(self, within_s: float, settled: bool) -> str:
        """Leave before the others: hand back, hand over, say goodbye. What was not done in time, in words.

        The training thread has stopped at a boundary, or in a step whose gradient nobody gets. `settled`: the
        strategy has done its part in the last step; if not, it cannot hand over.
        """
        self.node.end_calls()

        async def done(work: Coroutine[Any, Any, None]) -> bool:
            try:
                async with asyncio.timeout(within_s):
                    await work
                return True
            except (TimeoutError, PeerLost):
                return False
            except Exception as error:  # the others are still to hear a goodbye
                log.warning("worker %d: leaving failed: %r", self.me.rank, error)
                return False

        works = {"what it held of the data": self.dealing.give_back()}
        if settled:
            works["its last steps"] = self.strategy.leave(self.node)
        went = dict(zip(works, await asyncio.gather(*map(done, works.values())), strict=True))
        self.node.leave()
        self.dealing.part()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self.node.farewells.goodbye()
        lacks = [what for what, well in ({"its last steps": settled} | went).items() if not well]
        return " and ".join(lacks)

    async def _held_up(self, rendezvous: Rendezvous) -> list[int]:
        """Workers that are out of reach without a goodbye, and whose process still takes connections."""
        fabric = self.fabric
        lost = set(fabric.lives).difference(fabric.members, fabric.left)
        if self.loop.time() > self._asked_s + HELD_UP_S:
            self._asked_s = self.loop.time()
            there = await asyncio.gather(*(asyncio.to_thread(rendezvous.listens, peer) for peer in lost))
            found = [peer for peer, listens in zip(lost, there, strict=True) if listens]
            for peer in set(found) - set(self._waited_for):
                log.warning(
                    "worker %d: worker %d is out of reach, but its process is there; waiting",
                    self.me.rank,
                    peer,
                )
            self._waited_for = found
        return [peer for peer in self._waited_for if peer in lost]

    def _name_absent(self, members: Sequence[int]) -> None:
        """Say who had a part in the run, and has none in its answer."""
        gone = {peer for peer in self.fabric.lives if self.fabric.why_lost(peer) == LEFT}
        absent = sorted({*self.fabric.lives, *self.lacking}.difference(members, gone))
        if absent and (self.lacking or len(self.fabric.lives) > 1):
            log.warning(
                "worker %d: the answer is the mean of worker %s; it lacks worker %s: %s",
                self.me.rank,
                ", ".join(map(str, members)),
                ", ".join(map(str, absent)),
                self.lacking.get(absent[0]) or self.fabric.why_lost(absent[0]),
            )

    def _under_way(self) -> Note:
        sent, got = self.fabric.traffic()
        return float(self.fabric.quiet() and self.node.idle), float(sent), float(got)

    async def _mean(self, members: Sequence[int], tag: Tag) -> Answer:
        part = await self.strategy.answer(self.node)
        notes = await collectives.gather(self.fabric, members, (float(part is not None),), (*tag, "parts"))
        parts = sum(note[0] for note in notes.values())
        if not parts:
            raise WorkerLost(NO_ANSWER)
        if part is None:
            part = self.replica.plain_vector(self.replica.size, self.replica.dtype).zero_()
        shares = [notes[peer][0] / parts for peer in members]
        weights = await self.fabric.reduce(members, (*tag, "weights"), part, shares)
        return weights, await agree(self.fabric, members, (*tag, "buffers"), self._rest.buffers())

    async def consensus(self) -> Answer:
        """The mean of all workers' answers and buffers, collected by this one; nobody's training waits."""
        weights, parts, buffers = None, 0, dict[int, dict[str, Tensor]]()
        async for rank, part, their_buffers, _ in self.parts():
            if part is not None:
                part = part.to(self.replica.device)
                weights = part if weights is None else weights.add_(part)
                parts += 1
            buffers[rank] = their_buffers
        if weights is None:
            raise WorkerLost(NO_ANSWER)
        return weights.div_(parts), mean_buffers([buffers[rank] for rank in sorted(buffers)])

    async def parts(
        self, own: bool = False
    ) -> AsyncIterator[tuple[int, Tensor | None, dict[str, Tensor], int]]:
        """Of every worker: rank, part in the answer (or its own weights), buffers, steps. Own the vectors."""
        self._parts += 1
        tag: Tag = (RUNTIME, "part", self._parts)
        yield self.me.rank, await self._part(own), self._rest.buffers(), self.counters.steps
        asked = [peer for peer in self.fabric.members if peer != self.me.rank]
        for peer in asked:
            self.fabric.post(peer, (RUNTIME, "part"), note=(self._parts, float(own)))
        for peer in asked:
            try:
                part = await self.fabric.receive((*tag, "weights"), peer)
                buffers = await tensor_codec.receive(self.fabric, peer, (*tag, "buffers"))
                vector = None if part.vector is None else part.of(self.replica.size)
                (steps,) = part.numbers(1, 1)
            except PeerLost:
                continue
            yield peer, vector, buffers, steps

    async def _part(self, own: bool) -> Tensor | None:
        return await (self.node.weights() if own else self.strategy.answer(self.node))

    async def _hand_out_part(self, request: Message) -> None:
        number, own = request.numbers(2, 2)
        tag: Tag = (RUNTIME, "part", number)
        part = await self._part(bool(own)) if self.ready else None
        self.fabric.post(request.sender, (*tag, "weights"), part, note=(self.counters.steps,))
        buffers = tensor_codec.pack(self._rest.buffers())
        tensor_codec.post(self.fabric, request.sender, (*tag, "buffers"), buffers)
