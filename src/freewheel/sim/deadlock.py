"""Who waits for whom, where nothing can happen any more."""

from __future__ import annotations

from collections.abc import Mapping

from freewheel.errors import Deadlock, RunStopped, WorkerLost
from freewheel.sim.worker import SimulatedWorker


def standstill(workers: Mapping[int, SimulatedWorker], now_s: float) -> RunStopped:
    """Why a run stands still: nobody is left, or they wait for each other."""
    if not workers:
        return WorkerLost(f"no worker is left at {now_s:.3f} s: every one has crashed.")
    told = [
        f"worker {rank} waits for worker {peer} ({'/'.join(map(str, tag))})"
        for rank, worker in workers.items()
        for peer, tag in worker.fabric.waits()
        if peer is not None
    ]
    return Deadlock(f"deadlock at {now_s:.3f} s: {', '.join(told) or 'all workers wait'}.")
