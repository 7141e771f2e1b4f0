"""A worker's weights as one flat vector, and the corrections waiting for them.

All trainable parameters of one dtype and device become views of one flat buffer. The vector that travels
is the concatenation of the buffers in the widest of their dtypes; with one buffer (the usual case) it is
that buffer, and nothing is converted.

Weights move in two ways only: by the optimizer, and by `boundary`, which adds what is pending. Both run
between two steps, so a forward or backward pass never sees weights that changed half-way.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError


@dataclass(slots=True)
class Block:
    """One flat buffer, its gradient, and where it lies in the vector."""

    weights: Tensor
    gradient: Tensor  # empty where the parameters keep gradients of their own
    start: int
    parameters: list[nn.Parameter]

    @property
    def stop(self) -> int:
        return self.start + self.weights.numel()


class Replica:
    """Flat weights with pending corrections."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.size = blocks[-1].stop
        self.dtype = functools.reduce(torch.promote_types, (block.weights.dtype for block in blocks))
        self._pending: Tensor | None = None
        self.loads = 0  # how often the weights were overwritten

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Make the model's trainable parameters and their gradients views of flat buffers, in place."""
        return cls(flatten(model.named_parameters()))

    @classmethod
    def blank(cls, size: int) -> Self:
        """A replica of zeros without a model, for simulations of timing only."""
        return cls([Block(torch.zeros(size), torch.zeros(size), 0, [])])

    @property
    def weights(self) -> Tensor:
        """The weights as one vector, without what is pending; a view where there is one block."""
        return self._join([block.weights for block in self.blocks])

    @property
    def gradient(self) -> Tensor:
        """The gradients as one vector; a view where there is one block."""
        return self._join([block.gradient for block in self.blocks])

    def set_gradient(self, vector: Tensor) -> None:
        """Overwrite the gradients."""
        for block in self.blocks:
            block.gradient.copy_(vector[block.start : block.stop])

    async def snapshot(self, keep: bool = False) -> Tensor:
        """A copy of the weights, with what is pending; `keep`: for long, so in memory of its own."""
        return self.weights.clone() if self._pending is None else self.weights + self._pending

    async def snapshot_soon(self) -> Tensor | None:
        """The same; None where that would take long."""
        return await self.snapshot()

    def unused(self, vector: Tensor) -> None:
        """A snapshot that nobody has made anything of."""

    def correct(self, vector: Tensor, own: bool = False) -> None:
        """Add a vector that is handed over to what is pending; `own`: nobody else holds it either."""
        # Not in place: a strategy may have handed over a vector that a peer still holds.
        self._pending = vector if self._pending is None else self._pending + vector

    def boundary(self) -> None:
        """Add what is pending to the weights."""
        pending, self._pending = self._pending, None
        if pending is not None:
            for block in self.blocks:
                block.weights += pending[block.start : block.stop]

    def load(self, vector: Tensor) -> None:
        """Overwrite the weights and drop what is pending."""
        self._pending = None
        self.loads += 1
        for block in self.blocks:
            block.weights.copy_(vector[block.start : block.stop])

    def pieces(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and what a vector has for it, as a view in the parameter's shape."""
        for block in self.blocks:
            at = block.start
            for parameter in block.parameters:
                yield parameter, view(vector, at, parameter)
                at += parameter.numel()

    async def take_over(self, vector: Tensor) -> None:
        """Go on with these weights."""
        self.load(vector)

    def _join(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat([part.to(self.dtype) for part in parts])


def flatten(named: Iterable[tuple[str, nn.Parameter]], gradients: bool = True) -> list[Block]:
    """Move parameters (and gradients) into flat buffers, one per dtype and device, in order of appearance."""
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    seen: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
    twins: list[tuple[nn.Parameter, nn.Parameter]] = []
    for name, parameter in named:  # named_parameters yields a parameter tied by identity once
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}; only floating-point weights can be averaged."
            )
        place = (parameter.untyped_storage().data_ptr(), int(parameter.storage_offset()))
        if parameter.numel() and place in seen:  # tied by memory: two parameters over the same numbers
            other, first = seen[place]
            if first.shape != parameter.shape or first.stride() != parameter.stride():
                raise ConfigError(
                    f"parameters {other} and {name} share memory with different shapes; clone one of them."
                )
            twins.append((parameter, first))
            continue
        seen[place] = (name, parameter)
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    if not groups:
        raise ConfigError(
            "the model has no trainable parameter; set requires_grad on what should be trained."
        )
    blocks, start = [], 0
    for (dtype, device), parameters in groups.items():
        size = sum(parameter.numel() for parameter in parameters)
        weights = torch.empty(size, dtype=dtype, device=device)
        blocks.append(Block(weights, torch.zeros_like(weights[: size * gradients]), start, parameters))
        at = 0
        for parameter in parameters:
            piece = view(weights, at, parameter)
            piece.copy_(parameter.detach())
            parameter.data = piece
            if gradients:
                parameter.grad = view(blocks[-1].gradient, at, parameter)
            at += parameter.numel()
        start += size
    for parameter, first in twins:
        parameter.data = first.data
        if gradients:
            parameter.grad = first.grad
    return blocks


def view(flat: Tensor, at: int, like: Tensor) -> Tensor:
    """A piece of the flat buffer in the shape, and where it is dense the memory order, of a parameter."""
    return flat.as_strided(like.shape, strides(like), flat.storage_offset() + at)


def strides(like: Tensor) -> tuple[int, ...]:
    """The memory order of a parameter's piece: dense, and a dense parameter's own."""
    return torch.empty_like(like, device="meta").stride()
