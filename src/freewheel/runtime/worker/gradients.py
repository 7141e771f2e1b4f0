"""The gradients of one optimizer's parameters as one vector, for strategies that average gradients.

    the gradients, parameter by parameter | for each parameter, whether it has one | the loss of a closure

A parameter that has no gradient on any worker keeps none, as in a loop of its own: zeros would let momentum
and weight decay move it. The loss is averaged too, since an optimizer that calls its closure again and again
(LBFGS) goes by it: all workers must take the same way.

Workers that begin with the same gradients train on the same samples: their script does not share them. All
begin with the same weights, so the first gradients of two workers are the same, to the bit, where both took
the same batch, and practically never else: scripts that share the data out themselves are left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from freewheel.errors import Diverged
from freewheel.fabric.secret import Forged
from freewheel.replica import strides
from freewheel.runtime.membership.rendezvous import Rendezvous

log = logging.getLogger("freewheel")


class Gradients:
    """Gradients that go into a vector and come back out of it."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        dtype: torch.dtype,
        make: Callable[[int, torch.dtype], Tensor],
        reusable: Callable[[Tensor], bool],
        names: Mapping[int, str],
    ) -> None:
        self._parameters = list(parameters)
        starts = itertools.accumulate((one.numel() for one in self._parameters), initial=0)
        self._places = [
            (one.shape, strides(one), at) for one, at in zip(self._parameters, starts, strict=False)
        ]
        self._dtype, self._make, self._reusable, self._names = dtype, make, reusable, names
        self._numbers = sum(one.numel() for one in self._parameters)
        self.size = self._numbers + len(self._parameters) + 1
        self.loss = 0.0  # what the closure has said; the mean of all workers' once gradients were merged
        self._in_use: Tensor | None = None
        self._spare: deque[Tensor] = deque(maxlen=2)
        self._sparse: set[int] = set()  # those stay sparse, for optimizers that need them so

    def take(self) -> Tensor:
        """All of them as one vector; where there is none, zeros. Diverged if a number is not finite."""
        flat = self._spare.popleft() if self._spare else self._make(self.size, self._dtype)
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
                    raise Diverged(f"gradients of {self._names.get(id(one), '?')} are not finite")
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


@torch.no_grad()
def summed(parameters: Iterable[nn.Parameter]) -> int:
    """What gradients sum up to; 0: there are none, or they say nothing."""
    norms: list[Tensor] = []
    for gradient in (one.grad for one in parameters if one.grad is not None):
        numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    found = torch.stack(norms).tolist() if norms else []
    return zlib.crc32(repr(found).encode()) if any(found) and all(map(math.isfinite, found)) else 0


def compare(rendezvous: Rendezvous, mine: int) -> None:
    """Say so, once, where the first gradients of another worker have summed up to the same."""
    rank = str(rendezvous.place.rank)
    with contextlib.suppress(RuntimeError, OSError, Forged):  # the store is gone, or has a stranger's word
        other = rendezvous.first(f"gradients/{mine}", rank)
        if other != rank and rendezvous.first("alike", rank) == rank:
            log.warning(
                "workers %d and %d began with the same gradients, to the bit: they train on the same samples "
                "in the same order. Let worker.loader share them out, or share them by worker.rank",
                *sorted(map(int, (other, rank))),
            )
