"""SASGD: bulk-synchronous SGD with rare aggregation."""

import math
import zlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from freewheel.errors import ConfigError, above_zero, at_least
from freewheel.fabric.merges import Merge
from freewheel.node import Node
from freewheel.strategy import LONGEST, Machines, Strategy


def check_state(name: str, state: str, every: int) -> None:
    if state not in ("local", "averaged"):
        raise ConfigError(f"{name}: state must be 'local' or 'averaged', not {state!r}.")
    at_least(f"{name}: state_every", every, 1)


async def mean_moments(node: Node, merge: Merge, asked: bool = True) -> dict[str, Tensor]:
    """The means of the moments of all members that have some, by name; a new member has none yet.

    Moments that cannot be averaged are an error where the user `asked` for that, else they stay local.
    """
    names = []
    try:
        names = node.moments.names()
    except ConfigError:
        if asked:
            raise
    notes = await merge.gather((len(names), zlib.crc32("/".join(names).encode())))
    having = [rank for rank, (count, _) in notes.items() if count]
    if len({notes[rank] for rank in having}) > 1:
        if not asked:
            return {}
        raise ConfigError(
            f"state=averaged: the optimizer of worker {node.rank} has moments that others have not. "
            "Give all workers the same optimizer."
        )
    weights = {rank: 1 / len(having) if rank in having else 0.0 for rank in notes}
    if not names:  # it takes part all the same, with a weight of 0
        names = ["none"] * max(int(count) for count, _ in notes.values())
    return {name: await merge.reduce(node.moments.get(name), weights) for name in names}


OUTER = 0.3  # the momentum of the common model where the workers' optimizers have momentum


@dataclass
class SASGD(Strategy):
    """Step alone T times, then add up what all workers did by one global reduction.

        for t = 1..T:  x' <- x' + u_i                 local steps from the common x
        x <- x + (γ_p/γ) Σ_j Σ_t u_j ;  x' <- x       everybody waits for the reduction

    With γ_p = γ/p (the default) this is Local SGD, or K-AVG: the mean of the models. With γ_p = γ updates
    add up, which needs a small γ.

    Settings: interval (T), state (whether the optimizer's moments stay local or are averaged; None: averaged
    where it has momentum and the common model is the mean), state_every (reductions for each such average),
    scale (γ_p/γ; None: 1/p), outer (momentum β of the common model: x <- x̄ + β v, v its last move; None: 0.3
    where state and scale are None, T > 1 and the optimizer has momentum, else 0), early (so many steps at
    the beginning are each followed by a reduction).
    Late, lost and doubled messages: a late worker delays everybody once in T steps. When one is lost, the
    others reduce again without it (p counts them), and its steps since the last merge are lost. A worker
    that joins begins with a copy of a member, at a merge (where γ_p or β is given, with the common x).

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.SASGD(interval=8), workers=4, steps=40).staleness_max
        7.0

    Reference: Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient descent algorithm for
    deep-learning applications", ICPP 2017.
    Differences: sums updates, not gradients: the same for plain SGD, and any optimizer will do.
    """

    name = "sasgd"
    reference = "Cong, Bhardwaj, Feng, ICPP 2017; with γ_p = γ/p also Local SGD and K-AVG"
    convergence = "workers part by at most 2γTG between merges (triangle inequality)"
    reduces = True
    waits_for = "all"

    @property
    def keeps_mean(self) -> bool:  # type: ignore[override]
        """True where the common model is the plain mean; with outer=None only known after `start`."""
        return self.scale is None and not self.outer and not self.beta

    interval: int = 8
    scale: float | None = None
    state: Literal["local", "averaged"] | None = None
    state_every: int = 1
    outer: float | None = None
    early: int = 0

    averages, beta = False, 0.0  # whether moments are averaged, the common model's momentum; set in `start`

    @classmethod
    def suited(cls, machines: Machines) -> dict[str, int]:
        """The shortest power of two, from 2 on, at which a merge costs at most a tenth of its steps."""
        wanted = machines.merge_s / (0.1 * machines.grad_s)
        return {"interval": int(min(LONGEST, max(2, 2 ** math.ceil(math.log2(max(1.0, wanted))))))}

    def check(self, world_size: int) -> None:
        at_least("sasgd: the interval T", self.interval, 1)
        at_least("sasgd: early", self.early, 0)
        check_state("sasgd", self.state or "local", self.state_every)
        if self.state == "averaged" and self.scale is not None:
            raise ConfigError("sasgd: state=averaged goes with the mean of the models; leave scale out.")
        if self.scale is not None:
            above_zero("sasgd: the scale γ_p/γ", self.scale)
        if self.outer is not None and not 0 <= self.outer < 1:
            raise ConfigError(f"sasgd: outer must be at least 0 and below 1, not {self.outer:g}.")
        if self.outer and self.scale is not None:
            raise ConfigError("sasgd: outer goes with the mean of the models; leave scale out.")

    async def start(self, node: Node) -> None:
        self.x: Tensor | None = None
        self.v: Tensor | None = None
        usual = self.state is None and self.scale is None and node.momentum > 0
        self.averages = self.state == "averaged" or usual
        self.beta = (OUTER if usual and self.interval > 1 else 0.0) if self.outer is None else self.outer
        if self.scale is not None or self.beta:
            self.entered(node, await node.snapshot(keep=True))
        if node.rejoined:
            await self._merge(node)

    def stops(self, node: Node) -> bool:
        return node.steps % self.interval == 0 or node.steps <= self.early

    async def after_step(self, node: Node) -> None:
        if self.stops(node):
            await self._merge(node)

    async def _merge(self, node: Node) -> None:
        x, correction, means = await node.merge(lambda merge: self._reduce(node, merge))
        if self.x is not None and x is not None:
            self.x, self.v = x, None if self.v is None else x - self.x
        node.correct(correction, own=True)
        for name, vector in means.items():
            node.moments.set(name, vector)

    async def _reduce(self, node: Node, merge: Merge) -> tuple[Tensor | None, Tensor, dict[str, Tensor]]:
        """The new common model x where it is kept, how far it is from this worker's snapshot, mean moments.

        v is averaged, too: a new member has none, and all must go on alike.
        """
        x: Tensor | None = None
        if self.x is None:
            offset = await merge.offset(await node.snapshot())
        else:
            s = await node.snapshot(keep=True)
            if self.v is not None:
                x = await merge.mean(torch.add(s, self.v, alpha=self.beta))
            else:
                x = self.x + (self.scale or 0.0) * await merge.sum(s - self.x)
            offset = x - s
        due = self.averages and merge.number % self.state_every == 0
        return x, offset, await mean_moments(node, merge, asked=self.state is not None) if due else {}

    async def handover(self, node: Node) -> Tensor:
        return await node.weights() if self.x is None else self.x.clone()

    def entered(self, node: Node, weights: Tensor) -> None:
        self.x = weights if self.scale is not None or self.beta else None
        self.v = torch.zeros_like(weights) if self.beta else None
