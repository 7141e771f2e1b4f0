"""SGD without gradient delay, free-running: merges follow the network, never a slow worker's gradient."""

from dataclasses import dataclass

from torch import Tensor

from freewheel.errors import at_least
from freewheel.fabric.base import NotNow
from freewheel.fabric.merges import Merge
from freewheel.node import Node
from freewheel.patience import Patience
from freewheel.strategy import Strategy

# More than FEW workers wait for merges, and then PART of the difference to the mean counts: with all of it a
# worker would keep one n-th of the update it has just made until the others have made theirs.
FEW, PART = 4, 0.7


@dataclass
class FreeNoDelay(Strategy):
    """Merge all models in the background as often as the network allows; no worker waits.

        whenever some worker has `every` updates that are in no merge:
        s_j <- snapshot of every worker, wherever it is in its step;   P = mean_j s_j
        x_i <- x_i + (P - s_i)        at each worker's next boundary

    A slow worker gives a snapshot that has moved little; nobody waits for its gradient. A merge counts
    everywhere or nowhere: the worker of lowest rank leads, see fabric/calls.py.

    For many workers with momentum that is too late: a worker waits a moment at its boundary for a merge with
    its last update, and 0.7 of the difference to P counts, for all.

    Settings: every (updates that call for a merge), tau (a worker that many gradients ahead of its last
    merge waits for the next; None: never), patience (the longest wait for a merge at a boundary, in steps;
    0: none; None: 2 for more than 4 workers with momentum, else 0; over when the learning rate is below half
    of its highest).
    Late, lost and doubled messages: a merge in which a worker is lost is dropped on all sides and done again
    by the others; of two members that cannot reach each other one is left out. If the leader is lost while
    it says "commit", some may have heard it (counted as half); the next merge evens it out. A worker at τ
    that can be in no merge waits until it can.

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
    patience: float | None = None

    moment = Patience(0)  # how long it waits at its boundary; set in `start`

    def check(self, world_size: int) -> None:
        at_least("nodelay_free: every", self.every, 1)
        at_least("nodelay_free: tau", self.tau, self.every)
        at_least("nodelay_free: patience", self.patience, 0)

    async def start(self, node: Node) -> None:
        async def offset(merge: Merge) -> Tensor:
            if (s := await node.snapshot_soon()) is None:
                raise NotNow
            return await merge.offset(s, PART if self.moment.waits(len(merge.members)) else 1.0)

        self.moment = Patience(self.patience, node.momentum, FEW)
        self.free = node.free_merges(offset)

    def _bound(self, node: Node) -> bool:
        return self.tau is not None and node.unmerged_steps >= self.tau

    def stops(self, node: Node) -> bool:
        due = node.unmerged_steps >= self.every and self.moment.waits(len(node.members))
        return (due and self.moment.tries(node.steps, node.rate_left)) or self._bound(node)

    async def after_step(self, node: Node) -> None:
        if self._bound(node):
            await self.free.ask_until(lambda: not self._bound(node))
        else:
            await node.linger(self.moment, self._fresh(node))

    async def _fresh(self, node: Node) -> None:
        now = node.steps
        while node.steps - node.unmerged_steps < now and await self.free.ask():
            pass

    async def background(self, node: Node) -> None:
        self.free.serve()
        while True:
            await node.next_step()
            if node.unmerged_steps >= self.every:
                await self.free.ask()

    async def leave(self, node: Node) -> None:
        while node.unmerged_steps and len(node.members) > 1 and await self.free.ask():
            pass
