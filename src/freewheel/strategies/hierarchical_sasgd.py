"""Hierarchical SASGD: often inside a machine, rarely between machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freewheel import topology
from freewheel.errors import at_least
from freewheel.strategy import Strategy

if TYPE_CHECKING:
    from freewheel.node import Node


@dataclass
class HierarchicalSASGD(Strategy):
    """Average inside each node every T1 steps, and over all nodes every k·T1 steps.

        every T1:      x_i <- mean of x over the workers of the node
        every k·T1:    x_i <- mean of x over all workers: node sums, a ring of the nodes' first workers,
                       handed back inside the node

    Settings: nodes (workers are dealt to them in order of rank), interval (T1), global_every (k).
    Late, lost and doubled messages: as in sasgd, per level.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.HierarchicalSASGD(nodes=2), workers=4, steps=40)

    Reference: Cong, Bhardwaj, "A hierarchical, bulk-synchronous stochastic gradient descent algorithm for
    deep-learning applications on GPU clusters", ICMLA 2017.
    Differences: only the abstract was at hand; the two levels follow the same group's Hier-AVG.
    """

    name = "hierarchical_sasgd"
    reference = "Cong, Bhardwaj, ICMLA 2017; two levels as in Hier-AVG"
    waits_for = "all"
    keeps_mean = True

    nodes: int = 2
    interval: int = 4
    global_every: int = 4

    def check(self, world_size: int) -> None:
        """There must be at least one worker for each node."""
        at_least("hierarchical_sasgd: the interval T1", self.interval, 1)
        at_least("hierarchical_sasgd: global_every", self.global_every, 1)
        topology.deal(world_size, self.nodes)

    async def start(self, node: Node) -> None:
        """Find this worker's node and the first worker of each node."""
        groups = topology.deal(node.world_size, self.nodes)
        self.group = next(group for group in groups if node.rank in group)
        self.leads = [group[0] for group in groups]

    async def after_step(self, node: Node) -> None:
        """Every T1 steps: average, at the level that is due."""
        if node.steps % self.interval:
            return
        s = node.snapshot()
        total = await node.sum(s, self.group, tag=("inside", node.steps))
        members = len(self.group)
        if node.steps % (self.interval * self.global_every) == 0:
            if node.rank in self.leads:
                total = await node.sum(total, self.leads, tag=("between", node.steps))
            total = await node.broadcast(self.group[0], total, self.group, tag=("back", node.steps))
            members = node.world_size
        node.correct(total / members - s)
