"""What a simulated worker learns: a model, its optimizer, its batches."""

from __future__ import annotations

import copy
import gc
import math
import random
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError
from freewheel.moments import MOMENTUM, QuasiGlobal, adam_rate, check_optimizer
from freewheel.replica import Replica
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
        """A copy of one; zeros where there is none yet."""
        kept = self.moments.get(name)
        return torch.cat(
            [torch.zeros_like(one.gradient) for one in self.replica.blocks] if kept is None else kept
        )

    def set(self, name: str, vector: Tensor) -> None:
        """Overwrite one, if there is one."""
        for block, moment in zip(self.replica.blocks, self.moments.get(name, ()), strict=False):
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


class BlankMoments:
    """What an optimizer would remember, where nothing is trained and time alone counts."""

    def __init__(self, names: list[str], size: int) -> None:
        self._names, self._size = names, size

    def names(self) -> list[str]:
        """The optimizer's moments."""
        return self._names

    def get(self, name: str) -> Tensor:
        """Zeros."""
        return torch.zeros(self._size)

    def set(self, name: str, vector: Tensor) -> None:
        """Nothing is kept."""


class School:
    """What all workers of a run begin with: the model, the optimizer's settings, and what a model weighs."""

    def __init__(self, task: Task, strategy: Strategy, scenario: Scenario) -> None:
        check_optimizer(scenario.optimizer, scenario.momentum, strategy)
        self._task, self._scenario = task, scenario
        self.momentum = strategy.momentum if scenario.momentum is None else scenario.momentum
        # Momentum adds up 1/(1 - momentum) steps.
        adam = scenario.optimizer == "adamw"
        usual = task.adam_lr if adam else task.lr * (1 - self.momentum)
        self.lr = usual if scenario.lr is None else scenario.lr
        if adam:
            self.lr = adam_rate(self.lr, strategy, scenario.workers)
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
        self.blank_size = sum(p.numel() for p in weights)
        self.model_bytes = sum(p.numel() * p.element_size() for p in weights)
        if scenario.model_mb is not None:
            self.model_bytes = round(scenario.model_mb * 1e6)
        if not scenario.gradients:  # a short vector stands for the model; a ring cuts it into equal parts
            self.blank_size = scenario.workers * -(-1024 // scenario.workers)
        self.value_bytes = self.model_bytes / self.blank_size

    def moments(self) -> BlankMoments:
        """For a worker that trains nothing."""
        adam = ["exp_avg", "exp_avg_sq"] if self._scenario.optimizer == "adamw" else []
        return BlankMoments([MOMENTUM] if self.momentum else adam, self.blank_size)

    def study(self, rank: int, life: int) -> Study | None:
        """A worker's own, in one of its lives; None: nothing is trained."""
        if not self._scenario.gradients:
            return None
        seed = f"data/{self._scenario.seed}/{rank}/{life}"
        kind = AdamStudy if self._scenario.optimizer == "adamw" else Study
        return kind(self._task, self.model, rank, seed, self.momentum, self._scenario.weight_decay)
