"""A connection after the handshake: what waits to leave, what comes, and how vectors travel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from freewheel.fabric.base import BYTES, EXCHANGE, RUNTIME, Fabric, Message, Note, Tag
from freewheel.fabric.frames import BadFrame, Frame, Kind
from freewheel.fabric.handshake import Identity, Line
from freewheel.fabric.transfers import LONG, Landing, Outgoing, Transfers
from freewheel.fabric.windows import DEVICE, HOST, STREAM, Windows, is_locator

LAST_WORDS_S = 0.5  # how long a broken connection is still read: the peer may have said why it leaves


class Goodbye(Exception):
    """The peer said goodbye."""


class Vectors(Fabric):
    """A fabric whose vectors lie in windows, or travel as streams of numbers."""

    def __init__(self, me: Identity, windows: Windows, transfers: Transfers, wire: torch.dtype) -> None:
        super().__init__(me.rank)
        self.me, self.life, self.world_size = me, me.incarnation, me.world_size
        self.counters = transfers.counters
        self.windows, self.transfers, self.dtype, self.wire = windows, transfers, transfers.dtype, wire

    def wire_of(self, tag: Tag) -> torch.dtype:
        """How a vector travels. Only exchanges may be rounded: both sides correct by the same numbers."""
        if tag[:1] == (RUNTIME,) and tag[-1] == BYTES:
            return torch.uint8
        return self.wire if tag[:1] == (EXCHANGE,) else self.dtype

    def in_window(self, vector: Tensor, kind: str) -> bool:
        window = self.windows.of(vector)
        whole = vector.nbytes == vector.untyped_storage().nbytes()
        return window is not None and window.kind == kind and whole

    async def published(self, vector: Tensor, kind: str) -> Tensor:
        """A vector where peers can see it through such windows: itself, or a copy."""
        if self.in_window(vector, kind) or (kind == STREAM and not vector.is_cuda):
            if vector.is_cuda:  # the device may still be writing it
                await self.transfers.work(vector.numel(), lambda: None)
            return vector
        shown = self.windows.borrow(vector, HOST if kind == STREAM else kind)
        await self.transfers.work(vector.numel(), lambda: shown.copy_(vector))
        return shown


class Connection:
    """A connection with a peer; `offended` is called when it sends what cannot be used."""

    def __init__(
        self, fabric: Vectors, line: Line, offended: Callable[[Connection, Exception], None]
    ) -> None:
        self.fabric, self.line, self.offended = fabric, line, offended
        self.transport, self.peer, self.incarnation = line.transport, line.peer, line.incarnation
        self.kind, self.pid = line.kind, line.pid
        self.queue: deque[Outgoing] = deque()  # what waits to leave; the first one is leaving
        self.wake = asyncio.Event()
        self.spoke_s = 0.0
        self.sent = self.got = 0  # messages of the strategy, for telling whether any is still under way
        self.landings: dict[Tag, Landing] = {}  # vectors that are awaited in place, by their tag
        # Windows the peer has not read yet, by number: the message, the vector, whether it is borrowed.
        self.shown: dict[int, tuple[Outgoing, Tensor, bool]] = {}
        self.task: asyncio.Task[None] | None = None
        self.over = False  # whether it was given up: nothing is read from it any more
        self.blind = False  # whether a window of the peer's could not be opened, although it could be tried

    async def run(self) -> BaseException | None:
        """Read and write until either ends; the error that ended it."""
        reading, writing = both = asyncio.create_task(self.read()), asyncio.create_task(self.write())
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if reading not in done and isinstance(writing.exception(), OSError):
                await asyncio.wait([reading], timeout=LAST_WORDS_S)
            # What the peer said counts, then what broke.
            return (reading if reading.done() else writing).exception()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    # -- writing --

    def send(self, kind: Kind, tag: Tag = (), vector: Tensor | None = None, note: Note = ()) -> Outgoing:
        """Queue a frame; if nothing is queued, one without a vector leaves at once."""
        fabric, wire = self.fabric, self.fabric.wire_of(tag)
        outgoing = Outgoing(vector, wire, counted=kind is Kind.MESSAGE and tag[0] != RUNTIME)
        if vector is not None and self._near(tag, vector):
            outgoing.near = tag, note
        else:
            of_vector = (None, 0) if vector is None else (wire, vector.numel())
            outgoing.head = fabric.me.frame(kind, tag, note, *of_vector)
        fabric.counters.messages_out += kind is Kind.MESSAGE
        self.sent += outgoing.counted
        if not self.queue and vector is None:
            whole = self.line.sealed(outgoing.head)
            outgoing.head, outgoing.begun = whole[self.transport.write_now(whole) :], True
            if not outgoing.head:
                outgoing.set_result(None)
                return outgoing
        self.queue.append(outgoing)
        self.wake.set()
        return outgoing

    def _near(self, tag: Tag, vector: Tensor) -> bool:
        if self.kind == STREAM or vector.dtype == torch.uint8:
            return False
        once = tag[0] == RUNTIME and self.kind != DEVICE  # a window would stay mapped
        return not once and vector.numel() >= LONG and vector.is_cuda == (self.kind == DEVICE)

    async def write(self) -> None:
        fabric = self.fabric
        while True:
            while not self.queue:
                self.wake.clear()
                await self.wake.wait()
            outgoing = self.queue[0]
            if outgoing.cancelled() and not outgoing.begun:
                self.sent -= outgoing.counted
                self.queue.popleft()
                continue
            self.spoke_s = asyncio.get_running_loop().time()
            if outgoing.near is not None:
                await self._show(outgoing, *outgoing.near)
            else:
                head = outgoing.head if outgoing.begun else self.line.sealed(outgoing.head)
                await self.transport.write(head)
                fabric.counters.bytes_out += len(head)
                if outgoing.vector is not None:
                    if outgoing.vector.is_cuda:
                        outgoing.vector = await fabric.transfers.work(0, outgoing.vector.cpu)
                    await fabric.transfers.write(self.transport, outgoing.vector, outgoing.wire)
                if not outgoing.done():
                    outgoing.set_result(None)
            outgoing.vector = None  # others may keep the future
            self.queue.popleft()

    async def _show(self, outgoing: Outgoing, tag: Tag, note: Note) -> None:
        """Tell the peer in which window a vector lies; its READ completes `outgoing`."""
        vector, fabric = outgoing.vector, self.fabric
        assert vector is not None
        shown = await fabric.published(vector, self.kind)
        window = fabric.windows.of(shown)
        assert window is not None
        self.shown[window.number] = outgoing, shown, shown is not vector
        note = (*note, *window.locator, len(window.locator))
        head = self.line.sealed(fabric.me.frame(Kind.NEAR, tag, note))
        await self.transport.write(head)
        fabric.counters.bytes_out += len(head) + vector.nbytes

    def _was_read(self, note: Note) -> None:
        number = int(note[0]) if note and 0 <= note[0] < 2**53 else -1
        if number not in self.shown:
            raise BadFrame("it has read a window it was not shown")
        outgoing, shown, borrowed = self.shown.pop(number)
        if borrowed:
            self.fabric.windows.give_back(shown)
        if not outgoing.done():
            outgoing.set_result(None)

    # -- reading --

    async def read(self) -> None:
        while not self.over:
            frame, tag, note = await self.line.read()
            if frame.sender != self.peer or frame.incarnation != self.incarnation:
                raise BadFrame(f"it is worker {self.peer} and says to be worker {frame.sender}")
            if frame.kind is Kind.BYE:
                raise Goodbye(str(tag[0]) if tag else "it has left")
            if frame.kind is Kind.READ:
                self._was_read(note)
            elif frame.kind in (Kind.MESSAGE, Kind.NEAR) and tag:
                self.got += tag[0] != RUNTIME
                if frame.kind is Kind.NEAR:
                    await self._read_near(tag, note)
                else:
                    await self._read(frame, tag, note)
            elif frame.kind is not Kind.PING:
                raise BadFrame("it says hello twice")

    async def _read(self, frame: Frame, tag: Tag, note: Note) -> None:
        fabric, wire = self.fabric, self.fabric.wire_of(tag)
        if frame.dtype is None:
            fabric.deliver(Message(self.peer, tag, None, note, self._offend))
            await asyncio.sleep(0)  # whoever waited runs first: it may await the next frame in place
        elif frame.dtype != wire:
            raise BadFrame(f"it sends {frame.dtype}, not {wire}: give all the same wire")
        elif (landing := self.landings.get(tag)) is not None:
            await fabric.transfers.land(self.transport, wire, frame.numel, landing)
            self.landings.pop(tag, None)
        else:
            self._arrived(tag, note, await fabric.transfers.read(self.transport, wire, frame.numel))

    async def _read_near(self, tag: Tag, note: Note) -> None:
        length = int(note[-1]) if note and 0 < note[-1] < len(note) else 0
        locator, rest = note[-1 - length : -1], note[: -1 - length]
        theirs = await self.open(locator)
        vector = await self.fabric.transfers.work(theirs.numel(), theirs.clone)
        self.fabric.counters.bytes_in += vector.nbytes
        self.send(Kind.READ, note=(locator[1],))
        self._arrived(tag, rest, vector)

    def _arrived(self, tag: Tag, note: Note, vector: Tensor) -> None:
        if (landing := self.landings.get(tag)) is None:
            self.fabric.deliver(Message(self.peer, tag, vector, note, self._offend))
            return
        if vector.numel() != landing.numel:  # it was awaited while it arrived
            raise BadFrame(f"it sent {vector.numel()} numbers where {landing.numel} are awaited")
        self.fabric.transfers.take(landing, vector)
        del self.landings[tag]

    async def open(self, locator: Note, numel: int | None = None) -> Tensor:
        fabric = self.fabric
        if self.kind == STREAM or not is_locator(locator) or locator[2] != self.pid:
            raise BadFrame("it shows a window this worker cannot see")
        shown = int(locator[3]) // fabric.dtype.itemsize
        if shown > fabric.me.longest or (numel is not None and shown != max(1, numel)):
            raise BadFrame(f"it shows {shown} numbers, where the longest vector has {fabric.me.longest}")
        try:
            if (window := fabric.windows.known(locator)) is None:  # the first time may take a while
                window = await asyncio.to_thread(fabric.windows.open, locator)
                fabric.windows.keep(locator, window)
            memory = window.memory()
            if memory.nbytes != locator[3]:
                raise OSError("it has another size")
            return memory.view(fabric.dtype)[:numel]
        except ProcessLookupError:
            raise
        except (OSError, RuntimeError) as error:
            self.blind = True
            raise BadFrame(f"its window cannot be opened: {error}") from None

    def _offend(self, why: str) -> None:
        self.offended(self, BadFrame(why))
