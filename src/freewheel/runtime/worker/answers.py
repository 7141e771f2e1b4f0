"""The answer: the mean of all workers' parts, taken together at the end, or by one that asks the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from torch import Tensor

from freewheel.errors import PeerLost, WorkerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import Tag
from freewheel.node_driver import NodeDriver
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.asking import Asking, Reply
from freewheel.runtime.worker.buffers import agree, mean_buffers
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory
from freewheel.strategy import Strategy

PART = "part"
NO_ANSWER = "no worker that holds the answer is left."


class Answers:
    """One worker's part in the answer, and the others'. In the communication thread."""

    def __init__(self, asking: Asking, node: NodeDriver, strategy: Strategy, inventory: Inventory) -> None:
        self._asking, self._fabric, self._node = asking, asking.fabric, node
        self._strategy, self._inventory, self._replica = strategy, inventory, inventory.replica
        self.ready = False
        """Whether this worker has weights that others may copy."""
        asking.serve(PART, 1, self._hand_out)

    @property
    def merges_with(self) -> Sequence[int]:
        """The members of the merge this worker is in."""
        return self._node.merges_with

    async def handover(self) -> Tensor | None:
        """The weights a worker that joins begins with; None: not yet."""
        return await self._strategy.handover(self._node) if self.ready else None

    async def mean(self, members: Sequence[int], tag: Tag) -> Answer:
        """The mean of these workers, who all take it now."""
        part = await self._strategy.answer(self._node)
        notes = await collectives.gather(self._fabric, members, (float(part is not None),), (*tag, "parts"))
        parts = sum(note[0] for note in notes.values())
        if not parts:
            raise WorkerLost(NO_ANSWER)
        if part is None:
            part = self._replica.plain_vector(self._replica.size, self._replica.dtype).zero_()
        shares = {peer: notes[peer][0] / parts for peer in members}
        weights = await self._fabric.reduce((*tag, "weights"), part, shares)
        return weights, await agree(self._fabric, members, (*tag, "buffers"), self._inventory.buffers())

    async def consensus(self) -> Answer:
        """The mean of all workers, collected by this one; nobody's training waits."""
        weights, parts, buffers = None, 0, dict[int, dict[str, Tensor]]()
        async for rank, part, their_buffers, _ in self.parts():
            if part is not None:
                part = part.to(self._replica.device)
                weights = part if weights is None else weights.add_(part)
                parts += 1
            buffers[rank] = their_buffers
        if weights is None:
            raise WorkerLost(NO_ANSWER)
        return weights.div_(parts), mean_buffers([buffers[rank] for rank in sorted(buffers)])

    async def parts(
        self, own: bool = False
    ) -> AsyncIterator[tuple[int, Tensor | None, dict[str, Tensor], int]]:
        """Of every worker: rank, part in the answer (or its own weights), buffers, steps. Own the vectors."""
        fabric = self._fabric
        yield fabric.rank, await self._part(own), self._inventory.buffers(), fabric.counters.steps
        asked = {
            peer: asyncio.ensure_future(self._asking.ask(peer, PART, own))
            for peer in fabric.members
            if peer != fabric.rank
        }
        try:
            for peer, asking in asked.items():
                try:
                    part, buffers = await asking
                    vector = None if part.vector is None else part.of(self._replica.size)
                    (steps,) = part.numbers(1, 1)
                except PeerLost:
                    continue
                yield peer, vector, buffers, steps
        finally:
            for asking in asked.values():
                asking.cancel()

    async def _hand_out(self, own: int) -> Reply:
        part = await self._part(bool(own)) if self.ready else None
        return (self._fabric.counters.steps,), part, tensor_codec.pack(self._inventory.buffers())

    async def _part(self, own: bool) -> Tensor | None:
        return await (self._node.weights() if own else self._strategy.answer(self._node))
