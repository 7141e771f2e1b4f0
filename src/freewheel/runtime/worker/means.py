"""Means over workers of what the script itself measures or keeps: metrics, an average of weights of its own.

Each worker keeps what it last said under a name, and whoever wants the mean asks all others for theirs. So
nobody's training waits; one that wants everybody's waits until all have said as much under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from freewheel.data.order import number
from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import RUNTIME, Fabric, Message, Tag, hear

ASK: Tag = (RUNTIME, "mean")
FEW = 64
"""So many numbers travel as they are; more in the type of the weights."""
POLL_S = 0.02
WARN_S = 10.0
"""After which it is said who is waited for."""

log = logging.getLogger("freewheel")


class Means:
    """One worker's part in means. In the communication thread."""

    def __init__(
        self, fabric: Fabric, longest: int, dtype: torch.dtype, ended: Callable[[int], bool]
    ) -> None:
        self.fabric, self._longest, self._dtype, self._ended = fabric, longest, dtype, ended
        self._said: dict[int, tuple[int, list[Tensor]]] = {}
        """By the number of a name: how often something was said, and the last two times what."""
        self._serial = 0

    def serve(self) -> Coroutine[Any, Any, None]:
        """Answer those who ask."""
        return hear(self.fabric, ASK, self._answer)

    def _answer(self, message: Message) -> None:
        serial, name, turn, piece = message.numbers(4, 4)
        times, kept = self._said.get(name, (0, []))
        tag = (*ASK, serial)
        back = times - turn if turn else 0
        if not kept or not 0 <= back < len(kept):
            self.fabric.post(message.sender, tag, note=(float(times), -1.0))
            return
        value = kept[-1 - back]
        if value.numel() <= FEW:
            self.fabric.post(message.sender, tag, note=(float(times), float(value.numel()), *value.tolist()))
            return
        begin = min(max(0, piece), value.numel()) * self._longest
        part = value[begin : begin + self._longest].to(self._dtype)
        self.fabric.post(message.sender, tag, part, note=(float(times), float(value.numel())))

    async def mean(self, value: Tensor, name: str, wait: bool) -> Tensor:
        """The mean of what all have said under a name; `wait`: as often as this worker."""
        key = number(f"mean/{name}") >> 14
        times, kept = self._said.get(key, (0, []))
        if wait and not kept:  # one that was started again goes on where the others are
            times = max(0, await self._turn(key) - 1)
        self._said[key] = times + 1, [*kept[-1:], value]
        total, count = value.clone(), 1
        for peer in self.fabric.members:
            if peer != self.fabric.rank:
                theirs = await self._theirs(peer, name, key, times + 1 if wait else 0)
                if theirs is None:
                    continue
                if theirs.numel() != value.numel():
                    raise ConfigError(
                        f"worker {peer} has {theirs.numel()} numbers for the mean of {name!r}, this one "
                        f"{value.numel()}. Give the same on all workers."
                    )
                total, count = total.add_(theirs), count + 1
        return total.div_(count)

    async def _turn(self, key: int) -> int:
        """How often the others have said something under a name."""
        times = 0
        for peer in self.fabric.members:
            with contextlib.suppress(PeerLost):
                if peer != self.fabric.rank:
                    times = max(times, self._told(await self._ask(peer, key, 0, 0))[0])
        return times

    @staticmethod
    def _told(message: Message) -> tuple[int, int]:
        """How often, and how many numbers."""
        if len(message.note) < 2 or not all(-2 < one < 2**53 for one in message.note[:2]):
            raise message.bad("no part of a mean")
        return int(message.note[0]), int(message.note[1])

    async def _theirs(self, peer: int, name: str, key: int, turn: int) -> Tensor | None:
        """What a worker has said; None: nothing, or it is gone."""
        loop = asyncio.get_running_loop()
        warn_s = loop.time() + WARN_S
        try:
            while True:
                ended = self._ended(peer)  # before asking: it says nothing more afterwards
                message = await self._ask(peer, key, turn, 0)
                times, size = self._told(message)
                if 0 <= size <= FEW:
                    return torch.tensor(message.note[2:], dtype=torch.float64)
                if size > 0:
                    pieces = range(1, -(-size // self._longest))
                    rest = [await self._ask(peer, key, turn, piece) for piece in pieces]
                    return torch.cat([one.payload.cpu().to(torch.float64) for one in (message, *rest)])
                if not turn or ended or times > turn:
                    return None
                if loop.time() > warn_s:
                    warn_s = float("inf")
                    log.warning("waits for worker %d to call worker.mean for %r, too", peer, name)
                await asyncio.sleep(POLL_S)
        except PeerLost:
            return None

    async def _ask(self, peer: int, key: int, turn: int, piece: int) -> Message:
        self._serial += 1
        tag = (*ASK, self._serial)
        self.fabric.post(peer, ASK, note=(self._serial, key, turn, piece))
        try:
            return await self.fabric.receive(tag, peer)
        finally:
            self.fabric.forget(tag)


def each(value: Any, act: Callable[[Any], Any]) -> Any:
    """The same form, with what `act` makes of each number and tensor."""
    if isinstance(value, dict):
        return type(value)({key: each(one, act) for key, one in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(each(one, act) for one in value)
    if isinstance(value, bool) or not isinstance(value, Tensor | int | float):
        raise ConfigError(
            f"mean takes numbers, tensors, and lists and dicts of them, not a {type(value).__name__}."
        )
    return act(value)


def flat(value: Any) -> Tensor:
    """Numbers, tensors, lists and dicts of them as one vector."""
    parts = [torch.empty(0, dtype=torch.float64)]

    def add(one: Any) -> None:
        if not isinstance(one, Tensor):
            parts.append(torch.tensor([float(one)], dtype=torch.float64))
        elif not _stays(one):
            parts.append(one.detach().flatten().to("cpu", torch.float64))

    each(value, add)
    return torch.cat(parts)


def shaped(vector: Tensor, like: Any) -> Any:
    """A vector in the form of what it was made of."""
    at = 0

    def take(one: Any) -> Any:
        nonlocal at
        if isinstance(one, Tensor) and _stays(one):
            return one.clone()
        begin, at = at, at + (one.numel() if isinstance(one, Tensor) else 1)
        mean = vector[begin:at]
        return mean.view(one.shape).to(one.device, one.dtype) if isinstance(one, Tensor) else float(mean)

    return each(like, take)


def _stays(tensor: Tensor) -> bool:
    """Whether it has no mean: a mask, whose infinities are meant."""
    return tensor.ndim > 0 and not bool(tensor.isfinite().all())
