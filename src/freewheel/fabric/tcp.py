"""The real network: one connection for each pair of workers, vectors straight from and into tensor memory.

Every connection has a task that reads and one that writes. Messages to a peer leave in the order they were
sent. Vectors travel in pieces that fit a processor's cache. A peer whose connection breaks, that sends what
does not belong to this run, or that is silent for too long, is lost: whoever waits for it is told. Of a pair
the worker of higher rank calls again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Coroutine
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric import frames
from freewheel.fabric.base import EXCHANGE, RUNTIME, Meet, Message, Note, Tag
from freewheel.fabric.door import Door, read_head, words
from freewheel.fabric.frames import BadFrame, Frame, Kind
from freewheel.fabric.greeting import Identity
from freewheel.fabric.line import Line
from freewheel.fabric.link import Link
from freewheel.fabric.mailbox import AGAIN, Mailbox
from freewheel.fabric.shared import Window, Windows
from freewheel.fabric.vectors import LONG, Blend, Blends, Mover, Sending
from freewheel.observe.counters import Counters

PINGS = 4
"""Signs of life in the time after which silence is a loss."""
LAST_WORDS_S = 0.5
"""How long a line that broke is still read: a peer may have said why it goes."""
CALL_AGAIN_S = 0.25
FINISHED = "it has finished"

log = logging.getLogger("freewheel")


class TcpFabric(Mailbox):
    """One worker's end of the real network. Lives in the communication thread's event loop."""

    def __init__(
        self,
        me: Identity,
        counters: Counters,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype | None = None,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        silence_s: float = 2.0,
    ) -> None:
        super().__init__(me.rank)
        self.me, self.world_size, self.counters = me, me.world_size, counters
        self.dtype, self.wire, self.silence_s = dtype, wire or dtype, silence_s
        self.book: dict[int, tuple[str, int]] = {}
        """Where each peer was last known to listen."""
        self._encrypted = tls is not None
        self.lives: dict[int, int] = {me.rank: me.incarnation}
        """Which life of each worker was the last one seen."""
        self._links: dict[int, Link] = {}
        self._blends = Blends()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.windows = Windows()
        """Vectors that peers on the same machine read where they lie."""
        self.mover = Mover(counters, dtype, me.world_size)
        self._far: set[int] = set()
        """Peers whose windows cannot be opened, although they should."""
        self._loop = asyncio.get_running_loop()
        self._door = Door(
            me,
            counters,
            tls,
            shares=self._shares,
            check=self._check_life,
            admit=self._admit,
            spawn=self._spawn,
        )

    # -- life --

    def open(self, host: str, port: int = 0) -> int:
        """Listen; return the port."""
        self._spawn(self._watch())
        return self._door.open(host, port)

    async def connect(self, peer: int, host: str, port: int) -> None:
        """Call a peer; PeerLost with the reason if it cannot be had."""
        self.book[peer] = (host, port)
        line, frame, tag = await self._door.call(peer, host, port)
        self._install(Link(line, peer, frame.incarnation, f"{host}:{port}", self.rank), tag)

    async def close(self, why: str = FINISHED) -> None:
        """Say goodbye, then close everything."""
        self._closing = True
        bye = [self._queue(link, Kind.BYE, tag=(why[:200],)) for link in self._links.values()]
        if bye:
            await asyncio.wait(bye, timeout=1.0)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._door.close()
        await asyncio.to_thread(self.mover.close)
        self.windows.forget_peers()

    # -- what strategies use --

    def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> Sending:
        """Begin to send; the future is done when the last byte was handed to the system."""
        self.need(peer)
        if peer == self.rank:
            left = Sending(b"", vector, self.dtype, self._loop)
            left.set_result(None)
            self._loop.call_soon(self.deliver, Message(peer, tag, vector, note))
            return left
        sending = self._queue(self._links[peer], Kind.MESSAGE, tag, vector, note)
        self.leaving(peer, sending)
        return sending

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send without waiting; a message to a peer that is gone is dropped and counted."""
        if self.reaches(peer):
            self.send(peer, tag, vector, note)
        else:
            self.counters.messages_dropped += 1

    def rounded(self, tag: Tag, vector: Tensor) -> Tensor:
        """The vector as the others will see it, in place: what two sides compute from it is then the same."""
        wire = self._wire(tag)
        return vector if wire == vector.dtype else vector.copy_(vector.to(wire))

    def _wire(self, tag: Tag) -> torch.dtype:
        """Only exchanges may be rounded: both sides then compute from the same rounded snapshots."""
        return self.wire if tag[:1] == (EXCHANGE,) else self.dtype

    async def blend(
        self, peer: int, tag: Tag, mine: Tensor, meet: Meet, sending: asyncio.Future[None]
    ) -> Tensor:
        """Combine piece by piece, each as soon as theirs is here and mine has left; see Fabric.blend."""
        if tag in self._boxes or not isinstance(sending, Sending):
            if isinstance(sending, Sending) and sending.window is not None:
                await sending.reach(mine.numel(), self._links[peer].line)  # until the peer has read it
                if not sending.done() and not sending.broken:
                    sending.set_result(None)
            return await super().blend(peer, tag, mine, meet, sending)
        self.need(peer)
        blend = Blend(mine, meet, sending, self._loop.create_future())
        with self._blends.under_way(peer, tag, blend):
            try:
                await blend.done
                await sending
            except PeerLost:
                if blend.failure is not None:  # it was not the peer's
                    raise blend.failure from None
                raise
        return mine

    def forget(self, tag: Tag) -> None:
        """Drop what arrives with this tag; a window shown for it is not waited for any more."""
        super().forget(tag)
        self._blends.look_again()

    def lose(self, peer: int, why: str, what: str = "died") -> None:
        """A peer is gone: whoever blends with it is told too."""
        self.windows.forget_peers()  # those that are there are opened again
        self._blends.lose(peer, why)
        super().lose(peer, why, what)

    def traffic(self) -> tuple[int, int]:
        """Messages of the strategy sent and got over the present connections."""
        return sum(k.sent for k in self._links.values()), sum(k.got for k in self._links.values())

    def quiet(self) -> bool:
        """Whether nothing waits to leave."""
        return not (self._blends or any(link.queue for link in self._links.values()))

    # -- who is let in --

    def _shares(self, peer: int) -> bool:
        """Whether this worker is ready to share memory with a peer: not beside keys, nor where it failed."""
        return not self._encrypted and peer not in self._far

    def _check_life(self, frame: Frame) -> None:
        known = self._links.get(frame.sender)
        if known is None or frame.incarnation > known.incarnation:
            return
        if frame.incarnation < known.incarnation:
            raise BadFrame(f"it is an earlier life of worker {frame.sender}")
        if known.caller == self.rank > frame.sender:  # both called at once: one call is enough
            raise BadFrame("this worker has called already")

    def _admit(self, line: Line, frame: Frame, tag: Tag, address: str) -> None:
        self._install(Link(line, frame.sender, frame.incarnation, address, frame.sender), tag)

    def _install(self, link: Link, greeting: Tag) -> None:
        same = bool(self.me.place) and greeting[3] == self.me.place and link.line.local
        link.near = same and self._shares(link.peer)
        known = self._links.get(link.peer)
        if known is not None:
            why, what = (
                (AGAIN, "cut") if known.incarnation == link.incarnation else ("it lives again", "died")
            )
            self._unlink(known, why, what)
        self._links[link.peer] = link
        self.lives[link.peer] = link.incarnation
        link.task = self._spawn(self._keep(link))
        self.gain(link.peer)

    # -- connections --

    async def _keep(self, link: Link) -> None:
        """Read and write until either ends."""
        reading, writing = asyncio.create_task(self._read(link)), asyncio.create_task(self._write(link))
        both = (reading, writing)
        why, what = "closed", "died"
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if reading not in done and isinstance(writing.exception(), OSError):
                await asyncio.wait([reading], timeout=LAST_WORDS_S)
            last = reading if reading.done() else writing  # what the peer said counts, then what broke
            why, what = self._ended(link, last.exception())
        finally:
            for task in both:
                task.cancel()
            try:
                await asyncio.gather(*both, return_exceptions=True)
            finally:
                link.line.close()
                self._unlink(link, why, what)

    def _ended(self, link: Link, error: BaseException | None) -> tuple[str, str]:
        """Why a connection has ended, and what that means for the peer."""
        if isinstance(error, _Left):
            self.book.pop(link.peer, None)  # do not call again
            if str(error) != FINISHED:
                log.warning("worker %d has left the run: %s", link.peer, error)
            return str(error), "left" if str(error) != FINISHED else "finished"
        if isinstance(error, BadFrame):
            log.warning("refused worker %d at %s: %s", link.peer, link.address, error)
            return words(error), "cut"
        if error is not None and not isinstance(error, OSError | EOFError):
            log.error("the connection with worker %d failed", link.peer, exc_info=error)
        return words(error) if error is not None else "closed", "died"

    def _unlink(self, link: Link, why: str, what: str) -> None:
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        if link.task is not None and link.task is not asyncio.current_task():
            link.task.cancel()
        self.lose(link.peer, why, what)
        for sending in link.queue:
            sending.cancel()
        if not self._closing and link.peer in self.book and self.rank > link.peer:
            self._spawn(self._call_again(link.peer))

    async def _call_again(self, peer: int) -> None:
        while peer in self.book and peer not in self._links:
            await asyncio.sleep(CALL_AGAIN_S)
            with contextlib.suppress(PeerLost):
                if peer in self.book and peer not in self._links:
                    await self.connect(peer, *self.book[peer])

    async def _watch(self) -> None:
        """Send signs of life; drop who gives none."""
        now = self._loop.time()
        while True:
            ping_s, before = self.silence_s / PINGS, now
            await asyncio.sleep(ping_s)
            now = self._loop.time()
            if (
                now - before > 2 * ping_s
            ):  # this worker itself was held up: what came meanwhile is not read yet
                continue
            for link in list(self._links.values()):
                silent_s = now - link.line.heard_s
                if silent_s > self.silence_s and not link.deaf:
                    self._unlink(link, f"it has been silent for {silent_s:.0f} s", "cut")
                elif not link.queue and now - link.spoke_s >= ping_s:
                    self._queue(link, Kind.PING)

    # -- writing --

    def _frame(self, kind: Kind, tag: Tag = (), note: Note = (), vector: Tensor | None = None) -> bytes:
        dtype, numel = (None, 0) if vector is None else (self._wire(tag), vector.numel())
        return frames.pack(kind, self.me.run, self.rank, self.me.incarnation, tag, note, dtype, numel)

    def _queue(
        self, link: Link, kind: Kind, tag: Tag = (), vector: Tensor | None = None, note: Note = ()
    ) -> Sending:
        window = self._window(link, tag, vector)
        if window is not None:
            note = (os.getpid(), window.fd, window.numel, window.renew())
            head = self._frame(Kind.NEAR, tag, note)
            sending = Sending(head, None, self.dtype, self._loop, window)
            self.counters.bytes_out += window.numel * window.dtype.itemsize
        else:
            head = self._frame(kind, tag, note, vector)
            sending = Sending(head, vector, self._wire(tag), self._loop)
        if kind is Kind.MESSAGE:
            self.counters.messages_out += 1
            link.sent += tag[0] != RUNTIME
        link.put(sending)
        return sending

    def _window(self, link: Link, tag: Tag, vector: Tensor | None) -> Window | None:
        """Where the peer can read a vector, if it can."""
        if vector is None or vector.numel() < LONG or not link.near or tag[0] != EXCHANGE:
            return None
        return self.windows.of(vector)

    async def _write(self, link: Link) -> None:
        line = link.line
        while True:
            while not link.queue:
                link.wake.clear()
                await link.wake.wait()
            sending = link.queue.popleft()
            if sending.cancelled():
                continue  # nobody wants it any more, and it has not begun
            link.spoke_s = self._loop.time()
            try:
                await line.write(sending.head)
                self.counters.bytes_out += len(sending.head)
                if sending.vector is not None:
                    await self.mover.write(line, sending)
                    sending.vector = None  # others may keep the future
            except OSError:
                sending.broken = True
                raise
            if sending.window is None and not sending.done():
                sending.set_result(None)

    # -- reading --

    async def _read(self, link: Link) -> None:
        while True:
            frame, tag, note = await read_head(link.line, self.me, self.counters)
            if frame.sender != link.peer or frame.incarnation != link.incarnation:
                raise BadFrame(f"it is worker {link.peer} and says to be worker {frame.sender}")
            if frame.kind is Kind.BYE:
                raise _Left(str(tag[0]) if tag else "it has left")
            if frame.kind is Kind.PING:
                continue
            if frame.kind not in (Kind.MESSAGE, Kind.NEAR):
                raise BadFrame("it says hello twice")
            link.got += tag[:1] != (RUNTIME,)
            if frame.kind is Kind.NEAR:
                await self._read_near(link, tag, note)
                continue
            if frame.dtype is None:
                self.deliver(Message(link.peer, tag, None, note))
                await asyncio.sleep(0)  # who was waiting runs before the next frame: it may want to blend it
                continue
            if frame.dtype != self._wire(tag):
                raise BadFrame(f"it sends {frame.dtype}, not {self._wire(tag)}: give all the same wire")
            if (blend := self._blends.get(link.peer, tag)) is not None:
                await self.mover.blend(link.line, frame.numel, blend)
                continue
            # No name for the vector here: it would be kept until the next one comes.
            await self._arrived(link, tag, note, await self.mover.read(link.line, frame.dtype, frame.numel))

    async def _read_near(self, link: Link, tag: Tag, note: Note) -> None:
        """A vector that lies in a window of the peer's."""
        if not link.near or len(note) != 4 or not all(0 <= number < 2**53 for number in note):
            raise BadFrame("it shows a window this worker cannot see")
        pid, fd, numel, serial = (int(number) for number in note)
        if numel > self.me.longest:
            raise BadFrame(f"it shows {numel} numbers, where the longest vector has {self.me.longest}")
        try:
            window = self.windows.open(pid, fd, numel, self.dtype)
        except OSError as error:
            self._far.add(link.peer)  # next time it is told to send its vectors
            raise BadFrame(f"its window cannot be opened: {error}") from None
        link.deaf = True  # while this worker is not ready, nobody listens to the peer
        blend = await self._blends.find(link.peer, tag, self.forgotten)
        link.line.heard_s, link.deaf = self._loop.time(), False
        if blend is None:
            return  # the exchange was given up
        if blend.sending.window is not None:
            await self.mover.blend_near(link.line, window, serial, blend, self.rank < link.peer)
        else:
            vector = await self.mover.read_near(link.line, window, serial)
            await self._arrived(link, tag, (), vector)

    async def _arrived(self, link: Link, tag: Tag, note: Note, vector: Tensor) -> None:
        if (blend := self._blends.get(link.peer, tag)) is not None:  # it was asked for while it arrived
            if await blend.sending.reach(vector.numel(), link.line):
                blend.mine.copy_(blend.combine(blend.mine, vector))
                blend.finish()
        else:
            self.deliver(Message(link.peer, tag, vector, note))

    # -- tasks --

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the network of worker %d failed", self.rank, exc_info=task.exception())


class _Left(Exception):
    """The peer said goodbye."""
