"""The gradients of one optimizer's parameters as one vector, for strategies that average gradients.

    the gradients, parameter by parameter | for each parameter, whether it has one | the loss of a closure

A parameter that has no gradient on any worker keeps none, as in a loop of its own: zeros would let momentum
and weight decay move it. The loss is averaged too, since an optimizer that calls its closure again and again
(LBFGS) goes by it: all workers must take the same way.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from freewheel.errors import Diverged
from freewheel.replica import strides


class Gradients:
    """Gradients that go into a vector and come back out of it."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[int], Tensor],
        reusable: Callable[[Tensor], bool],
        name: Callable[[nn.Parameter], str],
    ) -> None:
        self._parameters = list(parameters)
        starts = itertools.accumulate((one.numel() for one in self._parameters), initial=0)
        self._places = [
            (one.shape, strides(one), at) for one, at in zip(self._parameters, starts, strict=False)
        ]
        self._make, self._reusable, self._name = make, reusable, name
        self._numbers = sum(one.numel() for one in self._parameters)
        self.size = self._numbers + len(self._parameters) + 1
        self.loss = 0.0  # what the closure has said; the mean of all workers' once gradients were merged
        self._in_use: Tensor | None = None
        self._spare: deque[Tensor] = deque(maxlen=2)
        self._sparse: set[int] = set()  # those stay sparse, for optimizers that need them so

    def take(self) -> Tensor:
        """All of them as one vector; where there is none, zeros. Diverged if a number is not finite."""
        flat = self._spare.popleft() if self._spare else self._make(self.size)
        into, given = list[Tensor](), list[Tensor]()
        for one, piece in self._pieces(flat):
            if one.grad is None:
                piece.zero_()
            elif one.grad.layout != torch.strided:
                self._sparse.add(id(one))
                # Added up first, as optimizers do: in another order the sum is another one.
                added = one.grad.coalesce() if one.grad.layout == torch.sparse_coo else one.grad
                piece.copy_(added.to_dense())
            else:
                into.append(piece)
                given.append(one.grad)
        if into:
            torch._foreach_copy_(into, given)
        marks = [float(one.grad is not None) for one in self._parameters]
        flat[self._numbers :].copy_(torch.tensor([*marks, self.loss], dtype=torch.float64))
        if not math.isfinite(flat.sum().item()):
            for one, piece in self._pieces(flat):
                if not piece.isfinite().all():
                    raise Diverged(f"gradients of {self._name(one)} are not finite")
            if not math.isfinite(self.loss):
                raise Diverged("the closure's loss is not finite")
        return flat

    def put(self, vector: Tensor) -> None:
        """Let the optimizer use these, where they are: the vector is in use until the next ones."""
        *marks, self.loss = vector[self._numbers :].tolist()
        for (one, piece), mark in zip(self._pieces(vector), marks, strict=True):
            if not mark:
                one.grad = None  # nobody has one
            elif id(one) in self._sparse:
                one.grad = piece.to_sparse(1).to(one.dtype)
            else:
                one.grad = piece.to(one.dtype)
        if vector.is_cuda:  # what was converted is there before the optimizer goes on
            torch.cuda.current_stream(vector.device).synchronize()
        if self._in_use is not None and self._reusable(self._in_use):
            self._spare.append(self._in_use)
        self._in_use = vector

    def let_go(self) -> None:
        """Keep no memory."""
        self._in_use = None
        self._spare.clear()

    def _pieces(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        begins = vector.storage_offset()
        for one, (shape, stride, at) in zip(self._parameters, self._places, strict=True):
            yield one, vector.as_strided(shape, stride, begins + at)
