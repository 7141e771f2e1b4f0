"""Copying a living worker: its weights, its buffers and its optimizer's state, for one that joins.

The worker that is copied goes on training. What is longer than a vector of the run may be travels in several.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import RUNTIME, Message, Tag
from freewheel.fabric.tcp import TcpFabric
from freewheel.runtime import states
from freewheel.runtime.live_replica import LiveReplica
from freewheel.runtime.rendezvous import POLL_S

COPY: Tag = (RUNTIME, "copy")
TRIES = 5

log = logging.getLogger("freewheel")


def _flat(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [one.detach().flatten().to("cpu", dtype) for one in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)


@torch.no_grad()
def _fill(tensors: list[Tensor], vector: Tensor) -> None:
    at = 0
    for one in tensors:
        one.copy_(vector[at : at + one.numel()].view(one.shape))
        at += one.numel()


def _buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flat_buffers(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """BatchNorm's statistics and the like as one vector: what a consensus averages beside the weights."""
    return _flat(_buffers(model), dtype)


def set_flat_buffers(model: nn.Module, vector: Tensor) -> None:
    """The way back."""
    _fill(_buffers(model), vector)


class Rest:
    """What a worker has beside the weights that train."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self._model, self._dtype, self.optimizer = model, dtype, optimizer

    def _fixed(self) -> list[Tensor]:
        frozen = (parameter for parameter in self._model.parameters() if not parameter.requires_grad)
        return _buffers(self._model) + [one.data for one in frozen if one.is_floating_point()]

    def buffers(self) -> Tensor:
        """BatchNorm's statistics and the like."""
        return flat_buffers(self._model, self._dtype)

    def fixed(self) -> Tensor:
        """The same with frozen parameters: what all begin with alike."""
        return _flat(self._fixed(), self._dtype)

    def set_fixed(self, vector: Tensor) -> None:
        """The way back."""
        _fill(self._fixed(), vector)


class Copies:
    """One worker's side of both: copying another, and being copied."""

    def __init__(self, fabric: TcpFabric, replica: LiveReplica, rest: Rest) -> None:
        self._fabric, self._replica, self._rest = fabric, replica, rest
        self._tries = 0

    async def take(self, source: int | None = None) -> bool:
        """Become a copy of a living worker; False: nobody has anything to copy, and others wait for this."""
        while not await self.take_once(source):
            if self._fabric.members[0] == self._fabric.rank:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def take_once(self, source: int | None = None) -> bool:
        """Become a copy of a living worker, if one has begun."""
        fabric = self._fabric
        for peer in fabric.members if source not in fabric.members else (source, *fabric.members):
            if peer != fabric.rank and await self._take_from(peer):
                return True
        return False

    async def _take_from(self, peer: int) -> bool:
        self._tries += 1
        tag: Tag = (*COPY, self._tries)
        try:
            self._fabric.post(peer, COPY, note=(self._tries,))
            weights = await self._fabric.receive((*tag, "weights"), peer)
            if weights.vector is None:
                return False
            fixed = await self._fabric.receive((*tag, "fixed"), peer)
            parts = [
                (await self._fabric.receive((*tag, "state"), peer)).payload
                for _ in range(int(weights.note[0]))
            ]
        except PeerLost:
            return False
        self._replica.load(weights.vector)
        self._rest.set_fixed(fixed.payload)
        if parts:
            groups = self._rest.optimizer.param_groups
            rates = [group.get("lr") for group in groups]  # the script's: the other's may be of any moment
            try:
                self._rest.optimizer.load_state_dict(states.unpack(torch.cat(parts)))
                for group, rate in zip(self._rest.optimizer.param_groups, rates, strict=True):
                    if rate is not None:
                        group["lr"] = rate
            except (ValueError, KeyError, RuntimeError) as error:  # it has another optimizer
                log.warning("the optimizer begins without worker %d's state: %s", peer, error)
        return True

    async def hand_out(
        self,
        handover: Callable[[], Awaitable[Tensor | None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Answer those who want a copy, for ever; `handover` gives the weights, or None: not yet."""
        while True:
            request = await self._fabric.receive(COPY)
            spawn(self._give(request, handover))

    async def _give(self, request: Message, handover: Callable[[], Awaitable[Tensor | None]]) -> None:
        peer, tag = request.sender, (*COPY, int(request.note[0]))
        weights = await handover()
        state = await self._state() if weights is not None else None
        parts = [] if state is None else list(torch.split(state, self._fabric.me.longest))
        self._fabric.post(peer, (*tag, "weights"), weights, note=(len(parts),))
        self._fabric.post(peer, (*tag, "fixed"), self._rest.fixed())
        for part in parts:
            self._fabric.post(peer, (*tag, "state"), part.clone())

    async def _state(self) -> Tensor | None:
        """The optimizer's state, read beside training.

        A step may fall into it, so some numbers may be one step older than others: that is less than what a
        worker that joins differs by anyway, and training does not wait for it.
        """
        for _ in range(TRIES):
            try:
                state = self._rest.optimizer.state_dict()
                return await asyncio.to_thread(states.pack, state, self._replica.dtype)
            except ConfigError as error:
                log.warning("%s It begins anew on the worker that joins.", error)
                return None
            except RuntimeError:  # the first step was just making it
                await asyncio.sleep(POLL_S)
        return None
