"""Moving vectors over a line, piece by piece, each piece while it is in the processor's cache.

Long vectors are moved by threads, in which a line's coroutines wait in the system and never give way, short
ones and those over TLS in the event loop. The same code does both.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import Meet, Tag
from freewheel.fabric.frames import BadFrame
from freewheel.fabric.line import Line
from freewheel.fabric.shared import Window
from freewheel.observe.counters import Counters

LONG = 1 << 15
"""Vectors of at least so many numbers are moved in threads."""
PIECE = 1 << 18
"""Numbers that are moved at once."""
NEAR_PIECE = 1 << 15
"""The same between windows, where four pieces and more should fit the cache."""
POLL_S, WAIT_S = 5e-5, 2e-3
AT_ONCE = 8
"""How often to look again before waiting: an event loop cannot wait for less than a millisecond."""


class Sending(asyncio.Future):  # type: ignore[type-arg]
    """A message on its way out, and how much of its vector has left."""

    def __init__(
        self,
        head: bytes,
        vector: Tensor | None,
        wire: torch.dtype,
        loop: asyncio.AbstractEventLoop,
        window: Window | None = None,
    ) -> None:
        super().__init__(loop=loop)
        self.head, self.vector, self.wire, self.sent = head, vector, wire, 0
        self.window = window
        """Where the vector lies, if the peer reads it there."""
        self.moved = threading.Condition()
        self.broken = False
        """Whether the line broke before all of it had left; who waits for it is told by the fabric."""

    def move(self, sent: int) -> None:
        """So much has left."""
        with self.moved:
            self.sent = sent
            self.moved.notify_all()

    async def reach(self, numel: int, line: Line) -> bool:
        """Wait until so much has left; False: it was given up before, or cannot leave any more."""
        looks, before = 0, 0
        while (gone := self.sent if self.window is None else self.window.read) < numel:
            if self.done() or self.broken:
                return False
            if gone != before:  # nobody listens to the peer meanwhile, but it moves
                before, line.heard_s = gone, time.monotonic()
            wait_s = 0.0 if looks < AT_ONCE else POLL_S if self.window is not None else WAIT_S
            await line.pause(self.moved, wait_s)
            looks += 1
        return True


@dataclass(slots=True)
class Blend:
    """A vector that is to be combined with another while both travel."""

    mine: Tensor
    meet: Meet
    sending: Sending
    done: asyncio.Future[None]
    failure: BaseException | None = None
    """What `meet` raised."""

    def combine(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """What the strategy makes of a piece of both."""
        try:
            return self.meet(mine, theirs)
        except BaseException as error:
            self.failure = error
            raise

    def finish(self) -> None:
        """Mine holds the result, and the peer has what it held before, unless that could not leave."""
        if self.sending.broken:
            return
        if self.sending.window is not None and not self.sending.done():
            self.sending.set_result(None)
        if not self.done.done():
            self.done.set_result(None)


class Blends:
    """The exchanges whose vectors are on their way, by peer and tag."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, Tag], Blend] = {}
        self._asked = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def get(self, peer: int, tag: Tag) -> Blend | None:
        """The exchange a vector belongs to, if it is still wanted."""
        blend = self._under_way.get((peer, tag))
        return None if blend is None or blend.done.done() else blend

    async def find(self, peer: int, tag: Tag, forgotten: Callable[[Tag], bool]) -> Blend | None:
        """The same; waits for one that is about to begin."""
        while (peer, tag) not in self._under_way and not forgotten(tag):
            await self._asked.wait()
        return self.get(peer, tag)

    def look_again(self) -> None:
        """An exchange has begun, or was given up."""
        self._asked.set()
        self._asked.clear()

    @contextlib.contextmanager
    def under_way(self, peer: int, tag: Tag, blend: Blend) -> Iterator[None]:
        """Let the vector that comes be combined."""
        self._under_way[peer, tag] = blend
        self.look_again()
        try:
            yield
        finally:
            del self._under_way[peer, tag]

    def lose(self, peer: int, why: str) -> None:
        """A peer is gone: whoever exchanges with it is told."""
        for (whom, _), blend in self._under_way.items():
            if whom == peer and not blend.done.done():
                blend.done.set_exception(PeerLost(peer, why))


class Mover:
    """Reads, writes and blends vectors."""

    def __init__(self, counters: Counters, dtype: torch.dtype, workers: int) -> None:
        self.counters, self.dtype = counters, dtype
        # Each connection reads and writes at once at most.
        self._threads = ThreadPoolExecutor(2 * workers, thread_name_prefix="freewheel-line")

    def close(self) -> None:
        """End the threads; their lines must have been closed."""
        self._threads.shutdown()

    async def write(self, line: Line, sending: Sending) -> None:
        """Send the vector of a message."""
        assert sending.vector is not None
        await self._move(line, sending.vector.numel(), partial(self._write, sending))

    async def read(self, line: Line, dtype: torch.dtype, numel: int) -> Tensor:
        """Receive a vector."""
        vector = torch.empty(numel, dtype=self.dtype)
        await self._move(line, numel, partial(self._read, dtype, vector))
        return vector

    async def blend(self, line: Line, numel: int, blend: Blend) -> None:
        """Receive a vector and combine it with another, which is on its way to the same peer.

        If that one cannot leave any more, the vector is read and dropped: what the peer says after it counts.
        """
        if numel != blend.mine.numel():
            raise BadFrame(f"it sent {numel} numbers in exchange for {blend.mine.numel()}")
        await self._move(line, numel, partial(self._blend, blend))
        blend.finish()

    async def blend_near(self, line: Line, window: Window, serial: int, blend: Blend, first: bool) -> None:
        """The same where both vectors lie in windows: each side combines one half, for both."""
        if window.numel != blend.mine.numel():
            raise BadFrame(f"it shows {window.numel} numbers for {blend.mine.numel()}")
        await self._move(line, LONG, partial(self._halve, window, serial, blend, first))
        blend.finish()

    async def read_near(self, line: Line, window: Window, serial: int) -> Tensor:
        """A copy of a vector that lies in a peer's window."""
        vector = torch.empty(window.numel, dtype=window.dtype)
        await self._move(line, LONG, partial(self._copy, window, serial, vector))
        return vector

    # -- in a thread, or in the event loop --

    async def _move(self, line: Line, numel: int, work: Callable[[Line], Coroutine[Any, Any, None]]) -> None:
        blocking = line.blocking() if numel >= LONG else None
        if blocking is None:
            await work(line)
            return

        def run() -> None:
            with blocking as thread_line:
                _complete(work(thread_line))

        await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def _write(self, sending: Sending, line: Line) -> None:
        assert sending.vector is not None
        vector = sending.vector.contiguous()
        for at in range(0, vector.numel(), PIECE):
            data = _memory(vector[at : at + PIECE].to(sending.wire))
            await line.write(data)
            self.counters.bytes_out += len(data)
            sending.move(min(at + PIECE, vector.numel()))

    async def _read(self, dtype: torch.dtype, vector: Tensor, line: Line) -> None:
        staging = None if dtype == self.dtype else torch.empty(min(PIECE, vector.numel()), dtype=dtype)
        for at in range(0, vector.numel(), PIECE):
            into = vector[at : at + PIECE]
            piece = into if staging is None else staging[: into.numel()]
            await self._read_piece(line, piece)
            if staging is not None:
                into.copy_(piece)

    async def _blend(self, blend: Blend, line: Line) -> None:
        numel = blend.mine.numel()
        staging = torch.empty(min(PIECE, numel), dtype=blend.sending.wire)
        for at in range(0, numel, PIECE):
            mine = blend.mine[at : at + PIECE]
            piece = staging[: mine.numel()]
            await self._read_piece(line, piece)
            if await blend.sending.reach(at + mine.numel(), line):
                mine.copy_(blend.combine(mine, piece.to(self.dtype)))

    async def _halve(self, window: Window, serial: int, blend: Blend, first: bool, line: Line) -> None:
        """Combine one half for both sides: the peer does the same with the other half."""
        _check_serial(window, serial)  # before anything is written: the handle may be another window's by now
        numel, theirs = blend.mine.numel(), window.vector()
        half = slice(0, numel // 2) if first else slice(numel // 2, numel)
        held, done = torch.empty(2, NEAR_PIECE, dtype=self.dtype), 0
        both = (torch.split(vector[half], NEAR_PIECE) for vector in (blend.mine, theirs))
        for mine, other in zip(*both, strict=True):
            before = held if len(mine) == NEAR_PIECE else held[:, : len(mine)]
            my_copy, other_copy = before[0].copy_(mine), before[1].copy_(other)
            _check_finite(before, own=before[0])
            mine.copy_(blend.combine(mine, other_copy))
            other.copy_(blend.combine(other, my_copy))
            done += len(mine)
            window.read, line.heard_s = done, time.monotonic()
        _check_serial(window, serial)
        window.read = numel
        await blend.sending.reach(numel, line)
        self.counters.bytes_in += blend.mine.nbytes

    async def _copy(self, window: Window, serial: int, vector: Tensor, line: Line) -> None:
        theirs = window.vector()
        for at in range(0, vector.numel(), PIECE):
            self._copy_piece(window, theirs, at, vector[at : at + PIECE])
        _check_serial(window, serial)
        self.counters.bytes_in += vector.nbytes

    def _copy_piece(self, window: Window, theirs: Tensor, at: int, into: Tensor) -> None:
        into.copy_(theirs[at : at + into.numel()])
        window.read = at + into.numel()  # from now on the owner may overwrite it
        _check_finite(into)

    async def _read_piece(self, line: Line, piece: Tensor) -> None:
        memory = _memory(piece)
        await line.read(memory)
        self.counters.bytes_in += len(memory)
        _check_finite(piece)


def _check_finite(piece: Tensor, own: Tensor | None = None) -> None:
    # A sum is finite only if all numbers are; one that overflows is looked at more closely.
    if not math.isfinite(piece.sum().item()) and not piece.isfinite().all():
        if own is not None and not own.isfinite().all():
            raise BadFrame("this worker's own weights are not finite")
        raise BadFrame("it sent numbers that are not finite")


def _check_serial(window: Window, serial: int) -> None:
    if window.serial != serial:
        raise EOFError("the peer gave up the exchange")


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _complete(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never gives way."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine gave way in a thread")
