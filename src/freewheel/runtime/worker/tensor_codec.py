"""What workers tell each other beside training: plain data, with tensors as bytes, each in its own type.

What is no tensor (names, shapes, learning rates) goes in front as text; nothing from another worker is ever
executed. The answer to a question is numbers, a vector of the weights' kind, and such data.
"""

import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import BYTES, BYTES_PIECE, RUNTIME, Fabric, Message, Note, Spawn, Tag, hear

TENSOR = "tensor"  # the only key of what stands for a tensor in the text: type, shape, where its bytes begin
LENGTH = 8  # bytes that say how long the text is
ALIGNED = 16  # where a tensor may begin
Reply: TypeAlias = tuple[Note, Tensor | None, Tensor]  # numbers, a vector, and what `pack` has made


def pack(state: dict[Any, Any]) -> Tensor:
    """Plain data with tensors as bytes; ConfigError if it holds anything else."""
    tensors: list[Tensor] = []
    length = 0

    def plain(value: Any) -> Any:
        nonlocal length
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise TypeError(f"a tensor of layout {value.layout}")
            data, begins = raw(value), length
            tensors.extend((data, torch.zeros(-data.numel() % ALIGNED, dtype=torch.uint8)))
            length += data.numel() + tensors[-1].numel()
            return {TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), begins]}
        if isinstance(value, dict):
            return [[key, plain(one)] for key, one in value.items()]
        if isinstance(value, list | tuple):
            return {type(value).__name__: [plain(one) for one in value]}
        return value

    try:
        text = json.dumps(plain(state), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the optimizer's state cannot be handed over: {error}.") from None
    head = len(text).to_bytes(LENGTH, "big") + text
    head += bytes(-len(head) % ALIGNED)
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors])


def unpack(data: Tensor) -> dict[Any, Any]:
    """The inverse of `pack`; tensors are views of the bytes. ValueError if `pack` has not made them."""

    def rich(value: Any) -> Any:
        if isinstance(value, list):
            return {key: rich(one) for key, one in value}
        if isinstance(value, dict):
            ((kind, inner),) = value.items()
            if kind == TENSOR:
                name, shape, at = inner
                dtype = getattr(torch, name)
                size = math.prod(shape) * dtype.itemsize
                if not 0 <= at <= at + size <= tensors.numel():
                    raise ValueError("a tensor is not where it is said to be")
                return tensors[at : at + size].view(dtype).view(shape)
            return (tuple if kind == "tuple" else list)(map(rich, inner))
        return value

    try:
        length = int.from_bytes(bytes(data[:LENGTH].tolist()), "big")
        tensors = data[-(-(LENGTH + length) // ALIGNED) * ALIGNED :]
        return {**rich(json.loads(bytes(data[LENGTH : LENGTH + length].numpy())))}
    except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"it is no packed state: {error}") from None


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def post(fabric: Fabric, peer: int, tag: Tag, data: Tensor) -> None:
    """Send what `pack` has made, without waiting, in pieces that fit a frame."""
    for part in torch.split(data, BYTES_PIECE):
        fabric.post(peer, (*tag, BYTES), part, note=(data.numel(),))


async def receive(fabric: Fabric, peer: int, tag: Tag, holds: type = Tensor) -> dict[str, Any]:
    """Wait for tensors (or other things of one type) by name; PeerLost if the bytes make no sense."""
    data, whole = bytearray(), -1
    while len(data) != whole:
        part = await fabric.receive((*tag, BYTES), peer)
        if part.payload.dtype != torch.uint8:
            raise part.bad("something else than bytes")
        (length,) = part.numbers(1, 1)
        whole = length if whole < 0 else whole
        data += part.payload.numpy().data
        if length != whole or len(data) > whole or not part.payload.numel():
            raise part.bad("bytes of another length")
    try:
        found = unpack(torch.frombuffer(data, dtype=torch.uint8))
    except ValueError:
        raise part.bad("no packed state") from None
    if not all(isinstance(one, holds) for one in found.values()):
        raise part.bad(f"something else than a {holds.__name__}")
    return found


class Asking:
    """One worker's questions to others, and its answers to theirs. In the communication thread."""

    def __init__(self, fabric: Fabric, spawn: Spawn) -> None:
        self.fabric, self._spawn = fabric, spawn

    async def ask(
        self, peer: int, what: str, *numbers: int, holds: type = Tensor
    ) -> tuple[Message, dict[str, Any]]:
        """A peer's numbers and vector, and things of one type by name; PeerLost if the peer is gone."""
        message = await self.fabric.ask(peer, (RUNTIME, what), note=numbers)
        try:
            return message, await receive(self.fabric, peer, message.tag, holds)
        finally:
            self.fabric.forget(message.tag)

    def serve(self, what: str, count: int, answer: Callable[..., Awaitable[Reply]]) -> None:
        """Answer questions from now on; they have `count` numbers."""

        async def reply(peer: int, number: int, *numbers: int) -> None:
            with contextlib.suppress(PeerLost):
                note, vector, packed = await answer(*numbers)
                self.fabric.post(peer, (RUNTIME, what, number), vector, note)
                post(self.fabric, peer, (RUNTIME, what, number), packed)

        def heard(question: Message) -> None:
            self._spawn(reply(question.sender, *question.numbers(1 + count, 1 + count)))

        self._spawn(hear(self.fabric, (RUNTIME, what), heard))
