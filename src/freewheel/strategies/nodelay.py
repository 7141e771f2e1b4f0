"""SGD without gradient delay, Algorithm 2 (cyclic)."""

from dataclasses import dataclass

from freewheel import theory
from freewheel.errors import ConfigError, at_least
from freewheel.fabric.merges import Merge
from freewheel.node import Node
from freewheel.strategy import LONGEST, Machines, Strategy


@dataclass
class NoDelay(Strategy):
    """Merge all models in the background while everybody computes on, at most τ gradients ahead.

    With β = τ/2, at the end of each cycle of β steps:

        wait for the merge of the last cycle's snapshots s:  P = mean_j s_j
        x_i <- P + (x_i - s_i)        the common model, with the last β updates replayed on it
        s_i <- x_i, and its merge begins beside the next β steps

    Settings: tau (τ, even).
    Late, lost and doubled messages: if a merge takes longer than β steps, workers wait at the end of the
    cycle, and only there. A merge in which a worker is lost is dropped on all sides and done again by the
    others, from snapshots of that moment. A worker that joins begins at a merge.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.NoDelay(tau=8), workers=4, steps=40).staleness_max <= 8
        True

    Reference: Talyansky et al., "Asynchronous SGD without gradient delay for efficient distributed
    training", ICLR 2019 submission, Algorithm 2.
    Differences: all workers together instead of a parameter server, with the same result.
    """

    name = "nodelay"
    reference = "Talyansky et al., ICLR 2019 submission, Algorithm 2 (the same rule as CoCoD-SGD)"
    convergence = "discrepancy at most 2Lτη, however many workers (Talyansky et al. 2019)"
    keeps_vectors = 2
    reduces = merges_beside = True
    waits_for = "all"
    keeps_mean = True

    tau: int = 16

    @classmethod
    def suited(cls, machines: Machines) -> dict[str, int]:
        tau = theory.nodelay_min_tau(machines.merge_s, machines.grad_s)
        return {"tau": min(max(tau, 4), LONGEST)}

    def check(self, world_size: int) -> None:
        at_least("nodelay: the staleness bound tau", self.tau, 2)
        if self.tau % 2:
            raise ConfigError(
                f"nodelay: tau must be even, since a cycle has tau/2 steps, not {self.tau}. "
                f"Take {self.tau - 1} or {self.tau + 1}, or nodelay_free, which has no cycle."
            )

    async def start(self, node: Node) -> None:
        self.merge = await node.merge_beside(Merge.offset)  # of the start: every cycle looks the same

    def stops(self, node: Node) -> bool:
        return node.steps % (self.tau // 2) == 0

    async def after_step(self, node: Node) -> None:
        if self.stops(node):
            node.correct(await self.merge, own=True)
            del self.merge  # it is large: free it before there is another
            self.merge = await node.merge_beside(Merge.offset)  # P - s_i

    def settled(self, node: Node) -> bool:
        return self.stops(node)  # the merge that has just begun holds all its steps

    async def leave(self, node: Node) -> None:
        node.correct(await self.merge, own=True)
