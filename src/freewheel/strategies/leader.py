"""Leader SGD: everybody is pulled towards the best worker."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from freewheel import topology
from freewheel.errors import ConfigError, at_least
from freewheel.fabric.merges import EVERYBODY, Group, Merge, View
from freewheel.node import Node
from freewheel.strategy import Strategy


@dataclass
class Leader(Strategy):
    """Every few steps, move towards the worker whose loss is lowest, in the group and over all groups.

        every l steps:  x_i <- x_i + λ (x_leader - x_i)      leader: lowest loss in the group
        every g steps:  x_i <- x_i + λ_g (x_leader - x_i)    leader: lowest loss of all

    Only the leader's weights are sent.

    Settings: interval (l), pull (λ), groups (how many), global_interval (g), global_pull (λ_g).
    Late, lost and doubled messages: everybody waits for the comparison of losses. When a worker is lost,
    those who are left compare again. A worker that comes begins with a copy, at a comparison.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.Leader(interval=4, pull=0.5), workers=4, steps=40)

    Reference: Teng et al., "Leader stochastic gradient descent for distributed training of deep learning
    models", NeurIPS 2019.
    Differences: workers compare their losses on common held-out data where the run has some. Training losses,
    which the paper compares, mean little where workers' data differ: the easiest data would lead for ever.
    """

    name = "leader"
    reference = "Teng et al., NeurIPS 2019"
    convergence = "follows one worker, so noise is averaged less; no rate known here"
    reduces = True
    waits_for = "all"
    staleness = "own gradients since the last comparison"

    interval: int = 1
    pull: float = 0.5
    groups: int = 1
    global_interval: int = 4
    global_pull: float = 0.5

    def check(self, world_size: int) -> None:
        at_least("leader: the interval", self.interval, 1)
        at_least("leader: the global interval", self.global_interval, 1)
        for name, value in (("pull", self.pull), ("global_pull", self.global_pull)):
            if not 0 < value <= 1:
                raise ConfigError(f"leader: {name} must be above 0 and at most 1, not {value:g}.")
        topology.deal(world_size, self.groups)

    async def start(self, node: Node) -> None:
        if node.rejoined:
            await self._compare(node)

    async def after_step(self, node: Node) -> None:
        if node.steps % self.interval == 0 or self._all_due(node):
            await self._compare(node)
        node.stale(node.steps % self.interval)

    def settled(self, node: Node) -> bool:
        return node.steps % self.interval == 0  # the others have followed it, if it was the best

    def _all_due(self, node: Node) -> bool:
        return self.groups > 1 and node.steps % self.global_interval == 0

    async def _compare(self, node: Node) -> None:
        def level(view: View) -> Group:
            if self.groups == 1 or self._all_due(node):
                return EVERYBODY, view.members
            group = topology.mates(node.rank, node.world_size, self.groups)
            return 1 + group[0], [rank for rank in group if rank in view.members]

        correction = await node.merge(lambda merge: self._follow(node, merge), level)
        if correction is not None:
            node.correct(correction, own=True)

    async def _follow(self, node: Node, merge: Merge) -> Tensor | None:
        """Compare losses, broadcast the best worker's weights, move towards them: in the group, then all."""
        scores = await merge.gather((node.score(),))
        s = x = await node.snapshot(keep=True)
        levels = []
        if node.steps % self.interval == 0:
            group = topology.mates(node.rank, node.world_size, self.groups)
            levels.append(([rank for rank in group if rank in merge.members], self.pull))
        if self._all_due(node):
            levels.append((list(merge.members), self.global_pull))
        for members, pull in levels:
            best = min(members, key=lambda rank: (scores[rank][0], rank))
            x_leader = await merge.broadcast(best, x if node.rank == best else None, members)
            if node.rank != best:
                x = x + pull * (x_leader - x)
        return None if x is s else x - s

    def donor(self, joiner: int, among: Sequence[int], world_size: int) -> int:
        group = topology.mates(joiner, world_size, self.groups)  # who is in it is at the same step
        return next((rank for rank in among if rank in group), among[0])
