"""What being attached costs in memory, in vectors of model size: python benchmarks/memory.py [--mb 400]

Two workers train with SGD and momentum, first apart, then attached. Their memory together, shared pages
counted once (PSS), is looked at again and again; the largest sum is compared with the one before. Model,
gradients and the optimizer's state are in both. What the library itself takes with any model is measured
with workers that do not communicate, and taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

import freewheel as fw

STEPS, STEP_S = 30, 0.1


def pss_bytes(pid: int) -> int:
    """Memory of a process, shared pages in equal parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def worker(strategy: str, megabytes: float) -> None:
    """Train alone, say so, train attached."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1000, round(megabytes * 250), bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, momentum=0.9)
    row = torch.ones(1, 1000)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(row).sum().backward()
            time.sleep(STEP_S)
            optimizer.step()

    steps()
    print("apart", flush=True)
    sys.stdin.readline()
    attached = fw.attach(model, optimizer, strategy)
    with attached:
        print("attached", flush=True)
        steps()
        print(json.dumps(attached.metrics()), flush=True)
        sys.stdin.readline()


def measure(strategy: str, megabytes: float) -> dict[str, float]:
    """The largest sum of both workers' memory, in both phases."""
    from freewheel_bench.workers import free_port

    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, __file__, "--worker", strategy, "--mb", str(megabytes)]
    both = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(k), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(2)
    ]
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], sum(pss_bytes(one.pid) for one in both))

    def expect(count: int) -> list[str]:
        return [one.stdout.readline() for one in both for _ in range(count)]  # type: ignore[union-attr]

    def go() -> None:
        for one in both:
            one.stdin.write("\n")  # type: ignore[union-attr]
            one.stdin.flush()  # type: ignore[union-attr]

    expect(1)
    apart = sum(pss_bytes(one.pid) for one in both)
    go()
    expect(1)  # joining is over: what it took to hand out the first weights is let go of
    thread = threading.Thread(target=watch)
    thread.start()
    words = expect(1)
    ended.set()
    thread.join()
    go()
    for one in both:
        one.wait(60)
    model_bytes = megabytes * 1e6
    done = sum(sum(json.loads(word)[key]["done"] for key in ("exchanges", "merges")) for word in words)
    return {"vectors": (peak[0] - apart) / 2 / model_bytes, "exchanges_and_merges": done}


def main() -> None:
    """Measure both strategies the aim names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=400.0)
    parser.add_argument("--worker")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.mb)
        return
    figures = {name: measure(name, given.mb) for name in ("none", "adpsgd", "nodelay", "nodelay_free")}
    library = figures["none"]["vectors"]
    print(f"  attached, without communication: {library * given.mb:.0f} MB a worker")
    for name, figure in figures.items():
        if name == "none":
            continue
        figure["vectors"] -= library
        print(f"  {name}: {figure['vectors']:.2f} vectors of {given.mb:g} MB a worker (aim: at most 2)")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
