"""SASGD: bulk-synchronous SGD with rare aggregation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freewheel.errors import ConfigError, at_least
from freewheel.strategy import Strategy

if TYPE_CHECKING:
    from freewheel.fabric.merges import Merge
    from freewheel.node import Node


@dataclass
class SASGD(Strategy):
    """Step alone T times, then add up what all workers did by one global reduction.

        for t = 1..T:  x' <- x' + u_i                 local steps from the common x
        x <- x + (γ_p/γ) Σ_j Σ_t u_j ;  x' <- x       everybody waits for the reduction

    With γ_p = γ/p (the default) this is Local SGD, also called K-AVG: the mean of the models. With
    γ_p = γ all workers' updates are added up, which needs a small γ.

    Settings: interval (T), scale (γ_p/γ; None is 1/p).
    Late, lost and doubled messages: a late worker delays everybody once in T steps. When one is lost, the
    others reduce again without it (p is how many they are), and what it did since the last merge is lost. A
    worker that comes begins with the common x at a merge.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.SASGD(interval=8), workers=4, steps=40).staleness_max
        7.0

    Reference: Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient descent algorithm for
    deep-learning applications", ICPP 2017.
    Differences: sums the optimizer's updates instead of raw gradients, which is the same for plain SGD and
    lets any optimizer be used.
    """

    name = "sasgd"
    reference = "Cong, Bhardwaj, Feng, ICPP 2017; with γ_p = γ/p also Local SGD and K-AVG"
    waits_for = "all"
    keeps_mean = True

    interval: int = 8
    scale: float | None = None

    def check(self, world_size: int) -> None:
        """T is a number of steps, the scale a factor."""
        at_least("sasgd: the interval T", self.interval, 1)
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ConfigError(f"sasgd: the scale γ_p/γ must be above 0, not {self.scale:g}.")

    async def start(self, node: Node) -> None:
        """Remember the common model x; one who comes back does so at a merge."""
        self.x = node.snapshot()
        if node.rejoined:
            await self.merge(node)

    async def after_step(self, node: Node) -> None:
        """Every T steps: reduce."""
        if node.steps % self.interval == 0:
            await self.merge(node)

    async def merge(self, node: Node) -> None:
        """Add up what all have done since the last time."""
        s, total, p = await node.merge(lambda merge: self.add_up(node, merge))
        scale = 1 / p if self.scale is None else self.scale
        self.x = self.x + scale * total
        node.correct(self.x - s)

    async def add_up(self, node: Node, merge: Merge) -> tuple[Tensor, Tensor, int]:
        """This worker's snapshot, the sum of all updates, and how many workers made them."""
        s = node.snapshot()
        return s, await merge.sum(s - self.x), len(merge.members)

    def handover(self, node: Node) -> Tensor:
        """The common model."""
        return self.x.clone()

    def entered(self, node: Node) -> None:
        """What was taken over is the common model."""
        self.x = node.weights()
