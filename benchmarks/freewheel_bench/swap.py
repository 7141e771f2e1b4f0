"""Two processes swap snapshots, both directions at once: Freewheel's exchanges beside gloo's isend and irecv.

    swap                gloo leaves each side with what the other had
    exchange            gloo leaves each side with what AD-PSGD makes of both, (theirs - mine)/2
    … over TCP          the same as workers of two machines do it, on loopback; those of one share memory

Through windows Freewheel combines on the way, so its swap is its exchange; over TCP it moves vectors and
no more, as gloo's does. An exchange begins with the two sides agreeing on it, which is part of its time. All
take turns in the same pair of processes. Wall time is the median of all swaps of both sides; CPU time, user
and system, is that of both processes together.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freewheel import __version__
from freewheel.errors import at_least
from freewheel.fabric import windows
from freewheel.fabric.base import Meet
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import TcpFabric
from freewheel.records.counters import Counters
from freewheel.strategies.adpsgd import ADPSGD
from freewheel_bench.contestants import FLOATS_PER_MB
from freewheel_bench.figure import Figure
from freewheel_bench.namespaces import Network
from freewheel_bench.parent import Parent, job
from freewheel_bench.rates import Progress
from freewheel_bench.workers import START_S, Place, Workers

SWAP, EXCHANGE = "swap", "exchange"
LINK_MBIT = 200_000.0
NEAR, TCP, GLOO = "freewheel", "freewheel over TCP", "gloo"


def swap(sizes_mb: Sequence[float], rounds: int, progress: Progress, apart: bool = False) -> list[Figure]:
    """Measure each size in a pair of processes of its own; four figures for each.

    `apart` puts the two into network namespaces of their own, with a link that is no limit.
    """
    if apart:
        with Network(2, LINK_MBIT) as built:
            return _swap(sizes_mb, rounds, progress, built.places)
    return _swap(sizes_mb, rounds, progress, [Place()] * 2)


def _swap(
    sizes_mb: Sequence[float], rounds: int, progress: Progress, places: Sequence[Place]
) -> list[Figure]:
    at_least("--rounds", rounds, 1)
    for mb in sizes_mb:
        at_least("--mb", mb, 0.001)
    found = []
    for done, mb in enumerate(sizes_mb):

        def show(share: float, done: int = done, mb: float = mb) -> None:
            progress(f"{mb:g} MB", (done + share) / len(sizes_mb))

        addresses = [place.address for place in places]
        asked = {"mb": mb, "rounds": rounds, "swaps": swaps_in_a_turn(mb), "addresses": addresses}
        with Workers("freewheel_bench.swap", asked, places) as pair:
            sides = pair.collect("result", START_S + 6 * rounds * mb, show)
            pair.finish(START_S)
        for way in (NEAR, TCP) if addresses[0] == addresses[1] else (TCP,):
            found += [_figure(kind, way, mb, [side[kind] for side in sides]) for kind in (SWAP, EXCHANGE)]
    return found


def swaps_in_a_turn(mb: float) -> int:
    """Few large ones, many small ones."""
    return max(2, min(50, round(200 / mb)))


def _figure(kind: str, way: str, mb: float, sides: Sequence[dict[str, dict[str, list[float]]]]) -> Figure:
    def wall_ms(who: str) -> float:
        return 1e3 * statistics.median(s for side in sides for s in side[who]["wall_s"])

    def cpu_ms(who: str) -> float:
        return 1e3 * sum(statistics.median(side[who]["cpu_s"]) for side in sides)

    name = kind if way == NEAR else f"{kind} over TCP"
    ours, theirs = wall_ms(way), wall_ms(GLOO)
    raw = {
        "freewheel_cpu_ms": cpu_ms(way),
        "gloo_cpu_ms": cpu_ms(GLOO),
        "cpu_ratio": cpu_ms(way) / cpu_ms(GLOO),
        "mb": mb,
        "wall_s": {who: [side[who]["wall_s"] for side in sides] for who in (way, GLOO)},
        "cpu_s": {who: [side[who]["cpu_s"] for side in sides] for who in (way, GLOO)},
    }
    return Figure(name, f"{mb:g} MB", ours, GLOO, theirs, theirs / ours, "ms, both directions at once", raw)


# -- in each of the two processes --


class Gloo:
    """Swaps by torch.distributed, into memory that is there already: the opponent at its best."""

    def __init__(self, size: int, peer: int) -> None:
        self.mine, self.theirs, self.peer = torch.randn(size), torch.zeros(size), peer

    def swap(self) -> None:
        works = [dist.isend(self.mine, self.peer), dist.irecv(self.theirs, self.peer)]
        for work in works:
            assert work is not None
            work.wait()

    def exchange(self) -> None:
        self.swap()
        self.theirs.sub_(self.mine).mul_(0.5)


class Party:
    """A worker that does nothing but exchange: the first calls, the second answers."""

    def __init__(self, size: int, rank: int, near: bool, addresses: Sequence[str]) -> None:
        self.addresses, self.near, self._swaps = addresses, near, 0
        self.theirs = torch.zeros(0 if near else size)
        place = windows.place() if near else ""
        me = Identity(bytes(16), rank, 2, 1, __version__, "swap", longest=size, place=place)
        self.fabric = TcpFabric(me, Counters())
        self.peer = 1 - rank
        self.meet: Meet = ADPSGD().meet
        self.mine = self.fabric.windows.make(size, torch.float32).copy_(torch.randn(size))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exchanges = Exchanges(self.fabric, self, self._spawn, random.Random(rank))
        self._done = asyncio.Semaphore(0)

    async def open(self) -> None:
        """Find each other: the ports travel by gloo."""
        ports: list[Any] = [None, None]
        await asyncio.to_thread(
            dist.all_gather_object, ports, self.fabric.open(self.addresses[self.fabric.rank])
        )
        if self.fabric.rank > self.peer:
            address = self.addresses[self.peer]
            await self.fabric.connect(self.peer, address, ports[self.peer])
        while self.peer not in self.fabric.members:
            await self.fabric.changed()
        self._spawn(self._exchanges.serve())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def swap(self) -> None:
        """What the other had; through windows it is combined on the way."""
        if self.near:
            await self.exchange()
            return
        self._swaps += 1
        tag = ("swap", self._swaps)
        sending = self.fabric.send(self.peer, tag, self.mine)
        await self.fabric.land(self.peer, tag, self.mine.numel(), self.theirs)
        await sending

    async def exchange(self) -> None:
        if self.fabric.rank == 0:
            while not await self._exchanges.call(self.peer):
                await asyncio.sleep(0)
        await self._done.acquire()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.fabric.close()

    async def snapshot_soon(self) -> Tensor:
        """The vector itself; an exchange may overwrite it."""
        return self.mine

    def met(self, peer: int, _: Tensor) -> None:
        """An exchange is complete."""
        self._done.release()

    def unused(self, _: Tensor) -> None:
        """It is kept anyway."""

    def count(self, _: str) -> None:
        """Nobody asks."""


async def _timed(act: Callable[[], Any], times: int) -> tuple[list[float], float]:
    """Wall seconds of each, and CPU seconds of one."""
    cpu_s, wall_s = time.process_time(), []

    def blocking() -> None:
        for _ in range(times):
            begin = time.perf_counter()
            act()
            wall_s.append(time.perf_counter() - begin)

    if asyncio.iscoroutinefunction(act):
        for _ in range(times):
            begin = time.perf_counter()
            await act()
            wall_s.append(time.perf_counter() - begin)
    else:
        await asyncio.to_thread(blocking)  # the fabrics' event loop goes on
    return wall_s, (time.process_time() - cpu_s) / times


async def _work(parent: Parent, asked: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    size = round(asked["mb"] * FLOATS_PER_MB)
    where = asked["addresses"]
    gloo = Gloo(size, 1 - rank)
    near, tcp = Party(size, rank, True, where), Party(size, rank, False, where)
    await near.open()
    await tcp.open()
    ways: dict[str, Gloo | Party] = {GLOO: gloo, NEAR: near, TCP: tcp}
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        kind: {who: {"wall_s": [], "cpu_s": []} for who in ways} for kind in (SWAP, EXCHANGE)
    }
    for turn in range(-1, asked["rounds"]):
        for kind, of in found.items():
            for who, way in ways.items():
                await asyncio.to_thread(dist.barrier)
                wall_s, cpu_s = await _timed(getattr(way, kind), asked["swaps"] if turn >= 0 else 2)
                if turn >= 0:  # the first turn warms up
                    of[who]["wall_s"] += wall_s
                    of[who]["cpu_s"].append(cpu_s)
        parent.say(progress=(turn + 1) / asked["rounds"])
    parent.say(result=found)
    await asyncio.to_thread(dist.barrier)
    await near.close()
    await tcp.close()


def main() -> None:
    parent, asked = Parent(), job()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asyncio.run(_work(parent, asked))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
