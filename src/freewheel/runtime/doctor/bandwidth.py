"""How good is the link to another host? Its latency, its bandwidth both ways, and what its clock says.

One host serves, another measures: `serving` there, `measure` here.
Both are workers of a run of their own, over the network that workers use: what is measured is what is used,
with the same handshake, the same limits and, with keys, the same TLS. One visitor is served after another,
or they would measure each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from freewheel.errors import ConfigError, PeerLost
from freewheel.fabric import secret
from freewheel.fabric.handshake import EARLIER, Identity
from freewheel.fabric.tcp import TcpFabric
from freewheel.records.counters import Counters
from freewheel.runtime.launch.keys import contexts
from freewheel.runtime.membership.hosts import listen

PORT = 29600
VISITORS = 4096  # places, of which each takes one by chance
VISIT_S = 120.0  # of one visitor, at most
SILENT_S = 10.0  # without a sign of life, at most
PINGS = 21
PIECE = torch.zeros(1 << 20)  # the longest message: 4 MB
FIRST = 1 << 14  # numbers of the first transfer; each next one has four times as many
LONG_ENOUGH_S = 0.5  # a transfer that took so long has measured the link
MOST_MB = 1024
VISIT, ASK, ANSWER, DATA = ("visit",), ("ask",), ("answer",), ("data",)
PING, TAKE, GIVE = range(3)


@dataclass(frozen=True)
class LinkFigure:
    """What was measured between this host and another."""

    latency_ms: float
    """One way: half of the median round trip of a short message."""
    mbit_out: float
    """From here to there, Mbit/s."""
    mbit_in: float
    """From there to here, Mbit/s."""
    clock_skew_ms: float
    """How far that host's clock is ahead of ours, known to about the latency."""


@contextlib.asynccontextmanager
async def serving(
    bind: str = "127.0.0.1",
    port: int = PORT,
    tls: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[int]:
    """Let others measure the link to this host; gives the port, a free one where 0 is asked for.

    With ``tls``, a folder with keys, only those who hold the same keys are answered.
    """
    listen(bind, port, "bind").close()  # which says in words why it cannot be
    async with _worker(0, tls) as fabric:
        port = fabric.open(bind, port)
        answering = asyncio.create_task(_serve(fabric, say))
        try:
            yield port
        finally:
            answering.cancel()


async def _serve(fabric: TcpFabric, say: Callable[[str], None]) -> None:
    while True:
        visit = await fabric.receive(VISIT)
        try:
            async with asyncio.timeout(VISIT_S):
                fabric.post(visit.sender, ANSWER)
                while True:
                    await _answer(fabric, visit.sender)
        except TimeoutError:
            visit.bad("for too long")
        except PeerLost:
            say("another host has measured its link to this one")


async def _answer(fabric: TcpFabric, peer: int) -> None:
    ask = await fabric.receive(ASK, peer)
    what, size = map(int, ask.note) if len(ask.note) == 2 else (-1, 0)
    if what not in (PING, TAKE, GIVE) or not 0 <= 4 * size <= MOST_MB * 10**6:
        raise ask.bad("what is not offered")
    if what == TAKE:
        await _take(fabric, peer, size)
    if what == GIVE:
        await _give(fabric, peer, size)
    fabric.post(peer, ANSWER, note=(time.time(),))


def measure(
    host: str, port: int = PORT, mb: float = 64, tls: Path | None = None, timeout_s: float = 30.0
) -> LinkFigure:
    """Measure the link to a host that serves; at most so many megabytes each way, and so many seconds."""
    return asyncio.run(measuring(host, port, mb, tls, timeout_s))


async def loopback(mb: float, tls: Path | None = None) -> LinkFigure:
    """Measure the link of this host with itself."""
    async with serving(port=0, tls=tls) as port:
        return await measuring("127.0.0.1", port, mb, tls)


async def measuring(
    host: str, port: int, mb: float, tls: Path | None = None, timeout_s: float = 30.0
) -> LinkFigure:
    """See `measure`. Transfers begin small and grow until one lasts long enough for a slow link."""
    if not 0 < mb <= MOST_MB:
        raise ConfigError(f"mb must be above 0 and at most {MOST_MB}, not {mb:g}.")
    if not 0 < timeout_s <= VISIT_S:
        raise ConfigError(f"timeout_s must be above 0 and at most {VISIT_S:g}, not {timeout_s:g}.")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port must be above 0 and below {1 << 16}, not {port}.")
    try:
        async with asyncio.timeout(timeout_s), _called(host, port, tls) as fabric:
            fabric.post(0, VISIT)
            await fabric.receive(ANSWER, 0)  # it is our turn
            return await _figure(fabric, max(1, round(mb * 10**6 / 4)))
    except (PeerLost, TimeoutError) as error:
        why = error.why if isinstance(error, PeerLost) else "it took too long"
        raise ConfigError(
            f"cannot measure the link to {host}:{port}: {why}. Start `freewheel doctor --serve` "
            "there (the same keys, or none, on both) and let its port be reached from here."
        ) from None


@contextlib.asynccontextmanager
async def _called(host: str, port: int, tls: Path | None) -> AsyncIterator[TcpFabric]:
    """A worker that is connected with the one that serves, in a place that nobody has."""
    for rank in random.sample(range(1, VISITORS + 1), VISITORS):
        async with _worker(rank, tls) as fabric:
            try:
                fabric.open("127.0.0.1")  # nobody calls; what is open gives signs of life
                await fabric.connect(0, host, port)
            except PeerLost as lost:
                if EARLIER in lost.why:
                    continue
                raise
            yield fabric
            return
    raise PeerLost(0, f"{VISITORS} others measure at the same time; wait a moment")


@contextlib.asynccontextmanager
async def _worker(rank: int, tls: Path | None) -> AsyncIterator[TcpFabric]:
    """One end of the network: rank 0 serves, the others visit it."""
    ends = contexts(tls) if tls else None
    key = secret.derive(secret.of_keys(tls) if tls else b"", "doctor")
    life = (1 << 32) - 1 - time.time_ns() // 1000 % (1 << 32)  # of two that take one place the first stays
    version = importlib.metadata.version("freewheel")
    me = Identity(key, rank, 1 + VISITORS, life, version, "links", PIECE.numel())
    fabric = TcpFabric(me, Counters(), tls=ends, silence_s=SILENT_S)
    try:
        yield fabric
    finally:
        await fabric.close()


async def _figure(fabric: TcpFabric, most: int) -> LinkFigure:
    trips = [await _timed(fabric, PING) for _ in range(PINGS)]
    shortest_s, skew_s = min(trips)  # the shortest trip left the least room for error
    return LinkFigure(
        latency_ms=1000 * statistics.median(trip_s for trip_s, _ in trips) / 2,
        mbit_out=await _grow(partial(_timed, fabric, TAKE), most, shortest_s),
        mbit_in=await _grow(partial(_timed, fabric, GIVE), most, shortest_s),
        clock_skew_ms=1000 * skew_s,
    )


async def _timed(fabric: TcpFabric, what: int, size: int = 0) -> tuple[float, float]:
    """Seconds until there is an answer to what was asked, and how far the other clock is ahead."""
    sent, begun_s = time.time(), time.perf_counter()
    fabric.post(0, ASK, note=(what, size))
    if what == TAKE:
        await _give(fabric, 0, size)
    if what == GIVE:
        await _take(fabric, 0, size)
    answer = await fabric.receive(ANSWER, 0)
    if len(answer.note) != 1:
        raise answer.bad("no time")
    took_s = time.perf_counter() - begun_s
    return took_s, answer.note[0] - sent - took_s / 2


async def _grow(transfer: Callable[[int], Awaitable[tuple[float, float]]], most: int, trip_s: float) -> float:
    """Mbit/s of the last transfer of so many numbers, without the round trip that each one costs."""
    size = min(FIRST, most)
    while True:
        took_s, _ = await transfer(size)
        if took_s >= LONG_ENOUGH_S or size == most:
            return 32e-6 * size / max(took_s - trip_s, took_s / 2)
        size = min(4 * size, most)


async def _give(fabric: TcpFabric, peer: int, size: int) -> None:
    for at in range(0, size, PIECE.numel()):
        await fabric.send(peer, DATA, PIECE[: size - at])


async def _take(fabric: TcpFabric, peer: int, size: int) -> None:
    while size > 0:
        size -= (await fabric.receive(DATA, peer)).payload.numel()
