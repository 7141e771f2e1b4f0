"""CIFAR-10: 50,000 small colour photographs of ten kinds of things, and 10,000 to test with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from freewheel.errors import ConfigError, at_least
from freewheel.task import Task
from freewheel.tasks import cifar10_files
from freewheel.tasks.nets import resnet20, vgg

NETS = {"resnet20": resnet20, "vgg": vgg}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training images' red, green and blue, each from 0 to 1."""
MARGIN = 4
"""Pixels by which an image is shifted at most."""
PART = 1000
"""How many images are evaluated at once, and how many training images workers compare themselves by."""


@dataclass
class Cifar10(Task):
    """Tell airplanes, cars, birds, cats, deer, dogs, frogs, horses, ships and trucks apart.

    Training images are shifted by up to 4 pixels and half of them mirrored, as in He et al., CVPR 2016; all
    workers draw from the same ones. They are kept as bytes and become numbers a batch at a time.

    Settings: data (a file or folder, see `cifar10_files`), net (resnet20 or vgg), batch_size, augment (shift
    and mirror).
    """

    lr: ClassVar[float] = 0.3

    data: str = ""
    net: Literal["resnet20", "vgg"] = "resnet20"
    batch_size: int = 128
    augment: bool = True

    def __post_init__(self) -> None:
        at_least("cifar10: batch_size", self.batch_size, 1)
        self.device = torch.device("cpu")
        self.loaded_from = ""

    def prepare(self, workers: int, seed: int) -> None:
        """Read the images, unless that was done."""
        if not self.data:
            raise ConfigError(
                "cifar10: no data given. Name the file or folder: --task cifar10:data=PATH, or --data PATH. "
                + cifar10_files.WANTED
            )
        if self.loaded_from != self.data:
            (self.images, self.labels), (self.test_images, self.test_labels) = cifar10_files.read(
                Path(self.data).expanduser()
            )
            self.loaded_from = self.data
        self.to(self.device)

    def to(self, device: torch.device) -> None:
        """Move the images to a device: from now on batches are there, and models are evaluated there."""
        self.device = device
        if self.loaded_from:
            self.images, self.labels = self.images.to(device), self.labels.to(device)
            self.test_images, self.test_labels = self.test_images.to(device), self.test_labels.to(device)
        self.mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self.std = 255 * torch.tensor(STD, device=device).view(3, 1, 1)

    def model(self) -> nn.Module:
        """The net that was asked for."""
        return NETS[self.net]()

    def batch(self, worker: int, generator: torch.Generator) -> Any:
        """Random training images, shifted and mirrored. The generator is the CPU's, whatever the device."""
        count = (self.batch_size,)
        draws = [torch.randint(len(self.labels), count, generator=generator)]
        if self.augment:
            draws += [torch.randint(top, count, generator=generator) for top in (2 * MARGIN + 1,) * 2 + (2,)]
        at, *how = torch.stack(draws).to(self.device)  # in one copy, should it go to another device
        images = self.images[at]
        if self.augment:
            images = shift_and_mirror(images, *how)
        return self._numbers(images), self.labels[at]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """Loss and accuracy on the test images."""
        return self._measure(model, self.test_images, self.test_labels)

    def score(self, model: nn.Module) -> float:
        """Loss on the first training images, as they are."""
        return self._measure(model, self.images[:PART], self.labels[:PART])[0]

    @torch.no_grad()
    def _measure(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
        loss = torch.zeros((), device=self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        for some, theirs in zip(torch.split(images, PART), torch.split(labels, PART), strict=True):
            outputs = model(self._numbers(some))
            loss += F.cross_entropy(outputs, theirs, reduction="sum")
            hits += (outputs.argmax(1) == theirs).sum()
        return loss.item() / len(labels), hits.item() / len(labels)

    def _numbers(self, images: Tensor) -> Tensor:
        """Bytes become numbers around 0, with a spread of about 1 in each channel."""
        return images.float().sub_(self.mean).div_(self.std)


def shift_and_mirror(images: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    """Cut each image out of itself with a black margin, `down` and `right` from the corner; mirror some."""
    count, channels, height, width = images.shape
    steps = [torch.arange(n, device=images.device) for n in (count, channels, height, width)]
    rows = steps[2] + down.unsqueeze(1)
    columns = torch.where(mirror.unsqueeze(1) == 1, steps[3].flip(0), steps[3]) + right.unsqueeze(1)
    wide = F.pad(images, (MARGIN,) * 4)
    return wide[
        steps[0].view(-1, 1, 1, 1), steps[1].view(-1, 1, 1), rows[:, None, :, None], columns[:, None, None]
    ]
