"""Downpour SGD: a parameter server that is asked rarely."""

from dataclasses import dataclass

from freewheel.errors import at_least
from freewheel.node import Node
from freewheel.strategies.asgd import ASGD


@dataclass
class Downpour(ASGD):
    """Step alone n_push times, then send the sum of the updates to the server and take its model.

        for t = 1..n_push:  x <- x + u;  a <- a + u
        send a to the server (x_server <- x_server + a), wait for x_server;  x <- x_server;  a <- 0

    Settings: interval (n_push = n_fetch), raw (as in asgd).
    Late, lost and doubled messages: as in asgd.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.Downpour(interval=4), workers=4, steps=40)

    Reference: Dean et al., "Large scale distributed deep networks", NeurIPS 2012; the rule as in mpiT.
    Differences: pushes and fetches at the same time; the server adds, it has no Adagrad of its own.
    """

    name = "downpour"
    reference = "Dean et al., NeurIPS 2012, as in mpiT"
    convergence = "as asgd, with larger and later updates; no rate known here"

    interval: int = 4

    def check(self, world_size: int) -> None:
        at_least("downpour: the interval", self.interval, 1)

    def stops(self, node: Node) -> bool:
        return node.steps % self.interval == 0

    async def after_step(self, node: Node) -> None:
        if self.stops(node):
            await super().after_step(node)
