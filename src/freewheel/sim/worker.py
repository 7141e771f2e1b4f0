"""A simulated worker: its node, its tasks, and the time its steps take."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from freewheel.data.batches import Batch, Key
from freewheel.data.dealing import Dealing
from freewheel.data.leases import LeaseQueue
from freewheel.errors import Diverged
from freewheel.node_driver import NodeDriver
from freewheel.records.schema import WorkerSample, worker_sample
from freewheel.replica import Replica
from freewheel.sim.fabric import VirtualFabric, Wire
from freewheel.sim.scenario import Compute
from freewheel.sim.study import Gradients, School, Study
from freewheel.strategy import Strategy

T = TypeVar("T")


class Clockwork:
    """A worker's step times."""

    def __init__(self, compute: Compute, rank: int, rng: random.Random, now: float = 0.0) -> None:
        self.rank, self.rng = rank, rng
        self.model = compute.of.get(rank, compute)
        self.factor = compute.slow.get(rank, 1.0)  # a fault may change it
        self.steps = 0
        pauses = ((at_s, for_s) for who, at_s, for_s in compute.pauses if who == rank and at_s >= now)
        self.pauses = sorted(pauses, reverse=True)

    def next_s(self, now: float) -> tuple[float, float]:
        """How long the next gradient takes, and the pause before it."""
        pause = 0.0
        while self.pauses and self.pauses[-1][0] <= now:
            pause += self.pauses.pop()[1]
        model, spread = self.model, self.model.spread
        took = model.ms / 1e3
        if model.kind == "uniform":
            took *= self.rng.uniform(1 - spread, 1 + spread)
        elif model.kind == "exponential":
            took *= self.rng.expovariate(1.0)
        elif model.kind == "lognormal":
            took *= self.rng.lognormvariate(-(spread**2) / 2, spread)
        elif model.kind == "trace":
            row = model.trace[self.steps % len(model.trace)]
            took = row[self.rank % len(row)] / 1e3
        self.steps += 1
        return took * self.factor, pause


class SimulatedWorker:
    """A worker in one of its lives: `begin`, `step` by step, then `end_training` or `depart`; or `die`."""

    def __init__(
        self,
        rank: int,
        school: School,
        wire: Wire,
        gradients: Gradients,
        used: Counter[tuple[int, int]],
        fail: Callable[[BaseException], None],
    ) -> None:
        scenario = school.scenario
        self._gradients, self._used, self._fail = gradients, used, fail
        self.rank, self.strategy = rank, school.strategy.copy()
        self.loop, self.trace = wire.loop, wire.trace
        life = wire.life[rank]
        self.study = Study(school, rank, life) if scenario.gradients else None
        self.replica = self.study.replica if self.study else Replica.blank(school.size)
        self._boundary = self.study.boundary if self.study else self.replica.boundary
        self.life = life + 1
        seed = f"{scenario.seed}/{rank}/{life}"
        self.clockwork = Clockwork(scenario.compute, rank, random.Random(f"compute/{seed}"), self.loop.time())
        # Strategies without a measure of their own get the node's.
        self._measures_staleness = type(self.strategy).staleness is not Strategy.staleness
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a life ends the same way twice
        self.training: asyncio.Task[Any] | None = None
        self.limit = scenario.steps if self.strategy.lockstep() else math.inf  # of its own steps
        self.completed = 0  # steps whose boundary is over
        self.ready = False  # whether it has weights: not while it copies another's
        self.ended = self.leaving = False  # whether it has made all its steps; was told to leave
        self.born_s = self.loop.time()
        self.computing_since: float | None = None
        self.fabric: VirtualFabric = wire.attach(rank)
        node_random = random.Random(f"node/{seed}")
        self.node = NodeDriver(self.fabric, self.replica, node_random, self.spawn, self.strategy)
        self.node.momentum, self.node.moments = school.momentum, school.moments
        self.counters = self.node.counters
        if self.study is not None:
            self.node.judge, self.node.moments = self.study.score, self.study.moments
            self.counters.measure = self.counters.measure_always = True
        self.hand: LeaseQueue | None = None
        if scenario.batches:
            dealing = Dealing(self.fabric, self.life, self.counters, self.spawn)
            parts = self.strategy.merges()
            key = Key(scenario.batches, 0, grid=scenario.batches * parts)
            self.hand = LeaseQueue(dealing, key, parts=parts)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until this life ends; if it fails, the run does."""
        task = self.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def launch(self, training: Coroutine[Any, Any, None]) -> None:
        self.node.listen()
        self.training = self.spawn(training)

    # -- training --

    async def begin(self, join: Coroutine[Any, Any, None] | None) -> None:
        node, strategy = self.node, self.strategy
        if join is not None:
            node.rejoined = True
            node.hold(joins=True)
            await join
            node.release()
        elif strategy.merges():
            node.views.begin(range(node.world_size))
        self.ready = True
        await strategy.start(node)
        if strategy.defines("background"):
            self.spawn(strategy.background(node))

    async def step(self, rate_of: Callable[[SimulatedWorker], float]) -> None:
        node, strategy, counters = self.node, self.strategy, self.counters
        batch = None if self.hand is None else await self._wait("data", self._draw(self.hand))
        stale = node.unmerged_steps
        await self._compute()
        if not self._measures_staleness:
            counters.stale(stale)
        await self._wait("peers", strategy.before_step(node))
        rate = rate_of(self)
        if self.study is not None:
            self.study.step(rate)
        counters.steps += 1
        if strategy.always_stops or strategy.stops(node):
            await self._wait("peers", strategy.after_step(node))
        self._boundary()
        if self.hand is not None and batch is not None:
            self._used[batch.number, batch.place] += 1
            counters.samples += 1
            self.hand.finish(batch)
        node.stepped()
        self.trace.add((self.loop.time(), "step", self.rank, counters.steps, node.loss))
        self.completed += 1

    async def _wait(self, cause: str, work: Coroutine[Any, Any, T]) -> T:
        self.counters.wait(cause, self.loop.time())
        result = await work
        self.counters.go_on(self.loop.time())
        return result

    async def _draw(self, hand: LeaseQueue) -> Batch:
        """The next batch, of the next pass if this one is over."""
        while (batch := await hand.draw()) is None:
            await hand.settle()
            hand.begin(hand.number + 1)
        return batch

    async def _compute(self) -> None:
        """Let a gradient's time pass; at its end the gradient is there."""
        took, pause = self.clockwork.next_s(self.loop.time())
        if pause:
            await asyncio.sleep(pause)
        self.computing_since = self.loop.time()
        if self.study is not None:
            self._gradients.begin(self.study)
        await asyncio.sleep(took)
        self._stop_computing()
        self.node.computed(took, self.counters.steps + 1)
        if self.counters.timeline is not None:
            self.counters.timeline.gradient(took)
        if self.study is None:
            return
        self.node.loss, norm = self._gradients.end(self.study)
        if not (math.isfinite(self.node.loss) and math.isfinite(norm)):
            raise Diverged(
                f"{self.strategy.name} diverged: worker {self.rank} got a loss of {self.node.loss:g} and a "
                f"gradient of norm {norm:g} first, in its step {self.counters.steps + 1} at "
                f"{self.loop.time():.3f} s. Lower the learning rate."
            )
        self.counters.gradient_norm_max = max(self.counters.gradient_norm_max, norm)

    # -- its end --

    async def depart(self) -> None:
        self.node.end_calls()
        if self.hand is not None:
            await self.hand.dealing.give_back()
        await self.strategy.leave(self.node)
        self.replica.boundary()
        self.node.leave()
        if self.hand is not None:
            self.hand.dealing.part()
        await self.node.farewells.goodbye()

    def _stop_computing(self) -> None:
        if self.computing_since is not None:
            self.counters.compute_s += self.loop.time() - self.computing_since
            self.computing_since = None

    def end_training(self) -> None:
        """Drop the gradient under way; communication goes on."""
        self._stop_computing()
        if self.training is not None:
            self.training.cancel()

    def die(self) -> None:
        self.end_training()
        for task in list(self.tasks):
            task.cancel()

    def sample(self, now_s: float, last: bool = False) -> WorkerSample:
        node, counters = self.node, self.counters
        computing_s = 0.0 if self.computing_since is None else now_s - self.computing_since
        sample = worker_sample(
            counters,
            time=now_s,
            rank=self.rank,
            life=self.life,
            state="finished" if last or self.ended else "training" if self.ready else "joining",
            began=self.born_s,
            steps=self.completed,
            elapsed_s=now_s - self.born_s,
            compute_s=counters.compute_s + computing_s,
            blocked_s=counters.blocked(now_s),
            progress=self.hand.progress() if self.hand is not None else 0.0,
            members=list(node.members),
            view=node.view.number,
            loss=node.loss if self.study is not None and counters.steps else None,
            last=last,
        )
        if self.study is None:  # distances of vectors that only stand for a model mean nothing
            sample["discrepancy"] = None
            sample["peers"] = {peer: (met, None) for peer, (met, _) in sample["peers"].items()}
        return sample
