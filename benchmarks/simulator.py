"""What the simulator costs: time against a plain training loop, events per second, memory per worker.

    python benchmarks/simulator.py [--json FILE]

Times are noisy, so the simulation and the plain loop take turns and the ratio of their medians is what
counts. Each part runs in a process of its own, on one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from freewheel.sim.driver import Simulation
from freewheel.sim.scenario import Scenario
from freewheel.strategies import resolve
from freewheel.task import Task
from freewheel.tasks import Digits

ROUNDS = 7


def plain_loop(task: Task, steps: int) -> float:
    """Seconds for the same gradients and optimizer steps in an ordinary PyTorch loop."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    generator = torch.Generator().manual_seed(0)
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, generator)).backward()
        optimizer.step()
    return time.perf_counter() - begin


def simulation(task: Task, workers: int, steps: int) -> float:
    """Seconds for a whole simulation of adpsgd, one exchange a step, evaluations included."""
    run = Simulation(resolve("adpsgd"), task, Scenario(workers=workers, steps=steps))
    begin = time.perf_counter()
    run.run()
    return time.perf_counter() - begin


def gradients(net: str) -> dict[str, float]:
    """The simulation against the plain loop, side by side."""
    workers, steps = 16, 200
    task = Digits(net=net)  # type: ignore[arg-type]
    task.prepare(workers, 0)
    plain_loop(task, 50)
    half = workers * steps // 2
    pairs = []
    for _ in range(ROUNDS):  # half of the plain loop before, half after: a machine that slows down hits both
        before, simulated, after = (
            plain_loop(task, half),
            simulation(task, workers, steps),
            plain_loop(task, half),
        )
        pairs.append((simulated, before + after))
    simulated, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"simulated_s": simulated, "plain_s": plain, "ratio": statistics.median(s / p for s, p in pairs)}


def timing_only() -> dict[str, float]:
    """128 workers × 500 steps of adpsgd without gradients."""
    run = Simulation(resolve("adpsgd"), Digits(), Scenario(workers=128, steps=500, gradients=False))
    begin = time.perf_counter()
    run.run()
    took = time.perf_counter() - begin
    return {"seconds": took, "events": run.trace.events, "events_per_s": run.trace.events / took}


class Wide(Digits):
    """Digits with a model large enough to be seen in the memory of a process."""

    def model(self) -> torch.nn.Module:
        """About 2.4 million weights."""
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32000), torch.nn.ReLU(), torch.nn.Linear(32000, 10)
        )


def memory(workers: int) -> dict[str, float]:
    """The largest size of a process that simulates this many workers, momentum included."""
    run = Simulation(
        resolve("adpsgd"), Wide(), Scenario(workers=workers, steps=4, momentum=0.9, evaluations=1)
    )
    run.run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak_bytes": peak, "model_bytes": sum(w.nbytes for w in Wide().model().parameters())}


def apart(*arguments: str) -> dict[str, float]:
    """Run one part in a process of its own."""
    command = [sys.executable, __file__, "--part", *arguments]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return answer


def main() -> None:
    """Run all parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs="+")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part:
        name, *rest = given.part
        part = {"gradients": gradients, "timing": timing_only, "memory": lambda n: memory(int(n))}[name]
        print(json.dumps(part(*rest)))  # type: ignore[operator]
        return
    figures: dict[str, object] = {}
    print("simulator, adpsgd, one exchange a step")
    for net, limit in (("mlp", 1.5), ("cnn", 1.1)):
        f = figures[net] = apart("gradients", net)
        print(f"  {net}: 16 workers cost {f['ratio']:.2f}× the plain loop (aim: at most {limit})")
    t = figures["timing_only"] = apart("timing")
    print(
        f"  timing only, 128 × 500: {t['seconds']:.1f} s, {t['events_per_s']:,.0f} events/s (aim: under 20 s)"
    )
    few, many = apart("memory", "8"), apart("memory", "24")
    vectors = (many["peak_bytes"] - few["peak_bytes"]) / 16 / few["model_bytes"]
    figures["memory"] = {"vectors_per_worker": vectors}
    print(f"  memory: {vectors:.1f} vectors of model size for each worker (aim: at most 6)")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
