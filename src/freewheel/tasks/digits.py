"""Handwritten digits: 1,797 images of 8×8 pixels that come with scikit-learn."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from freewheel.errors import at_least
from freewheel.task import Task
from freewheel.tasks.guessing import Guessing

TEST_IMAGES = 360
COMMON = 256  # how many training images workers compare themselves by
NETS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ),
}


@dataclass
class Digits(Guessing):
    """Tell ten digits apart; all workers draw from the same training images, unless they are kept apart.

    Settings: net (mlp or cnn), batch_size, apart (images are dealt out sorted: each worker has a few kinds).
    """

    lr: ClassVar[float] = 0.2
    to = Task.to  # such small images stay on the CPU

    net: Literal["mlp", "cnn"] = "mlp"
    batch_size: int = 32
    apart: bool = False

    def __post_init__(self) -> None:
        at_least("digits: batch_size", self.batch_size, 1)

    def prepare(self, workers: int, seed: int) -> None:
        from sklearn.datasets import load_digits  # slow to import, so only where it is used

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(data.target)[order]
        self.test_images, self.images = images.tensor_split([TEST_IMAGES])
        self.test_labels, self.labels = labels.tensor_split([TEST_IMAGES])
        self.common_images, self.common_labels = self.images[:COMMON], self.labels[:COMMON]
        if self.apart:
            by_label = torch.argsort(self.labels, stable=True)
            self.images, self.labels = self.images[by_label], self.labels[by_label]
        self.ends = [len(self.labels) * k // workers for k in range(workers + 1)]

    def model(self) -> nn.Module:
        return NETS[self.net]()

    def batch(self, worker: int, generator: torch.Generator) -> Any:
        first, end = (self.ends[worker], self.ends[worker + 1]) if self.apart else (0, len(self.labels))
        at = torch.randint(first, end, (self.batch_size,), generator=generator)
        return self.images[at], self.labels[at]

    def score(self, model: nn.Module) -> float:
        return self._measure(model, self.common_images, self.common_labels)[0]
