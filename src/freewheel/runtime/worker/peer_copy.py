"""Copying a living worker: its weights, its buffers and its optimizer's state, for one that joins.

The worker that is copied goes on training. Weights travel as vectors do; all else as bytes, in its own type.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from torch import Tensor

from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric.base import RUNTIME, Message, Spawn, Tag, hear
from freewheel.fabric.tcp import TcpFabric
from freewheel.runtime.membership.rendezvous import POLL_S
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.inventory import Inventory

COPY: Tag = (RUNTIME, "copy")
TRIES = 5

log = logging.getLogger("freewheel")


class Copies:
    """One worker's side of both: copying another, and being copied."""

    def __init__(self, fabric: TcpFabric, inventory: Inventory) -> None:
        self._fabric, self._inventory = fabric, inventory
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
            fixed = await tensor_codec.receive(self._fabric, peer, (*tag, "fixed"))
            theirs = weights.of(self._inventory.replica.size)
            state, (has_state,) = None, weights.numbers(1, 1)
            if has_state:
                state = await tensor_codec.receive_packed(self._fabric, peer, (*tag, "state"))
        except PeerLost:
            return False
        self._inventory.replica.load(theirs)
        self._inventory.set_fixed(fixed)
        if state is not None:
            optimizer = self._inventory.optimizer
            # The script's: the other's may be of any moment.
            rates = [group.get("lr") for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(tensor_codec.unpack(state))
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    if rate is not None:
                        group["lr"] = rate
            except (
                ArithmeticError,
                AttributeError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # it has another optimizer, or what it sent is no state
                log.warning("the optimizer begins without worker %d's state: %s", peer, error)
        return True

    def hand_out(
        self, handover: Callable[[], Awaitable[Tensor | None]], spawn: Spawn
    ) -> Coroutine[Any, Any, None]:
        """Answer those who want a copy, for ever; `handover` gives the weights, or None: not yet."""

        def answer(request: Message) -> None:
            (number,) = request.numbers(1, 1)
            spawn(self._give(request.sender, number, handover))

        return hear(self._fabric, COPY, answer)

    async def _give(self, peer: int, number: int, handover: Callable[[], Awaitable[Tensor | None]]) -> None:
        tag = (*COPY, number)
        weights = await handover()
        state = await self._state() if weights is not None else None
        self._fabric.post(peer, (*tag, "weights"), weights, note=(float(state is not None),))
        tensor_codec.post(self._fabric, peer, (*tag, "fixed"), self._inventory.fixed())
        if state is not None:
            tensor_codec.post(self._fabric, peer, (*tag, "state"), state)

    async def _state(self) -> Tensor | None:
        """The optimizer's state, read beside training.

        A step may fall into it, so some numbers may be one step older than others: that is less than what a
        worker that joins differs by anyway, and training does not wait for it.
        """
        for _ in range(TRIES):
            try:
                state = self._inventory.optimizer.state_dict()
                return await asyncio.to_thread(tensor_codec.pack, state)
            except ConfigError as error:
                log.warning("%s It begins anew on the worker that joins.", error)
                return None
            except RuntimeError:  # the first step was just making it
                await asyncio.sleep(POLL_S)
        return None
