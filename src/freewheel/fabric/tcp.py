"""The real network: one connection for each pair of workers, with a task that reads and one that writes.

Messages to a peer leave in the order they were sent. Vectors travel through windows between workers of one
host (fabric/windows.py), and else as streams (fabric/transfers.py); what several make of their vectors
together is in fabric/together.py. A peer is lost when its connection breaks, when it sends what does not
belong to this run, or when it is silent for too long. The one of higher rank then connects again.
"""

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import PeerLost
from freewheel.fabric.base import AGAIN, RUNTIME, Each, Left, Message, Tag
from freewheel.fabric.connection import Connection, Goodbye
from freewheel.fabric.frames import BadFrame, Crossed, Frame, Kind
from freewheel.fabric.handshake import EARLIER, REFUSED, Identity, Line, Listener, words
from freewheel.fabric.together import Together
from freewheel.fabric.transfers import Landing, Transfers
from freewheel.fabric.windows import Windows
from freewheel.records.counters import Counters

PINGS = 4  # heartbeats in the time after which silence is a loss
CALL_AGAIN_S = 0.25
# How much of what a peer has sent may lie here unread: so many bytes, and so many of the longest vectors.
UNREAD_BYTES, UNREAD = 1 << 26, 64
FINISHED, LEFT = "it has finished", "it was told to leave"  # words of a goodbye: no news, and no loss

log = logging.getLogger("freewheel")


class TcpFabric(Together):
    """One worker's end of the real network. Lives in the communication thread's event loop."""

    def __init__(
        self,
        me: Identity,
        counters: Counters,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype | None = None,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        silence_s: float = 2.0,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        # Where the strategy's vectors lie; on a device, `side` is the stream they are worked on in.
        self.home = side.device if side is not None else torch.device("cpu")
        transfers = Transfers(counters, dtype, me.world_size, side)
        super().__init__(me, Windows(self.home), transfers, wire or dtype)
        self.silence_s = silence_s
        self.book: dict[int, tuple[str, int]] = {}  # where each peer was last known to listen
        self._most_unread = UNREAD_BYTES + UNREAD * me.longest * dtype.itemsize
        self._connections: dict[int, Connection] = {}
        self.lives = {me.rank: me.incarnation}  # which life of each worker was the last one seen
        self.outlived: Callable[[], None] = lambda: None  # where a later life of this worker is there
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pids: dict[int, int] = {}  # the process of each peer that shares windows, or did
        self._loop = asyncio.get_running_loop()
        listening = self._check_life, self._install, self._spawn
        self._listener = Listener(me, counters, tls, self.windows, *listening)

    # -- life --

    def open(self, host: str, port: int = 0) -> int:
        self._spawn(self._watch())
        return self._listener.open(host, port)

    async def connect(self, peer: int, host: str, port: int) -> None:
        self.book[peer] = (host, port)
        try:
            line = await self._listener.call(peer, host, port)
        except PeerLost as error:
            if f"{REFUSED}: {EARLIER}" in error.why:
                self.book.clear()  # nobody is called again
                self.outlived()
            raise
        self._install(line)

    async def close(self, why: str = FINISHED) -> None:
        self.book.clear()  # nobody is called again
        links = self._connections.values()
        leaving: list[Left] = [out for link in links for out, *_ in link.shown.values()]
        leaving += [link.send(Kind.BYE, (why[:200],)) for link in links]
        if leaving:
            await asyncio.wait(leaving, timeout=1.0)
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await asyncio.to_thread(self.transfers.close)
        except RuntimeError:  # the interpreter is on its way out, and starts no thread any more
            self.transfers.close()
        self.windows.clear()

    # -- what strategies use --

    async def receive(self, tag: Tag, peer: int | None = None, among: Sequence[int] = ()) -> Message:
        """See Fabric.receive; a strategy gets vectors on the device where its own are."""
        message = await super().receive(tag, peer, among)
        if message.vector is not None and tag[0] != RUNTIME:
            message.vector = message.vector.to(self.home)
        return message

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        landing = Landing(numel, each)
        if tag in self._boxes:  # it came before it was awaited
            self.transfers.take(landing, (await super().receive(tag, peer)).of(numel).cpu())
            await landing
            return
        self.need(peer)
        landings = self._connections[peer].landings
        landings[tag] = landing
        try:
            await landing
        finally:
            landings.pop(tag, None)

    def kinds(self) -> dict[int, str]:
        return {peer: link.kind for peer, link in sorted(self._connections.items())}

    def traffic(self) -> tuple[int, int]:
        """How many of the strategy's messages were sent and received over the present connections."""
        links = self._connections.values()
        return sum(link.sent for link in links), sum(link.got for link in links)

    def quiet(self) -> bool:
        """Whether nothing waits to leave."""
        return not any(link.queue or link.shown or link.landings for link in self._connections.values())

    # -- who is let in --

    def _check_life(self, frame: Frame) -> None:
        known = self._connections.get(frame.sender)
        if known is None or frame.incarnation > known.incarnation:
            return
        if frame.incarnation < known.incarnation:
            raise BadFrame(f"{EARLIER} {frame.sender}")
        if known.line.called and self.rank > frame.sender:
            raise Crossed("this worker has called already")

    def _install(self, line: Line) -> None:
        link = Connection(self, line, self._offended)
        known = self._connections.get(link.peer)
        if known is not None:
            same = known.incarnation == link.incarnation
            self._unlink(known, *((AGAIN, "cut") if same else ("it lives again", "died")))
        self._connections[link.peer] = link
        self.lives[link.peer] = link.incarnation
        if link.pid:
            self._pids[link.peer] = link.pid
        link.task = self._spawn(self._keep(link))
        self.gain(link.peer)

    # -- connections --

    async def _keep(self, link: Connection) -> None:
        ended = "closed", "died"
        try:
            ended = self._ended(link, await link.run())
        finally:
            link.transport.close()
            self._unlink(link, *ended)

    def _ended(self, link: Connection, error: BaseException | None) -> tuple[str, str]:
        """Why a connection has ended, and what that means for the peer."""
        if isinstance(error, Goodbye):
            self.book.pop(link.peer, None)  # do not call again
            if str(error) not in (FINISHED, LEFT):
                log.warning("worker %d has left the run: %s", link.peer, error)
            return str(error), "left" if str(error) != FINISHED else "finished"
        if isinstance(error, BadFrame):
            log.warning("refused worker %d at %s: %s", link.peer, link.line.address, error)
            return words(error), "cut"
        if error is not None and not isinstance(error, OSError | EOFError):
            log.error("the connection with worker %d failed", link.peer, exc_info=error)
        return words(error) if error is not None else "closed", "died"

    def _unlink(self, link: Connection, why: str, what: str) -> None:
        if self._connections.get(link.peer) is not link:
            return
        del self._connections[link.peer]
        link.over = True
        if link.blind:
            self._listener.unshared.add(link.peer)
        if link.task is not None and link.task is not asyncio.current_task():
            link.task.cancel()
        self.lose(link.peer, why, what)
        for landing in link.landings.values():
            if not landing.done():
                landing.set_exception(PeerLost(link.peer, why))
        for _, vector, _ in link.shown.values():
            self.windows.retire(vector, [link.peer])
        for sending in link.queue:
            sending.cancel()
        self.windows.forget(link.pid)
        if link.peer in self.book and self.rank > link.peer:
            self._spawn(self._call_again(link.peer))

    async def _call_again(self, peer: int) -> None:
        while True:
            await asyncio.sleep(CALL_AGAIN_S)
            if peer not in self.book or peer in self._connections:
                return
            with contextlib.suppress(PeerLost):
                await self.connect(peer, *self.book[peer])

    async def _watch(self) -> None:
        """Send heartbeats; lose those who send none."""
        now = self._loop.time()
        while True:
            ping_s, before = self.silence_s / PINGS, now
            await asyncio.sleep(ping_s)
            now = self._loop.time()
            self.windows.settle(now, self._harmless)
            if now - before > 2 * ping_s:
                continue  # this worker itself was held up: what came meanwhile is unread
            for link in list(self._connections.values()):
                silent_s = now - link.transport.heard_s
                if silent_s > self.silence_s:
                    self._unlink(link, f"it has been silent for {silent_s:.0f} s", "cut")
                elif not link.queue and now - link.spoke_s >= ping_s:
                    link.send(Kind.PING)

    def _harmless(self, peer: int) -> bool:
        """Whether a peer writes into no window it was shown before: it is connected again, or dead."""
        dead = peer in self._pids and not os.path.exists(f"/proc/{self._pids[peer]}")
        return dead or peer in self._connections

    # -- messages --

    def deliver(self, message: Message) -> None:
        """See Fabric.deliver; a peer with too much unread is cut off."""
        super().deliver(message)
        if self._unread[message.sender] > self._most_unread and message.sender != self.rank:
            message.bad("more than anybody reads")

    def _offended(self, link: Connection, error: Exception) -> None:
        if self._connections.get(link.peer) is link:
            self._unlink(link, *self._ended(link, error))

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
