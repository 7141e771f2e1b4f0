"""CIFAR-10: 50,000 small colour photographs of ten kinds of things, and 10,000 to test with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
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
FEWEST = 10
"""Images each worker has at least, where they are divided."""


@dataclass
class Cifar10(Task):
    """Tell airplanes, cars, birds, cats, deer, dogs, frogs, horses, ships and trucks apart.

    Training images are shifted by up to 4 pixels and half of them mirrored, as in He et al., CVPR 2016; all
    workers draw from the same ones. They are kept as bytes and become numbers a batch at a time.

    Settings: data (a file or folder, see `cifar10_files`), net (resnet20 or vgg), batch_size, augment (shift
    and mirror), dirichlet (above 0: each worker has images of its own, each kind divided in shares drawn from
    a Dirichlet distribution with this parameter; 0.1: a few kinds each).
    """

    lr: ClassVar[float] = 0.3

    data: str = ""
    net: Literal["resnet20", "vgg"] = "resnet20"
    batch_size: int = 128
    augment: bool = True
    dirichlet: float = 0.0

    def __post_init__(self) -> None:
        at_least("cifar10: batch_size", self.batch_size, 1)
        at_least("cifar10: dirichlet", self.dirichlet, 0)
        self.own: list[Tensor] = []
        """Which images each worker draws from; none: all draw from all."""
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
        self.own = divided(self.labels, workers, self.dirichlet, seed) if self.dirichlet else []
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
        """Random training images, shifted and mirrored."""
        (images,), (labels,) = self.batches([self.draw(worker, generator)])
        # A GPU's convolutions want the channels of a pixel side by side; weights may lie as they do.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images, labels

    def draw(self, worker: int, generator: torch.Generator) -> Tensor:
        """Which images, how far down and right, whether mirrored; on the CPU, whatever the device."""
        count, own = (self.batch_size,), self.own[worker] if self.own else None
        at = torch.randint(len(self.labels if own is None else own), count, generator=generator)
        draws = [at if own is None else own[at]]
        if self.augment:
            draws += [torch.randint(top, count, generator=generator) for top in (2 * MARGIN + 1,) * 2 + (2,)]
        return torch.stack(draws)

    def batches(self, draws: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The images of several draws."""
        at, *how = torch.cat(list(draws), 1).to(self.device)  # in one copy, should it go to another device
        images = self.images[at]
        if self.augment:
            images = shift_and_mirror(images, *how)
        shape = (len(draws), self.batch_size)
        return self._numbers(images).view(*shape, *images.shape[1:]), self.labels[at].view(shape)

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


def divided(labels: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """The places of each worker's images: of every kind a share drawn from Dirichlet(alpha), nobody without.

    The smaller alpha, the fewer kinds has a worker.
    """
    rng, kinds = np.random.default_rng(seed), labels.cpu().numpy()
    of_kind = [rng.permutation(np.flatnonzero(kinds == kind)) for kind in np.unique(kinds)]
    for _ in range(1000):
        parts: list[list[Any]] = [[] for _ in range(workers)]
        for places in of_kind:
            ends = (np.cumsum(rng.dirichlet([alpha] * workers)) * len(places)).astype(int)[:-1]
            for part, some in zip(parts, np.split(places, ends), strict=True):
                part.append(some)
        own = [torch.from_numpy(np.sort(np.concatenate(part))) for part in parts]
        if min(map(len, own)) >= FEWEST:
            return own
    raise ConfigError(
        f"cifar10: dirichlet={alpha:g} leaves one of {workers} workers without images; take a larger one."
    )
