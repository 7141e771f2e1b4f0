"""One simulated worker: its node, its tasks, and the time it spends."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from freewheel.data.batches import Batch, Key
from freewheel.data.dealing import Dealing
from freewheel.data.leases import LeaseQueue
from freewheel.errors import Diverged
from freewheel.node_driver import NodeDriver
from freewheel.records.schema import WorkerSample, worker_sample
from freewheel.replica import Replica
from freewheel.sim.compute import Clockwork
from freewheel.sim.fabric import VirtualFabric, Wire
from freewheel.sim.gradients import Gradients
from freewheel.sim.scenario import Scenario
from freewheel.sim.study import Study
from freewheel.strategy import Strategy


class SimulatedWorker:
    """A worker in one of its lives: `begin`, `step` by step, then `end` or `depart`; or `die`."""

    def __init__(
        self,
        rank: int,
        strategy: Strategy,
        scenario: Scenario,
        wire: Wire,
        study: Study | None,
        blank_size: int,
        fail: Callable[[BaseException], None],
        gradients: Gradients,
    ) -> None:
        self._gradients, self._fail = gradients, fail
        self.rank, self.strategy, self.study = rank, strategy.copy(), study
        self.loop, self.trace = wire.loop, wire.trace
        self.replica = study.replica if study else Replica.blank(blank_size)
        self.life = wire.life[rank] + 1
        seed = f"{scenario.seed}/{rank}/{wire.life[rank]}"
        self.clockwork = Clockwork(scenario.compute, rank, random.Random(f"compute/{seed}"), self.loop.time())
        self._before, self._after = strategy.defines("before_step"), strategy.defines("after_step")
        self._always = strategy.always_stops()
        # A strategy with a staleness of its own records it; for the others the node's measure is taken.
        self._measured = type(strategy).staleness is not Strategy.staleness
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a life ends the same way twice
        self.ready = False
        """Whether it has weights to train: not while it copies another's."""
        self.limit: int | None = None
        """How many steps it makes; None: as many as there are."""
        self.completed = 0
        """Its steps, without one whose end it is still waiting for."""
        self.ended = False
        """Whether it has made all its steps."""
        self.leaving = False
        """Whether it was told to leave."""
        self.training: asyncio.Task[Any] | None = None
        self.born_s = self.loop.time()
        self.computing_since: float | None = None
        self.fabric: VirtualFabric = wire.attach(rank)
        self.node = NodeDriver(
            self.fabric,
            self.replica,
            random.Random(f"node/{seed}"),
            self.spawn,
            self.strategy,
        )
        if study is not None:
            self.node.judge = study.score
        if study is not None and self.strategy.quasi_global:
            study.follow()
        self.node.counters.measure = self.node.counters.measure_always = study is not None
        self.hand: LeaseQueue | None = None
        self.used: Counter[tuple[int, int]] = Counter()
        """Dealt batches it has used: pass and place of each."""
        self.dealing: Dealing | None = None
        if scenario.batches:
            dealing = self.dealing = Dealing(self.fabric, self.life, self.node.counters, self.spawn)
            parts = self.strategy.merges()
            key = Key(scenario.batches, 0, grid=scenario.batches * parts)
            self.hand = LeaseQueue(dealing, key, parts=parts)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in this worker's life; a failure of it is the run's."""
        task = self.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())  # type: ignore[arg-type]

    def launch(self, training: Coroutine[Any, Any, None]) -> None:
        """Start to train, and to answer others."""
        self.node.listen()
        self.training = self.spawn(training)

    # -- training --

    async def begin(self, join: Coroutine[Any, Any, None] | None) -> None:
        """Join if this is a later life; start the strategy, and its background."""
        node, strategy = self.node, self.strategy
        if join is not None:
            node.rejoined = True
            node.hold(joins=True)
            await join
            node.release()
        elif strategy.merges():
            node.begin_views(range(node.world_size))
        self.ready = True
        await strategy.start(node)
        if strategy.defines("background"):
            self.spawn(strategy.background(node))

    async def step(self, rate_of: Callable[[SimulatedWorker], float]) -> None:
        """One step: a batch, a gradient, the strategy's part, a boundary."""
        node, strategy, study, counters = self.node, self.strategy, self.study, self.node.counters
        batch = None
        if self.hand is not None:
            counters.wait("data", self.loop.time())
            batch = await self._draw(self.hand)
            counters.go_on(self.loop.time())
        stale = node.unmerged_steps
        await self._compute()
        if not self._measured:
            counters.stale(stale)
        if study is not None:
            self._learn(study)
        if self._before:
            counters.wait("peers", self.loop.time())
            await strategy.before_step(node)
            counters.go_on(self.loop.time())
        rate = rate_of(self)
        if study is not None:
            study.step(rate)
        counters.steps += 1
        if self._after and (self._always or strategy.stops(node)):
            counters.wait("peers", self.loop.time())
            await strategy.after_step(node)
            counters.go_on(self.loop.time())
        self.replica.boundary()
        if study is not None and study.quasi_global is not None:
            study.quasi_global.end([rate] * len(study.replica.blocks))
        if self.hand is not None and batch is not None:
            self.used[batch.number, batch.place] += 1
            counters.samples += 1
            self.hand.finish(batch)
        node.stepped()
        self.trace.add((self.loop.time(), "step", self.rank, counters.steps, node.loss))
        self.completed += 1

    async def _compute(self) -> None:
        """Let the time of a gradient pass."""
        took, pause = self.clockwork.next_s(self.loop.time())
        if pause:
            await asyncio.sleep(pause)
        self.computing_since = self.loop.time()
        if self.study is not None:
            self._gradients.begin(self.study)
        await asyncio.sleep(took)
        self._stop_computing()
        counters = self.node.counters
        self.node.computed(took, counters.steps + 1)
        if counters.timeline is not None:
            counters.timeline.gradient(took)

    async def _draw(self, hand: LeaseQueue) -> Batch:
        """The next batch dealt to this worker, of the next pass if this one is over."""
        while (batch := await hand.draw()) is None:
            await hand.settle()
            hand.begin(hand.number + 1)
        return batch

    def _learn(self, study: Study) -> None:
        node = self.node
        node.loss, norm = self._gradients.end(study)
        if not (math.isfinite(node.loss) and math.isfinite(norm)):
            what = f"a loss of {node.loss:g}" if math.isfinite(norm) else "a gradient that is not finite"
            raise Diverged(
                f"{self.strategy.name} diverged: worker {self.rank} got {what} first, in its step "
                f"{node.counters.steps + 1} at {self.loop.time():.3f} s. Lower the learning rate."
            )
        if norm > node.counters.gradient_norm_max:
            node.counters.gradient_norm_max = norm

    # -- its end --

    def leave(self) -> None:
        """Leave at the next boundary."""
        self.leaving = True
        self.node.farewells.announce()

    async def depart(self) -> None:
        """Hand back what was dealt, hand over what was learned, say goodbye."""
        self.node.end_calls()
        if self.dealing is not None:
            await self.dealing.give_back()
        await self.strategy.leave(self.node)
        self.replica.boundary()
        self.node.leave()
        if self.dealing is not None:
            self.dealing.part()
        await self.node.farewells.goodbye()

    def _stop_computing(self) -> None:
        """Count the time of a gradient that is finished, or cut off."""
        if self.computing_since is not None:
            self.node.counters.compute_s += self.loop.time() - self.computing_since
            self.computing_since = None

    def end_training(self) -> None:
        """Let go of the gradient that is under way; communication goes on."""
        self._stop_computing()
        if self.training is not None:
            self.training.cancel()

    def die(self) -> None:
        """End this life at once."""
        self.end_training()
        for task in list(self.tasks):
            task.cancel()

    # -- what it says of itself --

    def sample(self, now_s: float, last: bool = False) -> WorkerSample:
        """How it goes, as a real worker says it."""
        node, counters, elapsed_s = self.node, self.node.counters, now_s - self.born_s
        computing_s = 0.0 if self.computing_since is None else now_s - self.computing_since
        sample = worker_sample(
            counters,
            time=now_s,
            rank=self.rank,
            life=self.life,
            state="finished" if last or self.ended else "training" if self.ready else "joining",
            began=self.born_s,
            steps=self.completed,
            elapsed_s=elapsed_s,
            compute_s=counters.compute_s + computing_s,
            blocked_s=counters.blocked(now_s),
            progress=self.hand.progress() if self.hand is not None else 0.0,
            members=list(node.members),
            view=node.view.number,
            loss=node.loss if self.study is not None and counters.steps else None,
            last=last,
        )
        if self.study is None:  # vectors stand for a model, and say nothing about it
            sample["discrepancy"] = None
            sample["peers"] = {peer: (met, None) for peer, (met, _) in sample["peers"].items()}
        return sample
