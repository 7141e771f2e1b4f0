"""Where connections begin: a worker listens and calls others, and both sides say first who they are."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from freewheel.errors import PeerLost
from freewheel.fabric import frames
from freewheel.fabric.base import Note, Tag
from freewheel.fabric.frames import BadFrame, Frame, Kind
from freewheel.fabric.greeting import Identity
from freewheel.fabric.line import Line, dial, listen, open_line
from freewheel.observe.counters import Counters

GREETING_S = 10.0
"""How long a connection may take to say who it is."""
DIAL_S = 1.0
"""How long a call may take to be answered by the other machine: over a link that was cut a new call gets
through sooner than an old one."""
OTHER_KEYS = "its keys are not of this worker's set"
AGAIN_S = 1.0
"""Between two tries to take a connection where no handle is left."""

log = logging.getLogger("freewheel")


class Door:
    """Opens connections, in both directions; `admit` gets those that have said who they are."""

    def __init__(
        self,
        me: Identity,
        counters: Counters,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None,
        *,
        shares: Callable[[int], bool],
        check: Callable[[Frame], None],
        admit: Callable[[Line, Frame, Tag, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.me, self.counters = me, counters
        self._server = tls[0] if tls else None
        self._client = tls[1] if tls else None
        self._shares, self._check, self._admit, self._spawn = shares, check, admit, spawn
        self.listener: socket.socket | None = None

    def open(self, host: str, port: int = 0) -> int:
        """Listen; return the port."""
        self.listener = listen(host, port)
        self._spawn(self._accept(self.listener))
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        """Listen no longer; the task that takes connections must have ended."""
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.close()

    async def call(self, peer: int, host: str, port: int) -> tuple[Line, Frame, Tag]:
        """Connect with a peer; PeerLost with the reason if it cannot be had."""
        try:
            async with asyncio.timeout(DIAL_S):
                sock = await dial(host, port)
            opened: Line | socket.socket = sock
            try:
                async with asyncio.timeout(GREETING_S):  # keys take their time
                    opened = line = await open_line(sock, self._client, server=False)
                    await line.write(self.me.hello(self._shares(peer)))
                    frame, tag, _ = await read_head(line, self.me, self.counters)
                    self.me.check(frame, tag, peer)
            except BaseException:
                opened.close()
                raise
        except TimeoutError as error:
            raise PeerLost(peer, f"{host}:{port}: no answer in time") from error
        except ssl.SSLError as error:
            broken = isinstance(error, ssl.SSLEOFError)  # the connection ended; it says nothing of keys
            why = (
                words(error)
                if broken
                else f"{OTHER_KEYS} ({getattr(error, 'verify_message', '') or error.reason})"
            )
            raise PeerLost(peer, f"{host}:{port}: {why}") from error
        except (OSError, EOFError, BadFrame) as error:
            raise PeerLost(peer, f"{host}:{port}: {words(error)}") from error
        return line, frame, tag

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # no handle is left, for one; who calls tries again
                log.warning("cannot take a connection: %s", words(error))
                await asyncio.sleep(AGAIN_S)
                continue
            greeting = self._spawn(self._greet(sock, f"{address[0]}:{address[1]}"))
            # One that is cancelled before it begins cannot close the socket itself.
            greeting.add_done_callback(functools.partial(_close_if_cancelled, sock))

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """A connection came in: let it say who it is."""
        line: Line | None = None
        try:
            async with asyncio.timeout(GREETING_S):
                line = await open_line(sock, self._server, server=True)
                try:
                    frame, tag, _ = await read_head(line, self.me, self.counters)
                    self.me.check(frame, tag)
                    self._check(frame)
                except BadFrame as error:
                    refusal = frames.pack(
                        Kind.REFUSE, self.me.run, self.me.rank, self.me.incarnation, (str(error)[:200],)
                    )
                    with contextlib.suppress(OSError):
                        await line.write(refusal)
                    raise
                await line.write(self.me.hello(self._shares(frame.sender)))
        except BaseException as error:
            refused = isinstance(error, OSError | EOFError | BadFrame)  # silence and bad keys are OSErrors
            if refused:
                log.warning("refused a connection from %s: %s", address, words(error))
            if line is not None:
                line.close()
            sock.close()
            if not refused:
                raise
        else:
            self._admit(line, frame, tag, address)


async def read_head(line: Line, me: Identity, counters: Counters) -> tuple[Frame, Tag, Note]:
    """The next frame up to its vector."""
    head = bytearray(frames.HEADER.size)
    await line.read(memoryview(head))
    frame = frames.parse(head, me.run, me.longest)
    rest = bytearray(frame.rest)
    await line.read(memoryview(rest))
    counters.bytes_in += len(head) + len(rest)
    return (frame, *frames.parse_rest(frame, rest))


def words(error: BaseException) -> str:
    """What went wrong with a connection."""
    if isinstance(error, TimeoutError):
        return f"no answer within {GREETING_S:g} s"
    return str(error) or type(error).__name__


def _close_if_cancelled(sock: socket.socket, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        sock.close()
