"""How long one exchange of AD-PSGD takes between two processes of this host that do nothing else.

Run it as `python benchmarks/exchange.py --device cuda`. Both sides agree, publish what they have, combine it
and are done: nothing is left out but the snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Coroutine
from typing import Any

import torch
from torch import Tensor

from freewheel.fabric import windows
from freewheel.fabric.base import Pull
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import TcpFabric
from freewheel.records.counters import Counters

HOST = "127.0.0.1"


class Party:
    """A worker that does nothing but exchange."""

    meet = Pull(0.5)

    def __init__(self, fabric: TcpFabric, size: int) -> None:
        self.vector = fabric.windows.make(size, torch.float32).fill_(fabric.rank)
        self.met_times = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self.exchanges = Exchanges(fabric, self, self.spawn, random.Random(fabric.rank))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run beside."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def snapshot_soon(self) -> Tensor:
        """The vector itself."""
        return self.vector

    def unused(self, _snapshot: Tensor) -> None:
        """It is the vector itself."""

    def met(self, _peer: int, _correction: Tensor) -> None:
        """One more is done."""
        self.met_times += 1

    def count(self, _outcome: str) -> None:
        """Nobody asks."""


async def exchange(rank: int, device: str, size: int, times: int, ports: Any) -> None:
    """Worker 0 calls, worker 1 answers."""
    side = None
    if device == "cuda":
        side = torch.cuda.Stream()
        torch.cuda.set_stream(side)
    me = Identity(bytes(16), rank, 2, 1, "bench", "exchange", size, place=windows.place())
    fabric = TcpFabric(me, Counters(), side=side)
    ports[rank] = fabric.open(HOST)
    while not all(ports):
        await asyncio.sleep(0.01)
    if rank == 1:
        await fabric.connect(0, HOST, ports[0])
    while 1 - rank not in fabric.members:
        await fabric.changed()
    party = Party(fabric, size)
    party.spawn(party.exchanges.serve())
    took = []
    while rank == 0 and party.met_times < times:
        begin = time.perf_counter()
        if await party.exchanges.call(1):
            took.append(1e3 * (time.perf_counter() - begin))
        await asyncio.sleep(0.002)
    while rank == 1 and party.met_times < times:
        await asyncio.sleep(0.01)
    if took:
        median, kind = statistics.median(took), fabric.kinds()[1]
        print(f"{4 * size / 1e6:g} MB by {kind}: {median:.2f} ms, least {min(took):.2f} ms")
    await fabric.close()


def work(rank: int, device: str, size: int, times: int, ports: Any) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    asyncio.run(exchange(rank, device, size, times, ports))


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mb", type=float, default=340.0)
    parser.add_argument("--times", type=int, default=60)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ports = context.Array("i", 2)
    both = [
        context.Process(target=work, args=(rank, given.device, round(given.mb * 250_000), given.times, ports))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()


if __name__ == "__main__":
    main()
