"""Moving vectors over a transport, piece by piece, and combining pieces while they are in the cache.

The same coroutines move all vectors: long ones in threads, where they block and never yield; short ones, and
those over TLS, in the event loop.

What several workers make of their vectors together is computed once for all: each takes a share of the
numbers (two take a half each) and writes the results over everybody's vector, so they need no memory.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.fabric import kernels
from freewheel.fabric.base import Each, Meet, Note, Pull, Tag
from freewheel.fabric.frames import BadFrame
from freewheel.fabric.transport import Bytes, Transport
from freewheel.fabric.windows import DEVICE, HOST, STREAM
from freewheel.records.counters import Counters

T = TypeVar("T")
LONG = 1 << 15  # vectors of at least so many numbers are moved in threads
PIECE = 1 << 20  # numbers that are moved at once: with fewer, threads wake up too often
CHECKED = 1 << 17  # numbers that are checked, and combined, at once: they should stay in the cache
INLINE = 1 << 18  # host vectors up to here are combined in the event loop: a thread would take longer
# Numbers that are combined at once. A few of these pieces should fit the processor's cache; on a GPU more
# would be faster, and need more memory.
HOST_PIECE, DEVICE_PIECE = 1 << 16, 1 << 23
# Vectors of at most so many numbers, of two or all together, one worker combines, by the way they travel.
SHORT = {STREAM: -1, HOST: INLINE, DEVICE: 1 << 24}
ALIGN = 64  # shares of a vector begin at multiples of so many numbers


class Outgoing(asyncio.Future):  # type: ignore[type-arg]
    """A message on its way out; done when the last byte has left, or the peer has read the window."""

    head = b""  # all before the vector, or what is left of it
    begun = False  # whether some of it has left
    near: tuple[Tag, Note] | None = None  # the tag and the note, if the peer reads the vector from a window

    def __init__(self, vector: Tensor | None, wire: torch.dtype, counted: bool) -> None:
        super().__init__()
        self.vector, self.wire = vector, wire
        self.counted = counted  # whether it is a strategy's message: none may be under way at the end


class Landing(asyncio.Future):  # type: ignore[type-arg]
    """A vector that is awaited: each piece is handed to `each` with its place, in a thread or not."""

    def __init__(self, numel: int, each: Each | Tensor) -> None:
        super().__init__()
        self.numel, self.each = numel, each
        self.failure: BaseException | None = None  # what `each` raised

    @property
    def open(self) -> bool:
        """Whether it is still wanted; if not, what comes for it is read and dropped."""
        return self.failure is None and not self.done()

    def take(self, at: int, piece: Tensor) -> None:
        try:
            if not self.open:
                return
            if isinstance(self.each, Tensor):
                self.each[at : at + piece.numel()].copy_(piece)
            else:
                self.each(at, piece)
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        """All pieces are there; call this in the event loop."""
        if not self.done() and self.failure is not None:
            self.set_exception(self.failure)
        elif not self.done():
            self.set_result(None)


class Transfers:
    """Reads and writes vectors, and does long work beside the event loop."""

    def __init__(
        self, counters: Counters, dtype: torch.dtype, workers: int, side: torch.cuda.Stream | None
    ) -> None:
        self.counters, self.dtype, self.side = counters, dtype, side
        self._spare: dict[int, Tensor] = {}
        # Each connection reads and writes at once at most, and two wait for the device or combine.
        self._threads = ThreadPoolExecutor(2 * workers + 2, thread_name_prefix="freewheel-vectors")

    def close(self) -> None:
        """End the threads; their transports must have been closed."""
        self._threads.shutdown()

    def take(self, landing: Landing, vector: Tensor) -> None:
        """Land what was read before anybody awaited it, and use its memory again: fresh memory is dear."""
        landing.take(0, vector)
        landing.finish()
        if not vector.is_cuda and vector.numel() >= LONG:
            self._spare = {vector.numel(): vector}

    async def work(self, numel: int, act: Callable[[], T]) -> T:
        """Do something with vectors: in a thread, unless it is short; on a device, until it has finished."""
        if self.side is None and numel <= INLINE:
            return act()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, act)

    def _work(self, act: Callable[[], T]) -> T:
        if self.side is None:
            return act()
        with torch.cuda.stream(self.side):
            done = act()
            finished = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            finished.record(self.side)
        finished.synchronize()
        return done

    # -- over a transport --

    async def write(self, transport: Transport, vector: Tensor, wire: torch.dtype) -> None:
        await self._move(transport, vector.numel(), partial(self._write, vector, wire))

    async def read(self, transport: Transport, dtype: torch.dtype, numel: int) -> Tensor:
        kept = torch.uint8 if dtype == torch.uint8 else self.dtype
        spare = None if kept == torch.uint8 else self._spare.pop(numel, None)
        vector = torch.empty(numel, dtype=kept) if spare is None else spare
        await self.land(transport, dtype, numel, Landing(numel, vector))
        return vector

    async def land(self, transport: Transport, dtype: torch.dtype, numel: int, landing: Landing) -> None:
        if numel != landing.numel:
            raise BadFrame(f"it sent {numel} numbers where {landing.numel} are awaited")
        await self._move(transport, numel, partial(self._read, dtype, landing))
        landing.finish()

    async def _move(
        self, transport: Transport, numel: int, work: Callable[[Bytes], Coroutine[Any, Any, None]]
    ) -> None:
        blocking = transport.blocking() if numel >= LONG else None
        if blocking is None:
            await work(transport)
            return
        moving = self._threads.submit(lambda: _complete(work(blocking)))
        moving.add_done_callback(lambda _: blocking.socket.close())  # also of one that never began
        await asyncio.wrap_future(moving)

    async def _write(self, vector: Tensor, wire: torch.dtype, transport: Bytes) -> None:
        vector, as_it_is = vector.contiguous(), vector.dtype == wire
        staging = torch.empty(0 if as_it_is else min(PIECE, vector.numel()), dtype=wire)
        for at in range(0, vector.numel(), PIECE):
            piece = vector[at : at + PIECE]
            if not as_it_is:
                piece = staging[: piece.numel()].copy_(piece)
            data = _memory(piece)
            await transport.write(data)
            self.counters.bytes_out += len(data)

    async def _read(self, dtype: torch.dtype, landing: Landing, transport: Bytes) -> None:
        into = landing.each if isinstance(landing.each, Tensor) and landing.each.dtype == dtype else None
        staging: Tensor | None = None
        for at in range(0, landing.numel, PIECE):
            size = min(PIECE, landing.numel - at)
            if into is not None and landing.open:
                piece = into[at : at + size]
            else:
                staging = torch.empty(size, dtype=dtype) if staging is None else staging
                piece = staging[:size]
            memory = _memory(piece)
            await transport.read(memory)
            self.counters.bytes_in += len(memory)
            for part in torch.split(piece, CHECKED):
                if not finite(part):
                    raise BadFrame("it sent numbers that are not finite")
                if into is None:
                    landing.take(at, part.to(self.dtype))
                at += part.numel()


# -- what is made of several vectors, in place --


def shares(numel: int, count: int) -> list[slice]:
    cuts = [min(numel, -(-numel * k // (count * ALIGN)) * ALIGN) for k in range(count)] + [numel]
    return [slice(start, end) for start, end in itertools.pairwise(cuts)]


def correct(mine: Tensor, theirs: Tensor, meet: Meet) -> None:
    if isinstance(meet, Pull):
        mine.sub_(theirs).mul_(-meet.share)
    else:
        mine.copy_(meet(mine, theirs))


def combine_two(mine: Tensor, theirs: Tensor, meet: Meet) -> None:
    """Write over mine what the strategy makes of both, and its negative over theirs."""
    if isinstance(meet, Pull) and (fused := _kernels(mine, theirs)) is not None:
        fused.pull(mine, theirs, meet.share)
        return
    for own, far in pieces((mine, theirs)):
        other = far.to(own.device)
        correct(own, other, meet)
        if other is far:
            torch.neg(own, out=far)
        else:
            far.copy_(own.neg())


def combine_all(vectors: Sequence[Tensor], weights: Sequence[float], part: float) -> None:
    """Write over each vector the weighted sum of all of them, or a part of how far that is from it."""
    if len(vectors) <= kernels.MOST and (fused := _kernels(*vectors)) is not None:
        fused.all(vectors, weights, part)
        return
    total = torch.empty_like(vectors[0][: _size(vectors[0])])
    for parts in pieces(vectors):
        spread(add_up(total[: parts[0].numel()], parts, weights), parts, part)


def _kernels(*vectors: Tensor) -> kernels.Kernels | None:
    return kernels.for_device(vectors[0].device) if kernels.fits(*vectors) else None


def _size(vector: Tensor) -> int:
    return DEVICE_PIECE if vector.is_cuda else HOST_PIECE


def pieces(vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Vectors side by side, in pieces that fit the cache."""
    return zip(*(torch.split(vector, _size(vectors[0])) for vector in vectors), strict=True)


def add_up(total: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
    if not counted:
        return total.zero_()
    torch.mul(counted[0][0].to(total.device), counted[0][1], out=total)
    for part, weight in counted[1:]:
        total.add_(part.to(total.device), alpha=weight)
    return total


def spread(total: Tensor, pieces: Sequence[Tensor], part: float) -> None:
    """Write a sum, or a part of how far each piece is from it, over the pieces."""
    for piece in pieces:
        if not part:
            piece.copy_(total)
        elif piece.device == total.device:
            torch.sub(total, piece, out=piece)
        else:
            piece.copy_(total - piece.to(total.device))
        if part not in (0, 1):
            piece.mul_(part)


def tally(vectors: Sequence[Tensor], weights: Sequence[float], total: Tensor, travels: Tensor) -> None:
    """Write the weighted sum of some vectors into `total`, and from there where it can travel."""
    for into, *some in pieces((total, *vectors)):
        add_up(into, some, weights)
    travels.copy_(total)


def hand_out(vectors: Sequence[Tensor], part: float, total: Tensor, travels: Tensor) -> None:
    """Write a sum that has travelled, or a part of how far each vector is from it, over the vectors."""
    total.copy_(travels)
    for one, *some in pieces((total, *vectors)):
        spread(one, some, part)


def finite(piece: Tensor) -> bool:
    """Whether all numbers are: then so is their sum, unless it overflows."""
    return math.isfinite(piece.sum().item()) or bool(piece.isfinite().all())


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _complete(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never gives way."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise AssertionError("a coroutine gave way in a thread")
