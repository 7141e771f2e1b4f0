"""CIFAR-10: 50,000 small colour photographs of ten kinds of things, and 10,000 to test with."""

import io
import itertools
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from freewheel.errors import ConfigError, at_least, first_line
from freewheel.tasks.guessing import PART, Guessing
from freewheel.tasks.nets import resnet20, vgg

SIDE, CLASSES = 32, 10
BATCHES = [f"data_batch_{k}" for k in range(1, 6)]
WANTED = (
    "Give an .npz file with train_image, test_image (uint8, N×32×32×3) and train_label, test_label (0 to 9); "
    "or with JPEG files instead of pixels (train_jpeg: their bytes, train_end: where each ends; and test_…), "
    "which Pillow decodes (pip install pillow); or the folder of CIFAR-10's Python version (data_batch_1 to "
    "data_batch_5, test_batch)."
)

Array = NDArray[Any]
Split = tuple[Tensor, Tensor]  # images (uint8, N×3×32×32) and labels (int64)


def read(path: Path) -> tuple[Split, Split]:
    if not os.path.exists(path):  # which, unlike Path.exists, never raises
        raise ConfigError(f"cifar10: there is no {path}. {WANTED}")
    try:
        train, test = itertools.starmap(_checked, (_of_folder if path.is_dir() else _of_npz)(path))
    except Exception as error:  # a broken file can raise anything
        raise ConfigError(f"cifar10: {path} will not do ({first_line(error)}). {WANTED}") from None
    return train, test


def _of_npz(path: Path) -> Iterator[tuple[Array, Array]]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # a pickle could run code
        for part in ("train", "test"):
            if f"{part}_jpeg" in arrays:
                images = _decoded(arrays[f"{part}_jpeg"].tobytes(), arrays[f"{part}_end"])
            else:
                images = arrays[f"{part}_image"]
            yield images.transpose(0, 3, 1, 2), arrays[f"{part}_label"]


def _decoded(files: bytes, ends: Array) -> Array:
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]  # needed here only

    images = []
    for begin, end in itertools.pairwise([0, *ends.tolist()]):
        with Image.open(io.BytesIO(files[begin:end]), formats=("JPEG",)) as image:
            images.append(np.asarray(image.convert("RGB")))
    return np.stack(images)


def _of_folder(path: Path) -> Iterator[tuple[Array, Array]]:
    """Pickled dicts with rows of 3072 bytes: red, then green, then blue."""
    for names in (BATCHES, ["test_batch"]):
        if missing := [name for name in names if not (path / name).is_file()]:
            raise ValueError(f"it has no {', '.join(missing)}")
        files = [io.BytesIO((path / name).read_bytes()) for name in names]
        batches = [_OnlyArrays(file, encoding="bytes").load() for file in files]
        images = np.concatenate([batch[b"data"] for batch in batches])
        labels = np.concatenate([batch[b"labels"] for batch in batches])
        yield images.reshape(len(images), 3, SIDE, SIDE), labels


ALLOWED = {
    "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
}


class _OnlyArrays(pickle.Unpickler):
    """Reads pickled numpy arrays and plain values only, for a pickle may name any function to be called.

    Only those that rebuild an array are `ALLOWED`, so that a stranger's file cannot run code here.
    """

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        known = name.replace("numpy._core.", "numpy.core.")  # as numpy 2 writes it
        if known not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {name}")
        return ALLOWED[known]


def _checked(images: Array, labels: Array) -> Split:
    if images.dtype != np.uint8 or images.shape[1:] != (3, SIDE, SIDE):
        raise ValueError(f"its images are {images.dtype}, {images.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels):
        raise ValueError(f"its labels are {labels.dtype}, {labels.shape}, of {len(images)} images")
    if not set(labels.tolist()) <= set(range(CLASSES)):
        raise ValueError(f"its labels go from {labels.min()} to {labels.max()}")
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))


NETS = {"resnet20": resnet20, "vgg": vgg}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # red, green and blue, each from 0 to 1
MARGIN = 4  # pixels by which an image is shifted at most
FEWEST = 10  # images each worker has at least, where they are divided


@dataclass
class Cifar10(Guessing):
    """Tell airplanes, cars, birds, cats, deer, dogs, frogs, horses, ships and trucks apart.

    Training images are shifted by up to 4 pixels and half of them mirrored, as in He et al., CVPR 2016; all
    workers draw from the same ones. Images are kept as bytes; each batch becomes numbers when it is drawn.

    Settings: data (a file or folder, see `WANTED`), net (resnet20 or vgg), batch_size, augment (shift
    and mirror), dirichlet (above 0: each worker has images of its own, of each kind a share drawn from a
    Dirichlet distribution with this parameter; 0.1: a few kinds each).
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
        self.mean, self.std = (255 * torch.tensor(of).view(3, 1, 1) for of in (MEAN, STD))

    def prepare(self, workers: int, seed: int) -> None:
        if not self.data:
            raise ConfigError(
                "cifar10: no data given. Name the file or folder: --task cifar10:data=PATH, or --data PATH. "
                + WANTED
            )
        if not hasattr(self, "images"):  # else they were read already
            train, test = read(Path(self.data).expanduser())
            (self.images, self.labels), (self.test_images, self.test_labels) = train, test
        self.own = divided(self.labels, workers, self.dirichlet, seed) if self.dirichlet else None
        self.to(self.device)

    def model(self) -> nn.Module:
        return NETS[self.net]()

    def batch(self, worker: int, generator: torch.Generator) -> Any:
        (images,), (labels,) = self.batches([self.draw(worker, generator)])
        # Convolutions on a GPU want a pixel's channels side by side; the weights' layout does not matter.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images, labels

    def draw(self, worker: int, generator: torch.Generator) -> Tensor:
        """Which images, how far down and right, whether mirrored; on the CPU, whatever the device."""
        shift = 2 * MARGIN + 1
        own = torch.arange(len(self.labels)) if self.own is None else self.own[worker]
        tops = (len(own), shift, shift, 2) if self.augment else (len(own),)
        at, *how = (torch.randint(top, (self.batch_size,), generator=generator) for top in tops)
        return torch.stack([own[at], *how])

    def batches(self, draws: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        at, *how = torch.cat(list(draws), 1).to(self.device)  # in one copy, should it go to another device
        images = self.images[at]
        if self.augment:
            images = shift_and_mirror(images, *how)
        shape = (len(draws), self.batch_size)
        return self._numbers(images).view(*shape, *images.shape[1:]), self.labels[at].view(shape)

    def score(self, model: nn.Module) -> float:
        return self._measure(model, self.images[:PART], self.labels[:PART])[0]

    def _numbers(self, images: Tensor) -> Tensor:
        """Bytes become numbers around 0, with a spread of about 1 in each channel."""
        return images.float().sub_(self.mean).div_(self.std)


def shift_and_mirror(images: Tensor, down: Tensor, right: Tensor, mirror: Tensor) -> Tensor:
    """Cut each image out of itself with a black margin, `down` and `right` from the corner; mirror some."""
    height, width = images.shape[2:]
    windows = F.pad(images, (MARGIN,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    cut = windows[torch.arange(len(images), device=images.device), :, down, right]
    return torch.where(mirror.view(-1, 1, 1, 1) == 1, cut.flip(3), cut)


def divided(labels: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """Each worker's images, by their places: the smaller alpha, the fewer kinds."""
    rng, kinds = np.random.default_rng(seed), labels.cpu().numpy()
    for _ in range(1000):
        shares = rng.dirichlet([alpha] * workers, CLASSES)
        owners = np.zeros(len(kinds), int)
        for kind, share in enumerate(shares):
            places = rng.permutation(np.flatnonzero(kinds == kind))
            counts = np.diff((share.cumsum() * len(places)).round(), prepend=0).astype(int)
            owners[places] = np.repeat(range(workers), counts)
        if np.bincount(owners, minlength=workers).min() >= FEWEST:
            return [torch.from_numpy(np.flatnonzero(owners == rank)) for rank in range(workers)]
    raise ConfigError(
        f"cifar10: dirichlet={alpha:g} leaves one of {workers} workers without images; take a larger one."
    )
