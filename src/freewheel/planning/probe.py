"""The stand-in model: gradients that are one part signal, the same for all, and ten parts noise.

Its weights are a vector x that begins at 0. The first number is the signal: every gradient moves it by as
much. The others are noise of length 1, drawn anew for every gradient. So a distance between two replicas is
counted in updates; how far the first number of a replica is behind says how many gradients it lacks; and
what the noise of all gradients leaves in the answer says whether it was averaged.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from freewheel.task import Task

SIGNAL = 0.1
"""Against noise of length 1: near an optimum, gradients are mostly noise."""
SIZE = 256


class Vector(nn.Module):
    """A model that is one vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))


class Probe(Task):
    """A linear loss with a new slope for every gradient."""

    lr: ClassVar[float] = 1.0

    def __init__(self) -> None:
        self.taken = 0
        self.lags: list[float] = []
        """For each gradient: how many steps of all workers its model lacked when it was read."""

    def prepare(self, workers: int, seed: int) -> None:
        """A vector that a ring cuts into equal parts."""
        self.workers, self.size = workers, workers * -(-SIZE // workers)
        self.before = [0] * workers
        """How many gradients had been taken when each worker took its last."""
        self.total = torch.zeros(self.size)

    def model(self) -> nn.Module:
        """The vector 0."""
        return Vector(self.size)

    def batch(self, worker: int, generator: torch.Generator) -> tuple[int, Tensor]:
        """The next slope."""
        slope = torch.randn(self.size, generator=generator).div_(self.size**0.5)
        slope[0] = SIGNAL
        return worker, slope

    def loss(self, model: nn.Module, batch: tuple[int, Tensor]) -> Tensor:
        """Minus the slope: a step of 1 moves x by it."""
        worker, slope = batch
        assert isinstance(model, Vector)
        self.lags.append(self.before[worker] / self.workers - float(model.x[0].detach()) / SIGNAL)
        self.total += slope
        self.taken += 1
        self.before[worker] = self.taken
        return -torch.dot(model.x, slope)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """Minus the way made; the noise in the answer is kept, against that of the mean of all gradients."""
        assert isinstance(model, Vector)
        ideal = self.total[1:].norm().item() / self.workers
        self.noise = (model.x[1:].norm().item() / ideal) ** 2 if ideal else 1.0
        return -model.x[0].item(), None

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """By what workers compare themselves: the way made, and how far noise has carried them."""
        assert isinstance(model, Vector)
        return -model.x[0].item() + model.x[1:].square().sum().item()
