"""Workers that begin with the same gradients train on the same samples: their script does not share them.

All begin with the same weights. So the first gradients of two workers are the same, to the bit, where both
took the same batch, and practically never else: scripts that share the data out themselves are left alone.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from freewheel.fabric.base import RUNTIME, Fabric, Spawn, Tag, hear

FIRST: Tag = (RUNTIME, "first")

log = logging.getLogger("freewheel")


@torch.no_grad()
def summed(parameters: Iterable[nn.Parameter]) -> int:
    """What gradients sum up to; 0: there are none, or they say nothing."""
    norms: list[Tensor] = []
    for gradient in (one.grad for one in parameters if one.grad is not None):
        numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    found = torch.stack(norms).tolist() if norms else []
    return zlib.crc32(repr(found).encode()) if any(found) and all(map(math.isfinite, found)) else 0


class Firsts:
    """What the workers' first gradients sum up to, at the one of lowest rank, which compares them."""

    def __init__(self, fabric: Fabric, spawn: Spawn) -> None:
        self._fabric, self._known, self._said = fabric, dict[int, int](), False
        spawn(hear(fabric, FIRST, lambda message: self._note(message.sender, *message.numbers(1, 1))))

    async def tell(self, mine: int) -> None:
        """This worker's are known."""
        root = self._fabric.members[0]
        if root == self._fabric.rank:
            self._note(root, mine)
        else:
            self._fabric.post(root, FIRST, note=(mine,))

    def _note(self, rank: int, mine: int) -> None:
        alike = next((one for one, known in self._known.items() if one != rank and known == mine), None)
        self._known[rank] = mine
        if alike is not None and not self._said:
            self._said = True
            log.warning(
                "workers %d and %d began with the same gradients, to the bit: they train on the same samples "
                "in the same order. Let worker.loader share them out, or share them by worker.rank",
                *sorted((alike, rank)),
            )
