"""What tasks have in common whose model guesses one of several classes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from freewheel.task import Task

PART = 1000  # how many are evaluated at once


class Guessing(Task):
    """A batch is what the model sees, and the class it is to guess for each, or for each place in it."""

    device = torch.device("cpu")
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> None:
        self.device = device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of all guesses, in nats."""
        seen, classes = batch
        return F.cross_entropy(model(seen).flatten(0, -2), classes.flatten())

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        return self._measure(model, self.test_images, self.test_labels)

    @torch.no_grad()
    def _measure(self, model: nn.Module, data: Tensor, classes: Tensor) -> tuple[float, float]:
        """The mean loss, and the share of right guesses."""
        loss, hits = torch.zeros(2, device=self.device)
        for some, theirs in zip(torch.split(data, PART), torch.split(classes, PART), strict=True):
            guesses = model(self._numbers(some))
            loss += F.cross_entropy(guesses.flatten(0, -2), theirs.flatten()) * (len(some) / len(data))
            hits += (guesses.argmax(-1) == theirs).sum()
        return loss.item(), hits.item() / classes.numel()

    def _numbers(self, data: Tensor) -> Tensor:
        """Data as the model sees them."""
        return data
