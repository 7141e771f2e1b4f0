"""A parameter server: one vector in one worker's communication thread, others ask it.

The server takes requests one at a time, in the order they arrive, so an update and its answer are one
atomic act. Answers are posted, not awaited: a client behind a slow link does not hold up the others.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from freewheel.fabric.base import Fabric, Message, Tag, hear

REQUEST: Tag = ("server", "request")

Apply = Callable[[Tensor, Tensor], Tensor]


class Answer(NamedTuple):
    """What a server sent back, and how many other updates it had taken since it last answered us."""

    vector: Tensor
    delay: int


async def serve(fabric: Fabric, centre: Tensor, apply: Apply) -> None:
    """Answer requests for ever: ``apply(centre, vector)`` changes the centre in place and returns the answer.

    A request without a vector only reads the centre.
    """
    version = 0

    def answer(request: Message) -> None:
        nonlocal version
        number, known = request.numbers(2, 2)
        to: Tag = (*REQUEST, number)
        if request.vector is None:
            fabric.post(request.sender, to, centre.clone(), note=(0, version))
        else:
            update = apply(centre, request.of(centre.numel()))
            fabric.post(request.sender, to, update, note=(version - known, version + 1))
            version += 1

    await hear(fabric, REQUEST, answer)


class Client:
    """One worker's side."""

    def __init__(self, fabric: Fabric, server: int, numel: int) -> None:
        self.fabric, self.server, self.numel = fabric, server, numel
        self.version = 0

    async def ask(self, vector: Tensor | None) -> Answer:
        """Send a vector; None only reads the centre."""
        message = await self.fabric.ask(self.server, REQUEST, vector, (self.version,))
        delay, self.version = message.numbers(2, 2)
        return Answer(message.of(self.numel), delay)
