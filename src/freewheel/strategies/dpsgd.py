"""D-PSGD: synchronous averaging with graph neighbours."""

from dataclasses import dataclass

from torch import Tensor

from freewheel import topology
from freewheel.errors import ConfigError
from freewheel.fabric.merges import Merge
from freewheel.node import Node
from freewheel.strategy import Strategy
from freewheel.topology import Topology


@dataclass
class DPSGD(Strategy):
    """Average with all graph neighbours in every step, while the gradient is computed.

        x_i <- Σ_j W_ij x_j + u_i(x_i)        u_i: the optimizer's update at the model before mixing

    Settings: topology (its mixing matrix is W; a time-varying one is used step by step), quasi_global
    (momentum follows the way the weights went).
    Late, lost and doubled messages: a step counts when all have their neighbours' models, so a late worker
    delays all. When one is lost, the others mix the step again, on the same kind of graph where it exists
    for so many, else on a ring. A worker that joins begins with a copy, at a step.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.DPSGD(topology="one_peer_exponential"), workers=4, steps=20).workers
        4

    Reference: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
    """

    name = "dpsgd"
    reference = "Lian et al., NeurIPS 2017"
    convergence = "equal at few workers, worse at 32 (Assran et al. 2019, Table 1)"
    waits_for = "neighbours"
    keeps_mean = True
    staleness = "always 0: a step mixes in the neighbours' models of the same step"

    topology: str | Topology = "ring"
    quasi_global: bool = False

    def check(self, world_size: int) -> None:
        topology.resolve(self.topology, world_size)  # it must exist and be connected

    async def start(self, node: Node) -> None:
        await self._begin_mixing(node)

    async def after_step(self, node: Node) -> None:
        node.correct(await self.mixing)
        node.stale(0)
        await self._begin_mixing(node)

    def settled(self, node: Node) -> bool:
        return True  # the mixing that has just begun holds the last step

    async def leave(self, node: Node) -> None:
        node.correct(await self.mixing)

    async def _begin_mixing(self, node: Node) -> None:
        """Snapshot the model that the next gradient is taken at; mix beside training."""
        self.mixing = await node.merge_beside(lambda merge, s: self._mixed(merge, node.rank, s), keep=True)

    async def _mixed(self, merge: Merge, rank: int, s: Tensor) -> Tensor:
        """Σ_j W_ij (s_j - s_i) over the neighbours j of step k."""
        at = merge.members  # workers by their place in the graph
        try:
            graph = topology.resolve(self.topology, len(at))
        except ConfigError:  # not every kind exists for every number
            graph = topology.resolve("ring", len(at))
        i, k = at.index(rank), merge.number - 1
        neighbours = [at[j] for j in graph.neighbours(i, k)]
        listeners = [at[j] for j in graph.listeners(i, k)]
        correction = s.new_zeros(s.shape)
        async for j, s_j in merge.swap(listeners, neighbours, s):
            correction += graph.weight(i, at.index(j), k) * (s_j - s)
        return correction
