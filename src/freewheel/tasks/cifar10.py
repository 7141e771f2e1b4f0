"""CIFAR-10: 50,000 small colour photographs of ten kinds of things, and 10,000 to test with."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from freewheel.errors import ConfigError, at_least, first_line
from freewheel.task import Task
from freewheel.tasks.nets import resnet20, vgg

SIDE, CLASSES = 32, 10
BATCHES = [f"data_batch_{k}" for k in range(1, 6)]
WANTED = (
    "Give an .npz file with train_image, test_image (uint8, N×32×32×3) and train_label, test_label (0 to 9); "
    "or with JPEG files instead of pixels (train_jpeg: their bytes, train_end: where each ends; and test_…); "
    "or the folder of CIFAR-10's Python version (data_batch_1 to data_batch_5, test_batch)."
)

Split = tuple[Tensor, Tensor]
"""Images (uint8, N×3×32×32) and labels (int64)."""


def read(path: Path) -> tuple[Split, Split]:
    """Training and test images with their labels."""
    if not os.path.exists(path):  # which, unlike Path.exists, never raises
        raise ConfigError(f"cifar10: there is no {path}. {WANTED}")
    try:
        if not path.is_dir():
            return _read_npz(path)
        images, labels = zip(*(_read_batch(path / name) for name in BATCHES), strict=True)
        return (torch.cat(images), torch.cat(labels)), _read_batch(path / "test_batch")
    except _Unfit as reason:
        raise ConfigError(f"cifar10: {path} will not do: {reason}. {WANTED}") from None


class _Unfit(Exception):
    """Why a file or folder is not CIFAR-10, in a few words."""


def _read_npz(path: Path) -> tuple[Split, Split]:
    try:
        # Without pickles (numpy's default), so that a foreign file cannot run code.
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise _Unfit("it holds a single array")
            return _split(arrays, "train"), _split(arrays, "test")
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise _Unfit(f"it cannot be read as an .npz file ({first_line(error)})") from None


def _split(arrays: Mapping[str, NDArray[Any]], part: str) -> Split:
    labels = _array(arrays, f"{part}_label")
    if f"{part}_jpeg" in arrays:
        images = _decode(_array(arrays, f"{part}_jpeg"), _array(arrays, f"{part}_end"), part)
    else:
        images = _array(arrays, f"{part}_image")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (SIDE, SIDE, 3):
        raise _Unfit(f"{part}_image is {_looks(images)} instead of uint8, N×32×32×3")
    return _checked(images.transpose(0, 3, 1, 2), labels, part)


def _array(arrays: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in arrays:
        raise _Unfit(f"it has no {name}, only {', '.join(arrays) or 'nothing'}")
    return arrays[name]


def _checked(images: NDArray[Any], labels: NDArray[Any], part: str) -> Split:
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise _Unfit(f"the labels of {part} are {_looks(labels)} instead of N whole numbers")
    if len(images) != len(labels) or not len(labels):
        raise _Unfit(f"{part} has {len(images)} images and {len(labels)} labels")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise _Unfit(f"the labels of {part} go from {labels.min()} to {labels.max()} instead of 0 to 9")
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))


def _decode(data: NDArray[Any], ends: NDArray[Any], part: str) -> NDArray[Any]:
    """Pixels from JPEG files that lie one after another."""
    try:
        from PIL import Image  # type: ignore[import-not-found, unused-ignore]  # needed here only
    except ImportError:
        raise _Unfit(
            "its images are JPEG files, and Pillow, which decodes them, is not installed (pip install pillow)"
        ) from None
    if data.dtype != np.uint8 or data.ndim != 1:
        raise _Unfit(f"{part}_jpeg is {_looks(data)} instead of uint8, one long row of bytes")
    if ends.dtype.kind not in "iu" or ends.ndim != 1:
        raise _Unfit(f"{part}_end is {_looks(ends)} instead of N whole numbers")
    raw, start = data.tobytes(), 0
    images = np.empty((len(ends), SIDE, SIDE, 3), np.uint8)
    for k, end in enumerate(ends.tolist()):
        if not start < end <= len(raw):
            raise _Unfit(f"{part}_end says image {k} ends at byte {end} of {len(raw)}, and begins at {start}")
        try:
            with Image.open(io.BytesIO(raw[start:end]), formats=("JPEG",)) as image:
                if image.size != (SIDE, SIDE):
                    raise _Unfit(f"image {k} of {part} has {image.width}×{image.height} pixels, not 32×32")
                images[k] = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError):  # Pillow's for broken files
            raise _Unfit(f"image {k} of {part} cannot be decoded as JPEG") from None
        start = end
    return images


def _read_batch(path: Path) -> Split:
    """One of the published files: a pickled dict with rows of 3072 bytes (red, then green, then blue)."""
    try:
        with path.open("rb") as file:
            content = _OnlyArrays(file, encoding="bytes").load()
    except FileNotFoundError:
        raise _Unfit(f"it has no {path.name}") from None
    except Exception as error:  # a broken pickle can raise anything
        raise _Unfit(f"{path.name} cannot be read ({first_line(error)})") from None
    named = content if isinstance(content, dict) else {}
    rows = named.get(b"data", named.get("data"))
    labels = named.get(b"labels", named.get("labels"))
    if not isinstance(rows, np.ndarray) or not isinstance(labels, list):
        raise _Unfit(f"{path.name} has no data and labels")
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3 * SIDE * SIDE:
        raise _Unfit(f"the data of {path.name} are {_looks(rows)} instead of uint8, N×3072")
    if not all(isinstance(label, int) and 0 <= label < CLASSES for label in labels):
        raise _Unfit(f"the labels of {path.name} are not whole numbers from 0 to 9")
    return _checked(rows.reshape(-1, 3, SIDE, SIDE), np.array(labels, np.int64), path.name)


_RECONSTRUCT = np.empty(0).__reduce__()[0]


class _OnlyArrays(pickle.Unpickler):
    """Reads pickled numpy arrays and plain values, and nothing else.

    A pickle may name any function to be called while it is read; CIFAR-10's files name three, those that
    rebuild an array. All others are refused, so a file from a stranger cannot run code here.
    """

    allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # written by numpy 2
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return self.allowed[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None


def _looks(array: NDArray[Any]) -> str:
    return f"{array.dtype}, {'×'.join(map(str, array.shape)) or 'a single value'}"


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

    Settings: data (a file or folder, see `WANTED`), net (resnet20 or vgg), batch_size, augment (shift
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
                + WANTED
            )
        if self.loaded_from != self.data:
            (self.images, self.labels), (self.test_images, self.test_labels) = read(
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
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
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
