"""A training loop in which everything matters that a checkpoint must bring back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import crew
from freewheel.runtime.membership.place import Place

SAMPLES, BATCH, PASSES, EVERY = 48, 4, 3, 5
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from three random generators."""

    def __init__(self, samples: int = SAMPLES, noise: bool = True) -> None:
        self.noise = noise
        self.inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.inputs[k]
        if not self.noise:
            return x, x.sum().view(1)
        return x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand(), x.sum().view(1)


def net(width: int = 8) -> nn.Module:
    layers = nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 1)
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)  # other workers may be threads of the same process
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def train(
    folder: Path | None,
    *,
    place: Place | None = None,
    optimizer: str = "sgd",
    strategy: str = "adpsgd",
    resume: bool = False,
    at_step: Callable[[int], None] = lambda step: None,
    samples: int = SAMPLES,
    width: int = 8,
    every: int | None = EVERY,
    keep: int = 3,
    passes: int = PASSES,
    noise: bool = True,
) -> dict[str, Any]:
    """Train; what it began and ended with, to the last bit, and the losses by step.

    Without noise no random number is drawn, so that workers may be threads of one process.
    """
    model = net(width)
    if not noise:
        model[2].p = 0.0
    steps = OPTIMIZERS[optimizer](model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(steps, T_0=7)
    by_pass = torch.optim.lr_scheduler.MultiStepLR(steps, milestones=[1, 2])
    made, _ = crew.worker(
        place or Place(), model, strategy, optimizer=steps, resume=folder if resume else None
    )
    seed(7 + 100 * resume)  # a resumed run has another history: only the checkpoint may count
    losses, began = {}, {}
    with made as worker:
        loader = worker.loader(Noisy(samples, noise), BATCH, seed=3)
        if folder is not None:
            extra = {"scheduler": scheduler, "by_pass": by_pass}
            worker.checkpoint(folder, every=every, keep=keep, extra=extra)
        torch.rand(3 * resume)
        began = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(loader.epoch, passes):
            for inputs, targets in loader:
                loss = (model(inputs) - targets).square().mean()
                steps.zero_grad()
                loss.backward()
                worker.report(loss)
                steps.step()
                scheduler.step()
                step = worker.metrics()["steps"]
                losses[step] = loss.item()
                worker._checkpoints.wait()  # one that is still being written would be skipped
                at_step(step)
            by_pass.step()
    return {
        "losses": losses,
        "began": began,
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "lr": steps.param_groups[0]["lr"],
        "random": (torch.rand(1).item(), random.random(), np.random.rand()),
        "checkpoints": worker.metrics()["checkpoints"],
        "steps": worker.metrics()["steps"],
    }
