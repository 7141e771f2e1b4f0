"""Two processes swap vectors, both directions at once: Freewheel's fabric beside gloo's isend and irecv.

    swap        each side ends with the other's vector beside its own
    exchange    each side ends with what AD-PSGD makes of both, (theirs - mine)/2

The two take turns in the same pair of processes. Wall time is the median of all swaps of both; CPU time, user
and system, is that of both processes together, for one swap.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from freewheel.bench.figure import Figure
from freewheel.bench.processes import Parent, Place, Processes, free_port, job
from freewheel.bench.rates import Progress
from freewheel.errors import at_least
from freewheel.strategies.adpsgd import ADPSGD

SWAP, EXCHANGE = "swap", "exchange"
OURS, GLOO = "freewheel", "gloo"
START_S = 120.0
FLOATS_PER_MB = 250_000


def swap(sizes_mb: Sequence[float], rounds: int, progress: Progress) -> list[Figure]:
    """Measure each size in a pair of processes of its own; two figures for each."""
    at_least("--rounds", rounds, 1)
    for mb in sizes_mb:
        at_least("--mb", mb, 0.001)
    found = []
    for done, mb in enumerate(sizes_mb):

        def show(message: dict[str, Any], done: int = done, mb: float = mb) -> None:
            progress(f"{mb:g} MB", (done + message.get("progress", 0.0)) / len(sizes_mb))

        show({})
        asked = {"mb": mb, "rounds": rounds, "swaps": swaps_in_a_turn(mb)}
        with Processes("freewheel.bench.swap", asked, [Place()] * 2, free_port()) as pair:
            sides = pair.collect("result", START_S + 2 * rounds * mb, show)
            pair.finish(START_S)
        found += [_figure(kind, mb, *(side[kind] for side in sides)) for kind in (SWAP, EXCHANGE)]
    return found


def swaps_in_a_turn(mb: float) -> int:
    """Few large ones, many small ones."""
    return max(2, min(50, round(200 / mb)))


def _figure(kind: str, mb: float, *sides: dict[str, dict[str, list[float]]]) -> Figure:
    def wall_ms(who: str) -> float:
        return 1e3 * statistics.median(s for side in sides for s in side[who]["wall_s"])

    def cpu_ms(who: str) -> float:
        return 1e3 * sum(statistics.median(side[who]["cpu_s"]) for side in sides)

    raw = {
        "freewheel_cpu_ms": cpu_ms(OURS),
        "gloo_cpu_ms": cpu_ms(GLOO),
        "cpu_ratio": cpu_ms(OURS) / cpu_ms(GLOO),
        "freewheel_mb_per_s": 2e3 * mb / wall_ms(OURS),
        "gloo_mb_per_s": 2e3 * mb / wall_ms(GLOO),
        "mb": mb,
        "wall_s": {who: [side[who]["wall_s"] for side in sides] for who in (OURS, GLOO)},
        "cpu_s": {who: [side[who]["cpu_s"] for side in sides] for who in (OURS, GLOO)},
    }
    ours, theirs = wall_ms(OURS), wall_ms(GLOO)
    return Figure(kind, f"{mb:g} MB", ours, GLOO, theirs, theirs / ours, "ms, both directions at once", raw)


# -- in each of the two processes --


class Gloo:
    """Swaps by torch.distributed, into memory that is there already: the opponent at its best."""

    def __init__(self, mine: Tensor, peer: int) -> None:
        self.mine, self.peer, self.theirs = mine, peer, torch.empty_like(mine)

    def _swap(self) -> None:
        works = [dist.isend(self.mine, self.peer), dist.irecv(self.theirs, self.peer)]
        for work in works:
            assert work is not None
            work.wait()

    async def swap(self) -> None:
        """Both vectors on both sides."""
        self._swap()

    async def exchange(self) -> None:
        """What AD-PSGD makes of both."""
        self._swap()
        self.theirs.sub_(self.mine).mul_(0.5)


class Ours:
    """Swaps by Freewheel's fabric, as an exchange does them."""

    def __init__(self, mine: Tensor, peer: int) -> None:
        from freewheel import __version__
        from freewheel.fabric.greeting import Identity
        from freewheel.fabric.tcp import TcpFabric
        from freewheel.observe.counters import Counters

        me = Identity(b"freewheel bench ".ljust(16), 1 - peer, 2, 0, __version__, "swap", mine.numel())
        self.mine, self.peer, self.meet = mine, peer, ADPSGD().meet
        self.fabric, self.number = TcpFabric(me, Counters()), 0

    async def open(self) -> None:
        """Find each other: the ports travel by gloo."""
        ports: list[Any] = [None, None]
        dist.all_gather_object(ports, self.fabric.open("127.0.0.1"))
        if self.fabric.rank > self.peer:
            await self.fabric.connect(self.peer, "127.0.0.1", ports[self.peer])
        while self.peer not in self.fabric.members:
            await self.fabric.changed()

    async def swap(self) -> None:
        """Both vectors on both sides."""
        from freewheel.fabric.collectives import send_and_receive

        self.number += 1
        await send_and_receive(self.fabric, self.peer, self.peer, (SWAP, self.number), self.mine)

    async def exchange(self) -> None:
        """What AD-PSGD makes of both."""
        self.number += 1
        sending = self.fabric.send(self.peer, (SWAP, self.number), self.mine)
        await self.fabric.blend(self.peer, (SWAP, self.number), self.mine, self.meet, sending)


async def _timed(act: Callable[[], Awaitable[None]], times: int) -> tuple[list[float], float]:
    """Wall seconds of each, and CPU seconds of one."""
    cpu_s, wall_s = time.process_time(), []
    for _ in range(times):
        begin = time.perf_counter()
        await act()
        wall_s.append(time.perf_counter() - begin)
    return wall_s, (time.process_time() - cpu_s) / times


async def _work(parent: Parent, asked: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    size = round(asked["mb"] * FLOATS_PER_MB)
    gloo, ours = Gloo(torch.randn(size), 1 - rank), Ours(torch.randn(size), 1 - rank)
    await ours.open()
    ways: dict[str, Gloo | Ours] = {GLOO: gloo, OURS: ours}
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        kind: {who: {"wall_s": [], "cpu_s": []} for who in ways} for kind in (SWAP, EXCHANGE)
    }
    for turn in range(-1, asked["rounds"]):
        for kind, of in found.items():
            for who, way in ways.items():
                dist.barrier()
                wall_s, cpu_s = await _timed(getattr(way, kind), asked["swaps"] if turn >= 0 else 1)
                if turn >= 0:  # the first turn warms up
                    of[who]["wall_s"] += wall_s
                    of[who]["cpu_s"].append(cpu_s)
        parent.say(progress=(turn + 1) / asked["rounds"])
    parent.say(result=found)
    dist.barrier()
    await ours.fabric.close()


def main() -> None:
    """Swap in turns and tell how long each took."""
    parent, asked = Parent(), job()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asyncio.run(_work(parent, asked))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
