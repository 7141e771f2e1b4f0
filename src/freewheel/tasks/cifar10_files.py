"""Reading CIFAR-10: from one .npz file, of pixels or of JPEG images, or from its authors' own folder."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freewheel.errors import ConfigError, first_line

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
        """One of the allowed functions."""
        try:
            return self.allowed[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None


def _looks(array: NDArray[Any]) -> str:
    return f"{array.dtype}, {'×'.join(map(str, array.shape)) or 'a single value'}"
