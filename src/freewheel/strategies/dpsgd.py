"""D-PSGD: synchronous averaging with graph neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freewheel import topology
from freewheel.strategy import Strategy
from freewheel.topology import Topology

if TYPE_CHECKING:
    from freewheel.node import Node


@dataclass
class DPSGD(Strategy):
    """Average with all graph neighbours in every step, while the gradient is computed.

        x_i <- Σ_j W_ij x_j + u_i(x_i)        u_i: the optimizer's update at the model before mixing

    Settings: topology (its mixing matrix is W; a time-varying one is used step by step).
    Late, lost and doubled messages: a late neighbour delays its neighbours, and so, step by step, all; a
    lost one stops the run.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.DPSGD(topology="one_peer_exponential"), workers=4, steps=20).workers
        4

    Reference: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
    """

    name = "dpsgd"
    reference = "Lian et al., NeurIPS 2017"
    waits_for = "neighbours"
    keeps_mean = True
    staleness = "always 0: a step mixes in the neighbours' models of the same step"

    topology: str | Topology = "ring"

    def check(self, world_size: int) -> None:
        """The graph must exist and be connected."""
        topology.resolve(self.topology, world_size)

    async def start(self, node: Node) -> None:
        """Begin to mix the model that the first gradient is taken at."""
        self.graph = topology.resolve(self.topology, node.world_size)
        self.mixing = node.beside(self.mix(node, node.snapshot(), 0))

    async def after_step(self, node: Node) -> None:
        """Take the mixture in; begin to mix what the next gradient is taken at."""
        node.correct(await self.mixing)
        node.stale(0)
        self.mixing = node.beside(self.mix(node, node.snapshot(), node.steps))

    async def mix(self, node: Node, s: Tensor, k: int) -> Tensor:
        """Σ_j W_ij (s_j - s_i) over the neighbours j of step k."""
        i, tag = node.rank, ("mix", k)
        sending = node.beside(node.send_all(self.graph.listeners(i, k), tag, s))
        correction = s.new_zeros(s.shape)
        for j in self.graph.neighbours(i, k):
            s_j = (await node.receive(tag, j)).payload
            correction += self.graph.weight(i, j, k) * (s_j - s)
        await sending
        return correction
