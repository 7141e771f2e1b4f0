"""What dealing by leases costs a step of 5 ms: the same loop with worker.loader and with torch's own sampler.

    freewheel run -n 2 benchmarks/dealing.py

Both sides take turns. A step computes by sleeping. What dealing costs is CPU time of the whole process, both
of its threads, beyond that of DistributedSampler; and the time in which the loop waited for a lease.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import freewheel as fw

STEP_S, STEPS, ROUNDS = 0.005, 400, 5
SAMPLES, BATCH = 1_000_000, 16


def timed(loader: Iterable[Any]) -> float:
    """Milliseconds of CPU time a step takes."""
    batches = iter(loader)
    next(batches)
    begin = time.process_time()
    for _ in range(STEPS):
        time.sleep(STEP_S)
        next(batches)
    return 1e3 * (time.process_time() - begin) / STEPS


def main() -> None:
    """Measure, print."""
    model = torch.nn.Linear(8, 1)
    data = torch.arange(SAMPLES)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none") as worker:
        dealt = worker.loader(data, BATCH)
        sampler = DistributedSampler(data, worker.world_size, worker.rank)
        fixed = DataLoader(data, BATCH, sampler=sampler)
        both = [(timed(dealt), timed(fixed)) for _ in range(ROUNDS)]
        blocked = worker.metrics()["blocked_share"]
    leases, shares = (statistics.median(column) for column in zip(*both, strict=True))
    print(
        f"CPU time of a step: leases {leases:.3f} ms, DistributedSampler {shares:.3f} ms; the difference is "
        f"{100 * (leases - shares) / (1e3 * STEP_S):.2f} % of 5 ms; waited for leases: {100 * blocked:.3f} %"
    )


if __name__ == "__main__":
    main()
