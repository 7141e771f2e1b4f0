"""What dealing by leases costs a step of 5 ms: the same loop with worker.loader and with torch's own sampler.

    freewheel run -n 2 benchmarks/dealing.py

Both sides take turns. A step computes by sleeping. What dealing costs is CPU time of the whole process, both
of its threads, beyond that of DistributedSampler; and the time the loop waits for a batch, beyond the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import freewheel as fw

STEP_S, STEPS, ROUNDS = 0.005, 400, 7
SAMPLES, BATCH = 1_000_000, 16


def timed(loader: Iterable[Any]) -> tuple[float, float]:
    """Milliseconds of CPU time a step takes, and of waiting for its batch."""
    batches = iter(loader)
    next(batches)
    begin, waited = time.process_time(), 0.0
    for _ in range(STEPS):
        time.sleep(STEP_S)
        since = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - since
    return 1e3 * (time.process_time() - begin) / STEPS, 1e3 * waited / STEPS


def main() -> None:
    """Measure, print."""
    model = torch.nn.Linear(8, 1)
    data = torch.arange(SAMPLES)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none") as worker:
        dealt = worker.loader(data, BATCH)
        sampler = DistributedSampler(data, worker.world_size, worker.rank)
        fixed = DataLoader(data, BATCH, sampler=sampler)
        rounds = [(*timed(dealt), *timed(fixed)) for _ in range(ROUNDS)]
    leases, leases_wait, shares, shares_wait = (statistics.median(one) for one in zip(*rounds, strict=True))
    print(
        f"CPU time of a step: leases {leases:.3f} ms, DistributedSampler {shares:.3f} ms; the difference is "
        f"{20 * (leases - shares):.2f} % of 5 ms. Waiting for a batch: {leases_wait:.3f} ms and "
        f"{shares_wait:.3f} ms, {20 * (leases_wait - shares_wait):.2f} %"
    )


if __name__ == "__main__":
    main()
