"""The contract of a task, and the optimizer that trains one."""

import abc
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from freewheel.batchnorm import recalibrate
from freewheel.errors import ConfigError
from freewheel.settings import Training
from freewheel.strategy import Strategy

OPTIMIZERS = ("sgd", "adamw")


class Task(abc.ABC):
    """A problem to train on. `prepare` is called once before anything else."""

    lr: ClassVar[float]
    """A learning rate that suits every strategy on a handful of workers."""
    adam_lr: ClassVar[float] = 0.001
    """The same for AdamW."""

    @abc.abstractmethod
    def prepare(self, workers: int, seed: int) -> None:
        """Load or make the data for this many workers."""

    def to(self, device: torch.device) -> None:
        """Move the data: from now on batches are there. A task that only knows the CPU stays there."""
        if device.type != "cpu":
            raise ConfigError(f"this task cannot be trained on {device}; take the CPU.")

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; the caller has seeded torch."""

    @abc.abstractmethod
    def batch(self, worker: int, generator: torch.Generator) -> Any:
        """The next batch of a worker."""

    def draw(self, worker: int, generator: torch.Generator) -> Any:
        """What decides the next batch of a worker: random draws; by default the batch itself."""
        return self.batch(worker, generator)

    def batches(self, draws: Sequence[Any]) -> Any:
        """The batches of several draws, stacked."""
        return pytree.tree_map(lambda *parts: torch.stack(parts), *draws)

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss to take the gradient of."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """Loss and accuracy (None: there is none) on data nobody trained on; the model is in eval mode."""

    def recalibrate(self, model: nn.Module, workers: int, seed: int) -> None:
        """Measure BatchNorm's statistics of a model that is a mean of others, where it has any."""
        draws = torch.Generator().manual_seed(seed)
        batches = (self.batch(turn % workers, draws) for turn in itertools.count())
        recalibrate(model, batches, forward=lambda batch: self.loss(model, batch))

    def score(self, model: nn.Module) -> float:
        """The loss on data common to all workers, by which they may compare themselves."""
        return self.evaluate(model)[0]


def check_optimizer(name: str, momentum: float | None, strategy: Strategy | None) -> None:
    """Refuse an optimizer that does not exist, or that a strategy cannot work with."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"the optimizer must be {' or '.join(OPTIMIZERS)}, not {name!r}.")
    if name == "sgd":
        return
    if momentum is not None:
        raise ConfigError(f"momentum is sgd's; {name} has its own. Leave it out, or take sgd.")
    if strategy is not None and (strategy.momentum or strategy.quasi_global):
        raise ConfigError(
            f"{strategy.name} with these settings uses sgd's momentum, which {name} has not: take sgd."
        )


def optimizer_of(
    asked: Training, task: Task, strategy: Strategy | None, weights: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of a built-in task; without a strategy: for DDP."""
    if asked.optimizer == "adamw":
        lr = adam_rate(task.adam_lr if asked.lr is None else asked.lr, strategy, asked.workers)
        return torch.optim.AdamW(weights, lr, weight_decay=asked.weight_decay)
    momentum = asked.momentum if asked.momentum is not None else strategy.momentum if strategy else 0.0
    lr = task.lr * (1 - momentum) if asked.lr is None else asked.lr  # it adds up 1/(1 - momentum) steps
    return torch.optim.SGD(weights, lr, momentum, nesterov=momentum > 0, weight_decay=asked.weight_decay)


def adam_rate(rate: float, strategy: Strategy | None, workers: int) -> float:
    """Each worker's rate of AdamW, so that the averaged update is that of `rate`; no strategy: DDP.

    AdamW divides by the size of its gradients, which are mostly noise; the mean of n workers' gradients has
    1/√n of that noise. So updates are shorter by √n if workers average them instead of their gradients.
    """
    if strategy is None or strategy.defines("before_step") or getattr(strategy, "raw", False):
        return rate  # gradients are averaged, or the strategy asks for the rate as it is
    mixes = strategy.defines("background") or strategy.defines("after_step")
    return rate * math.sqrt(workers) if mixes else rate
