"""The contract of a task: a model, a worker's batches, a loss, and how good a model is."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from freewheel.batchnorm import recalibrate
from freewheel.errors import ConfigError


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
        """What decides the next batch of a worker; where that is not worth a method, the batch itself."""
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


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, not {device!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: this machine has no CUDA device that torch can use; take cpu.")
