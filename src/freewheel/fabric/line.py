"""A connection as two acts: read exactly so many bytes into memory, write all of these.

Plain sockets read straight into the memory of a tensor. TLS goes through asyncio's streams, which copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Protocol

STREAM_BYTES = 4 << 20
"""How much of a TLS connection may wait to be read."""


class Line(Protocol):
    """A connection, opened by either side."""

    heard_s: float
    """When the last byte came, by the event loop's clock."""

    async def read(self, into: memoryview) -> None:
        """Fill the memory; EOFError when the other side has closed."""

    async def write(self, data: memoryview | bytes) -> None:
        """Hand all bytes to the system."""

    def close(self) -> None:
        """Close at once; whoever reads or writes sees an error."""


class PlainLine:
    """A TCP socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop, self._socket = asyncio.get_running_loop(), sock
        self.heard_s = self._loop.time()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def read(self, into: memoryview) -> None:
        """Fill the memory; EOFError when the other side has closed."""
        while len(into):
            got = await self._loop.sock_recv_into(self._socket, into)
            if not got:
                raise EOFError("the connection was closed")
            self.heard_s = self._loop.time()
            into = into[got:]

    async def write(self, data: memoryview | bytes) -> None:
        """Hand all bytes to the system."""
        await self._loop.sock_sendall(self._socket, data)

    def close(self) -> None:
        """Close at once; whoever reads or writes must have been cancelled."""
        self._socket.close()


class TlsLine:
    """A TLS connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()

    async def read(self, into: memoryview) -> None:
        """Fill the memory; EOFError when the other side has closed."""
        at = 0
        while at < len(into):
            data = await self._reader.read(len(into) - at)
            if not data:
                raise EOFError("the connection was closed")
            self.heard_s = self._loop.time()
            into[at : at + len(data)] = data
            at += len(data)

    async def write(self, data: memoryview | bytes) -> None:
        """Hand all bytes to the system."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()


async def dial(host: str, port: int, tls: ssl.SSLContext | None) -> Line:
    """Connect."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, _, _, address = found[0]
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        return await open_line(sock, tls, server=False)
    except BaseException:
        sock.close()
        raise


async def open_line(sock: socket.socket, tls: ssl.SSLContext | None, server: bool) -> Line:
    """Make a line of a connected socket; with TLS, shake hands first."""
    if tls is None:
        return PlainLine(sock)
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
    return TlsLine(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket; port 0 takes any that is free."""
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
