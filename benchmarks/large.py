"""A GPT of 1.3 billion weights on workers that share a GPU: does it train, and what memory does it take?

Run it as `freewheel run -n 2 benchmarks/large.py`. The same loop runs alone first, then attached; the
difference of the two peaks, windows included, is what being attached takes beyond model, gradients and
optimizer.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import freewheel as fw
from freewheel_bench.contestants import Transformer


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> tuple[float, float]:
    """Train so many steps; the last loss, and steps in a second."""
    begin, loss = time.perf_counter(), torch.zeros(())
    for _ in range(count):
        loss = model()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach()), count / (time.perf_counter() - begin)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--strategy", default="adpsgd")
    given = parser.parse_args()
    model = Transformer(given.layers, given.width, 512, given.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps(model, optimizer, 3)
    vector = sum(parameter.nbytes for parameter in model.parameters())
    alone, host = torch.cuda.max_memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fw.attach(model, optimizer, given.strategy) as worker:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss, rate = steps(model, optimizer, given.steps)
        more = torch.cuda.max_memory_allocated() - alone
        windows = worker._agent.fabric.windows.nbytes()
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host)
        done = worker.metrics()
    print(
        f"worker {worker.rank}: {vector / 4e9:.2f} billion weights, loss {loss:.2f}, {rate:.2f} steps/s, "
        f"{done['exchanges']['done'] + done['merges']['done']} exchanges in {given.steps} steps "
        f"by {sorted(set(done['windows'].values()))} windows; beyond model, gradients and optimizer "
        f"{(more + windows) / vector:.2f} vectors on the device ({windows / vector:.2f} in windows), "
        f"{grown / vector:.2f} on the host"
    )


if __name__ == "__main__":
    main()
