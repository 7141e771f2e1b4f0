"""What workers ask each other beside training: parts of the answer, copies for joiners, means of scripts.

The worker that is asked goes on training. Weights travel as vectors; all else as bytes, in its own type.

For means of what scripts measure or keep, each worker keeps what it last said under a name, and one that
wants the mean asks all others. Nobody's training waits, except with `wait`: until all have said as much.
"""

import asyncio
import contextlib
import logging
import math
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from freewheel.data.order import number
from freewheel.errors import ConfigError, PeerLost, WorkerLost
from freewheel.fabric import collectives
from freewheel.fabric.base import Tag
from freewheel.node_driver import NodeDriver
from freewheel.runtime.membership.rendezvous import POLL_S
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory, TensorMean
from freewheel.runtime.worker.tensor_codec import Asking, Reply
from freewheel.strategy import Strategy

MODEL = "model"
PART, OWN, COPY = range(3)  # a part in the answer, a worker's own weights, all that a joiner begins with
NO_ANSWER = "no worker that holds the answer is left."
TRIES = 5
MEAN = "mean"
FEW = 64  # up to so many numbers travel in float64; more in the type of the weights
AGAIN_S = 0.02  # between two questions for one mean
WARN_S = 10.0  # after which a warning says which worker is awaited
STUCK_S = 3.0  # after which a mean does without a peer that is waiting to merge with this worker

log = logging.getLogger("freewheel")


class Answers:
    """One worker's answers about its model, and its questions to others. In the communication thread."""

    def __init__(self, asking: Asking, node: NodeDriver, strategy: Strategy, inventory: Inventory) -> None:
        self._asking, self._fabric, self._node = asking, asking.fabric, node
        self._strategy, self._inventory, self._replica = strategy, inventory, inventory.replica
        self.ready = False  # whether this worker has weights that others may copy
        asking.serve(MODEL, 1, self._tell)

    async def _tell(self, what: int) -> Reply:
        vector = await self._weights(what) if self.ready else None
        if what == COPY and vector is not None:
            rest = await self._rest()
        else:
            rest = tensor_codec.pack({} if what == COPY else self._inventory.buffers())
        return (self._fabric.counters.steps,), vector, rest

    async def _weights(self, what: int) -> Tensor | None:
        if what == COPY:
            return await self._strategy.handover(self._node)
        return await (self._node.weights() if what == OWN else self._strategy.answer(self._node))

    async def _rest(self) -> Tensor:
        """Buffers, frozen parameters and the optimizer's state, read although training may be in a step."""
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

    async def mean(self, members: Sequence[int], tag: Tag) -> Answer:
        """The mean of these workers, who all call this; the first averages the buffers, if they differ."""
        fabric, (first, *others), part = self._fabric, members, await self._weights(PART)
        buffers = self._inventory.buffers()
        packed = tensor_codec.pack(buffers)
        note = float(part is not None), float(zlib.crc32(packed.numpy().data))
        notes = await collectives.gather(fabric, members, note, (*tag, "parts"))
        parts = sum(has_part for has_part, _ in notes.values())
        if not parts:
            raise WorkerLost(NO_ANSWER)
        if part is None:
            part = self._replica.plain_vector(self._replica.size, self._replica.dtype).zero_()
        shares = {peer: notes[peer][0] / parts for peer in members}
        weights, tag = await fabric.reduce((*tag, "weights"), part, shares), (*tag, "buffers")
        if len({digest for _, digest in notes.values()}) == 1:
            return weights, buffers
        if fabric.rank != first:
            tensor_codec.post(fabric, first, tag, packed)
            return weights, await tensor_codec.receive(fabric, first, tag)
        mean = TensorMean(buffers=True)
        mean.add(buffers)
        for peer in others:
            mean.add(await tensor_codec.receive(fabric, peer, tag))
        packed = tensor_codec.pack(mean.result())
        for peer in others:
            tensor_codec.post(fabric, peer, tag, packed)
        return weights, mean.result()

    async def consensus(self) -> Answer:
        weights, parts, buffers = None, 0, TensorMean(buffers=True)
        async for _, part, their_buffers, _ in self.parts():
            buffers.add(their_buffers)
            if part is not None:
                part = part.to(self._replica.device)
                weights = part if weights is None else weights.add_(part)
                parts += 1
        if weights is None:
            raise WorkerLost(NO_ANSWER)
        return weights.div_(parts), buffers.result()

    async def parts(
        self, own: bool = False
    ) -> AsyncIterator[tuple[int, Tensor | None, dict[str, Tensor], int]]:
        """Of every worker: rank, part in the answer (`own`: its weights), buffers, steps. Own the vectors."""
        fabric, what = self._fabric, OWN if own else PART
        own_part = await self._weights(what), self._inventory.buffers(), fabric.counters.steps
        asked = {peer: asyncio.ensure_future(self._asking.ask(peer, MODEL, what)) for peer in fabric.others}
        try:
            for peer in fabric.members:
                if peer == fabric.rank:
                    yield fabric.rank, *own_part
                    continue
                try:
                    part, buffers = await asked[peer]
                    vector = None if part.vector is None else part.of(self._replica.size)
                    (steps,) = part.numbers(1, 1)
                except PeerLost:
                    continue
                yield peer, vector, buffers, steps
        finally:
            for asking in asked.values():
                asking.cancel()

    async def copy(self, source: int | None = None) -> bool:
        """Become a copy of a living worker; False where nobody has weights and others wait for this one's."""
        while not await self.copy_once(source):
            if self._fabric.members[0] == self._fabric.rank:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def copy_once(self, source: int | None = None) -> bool:
        """As `copy`, in one round over the others, `source` first; False if none could be copied."""
        for peer in sorted(self._fabric.others, key=lambda peer: peer != source):
            try:
                weights, rest = await self._asking.ask(peer, MODEL, COPY, holds=dict)
                if weights.vector is None:
                    continue
                theirs, fixed = weights.of(self._replica.size), rest.get("fixed", {})
                if not all(isinstance(one, Tensor) for one in fixed.values()):
                    raise weights.bad("something else than tensors")
            except PeerLost:
                continue
            self._replica.load(theirs)
            self._inventory.set_fixed(fixed)
            if "state" in rest:  # at the rates of the script: the other's may be of any moment
                optimizer = self._inventory.optimizer
                rates = [group.get("lr") for group in optimizer.param_groups]
                try:
                    optimizer.load_state_dict(rest["state"])
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        if rate is not None:
                            group["lr"] = rate
                except Exception as error:  # it has another optimizer, or what it sent is no state
                    log.warning("the optimizer begins without worker %d's state: %s", peer, error)
            return True
        return False


class Means:
    """One worker's part in the means of scripts. In the communication thread."""

    def __init__(
        self,
        asking: Asking,
        dtype: torch.dtype,
        ended: Callable[[int], bool],
        merging: Callable[[], Sequence[int]],
        begun: Callable[[], bool],
    ) -> None:
        self._asking, self._fabric, self._dtype = asking, asking.fabric, dtype
        # Whether a peer's loop has ended; the members of the merge under way; whether training has begun.
        self._ended, self._merging, self._begun = ended, merging, begun
        self._said: dict[int, tuple[int, list[Tensor]]] = {}  # by name: how often, and the last two values
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
        """The mean of what all have said under a name; `wait`: until all have said as much as this worker."""
        key = number(f"mean/{name}") >> 14
        times, kept = self._said.get(key, (0, []))
        if wait and not kept:  # after a restart: go on where the others are
            for peer in self._fabric.others:
                with contextlib.suppress(PeerLost):
                    message, _ = await self._asking.ask(peer, MEAN, key, 0)
                    times = max(times, message.numbers(1)[0] - 1)
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
                        f"{value.numel()}. Give the same on all workers, and each thing a name of its own."
                    )
                total, count = total.add_(theirs), count + 1
        return total.div_(count)

    async def _theirs(self, peer: int, name: str, key: int, turn: int) -> Tensor | None:
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
            # The peer waits for this worker's next step, which comes after the mean: a deadlock.
            stuck = self._fabric.rank in merging and not self._merging()
            stuck_s = min(stuck_s, clock() + STUCK_S) if stuck else math.inf
            if clock() > stuck_s:
                log.warning("the mean of %r is without worker %d: it waits for a step here", name, peer)
                return None
            await asyncio.sleep(AGAIN_S)


def flat(value: Any) -> Tensor:
    parts = [torch.empty(0, dtype=torch.float64)]
    for one in pytree.tree_leaves(value):
        if isinstance(one, bool) or not isinstance(one, Tensor | int | float):
            raise ConfigError(
                f"mean takes numbers, tensors, and lists and dicts of them, not a {type(one).__name__}."
            )
        if not _stays(one):
            parts.append(torch.as_tensor(one, dtype=torch.float64, device="cpu").detach().flatten())
    return torch.cat(parts)


def unnamed(value: Any, caller: FrameType) -> str:
    """The name of a mean that has none: the line of the call, and a digest of the value's keys."""
    keys = zlib.crc32(str(pytree.tree_structure(value)).encode())
    return f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} ({keys:x})"


def shaped(vector: Tensor, like: Any) -> Any:
    leaves, form = pytree.tree_flatten(like)
    parts = torch.split(vector, [0 if _stays(one) else torch.as_tensor(one).numel() for one in leaves])

    def piece(one: Any, part: Tensor) -> Any:
        if not isinstance(one, Tensor):
            return float(part)
        return one.clone() if _stays(one) else part.view(one.shape).to(one.device, one.dtype)

    return pytree.tree_unflatten(map(piece, leaves, parts), form)


def _stays(value: Any) -> bool:
    """Whether a value is not averaged: a mask, whose infinities are meant."""
    return isinstance(value, Tensor) and value.ndim > 0 and not bool(value.isfinite().all())
