"""Means over workers of what the script itself measures or keeps: metrics, an average of weights of its own.

Each worker keeps what it last said under a name, and whoever wants the mean asks all others for theirs. So
nobody's training waits; one that wants everybody's waits until all have said as much under that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freewheel.data.order import number
from freewheel.errors import ConfigError, PeerLost
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.tensor_codec import Asking, Reply

MEAN = "mean"
FEW = 64  # so many numbers travel as they are; more in the type of the weights
POLL_S = 0.02
WARN_S = 10.0  # after which it is said who is waited for
STUCK_S = 3.0  # after which the one of two that waits for a mean does without the one that waits to merge

log = logging.getLogger("freewheel")


class Means:
    """One worker's part in means. In the communication thread."""

    def __init__(
        self,
        asking: Asking,
        dtype: torch.dtype,
        ended: Callable[[int], bool],
        merging: Callable[[], Sequence[int]],
        begun: Callable[[], bool],
    ) -> None:
        self._asking, self._fabric, self._dtype = asking, asking.fabric, dtype
        # Whose loop has ended; whom this worker merges with just now; whether it can say anything.
        self._ended, self._merging, self._begun = ended, merging, begun
        self._said: dict[int, tuple[int, list[Tensor]]] = {}  # by name: how often, the last two times what
        asking.serve(MEAN, 2, self._answer)

    async def _answer(self, name: int, turn: int) -> Reply:
        times, kept = self._said.get(name, (0, []))
        back = times - turn if turn else 0
        found = {}
        if 0 <= back < len(kept):
            value = kept[-1 - back]
            found[""] = value if value.numel() <= FEW else value.to(self._dtype)
        return (times, self._begun(), *self._merging()), None, tensor_codec.pack(found)

    async def mean(self, value: Tensor, name: str, wait: bool) -> Tensor:
        """The mean of what all have said under a name; `wait`: as often as this worker."""
        key = number(f"mean/{name}") >> 14
        times, kept = self._said.get(key, (0, []))
        if wait and not kept:  # one that was started again goes on where the others are
            times = max(0, await self._turn(key) - 1)
        self._said[key] = times + 1, [*kept[-1:], value]
        total, count = value.clone(), 1
        for peer in self._fabric.others:
            theirs = None
            with contextlib.suppress(PeerLost):
                theirs = await self._theirs(peer, name, key, times + 1 if wait else 0)
            if theirs is not None:
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
        for peer in self._fabric.others:
            with contextlib.suppress(PeerLost):
                message, _ = await self._asking.ask(peer, MEAN, key, 0)
                times = max(times, message.numbers(1)[0])
        return times

    async def _theirs(self, peer: int, name: str, key: int, turn: int) -> Tensor | None:
        """What a worker has said; None: nothing."""
        clock = asyncio.get_running_loop().time
        warn_s, stuck_s = clock() + WARN_S, math.inf
        while True:
            ended = self._ended(peer)  # before asking: it says nothing more afterwards
            message, found = await self._asking.ask(peer, MEAN, key, turn)
            times, begun, *merging = message.numbers(2)
            if "" in found:
                theirs: Tensor = found[""].flatten()
                if theirs.dtype not in (torch.float64, self._dtype):
                    raise message.bad(f"a mean of {theirs.dtype}")
                return theirs.to(torch.float64)
            if not turn or ended or times > turn or not begun:
                return None
            if clock() > warn_s:
                warn_s = math.inf
                log.warning("waits for worker %d to call worker.mean for %r, too", peer, name)
            # It may wait for this worker's next step, which comes after the mean, or never.
            stuck = self._fabric.rank in merging and not self._merging()
            stuck_s = min(stuck_s, clock() + STUCK_S) if stuck else math.inf
            if clock() > stuck_s:
                log.warning("the mean of %r is without worker %d: it waits for a step here", name, peer)
                return None
            await asyncio.sleep(POLL_S)


def flat(value: Any) -> Tensor:
    """Numbers, tensors, lists and dicts of them as one vector."""
    parts = [torch.empty(0, dtype=torch.float64)]
    for one in pytree.tree_leaves(value):
        if isinstance(one, bool) or not isinstance(one, Tensor | int | float):
            raise ConfigError(
                f"mean takes numbers, tensors, and lists and dicts of them, not a {type(one).__name__}."
            )
        if not _stays(one):
            parts.append(torch.as_tensor(one, dtype=torch.float64, device="cpu").detach().flatten())
    return torch.cat(parts)


def shaped(vector: Tensor, like: Any) -> Any:
    """A vector in the form of what it was made of."""
    at = 0

    def piece(one: Any) -> Any:
        nonlocal at
        if not isinstance(one, Tensor):
            at += 1
            return float(vector[at - 1])
        if _stays(one):
            return one.clone()
        at += one.numel()
        return vector[at - one.numel() : at].view(one.shape).to(one.device, one.dtype)

    return pytree.tree_map(piece, like)


def _stays(value: Any) -> bool:
    """Whether it has no mean: a mask, whose infinities are meant."""
    return isinstance(value, Tensor) and value.ndim > 0 and not bool(value.isfinite().all())
