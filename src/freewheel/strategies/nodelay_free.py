"""SGD without gradient delay, free-running: merges follow the network, never a slow worker's gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel.errors import at_least
from freewheel.fabric.base import NotNow
from freewheel.fabric.merges import Merge
from freewheel.node import Node
from freewheel.strategy import Strategy


@dataclass
class FreeNoDelay(Strategy):
    """Merge all models in the background as often as the network allows; no worker waits.

        whenever some worker has `every` updates that are in no merge:
        s_j <- snapshot of every worker, wherever it is in its step;   P = mean_j s_j
        x_i <- x_i + (P - s_i)        at each worker's next boundary

    A slow worker gives a snapshot that has moved little; the others do not wait for its gradient. A merge
    counts everywhere or nowhere: the worker of lowest rank leads, see fabric/free_merges.py.

    Settings: every (updates that call for a merge), tau (a worker that many gradients ahead of its last
    merge waits for the next; None: it never waits).
    Late, lost and doubled messages: a merge in which a worker is lost is dropped on all sides and done
    again with the others, and of two members that cannot reach each other one is left out; if the leader
    is lost while it says "commit", some may have heard it (counted as half) and the next merge evens it
    out. A worker at τ that can be in no merge waits until it can.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate("nodelay_free", workers=4, steps=40, compute=fw.Compute(slow={0: 5}))
        >>> result.idle_share < 0.01
        True

    Reference: Talyansky et al., ICLR 2019 submission, Algorithm 1.
    Differences: Algorithm 1 begins a merge when every worker has a gradient; this one when any has.
    """

    name = "nodelay_free"
    reference = "Talyansky et al., ICLR 2019 submission, Algorithm 1, without waiting for every gradient"
    convergence = "as nodelay, τ what the network allows: unbounded unless tau is set"
    keeps_vectors = 2
    reduces = merges_beside = True
    keeps_mean = True

    every: int = 1
    tau: int | None = None

    def check(self, world_size: int) -> None:
        """Both count steps."""
        at_least("nodelay_free: every", self.every, 1)
        at_least("nodelay_free: tau", self.tau, self.every)

    async def start(self, node: Node) -> None:
        """Be ready to give a snapshot at any time."""

        async def offset(merge: Merge) -> Tensor:
            if (s := await node.snapshot_soon()) is None:
                raise NotNow
            return await merge.offset(s)

        self.free = node.free_merges(offset)

    def stops(self, node: Node) -> bool:
        """At the bound τ."""
        return self.tau is not None and node.unmerged_steps >= self.tau

    async def after_step(self, node: Node) -> None:
        """Wait for a merge."""
        await self.free.ask_until(lambda: not self.stops(node))

    async def background(self, node: Node) -> None:
        """Ask for a merge whenever there is something to merge."""
        self.free.serve()
        while True:
            await node.next_step()
            if node.unmerged_steps >= self.every:
                await self.free.ask()

    async def leave(self, node: Node) -> None:
        """Go once a merge has this worker's last step."""
        while node.unmerged_steps and len(node.members) > 1:
            if not await self.free.ask():
                return
