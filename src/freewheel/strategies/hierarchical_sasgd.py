"""Hierarchical SASGD: often inside a machine, rarely between machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from freewheel import topology
from freewheel.errors import at_least
from freewheel.fabric.merges import EVERYBODY, Group, Merge, View
from freewheel.node import Node
from freewheel.strategies.sasgd import check_state, mean_moments
from freewheel.strategy import Machines, Strategy


@dataclass
class HierarchicalSASGD(Strategy):
    """Average inside each node every T1 steps, and over all nodes every k·T1 steps.

        every T1:      x_i <- mean of x over the workers of the node
        every k·T1:    x_i <- mean of x over all workers: node sums, a ring of the nodes' first workers,
                       a broadcast inside each node

    Settings: nodes (workers are dealt to them in order of rank), interval (T1), global_every (k), state and
    state_every (what becomes of the optimizer's moments, as in sasgd).
    Late, lost and doubled messages: as in sasgd, per level. A node goes on with the workers it has left.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.HierarchicalSASGD(nodes=2), workers=4, steps=40)

    Reference: Cong, Bhardwaj, "A hierarchical, bulk-synchronous stochastic gradient descent algorithm for
    deep-learning applications on GPU clusters", ICMLA 2017.
    Differences: only the abstract was at hand; the two levels follow the same group's Hier-AVG.
    """

    name = "hierarchical_sasgd"
    reference = "Cong, Bhardwaj, ICMLA 2017; two levels as in Hier-AVG"
    convergence = "workers part by at most 2γ·k·T1·G (triangle inequality)"
    reduces = True
    waits_for = "all"
    keeps_mean = True

    nodes: int = 2
    interval: int = 4
    global_every: int = 4
    state: Literal["local", "averaged"] = "local"
    state_every: int = 1

    @classmethod
    def suited(cls, machines: Machines) -> dict[str, int]:
        return {"nodes": machines.nodes} if machines.workers_per_node > 1 and machines.nodes > 1 else {}

    def check(self, world_size: int) -> None:
        at_least("hierarchical_sasgd: the interval T1", self.interval, 1)
        at_least("hierarchical_sasgd: global_every", self.global_every, 1)
        check_state("hierarchical_sasgd", self.state, self.state_every)
        topology.deal(world_size, self.nodes)

    async def start(self, node: Node) -> None:
        if node.rejoined:
            await self._merge(node)

    def stops(self, node: Node) -> bool:
        return node.steps % self.interval == 0

    async def after_step(self, node: Node) -> None:
        if self.stops(node):
            await self._merge(node)

    async def _merge(self, node: Node) -> None:
        def level(view: View) -> Group:
            if node.steps % (self.interval * self.global_every) == 0:
                return EVERYBODY, view.members
            group = topology.mates(node.rank, node.world_size, self.nodes)
            return 1 + group[0], [rank for rank in group if rank in view.members]

        offset, means = await node.merge(lambda merge: self._average(node, merge), level)
        node.correct(offset, own=True)
        for name, vector in means.items():
            node.moments.set(name, vector)

    async def _average(self, node: Node, merge: Merge) -> tuple[Tensor, dict[str, Tensor]]:
        """How far the mean is from this worker's snapshot; where all merge, the mean of their moments."""
        if merge.group != EVERYBODY:
            return await merge.offset(await node.snapshot()), {}
        s = await node.snapshot(keep=True)
        dealt = topology.deal(node.world_size, self.nodes)  # a loss moves nobody to another node
        groups = [left for group in dealt if (left := [rank for rank in group if rank in merge.members])]
        group = next(group for group in groups if node.rank in group)
        total = await merge.sum(s.clone(), group)
        if len(groups) > 1:
            leads = [group[0] for group in groups]
            if node.rank in leads:
                total = await merge.sum(total, leads)
            total = await merge.broadcast(group[0], total, group)
        due = self.state == "averaged" and merge.number % self.state_every == 0
        means = await mean_moments(node, merge) if due else {}
        return total.div(len(merge.members)).sub_(s), means

    def donor(self, joiner: int, among: Sequence[int], world_size: int) -> int:
        group = topology.mates(joiner, world_size, self.nodes)  # who is in it is at the same step
        return next((rank for rank in among if rank in group), among[0])
