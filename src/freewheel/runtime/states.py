"""An optimizer's state as one vector of numbers, for handing it to a worker that joins.

What is no tensor (names, shapes, learning rates) goes in front as text, a number for each byte: so it
travels as every vector does, and nothing that comes from another worker is ever run.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import ConfigError

TENSOR = "tensor"
"""The only key of what stands for a tensor in the text: its type, its shape, and where its numbers begin."""


def pack(state: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Plain data with tensors as a vector; ConfigError if something in it is neither."""
    tensors: list[Tensor] = []
    length = 0

    def plain(value: Any) -> Any:
        nonlocal length
        if isinstance(value, Tensor):
            tensors.append(value.detach().flatten().to("cpu", dtype))
            length += value.numel()
            return {
                TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), length - value.numel()]
            }
        if isinstance(value, dict):
            return [[key, plain(one)] for key, one in value.items()]
        if isinstance(value, list | tuple):
            return {type(value).__name__: [plain(one) for one in value]}
        return value

    try:
        text = zlib.compress(json.dumps(plain(state), allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer's state cannot be handed over: {error}.") from None
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(dtype)
    return torch.cat([torch.tensor([float(len(text))], dtype=dtype), words, *tensors])


def unpack(vector: Tensor) -> dict[str, Any]:
    """The way back."""
    length = int(vector[0])
    text = bytes(vector[1 : 1 + length].to(torch.uint8).tolist())
    numbers = vector[1 + length :]

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return {key: rich(one) for key, one in value}
        if isinstance(value, dict):
            ((kind, inner),) = value.items()
            if kind == TENSOR:
                dtype, shape, at = inner
                return numbers[at : at + math.prod(shape)].view(shape).to(getattr(torch, dtype))
            return (tuple if kind == "tuple" else list)(map(rich, inner))
        return value

    found: dict[str, Any] = rich(json.loads(zlib.decompress(text)))
    return found
