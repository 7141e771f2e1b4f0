"""Copying a living worker: its weights, its buffers and its optimizer's state, for one that joins.

The worker that is copied goes on training. Weights travel as vectors do; all else as bytes, in its own type.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from torch import Tensor

from freewheel.errors import ConfigError, PeerLost
from freewheel.runtime.membership.rendezvous import POLL_S
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.asking import Asking, Reply
from freewheel.runtime.worker.inventory import Inventory

COPY = "copy"
TRIES = 5

log = logging.getLogger("freewheel")


class Copies:
    """One worker's side of both: copying another, and being copied."""

    def __init__(
        self, asking: Asking, inventory: Inventory, handover: Callable[[], Awaitable[Tensor | None]]
    ) -> None:
        self._asking, self._fabric, self._inventory = asking, asking.fabric, inventory
        self._handover = handover
        """Gives the weights for a worker that joins, or None: not yet."""
        asking.serve(COPY, 0, self._give)

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
        inventory, optimizer = self._inventory, self._inventory.optimizer
        try:
            weights, rest = await self._asking.ask(peer, COPY, holds=dict)
            if weights.vector is None:
                return False
            theirs, fixed = weights.of(inventory.replica.size), rest.get("fixed", {})
            if not all(isinstance(one, Tensor) for one in fixed.values()):
                raise weights.bad("something else than tensors")
        except PeerLost:
            return False
        inventory.replica.load(theirs)
        inventory.set_fixed(fixed)
        if "state" in rest:
            # The script's: the other's may be of any moment.
            rates = [group.get("lr") for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(rest["state"])
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    if rate is not None:
                        group["lr"] = rate
            except Exception as error:  # it has another optimizer, or what it sent is no state
                log.warning("the optimizer begins without worker %d's state: %s", peer, error)
        return True

    async def _give(self) -> Reply:
        weights = await self._handover()
        return (), weights, tensor_codec.pack({}) if weights is None else await self._rest()

    async def _rest(self) -> Tensor:
        """Buffers, frozen parameters and the optimizer's state, read beside training.

        A step may fall into it, so some numbers may be one step older than others: that is less than what a
        worker that joins differs by anyway, and training does not wait for it.
        """
        found: dict[str, Any] = {"fixed": self._inventory.fixed()}
        for _ in range(TRIES):
            try:
                state = self._inventory.optimizer.state_dict()
                return await asyncio.to_thread(tensor_codec.pack, {**found, "state": state})
            except ConfigError as error:
                log.warning("%s It begins anew on the worker that joins.", error)
                break
            except RuntimeError:  # the first step was just making it
                await asyncio.sleep(POLL_S)
        return tensor_codec.pack(found)
