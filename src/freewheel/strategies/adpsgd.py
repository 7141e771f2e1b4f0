"""AD-PSGD: asynchronous pairwise averaging without a server."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel import topology
from freewheel.errors import at_least
from freewheel.fabric.base import Pull
from freewheel.node import Node
from freewheel.strategy import Machines, Strategy
from freewheel.topology import Topology


@dataclass
class ADPSGD(Strategy):
    """Average with one random neighbour at a time, in the background.

        s_i, s_j <- snapshots of a pair, while both compute on
        x_i <- x_i + (s_j - s_i)/2        at i's next boundary
        x_j <- x_j + (s_i - s_j)/2        at j's next boundary

    The two corrections sum to zero, so the mean of all replicas moves only by the optimizers' updates,
    whatever steps fall in between.

    Each worker takes part in about one exchange a step: it calls a neighbour late in a step in which no
    other worker has called it, so that what it gets is fresh at its boundary.

    Settings: topology (who may meet whom), tries (neighbours asked before the worker lets a step pass
    without an exchange), every (steps for each exchange), per_step (exchanges in a step, where the links
    are fast), quasi_global (momentum follows the way the weights went).
    Late, lost and doubled messages: a late peer delays only the pair's own exchange, never a step. A peer
    lost before both have both snapshots: neither corrects. See fabric/exchange.py.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.ADPSGD(topology="ring"), workers=4, steps=40).idle_share < 0.01
        True

    Reference: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel SGD", ICML 2018.
    Differences: any graph instead of a bipartite one, since a busy peer is skipped and not waited for
    (topology="bipartite_ring" gives the paper's active and passive roles); corrections are differences of
    snapshots, so no step has to be kept out while a pair averages; momentum stays local.
    """

    name = "adpsgd"
    reference = "Lian, Zhang, Zhang, Liu, ICML 2018"
    convergence = "the rate of SGD once training is long (Lian et al. 2018, Corollary 2)"
    keeps_vectors = 2
    keeps_mean = True

    topology: str | Topology = "complete"
    tries: int = 3
    every: int = 1
    per_step: int = 1
    quasi_global: bool = False

    @classmethod
    def round_s(cls, machines: Machines) -> float:
        """A model there and one back."""
        return 2 * machines.model_s

    def check(self, world_size: int) -> None:
        """The graph must exist and be connected."""
        at_least("adpsgd: tries", self.tries, 1)
        at_least("adpsgd: every", self.every, 1)
        at_least("adpsgd: per_step", self.per_step, 1)
        topology.resolve(self.topology, world_size)

    meet = Pull(0.5)
    """Half of the difference, on both sides."""

    async def background(self, node: Node) -> None:
        """So many exchanges for each step, with the first free one of a few random neighbours."""
        graph = topology.resolve(self.topology, node.world_size)
        if not graph.initiates(node.rank):
            return
        while True:
            before = node.exchanges
            await node.next_step(self.every)
            for number in range(1, self.per_step + 1):
                await node.late(number / self.per_step)
                if node.exchanges >= before + number:
                    continue  # another worker called: that was this worker's exchange
                for peer, _ in zip(node.peers(graph), range(self.tries), strict=False):
                    if await node.exchange(peer):
                        break
