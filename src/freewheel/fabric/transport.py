"""A transport fills memory with bytes that come, or writes all bytes of some memory.

Plain sockets read straight into a tensor's memory, long vectors in threads. TLS goes through asyncio's
streams, which copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from typing import TypeAlias

SIGN_US = 250_000  # how long a thread waits at a time: what has come by then shows that the peer lives
STREAM_BYTES = 4 << 20  # how much of a TLS connection may wait to be read


class PlainTransport:
    """A TCP socket: short reads and writes in the event loop, long ones in threads.

    A thread that waits in the system for half a megabyte costs a tenth of an event loop that is woken for
    every few kilobytes, and leaves the interpreter to the training thread meanwhile.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._loop, self._socket = asyncio.get_running_loop(), sock
        self.heard_s = self._loop.time()  # when the last byte came, by the event loop's clock
        sock.setblocking(True)  # in the event loop MSG_DONTWAIT says otherwise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, SIGN_US))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local(self) -> bool:
        """Whether both ends have the same address: they are on one machine."""
        with contextlib.suppress(OSError):  # the other side has left already
            return bool(self._socket.getsockname()[0] == self._socket.getpeername()[0])
        return False

    async def read(self, into: memoryview) -> None:
        while len(into):
            try:
                got = self._socket.recv_into(into, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await self._until(self._loop.add_reader, self._loop.remove_reader)
                continue
            into = into[self.heard(got) :]

    async def write(self, data: memoryview | bytes) -> None:
        data = memoryview(data)
        while len(data):
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                await self._until(self._loop.add_writer, self._loop.remove_writer)

    def write_now(self, data: bytes) -> int:
        """Write what the system takes at once; how many bytes that was."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except OSError:  # it is full, or broken, which the next write finds out
            return 0

    async def _until(self, add: Callable[..., None], remove: Callable[[int], object]) -> None:
        ready, number = asyncio.Event(), self._socket.fileno()
        add(number, ready.set)
        try:
            await ready.wait()
        finally:
            remove(number)

    def heard(self, got: int) -> int:
        """Note that so many bytes came; EOFError if it was none."""
        if not got:
            raise EOFError("the connection was closed")
        self.heard_s = self._loop.time()
        return got

    def blocking(self) -> BlockingTransport | None:
        """This transport for a thread, which may wait in system calls; None if no file handle is left."""
        with contextlib.suppress(OSError):
            return BlockingTransport(self, self._socket.dup())
        return None

    def close(self) -> None:
        """Close at once: a thread that still waits sees the end. No task may use it any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class BlockingTransport:
    """A plain transport for a thread: its coroutines block and never yield.

    The thread has a file handle of its own, which is not closed and used for another connection under it.
    """

    def __init__(self, transport: PlainTransport, sock: socket.socket) -> None:
        self._transport, self.socket = transport, sock

    async def read(self, into: memoryview) -> None:
        while len(into):
            # Nothing may come for SIGN_US; whether the peer is silent for too long, others decide.
            with contextlib.suppress(BlockingIOError):
                into = into[self._transport.heard(self.socket.recv_into(into, 0, socket.MSG_WAITALL)) :]

    async def write(self, data: memoryview | bytes) -> None:
        self.socket.sendall(data)


class TlsTransport:
    """A TLS connection."""

    local = False

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()

    async def read(self, into: memoryview) -> None:
        while len(into):
            if not (data := await self._reader.read(len(into))):
                raise EOFError("the connection was closed")
            self.heard_s = self._loop.time()
            into[: len(data)] = data
            into = into[len(data) :]

    async def write(self, data: memoryview | bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def write_now(self, data: bytes) -> int:
        """Nothing: what is encrypted is written in order by one task."""
        return 0

    def blocking(self) -> None:
        """None: two threads must not use one TLS connection at once."""
        return

    def close(self) -> None:
        self._writer.transport.abort()


Transport: TypeAlias = PlainTransport | TlsTransport  # a connection, opened by either side
Bytes: TypeAlias = Transport | BlockingTransport  # what moves them


async def dial(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, _, _, address = found[0]
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def open_transport(sock: socket.socket, tls: ssl.SSLContext | None, server: bool) -> Transport:
    if tls is None:
        return PlainTransport(sock)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=STREAM_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if server:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls)
    else:
        transport, _ = await loop.create_connection(
            lambda: protocol, sock=sock, ssl=tls, server_hostname="freewheel"
        )
    return TlsTransport(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def listen(host: str, port: int = 0) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    both = family == socket.AF_INET6
    sock = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
    sock.setblocking(False)
    return sock
