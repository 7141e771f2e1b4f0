"""AllReduce-SGD: the synchronous baseline."""

from dataclasses import dataclass

from freewheel.node import Node
from freewheel.strategy import Strategy


@dataclass
class AllReduce(Strategy):
    """Average the gradients of all workers before every step (what DDP does).

        g   <- mean_j g_j(x)          over all workers; everybody waits for the slowest
        x_i <- optimizer step with g

    Late, lost and doubled messages: a late gradient delays everybody. When a worker is lost, the others do
    the step again, with their mean; replicas stay equal. One that joins copies theirs while they wait.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate("allreduce", workers=2, steps=20).discrepancy_max
        0.0

    Reference: synchronous data-parallel SGD, textbook form.
    Differences: it starts after the backward pass, which DDP overlaps (`theory.sync_step_s`: what it saves).
    """

    name = "allreduce"
    reference = "synchronous data-parallel SGD (textbook)"
    convergence = "nothing: one model, a step is a batch of all workers (textbook)"
    keeps_vectors = 1
    reduces = True
    waits_for = "all"
    keeps_mean = True
    staleness = "always 0: every gradient is in the model before the next is taken"

    async def before_step(self, node: Node) -> None:
        node.set_gradient(await node.merge(lambda merge: merge.mean(node.gradient())))
        node.stale(0)
