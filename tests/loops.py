"""Ordinary training loops around `fw.attach`, which tests of several subjects use."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import crew
import freewheel as fw
from freewheel.runtime.membership.place import Place

DEADLINE_S = 60.0


def make(place: Place, model: nn.Module, optimizer: Any = None, strategy: str = "adpsgd", **settings: Any):
    """A worker, with its optimizer beside it; by default plain SGD."""
    worker, chosen = crew.worker(place, model, strategy, optimizer=optimizer, **settings)
    worker.optimizer = chosen
    return worker


def net(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    """One ordinary step on random data."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 4, generator=generator)
    loss = (model(inputs) - inputs[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def run(place: Place, strategy: str = "adpsgd", steps: int = 10, **settings: Any) -> fw.Worker:
    model = net(place.rank)
    worker = make(place, model, None, strategy, **settings)
    with worker:
        for k in range(steps):
            worker.report(step(model, worker.optimizer, seed=100 * place.rank + k))
    return worker


def merged(worker: fw.Worker) -> int:
    """How many exchanges and merges a worker has taken part in."""
    metrics = worker.metrics()
    return metrics["exchanges"]["done"] + metrics["merges"]["done"]


def train_until(worker: fw.Worker, merges: int) -> None:
    """Step until so many have come about."""
    end_s = time.monotonic() + DEADLINE_S
    while merged(worker) < merges:
        assert time.monotonic() < end_s, f"{merged(worker)} of {merges} merges"
        time.sleep(1e-3)  # this is the computing
        worker.optimizer.step()


def move_to(worker: fw.Worker, value: torch.Tensor | float) -> None:
    """Set a worker's weights between two steps."""
    replica = worker._replica
    replica.begin_moving()
    for block in replica.blocks:
        block.weights.copy_(torch.as_tensor(value, dtype=block.weights.dtype))
    replica.end_moving()
