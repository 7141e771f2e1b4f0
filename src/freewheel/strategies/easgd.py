"""EASGD: workers on springs around a centre."""

from dataclasses import dataclass

from torch import Tensor

from freewheel.errors import ConfigError, at_least
from freewheel.node import Node
from freewheel.strategies.asgd import SERVER
from freewheel.strategy import Strategy


@dataclass
class EASGD(Strategy):
    """Pull worker and centre towards each other every few steps; the centre is the answer.

        every τ steps:  e = α (x_i - c);   c <- c + e;   x_i <- x_i - e

    Settings: interval (τ), alpha (α; None: 0.9/n, so that n workers pull the centre by 0.9).
    Late, lost and doubled messages: late workers pull late; only losing worker 0, the server, stops the run.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.EASGD(interval=4), workers=4, steps=40)

    Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015.
    Differences: the server computes e from the worker's snapshot, so both sides use the same one.
    """

    name = "easgd"
    reference = "Zhang, Choromanska, LeCun, NeurIPS 2015"
    convergence = "stable for small α (Zhang et al. 2015); no rate known here"
    waits_for = "server"

    interval: int = 4
    alpha: float | None = None

    def check(self, world_size: int) -> None:
        at_least(f"{self.name}: the interval", self.interval, 1)
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ConfigError(f"{self.name}: alpha must lie between 0 and 1, not {self.alpha:g}.")

    async def start(self, node: Node) -> None:
        if node.rank == SERVER:
            self.centre = await node.snapshot(keep=True)

    async def background(self, node: Node) -> None:
        def pull(centre: Tensor, x: Tensor) -> Tensor:
            e = (self.alpha or 0.9 / node.world_size) * (x - centre)
            centre += e
            return e.neg_()

        if node.rank == SERVER:
            await node.serve(self.centre, pull)

    def stops(self, node: Node) -> bool:
        return node.steps % self.interval == 0

    async def after_step(self, node: Node) -> None:
        if self.stops(node):
            node.correct((await node.ask(SERVER, await node.snapshot(keep=True))).vector)

    async def answer(self, node: Node) -> Tensor | None:
        return self.centre.clone() if node.rank == SERVER else None
