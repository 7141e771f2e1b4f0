"""One simulated worker: its node, its model, its tasks, and the time it spends."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.data.batches import Batch, Key
from freewheel.data.dealing import Dealing
from freewheel.data.leases import LeaseQueue
from freewheel.errors import ConfigError, Diverged
from freewheel.moments import MOMENTUM, QuasiGlobal
from freewheel.node import Node
from freewheel.replica import Replica
from freewheel.sim.compute import Clockwork
from freewheel.sim.fabric import VirtualFabric, Wire
from freewheel.sim.gradients import Gradients
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task

ADAM_BETAS = (0.9, 0.999)
"""PyTorch's own."""


class Study:
    """What a simulated worker learns: a task's model with its own optimizer and batches."""

    def __init__(
        self, task: Task, start: nn.Module, rank: int, seed: str, momentum: float, decay: float
    ) -> None:
        self.task, self.rank = task, rank
        self.model = copy.deepcopy(start)
        self.replica = Replica.of(self.model)
        self.momentum, self.decay = momentum, decay
        self.moments: dict[str, list[Tensor]] = {}
        """What the optimizer remembers, in the replica's blocks."""
        self.quasi_global: QuasiGlobal | None = None
        self.statistics = True
        """Whether BatchNorm's statistics are kept up to date while it learns."""
        self.generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))

    def draw(self) -> Any:
        """What decides the next batch."""
        return self.task.draw(self.rank, self.generator)

    def gradient(self, batch: Any) -> tuple[float, float]:
        """Compute a gradient; return the loss and the gradient's norm."""
        for block in self.replica.blocks:
            block.gradient.zero_()
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), torch.linalg.vector_norm(self.replica.gradient).item()

    def follow(self) -> None:
        """Let momentum follow the way the weights go."""
        if not self.momentum:
            raise ConfigError("quasi_global needs momentum: give 0.9, or leave quasi_global out.")
        self.quasi_global = QuasiGlobal([block.weights for block in self.replica.blocks])

    def step(self, lr: float) -> None:
        """SGD with Nesterov's momentum: torch.optim.SGD's numbers, in a few calls over whole blocks."""
        if self.decay:
            for block in self.replica.blocks:
                block.gradient.add_(block.weights, alpha=self.decay)
        if not self.momentum:
            for block in self.replica.blocks:
                block.weights.add_(block.gradient, alpha=-lr)
            return
        velocities = self.moment(MOMENTUM)
        if self.quasi_global is not None:
            self.quasi_global.begin(velocities)
        for block, velocity in zip(self.replica.blocks, velocities, strict=True):
            velocity.mul_(self.momentum).add_(block.gradient)
            block.gradient.add_(velocity, alpha=self.momentum)
            block.weights.add_(block.gradient, alpha=-lr)

    def moment(self, name: str) -> list[Tensor]:
        """One of the optimizer's moments; zeros at first."""
        if name not in self.moments:
            self.moments[name] = [torch.zeros_like(block.gradient) for block in self.replica.blocks]
        return self.moments[name]

    def names(self) -> list[str]:
        """The optimizer's moments."""
        return sorted(self.moments)

    def get(self, name: str) -> Tensor:
        """A copy of one."""
        return torch.cat(self.moments[name])

    def set(self, name: str, vector: Tensor) -> None:
        """Overwrite one."""
        for block, moment in zip(self.replica.blocks, self.moments[name], strict=True):
            moment.copy_(vector[block.start : block.stop])

    def score(self) -> float:
        """The loss of this worker's model on data common to all."""
        self.model.eval()
        if not self.statistics:
            self.task.recalibrate(self.model, self.rank + 1, 0)
        try:
            return self.task.score(self.model)
        finally:
            self.model.train()


class AdamStudy(Study):
    """The same with AdamW: torch.optim.AdamW's numbers, in a few calls over whole blocks."""

    made = 0

    def step(self, lr: float) -> None:
        """One step; weight decay is apart from the gradient."""
        self.made += 1
        (of_mean, of_square), tiny = ADAM_BETAS, 1e-8
        means, squares = self.moment("exp_avg"), self.moment("exp_avg_sq")
        mean_share, square_share = 1 - of_mean**self.made, 1 - of_square**self.made
        for block, mean, square in zip(self.replica.blocks, means, squares, strict=True):
            block.weights.mul_(1 - lr * self.decay)
            mean.lerp_(block.gradient, 1 - of_mean)
            square.mul_(of_square).addcmul_(block.gradient, block.gradient, value=1 - of_square)
            size = (square.sqrt() / math.sqrt(square_share)).add_(tiny)
            block.weights.addcdiv_(mean, size, value=-lr / mean_share)


class SimulatedWorker:
    """A worker in one of its lives."""

    def __init__(
        self,
        rank: int,
        strategy: Strategy,
        scenario: Scenario,
        wire: Wire,
        study: Study | None,
        blank_size: int,
        fail: Callable[[BaseException], None],
        rate: Callable[[SimulatedWorker], float],
        gradients: Gradients,
    ) -> None:
        self._rate, self._gradients = rate, gradients
        self.rank, self.strategy, self.study = rank, strategy.copy(), study
        self.loop, self.trace, self._fail = wire.loop, wire.trace, fail
        self.replica = study.replica if study else Replica.blank(blank_size)
        self.life = wire.life[rank]
        life = f"{scenario.seed}/{rank}/{self.life}"
        rng = random.Random(f"compute/{life}")
        self.clockwork = Clockwork(scenario.compute, rank, rng, self.loop.time())
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order, so that a life ends the same way twice
        self.ready = False
        """Whether it has weights to train: not while it copies another's."""
        self.completed = 0
        """Its steps, without one whose end it is still waiting for."""
        self.ended = False
        """Whether it has made all its steps."""
        self.leaving = False
        """Whether it was told to leave."""
        self.training: asyncio.Task[Any] | None = None
        self.born_s = self.loop.time()
        self.computing_since: float | None = None
        # The fabric counts bytes for the node; the node is made of the fabric.
        self.fabric: VirtualFabric = wire.attach(rank)
        self.node = Node(
            self.fabric,
            self.replica,
            random.Random(f"node/{life}"),
            spawn=self.spawn,
            strategy=self.strategy,
            score=study.score if study else None,
            moments=study,
        )
        if study is not None and self.strategy.quasi_global:
            study.follow()
        self.fabric.counters = self.node.counters
        self.node.counters.measure = self.node.counters.measure_always = study is not None
        self.hand: LeaseQueue | None = None
        self.used: Counter[tuple[int, int]] = Counter()
        """Dealt batches it has used: pass and place of each."""
        self.dealing: Dealing | None = None
        if scenario.batches:
            dealing = self.dealing = Dealing(self.fabric, wire.life[rank], self.node.counters, self.spawn)
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

    def launch(
        self,
        steps: int | None,
        join: Coroutine[Any, Any, None] | None,
        done: Callable[[SimulatedWorker], None],
        ended: Callable[[], None],
        left: Callable[[SimulatedWorker], None],
    ) -> None:
        """Start: join if this is a later life, then train, with the background beside it."""
        if self.strategy.defines("meet"):
            self.spawn(self.node.answer_calls())
        self.node.farewells.serve()
        self.training = self.spawn(self._train(steps, join, done, ended, left))

    async def _train(
        self,
        steps: int | None,
        join: Coroutine[Any, Any, None] | None,
        done: Callable[[SimulatedWorker], None],
        ended: Callable[[], None],
        left: Callable[[SimulatedWorker], None],
    ) -> None:
        node, strategy, study, counters = self.node, self.strategy, self.study, self.node.counters
        rate = 0.0
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
        before, after = strategy.defines("before_step"), strategy.defines("after_step")
        # A strategy with a staleness of its own records it; for the others the node's measure is taken.
        measured = type(strategy).staleness is not Strategy.staleness
        while steps is None or node.steps < steps:
            batch = None
            if self.hand is not None:
                counters.wait("data", self.loop.time())
                batch = await self._draw(self.hand)
                counters.go_on(self.loop.time())
            stale = node.unmerged_steps
            took, pause = self.clockwork.next_s(self.loop.time())
            if pause:
                await asyncio.sleep(pause)
            self.computing_since = self.loop.time()
            if study is not None:
                self._gradients.begin(study)
            await asyncio.sleep(took)
            self.stop_computing()
            node.computed(took, counters.steps + 1)
            if counters.timeline is not None:
                counters.timeline.gradient(took)
            if not measured:
                counters.stale(stale)
            if study is not None:
                self._learn(study)
            if before:
                counters.wait("peers", self.loop.time())
                await strategy.before_step(node)
                counters.go_on(self.loop.time())
            if study is not None:
                rate = self._rate(self)
                study.step(rate)
            counters.steps += 1
            if after:
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
            done(self)
            if self.leaving and strategy.settled(node):
                await self._depart()
                self.loop.call_soon(left, self)
                return
        self.ended = True
        node.leave()
        ended()

    def leave(self) -> None:
        """Leave at the next boundary."""
        self.leaving = True
        self.node.farewells.announce()

    async def _depart(self) -> None:
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

    def stop_computing(self) -> None:
        """Count the time of a gradient that is finished, or cut off."""
        if self.computing_since is not None:
            self.node.counters.compute_s += self.loop.time() - self.computing_since
            self.computing_since = None

    def end_training(self) -> None:
        """Let go of the gradient that is under way; communication goes on."""
        self.stop_computing()
        self.node.counters.alive_s = self.loop.time() - self.born_s
        if self.training is not None:
            self.training.cancel()

    def die(self) -> None:
        """End this life at once."""
        self.end_training()
        for task in list(self.tasks):
            task.cancel()
