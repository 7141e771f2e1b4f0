"""Who waits for whom, where nothing can happen any more."""

from __future__ import annotations

from collections.abc import Mapping

from freewheel.errors import Deadlock, RunStopped, WorkerLost
from freewheel.sim.worker import SimulatedWorker


def standstill(workers: Mapping[int, SimulatedWorker], now_s: float) -> RunStopped:
    """Why a run stands still: nobody is left, or they wait for each other."""
    if not workers:
        return WorkerLost(f"no worker is left at {now_s:.3f} s: every one has crashed.")
    needs = {
        rank: [(peer, tag) for peer, tag in worker.fabric.waits() if peer is not None]
        for rank, worker in workers.items()
    }
    circle = _circle({rank: [peer for peer, _ in waiting] for rank, waiting in needs.items()})
    told = [
        f"worker {rank} waits for worker {peer} ({'/'.join(map(str, tag))})"
        for rank in circle or sorted(needs)
        for peer, tag in needs[rank]
        if not circle or peer in circle
    ]
    return Deadlock(f"deadlock at {now_s:.3f} s: {', '.join(told) or 'all workers wait'}.")


def _circle(graph: dict[int, list[int]]) -> list[int]:
    """A circle in a graph of who waits for whom, or nothing."""
    done: set[int] = set()

    def walk(path: list[int]) -> list[int]:
        for after in graph.get(path[-1], ()):
            if after in path[:-1]:
                return path[path.index(after) :]
            if after not in done and after != path[-1]:
                found = walk([*path, after])
                if found:
                    return found
        done.add(path[-1])
        return []

    return next((circle for start in sorted(graph) if (circle := walk([start]))), [])
