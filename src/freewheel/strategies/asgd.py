"""A-PSGD: asynchronous SGD with a parameter server."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from freewheel.node import Node
from freewheel.strategy import Strategy, Waits

SERVER = 0  # the rank whose communication thread is the server


def add(centre: Tensor, update: Tensor) -> Tensor:
    """The server's rule: x <- x + u, and the answer is x."""
    centre += update
    return centre.clone()


@dataclass
class ASGD(Strategy):
    """Send every update to a server that adds it at once, and go on from the server's model.

        worker:  x <- server's x;  u = update at x;  send u, wait for the new x
        server:  x <- x + u(x_{k-τ_k})        in the order of arrival

    Settings: raw (workers use the optimizer's learning rate as it is; else 1/n of it, so that a round of all
    workers moves the model as far as one averaged step).
    Late, lost and doubled messages: a late update is added late (its delay τ_k counts the updates in between,
    n - 1 on average at any speeds). Only losing worker 0, the server, or a link to it stops the run.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate("asgd", workers=4, steps=50).staleness_mean
        2.97

    Reference: asynchronous parameter-server SGD, the A-PSGD baseline of AD-PSGD (Lian et al., ICML 2018).
    Differences: a worker's own optimizer makes the update, so momentum is local. Worker 0 needs no network to
    reach the server, and makes more of the steps where the model is large.
    """

    name = "asgd"
    reference = "parameter-server ASGD, the A-PSGD baseline of Lian et al., ICML 2018"
    convergence = "each gradient n-1 updates late: σ²/ε² + τ/ε (Koloskova et al. 2022)"
    waits_for: ClassVar[Waits] = "server"
    staleness = "gradient delay: updates the server took between a gradient's read and its arrival"

    raw: bool = False

    def rate_share(self, workers: int) -> float:
        return 1.0 if self.raw else 1 / workers  # updates add up

    async def start(self, node: Node) -> None:
        self.x = await node.snapshot(keep=True)
        self.centre = self.x.clone() if node.rank == SERVER else None
        if self.centre is None and node.rejoined:
            s, self.x = self.x, (await node.ask(SERVER, None)).vector
            node.correct(self.x - s)

    async def background(self, node: Node) -> None:
        if self.centre is not None:
            await node.serve(self.centre, add)

    async def after_step(self, node: Node) -> None:
        s = await node.snapshot(keep=True)
        answer = await node.ask(SERVER, s - self.x)
        node.stale(answer.delay)
        self.x = answer.vector
        node.correct(self.x - s)

    async def answer(self, node: Node) -> Tensor | None:
        return None if self.centre is None else self.centre.clone()
