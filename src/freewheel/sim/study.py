"""What simulated workers learn: a model, its optimizer, its batches."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import random
from typing import Any

import torch
from torch import nn

from freewheel.moments import Moments, QuasiGlobal, momentum_of
from freewheel.replica import Replica
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task, check_optimizer, optimizer_of


class School:
    """What all workers of a run begin with: the model, the optimizer's settings, and what a model weighs."""

    def __init__(self, task: Task, strategy: Strategy, scenario: Scenario) -> None:
        check_optimizer(scenario.optimizer, scenario.momentum, strategy)
        self.task, self.strategy, self.scenario = task, strategy, scenario
        device = torch.device(scenario.device if scenario.gradients else "cpu")
        task.prepare(scenario.workers, scenario.seed)
        if device.type != "cpu":
            gc.collect()  # an earlier run's replicas
            torch.cuda.empty_cache()
            task.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(scenario.seed)
            self.model = task.model().to(device)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.size = sum(p.numel() for p in weights)
        self.model_bytes = sum(p.numel() * p.element_size() for p in weights)
        if scenario.model_mb is not None:
            self.model_bytes = round(scenario.model_mb * 1e6)
        if not scenario.gradients:  # a short vector stands for the model; a ring cuts it into equal parts
            self.size = scenario.workers * -(-1024 // scenario.workers)
        self.value_bytes = self.model_bytes / self.size
        self.blank = Replica.blank(1 if scenario.gradients else self.size)
        """Zeros, and an optimizer that has made a step: for workers that train nothing."""
        optimizer, self.moments = self.optimizer(self.blank)
        optimizer.step()
        self.lr: float = optimizer.param_groups[0]["lr"]
        self.momentum = momentum_of(optimizer)

    def optimizer(self, replica: Replica) -> tuple[torch.optim.Optimizer, Moments]:
        """An optimizer of whole blocks, which it steps in a few calls, and its moments."""
        blocks = []
        for block in replica.blocks:
            whole = nn.Parameter(block.weights)
            whole.grad = block.gradient
            blocks.append(dataclasses.replace(block, parameters=[whole]))
        weights = [one for block in blocks for one in block.parameters]
        optimizer = optimizer_of(self.scenario, self.task, self.strategy, weights)
        for group in optimizer.param_groups:
            group["foreach"] = False  # torch need not find out in every step
        return optimizer, Moments(optimizer, Replica(blocks))


class Study:
    """What one simulated worker learns, in one of its lives."""

    def __init__(self, school: School, rank: int, life: int) -> None:
        self.task, self.rank = school.task, rank
        self.model = copy.deepcopy(school.model)
        self.replica = Replica.of(self.model)
        self.optimizer, self.moments = school.optimizer(self.replica)
        self._step = inspect.unwrap(type(self.optimizer).step)
        """Without torch's hooks."""
        group = self.optimizer.param_groups[0]
        self._plain = type(self.optimizer) is torch.optim.SGD and not (
            group["momentum"] or group["weight_decay"]
        )
        self.quasi_global: QuasiGlobal | None = None
        if school.strategy.quasi_global:
            self.quasi_global = QuasiGlobal(self.optimizer)
        self.statistics = True
        """Whether BatchNorm's statistics are kept up to date while it learns."""
        seed = random.Random(f"data/{school.scenario.seed}/{rank}/{life}").getrandbits(62)
        self.generator = torch.Generator().manual_seed(seed)

    def gradient(self, batch: Any) -> tuple[float, float]:
        """Compute a gradient; return the loss and the gradient's norm."""
        for block in self.replica.blocks:
            block.gradient.zero_()
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), torch.linalg.vector_norm(self.replica.gradient).item()

    def step(self, lr: float) -> None:
        """The optimizer's step."""
        if self._plain:  # torch's takes longer than a small model's gradient
            for block in self.replica.blocks:
                block.weights.add_(block.gradient, alpha=-lr)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.quasi_global is not None:
            self.quasi_global.begin()
        with torch.no_grad():
            self._step(self.optimizer)

    def boundary(self) -> None:
        """Take in what is pending; let momentum follow the way the weights go, if it does."""
        self.replica.boundary()
        if self.quasi_global is not None:
            self.quasi_global.end()

    def score(self) -> float:
        """The loss of this worker's model on data common to all."""
        self.model.eval()
        if not self.statistics:
            self.task.recalibrate(self.model, self.rank + 1, 0)
        try:
            return self.task.score(self.model)
        finally:
            self.model.train()
