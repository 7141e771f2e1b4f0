"""Measure the link to another host: latency, bandwidth both ways, clock skew.

One host runs `serving`, another `measuring`. Both use the workers' transports, handshake and, with keys, TLS.
Visitors are served one at a time, since they would slow each other. A visitor says how many bytes it sends
and how many it wants; the answer is the server's time, and these bytes.
"""

import asyncio
import contextlib
import socket
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.fabric import secret
from freewheel.fabric.frames import BadFrame
from freewheel.fabric.handshake import BROKEN, DIAL_S, prove, take
from freewheel.fabric.transport import Transport, dial, open_transport
from freewheel.runtime.launch.keys import contexts
from freewheel.runtime.membership.hosts import listen

PORT = 29600
GREETING_S, VISIT_S = 5.0, 60.0  # the most for a visitor's handshake, and for its visit
MEASURE_S = 30.0  # the most that a visitor waits for its turn and its figures
PINGS = 21
FIRST = 1 << 16  # bytes of the first transfer; each next one has four times as many
LONG_ENOUGH_S = 0.5  # a transfer that took so long has measured the link
MOST_MB, MEGABYTES = 1024, 64.0  # the largest transfer allowed, and by default
PIECE = memoryview(bytes(1 << 20))
ASK, CLOCK = struct.Struct("!QQ"), struct.Struct("!d")


@dataclass(frozen=True)
class LinkFigure:
    """What was measured between this host and another."""

    latency_ms: float  # one way
    mbit_out: float
    mbit_in: float
    clock_skew_ms: float  # how far that host's clock is ahead of ours, known to about the latency


@contextlib.asynccontextmanager
async def serving(
    bind: str = "127.0.0.1",
    port: int = PORT,
    tls: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[int]:
    """Let others measure the link to this host, with `tls` only holders of the same keys; gives the port."""
    with listen(bind, port, "bind") as listener:
        listener.setblocking(False)
        answering = asyncio.create_task(_serve(listener, tls, say))
        try:
            yield listener.getsockname()[1]
        finally:
            answering.cancel()
            await asyncio.wait([answering])


async def _serve(listener: socket.socket, tls: Path | None, say: Callable[[str], None]) -> None:
    while True:
        visitor, _ = await asyncio.get_running_loop().sock_accept(listener)
        with contextlib.suppress(*BROKEN):  # it leaves, or is no member
            async with _met(visitor, tls, GREETING_S, calls=False) as transport:
                say("another host measures its link to this one")
                async with asyncio.timeout(VISIT_S):
                    while True:
                        await _answer(transport)


async def _answer(transport: Transport) -> None:
    sent, wanted = ASK.unpack(await take(transport, ASK.size))
    if max(sent, wanted) > MOST_MB * 10**6:
        raise BadFrame("it asks for more than is offered")
    await _drop(transport, sent)
    await transport.write(CLOCK.pack(time.time()))
    await _give(transport, wanted)


async def loopback(mb: float, tls: Path | None = None) -> LinkFigure:
    async with serving(port=0, tls=tls) as port:
        return await measuring("127.0.0.1", port, mb, tls)


async def measuring(host: str, port: int, mb: float, tls: Path | None = None) -> LinkFigure:
    """Measure the link to a host that serves, with transfers that grow until one lasts LONG_ENOUGH_S."""
    if not 0 < mb <= MOST_MB:
        raise ConfigError(f"mb must be above 0 and at most {MOST_MB}, not {mb:g}.")
    try:
        async with asyncio.timeout(DIAL_S):
            sock = await dial(host, port)
        async with asyncio.timeout(MEASURE_S), _met(sock, tls, MEASURE_S, calls=True) as transport:
            most, trips = round(mb * 10**6), [await _timed(transport) for _ in range(PINGS)]
            shortest_s, skew_s = min(trips)  # the shortest trip left the least room for error
            return LinkFigure(
                latency_ms=1000 * statistics.median(trip_s for trip_s, _ in trips) / 2,
                mbit_out=await _grow(lambda size: _timed(transport, sent=size), most, shortest_s),
                mbit_in=await _grow(lambda size: _timed(transport, wanted=size), most, shortest_s),
                clock_skew_ms=1000 * skew_s,
            )
    except BROKEN as error:
        why = "it took too long" if isinstance(error, TimeoutError) else error
        raise ConfigError(
            f"cannot measure the link to {host}:{port}: {why}. Start `freewheel doctor --serve` "
            "there (the same keys, or none, on both) and let its port be reached from here."
        ) from None


@contextlib.asynccontextmanager
async def _met(sock: socket.socket, tls: Path | None, most_s: float, calls: bool) -> AsyncIterator[Transport]:
    """A connection after the handshake: both ends hold the same keys, or none."""
    opened: Transport | socket.socket = sock
    try:
        async with asyncio.timeout(most_s):
            context = contexts(tls)[calls] if tls else None
            opened = transport = await open_transport(sock, context, server=not calls)
            await prove(transport, secret.derive(secret.of_keys(tls) if tls else b"", "doctor"), calls)
        yield transport
    finally:
        opened.close()


async def _timed(transport: Transport, sent: int = 0, wanted: int = 0) -> tuple[float, float]:
    """Seconds for a question and its answer, and how far the other clock is ahead."""
    now_s, begun_s = time.time(), time.perf_counter()
    await transport.write(ASK.pack(sent, wanted))
    await _give(transport, sent)
    (clock_s,) = CLOCK.unpack(await take(transport, CLOCK.size))
    await _drop(transport, wanted)
    took_s = time.perf_counter() - begun_s
    return took_s, clock_s - now_s - took_s / 2


async def _grow(transfer: Callable[[int], Awaitable[tuple[float, float]]], most: int, trip_s: float) -> float:
    """Mbit/s of the largest transfer, without its round trip."""
    size = min(FIRST, most)
    while True:
        took_s, _ = await transfer(size)
        if took_s >= LONG_ENOUGH_S or size == most:
            return 8e-6 * size / max(took_s - trip_s, took_s / 2)
        size = min(4 * size, most)


async def _give(transport: Transport, size: int) -> None:
    for at in range(0, size, len(PIECE)):
        await transport.write(PIECE[: size - at])


async def _drop(transport: Transport, size: int) -> None:
    into = memoryview(bytearray(len(PIECE)))
    for at in range(0, size, len(into)):
        await transport.read(into[: size - at])
