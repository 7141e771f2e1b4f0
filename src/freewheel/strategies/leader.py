"""Leader SGD: everybody is pulled towards the best worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freewheel import topology
from freewheel.errors import ConfigError, at_least
from freewheel.strategy import Strategy

if TYPE_CHECKING:
    from freewheel.node import Node


@dataclass
class Leader(Strategy):
    """Every few steps, move towards the worker whose loss is lowest, in the group and over all groups.

        every l steps:  x_i <- x_i + λ (x_leader - x_i)      leader: lowest loss in the group
        every g steps:  x_i <- x_i + λ_g (x_leader - x_i)    leader: lowest loss of all

    Only the leader's weights are sent.

    Settings: interval (l), pull (λ), groups (how many), global_interval (g), global_pull (λ_g).
    Late, lost and doubled messages: everybody waits for the comparison of losses; a lost worker stops
    the run.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.Leader(interval=4, pull=0.5), workers=4, steps=40)

    Reference: Teng et al., "Leader stochastic gradient descent for distributed training of deep learning
    models", NeurIPS 2019.
    Differences: workers compare themselves by their loss on common held-out data where the run has some.
    Their training losses, which the paper compares, say nothing about each other when the workers' data
    differ: the one with the easiest data would lead for ever.
    """

    name = "leader"
    reference = "Teng et al., NeurIPS 2019"
    waits_for = "all"
    staleness = "own gradients since the last comparison"

    interval: int = 1
    pull: float = 0.5
    groups: int = 1
    global_interval: int = 4
    global_pull: float = 0.5

    def check(self, world_size: int) -> None:
        """Pulls are shares; there must be at least one worker for each group."""
        at_least("leader: the interval", self.interval, 1)
        at_least("leader: the global interval", self.global_interval, 1)
        for name, value in (("pull", self.pull), ("global_pull", self.global_pull)):
            if not 0 < value <= 1:
                raise ConfigError(f"leader: {name} must be above 0 and at most 1, not {value:g}.")
        topology.deal(world_size, self.groups)

    async def start(self, node: Node) -> None:
        """Find this worker's group."""
        groups = topology.deal(node.world_size, self.groups)
        self.group = next(group for group in groups if node.rank in group)

    async def after_step(self, node: Node) -> None:
        """Compare and follow, at the levels that are due."""
        if node.steps % self.interval == 0:
            await self.follow(node, self.group, self.pull, "group")
        if self.groups > 1 and node.steps % self.global_interval == 0:
            await self.follow(node, range(node.world_size), self.global_pull, "all")
        node.stale(node.steps % self.interval)

    async def follow(self, node: Node, members: Sequence[int], pull: float, level: str) -> None:
        """Compare losses, hand out the best worker's weights, move towards them."""
        tag = (level, node.steps)
        scores = await node.gather((node.score(),), members, tag)
        best = min(members, key=lambda rank: (scores[rank][0], rank))
        s = node.snapshot()
        x_leader = await node.broadcast(best, s if node.rank == best else None, members, tag)
        if node.rank != best:
            node.correct(pull * (x_leader - s))
