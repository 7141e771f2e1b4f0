"""The answer: the mean of all workers' parts, taken together at the end, or by one that asks the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from torch import Tensor

from freewheel.errors import PeerLost, WorkerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import RUNTIME, Message, Tag, hear
from freewheel.fabric.tcp import TcpFabric
from freewheel.node_driver import NodeDriver
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.buffers import agree, mean_buffers
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory
from freewheel.strategy import Strategy

PART: Tag = (RUNTIME, "part")
NO_ANSWER = "no worker that holds the answer is left."


class Answers:
    """One worker's part in the answer, and the others'. In the communication thread."""

    def __init__(self, fabric: TcpFabric, node: NodeDriver, strategy: Strategy, inventory: Inventory) -> None:
        self._fabric, self._node, self._strategy, self._inventory = fabric, node, strategy, inventory
        self._replica = inventory.replica
        self.ready = False
        """Whether this worker has weights that others may copy."""
        self._asked = 0

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
        self._asked += 1
        tag, fabric = (*PART, self._asked), self._fabric
        yield fabric.rank, await self._part(own), self._inventory.buffers(), fabric.counters.steps
        asked = [peer for peer in fabric.members if peer != fabric.rank]
        for peer in asked:
            fabric.post(peer, PART, note=(self._asked, float(own)))
        for peer in asked:
            try:
                part = await fabric.receive((*tag, "weights"), peer)
                buffers = await tensor_codec.receive(fabric, peer, (*tag, "buffers"))
                vector = None if part.vector is None else part.of(self._replica.size)
                (steps,) = part.numbers(1, 1)
            except PeerLost:
                continue
            yield peer, vector, buffers, steps

    def serve(self) -> Coroutine[Any, Any, None]:
        """Answer those who ask."""
        return hear(self._fabric, PART, self._hand_out)

    async def _hand_out(self, request: Message) -> None:
        number, own = request.numbers(2, 2)
        tag, fabric = (*PART, number), self._fabric
        part = await self._part(bool(own)) if self.ready else None
        fabric.post(request.sender, (*tag, "weights"), part, note=(fabric.counters.steps,))
        buffers = tensor_codec.pack(self._inventory.buffers())
        tensor_codec.post(fabric, request.sender, (*tag, "buffers"), buffers)

    async def _part(self, own: bool) -> Tensor | None:
        return await (self._node.weights() if own else self._strategy.answer(self._node))
