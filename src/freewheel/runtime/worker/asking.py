"""Questions from worker to worker, beside training: the answer is numbers, a vector, named tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import RUNTIME, Fabric, Message, Note, Spawn, hear
from freewheel.runtime.worker import tensor_codec

Reply: TypeAlias = tuple[Note, Tensor | None, Tensor]
"""Numbers, a vector of the weights' kind, and what `tensor_codec.pack` has made of all else."""


class Asking:
    """One worker's questions, and its answers to those of others. In the communication thread."""

    def __init__(self, fabric: Fabric, spawn: Spawn) -> None:
        self.fabric, self._spawn = fabric, spawn

    async def ask(
        self, peer: int, what: str, *numbers: int, holds: type = Tensor
    ) -> tuple[Message, dict[str, Any]]:
        """A peer's numbers and vector, and things of one type by name; PeerLost when the peer is gone."""
        message = await self.fabric.ask(peer, (RUNTIME, what), note=numbers)
        try:
            return message, await tensor_codec.receive(self.fabric, peer, message.tag, holds)
        finally:
            self.fabric.forget(message.tag)

    def serve(self, what: str, count: int, answer: Callable[..., Awaitable[Reply]]) -> None:
        """Answer those who ask; their questions have so many numbers."""

        async def reply(peer: int, number: int, *numbers: int) -> None:
            with contextlib.suppress(PeerLost):
                note, vector, packed = await answer(*numbers)
                self.fabric.post(peer, (RUNTIME, what, number), vector, note)
                tensor_codec.post(self.fabric, peer, (RUNTIME, what, number), packed)

        def heard(question: Message) -> None:
            self._spawn(reply(question.sender, *question.numbers(1 + count, 1 + count)))

        self._spawn(hear(self.fabric, (RUNTIME, what), heard))
