"""DASGD: decentralized asynchronous SGD by broadcasting updates."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from freewheel.errors import ConfigError, PeerLost, at_least
from freewheel.fabric.base import Message
from freewheel.node import Node
from freewheel.strategy import Machines, Strategy

UPDATE = ("update",)


@dataclass
class DASGD(Strategy):
    """Tell everybody every update, without reply; everybody adds what it hears.

        every `interval` steps:  δ_i <- own updates since the last broadcast;  send δ_i to all others
        on arrival of δ_j:       x_i <- x_i + δ_j          (form="sum", the paper's)
                                 x_i <- x_i + δ_j/n        (form="mean"; own updates shrink to δ_i/n too)

    All replicas hold x_0 plus the updates they have, so two of them differ only by updates that one of them
    lacks: ‖x_i - x_j‖ <= γ·Q·S_ij.

    Settings: interval (None: every second step, or when the last broadcast has left to most peers, if that
    is later; the authors recommend the number of workers), form, raw (as in asgd).
    Late, lost and doubled messages: late updates are added late; if a peer's link cannot keep up, messages
    to it carry more steps instead of queueing. Messages lost with a dying worker or on a cut link leave a
    lasting offset between receivers and others; so may the first moments of a worker that comes back.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.DASGD(interval=4), workers=4, steps=40).idle_share < 0.01
        True

    Reference: Tosi, Theobald, "Convergence analysis of decentralized ASGD", 2023; code: TensAIR.
    Differences: broadcasts updates, not gradients, so any optimizer will do and replicas coincide once all
    is delivered; the "mean" form, the default, is ours: own updates count in full until they are broadcast,
    so that their delay does not hurt momentum.
    """

    name = "dasgd"
    reference = "Tosi, Theobald, 2023 (TensAIR)"
    convergence = "σ/ε² + QS/ε^1.5 + S/ε: grows with staleness S (Tosi, Theobald 2023)"
    staleness = "own gradients that others were last known to lack, summed over them"

    interval: int | None = None
    form: Literal["sum", "mean"] = "mean"
    raw: bool = False

    def rate_share(self, workers: int) -> float:
        return 1 / workers if self.form == "sum" and not self.raw else 1.0

    async def handover(self, node: Node) -> Tensor:
        return self.base.clone()  # without updates still to be broadcast: the new worker will receive those

    @classmethod
    def round_s(cls, machines: Machines) -> float:
        return (machines.workers - 1) * machines.model_s

    def check(self, world_size: int) -> None:
        at_least("dasgd: the broadcast interval", self.interval, 1)
        if self.form not in ("sum", "mean"):
            raise ConfigError(f"dasgd: form must be 'sum' or 'mean', not {self.form!r}.")

    async def start(self, node: Node) -> None:
        self.base = await node.snapshot(keep=True)  # own updates are what the weights have beyond it
        # Held while a snapshot is taken: an update that arrives is in both it and the base, or in neither.
        self.still = asyncio.Lock()
        self.sent = node.steps
        # How many gradients of each worker are in this replica; of its own: how many were broadcast.
        self.applied = [0] * node.world_size
        self.theirs = [0] * node.world_size  # how many of this worker's each had when it last wrote
        self.owed: dict[int, Tensor] = {}  # updates that wait until the last message to a peer has left
        self.sending: dict[int, asyncio.Task[None]] = {}

    async def background(self, node: Node) -> None:
        async def add(message: Message) -> None:
            counts = message.numbers(node.world_size, node.world_size)
            update, sender = message.of(self.base.numel()), message.sender
            self.applied[sender], self.theirs[sender] = counts[sender], counts[node.rank]
            async with self.still:
                self.base = self.base + update  # it moves along, so that own updates stay s - base
                node.correct(update)

        node.beside(node.hear(UPDATE, add))
        while True:
            await node.next_step()
            # A worker that came back counts its steps anew; others may know more from its earlier life.
            lacks = (max(0, node.steps - self.theirs[peer]) for peer in node.members if peer != node.rank)
            node.stale(sum(lacks))  # own gradients the others lack
            # Queued broadcasts delay each other: without an interval, wait until most have left.
            free = self.interval is not None or 2 * len(self.sending) < len(node.members)
            if free and node.steps - self.sent >= (self.interval or 2):
                await self._broadcast(node)

    async def _broadcast(self, node: Node) -> None:
        """Send own updates since the last time; those a peer cannot take yet are added up for it."""
        async with self.still:
            s = await node.snapshot(keep=True)
            delta, self.base, self.sent = s - self.base, s, node.steps
        self.applied[node.rank] = node.steps
        if self.form == "mean":
            delta = delta / node.world_size
            shrink = delta * (1 - node.world_size)
            self.base = self.base + shrink
            node.correct(shrink)
        for peer in node.members:
            if peer != node.rank:
                self.owed[peer] = self.owed[peer] + delta if peer in self.owed else delta
                if peer not in self.sending:
                    self.sending[peer] = node.beside(self._pay(node, peer))

    async def leave(self, node: Node) -> None:
        if node.steps > self.sent:
            await self._broadcast(node)
        while self.sending:
            await asyncio.wait(self.sending.values())

    async def _pay(self, node: Node, peer: int) -> None:
        try:
            while peer in self.owed:
                await node.send(peer, UPDATE, self.owed.pop(peer), note=tuple(self.applied))
        except PeerLost:
            node.counters.messages_dropped += 1
            self.owed.pop(peer, None)
        finally:
            self.sending.pop(peer, None)
