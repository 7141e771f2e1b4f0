"""What a run on Ray loses when something is lost: a worker's process, a node, the place where workers meet.

Run it as `python benchmarks/engines.py`: a real Ray of several nodes (raylets) on this machine. Each worker
writes down when each of its steps ended. `--only share` measures the rate beside `freewheel run` alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_S, SLOW, ALONE_S, TOGETHER_S = 0.05, 10, 6.0, 15.0

SIZE = 80 << 20
"""Memory of a node's object store, the least that Ray takes."""
Log = list[tuple[float, int]]
"""When each step of one life ended, and how many exchanges it had made by then."""


def train(folder: Path) -> None:
    """A worker: steps of the same length until a file is there, each written down."""
    import torch

    import freewheel as fw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with fw.attach(model, optimizer, "adpsgd", seed=0) as worker:
        name = f"{worker.rank}-{time.time():.3f}-{os.getpid()}"
        with (folder / name).open("w", buffering=1) as log:
            while not (folder / "end").exists():
                time.sleep(STEP_S)
                model(torch.randn(8, 1000)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                log.write(f"{time.time():.4f} {worker.metrics()['exchanges']['done']}\n")
    worker.consensus()  # else it is said that nobody has asked for it


def rate(folder: Path) -> None:
    """A worker that measures its rate without communication, then with it; worker 3 is slower."""
    import torch

    import freewheel as fw
    from freewheel.runtime.membership.place import Place

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    rank = Place.read().rank
    step_s = STEP_S * (SLOW if rank == 3 else 1)

    def steps(seconds: float) -> float:
        made, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            time.sleep(step_s)
            model(torch.randn(8, 1000)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            made += 1
        return made / (time.perf_counter() - began)

    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < 4:  # all of them measure at the same time
        time.sleep(0.01)
    alone = steps(ALONE_S)
    with fw.attach(model, optimizer, "adpsgd", seed=0) as worker:
        steps(1.0)
        together = steps(TOGETHER_S)
    worker.consensus()  # else it is said that nobody has asked for it
    (folder / f"rate-{rank}").write_text(f"{alone} {together}")


class Watched:
    """A run on Ray in a thread of this process, and what its workers have written."""

    def __init__(self, workers: int, most: int | None = None) -> None:
        import freewheel.ray

        self.folder = Path(tempfile.mkdtemp(prefix="fw-"))
        self.name, folder = self.folder.name, self.folder
        self.answers: Any = None

        def go() -> None:
            self.answers = freewheel.ray.run(lambda: train(folder), workers, most, name=self.name)

        self.thread = threading.Thread(target=go, daemon=True)
        self.thread.start()

    def lives(self, rank: int) -> list[Path]:
        """One file for each life of a worker, the newest last."""
        found = self.folder.glob(f"{rank}-*")
        return sorted(found, key=lambda path: float(path.name.split("-")[1]))

    def log(self, path: Path) -> Log:
        """What one life has written."""
        lines = [line.split() for line in path.read_text().splitlines()]
        return [(float(words[0]), int(words[1])) for words in lines if len(words) == 2]

    def pid(self, rank: int) -> int:
        """The process of a worker's newest life."""
        return int(self.lives(rank)[-1].name.split("-")[2])

    def exchanging(self, rank: int, life: int) -> float:
        """When a worker's life had made its first exchange and a step after it."""
        return until(
            lambda: (
                (files := self.lives(rank))
                and len(files) >= life
                and next((at for at, done in self.log(files[life - 1]) if done), None)
            )
        )

    def pause(self, others: list[int], since: float) -> float:
        """The longest time between two steps of those who were not touched, beyond a step's own."""
        gaps = [0.0]
        for rank in others:
            times = [at for at, _ in self.log(self.lives(rank)[-1])]
            usual = statistics.median(b - a for a, b in itertools.pairwise(times))
            gaps += [b - a - usual for a, b in itertools.pairwise(times) if b > since]
        return max(gaps)

    def end(self) -> None:
        """Let all end."""
        (self.folder / "end").touch()
        self.thread.join(60)
        shutil.rmtree(self.folder)


def until(found: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait for it."""
    end = time.monotonic() + timeout_s
    while not (what := found()):
        if time.monotonic() > end:
            raise SystemExit("it never came")
        time.sleep(0.05)
    return what


def actor(name: str) -> dict[str, Any]:
    """What Ray knows of an actor."""
    from ray._private.state import actors  # the public way needs Ray's dashboard

    return next(one for one in actors().values() if one["Name"] == name)


def losses(cluster: Any) -> None:
    """Lose one after the other."""
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=SIZE) for _ in range(2)]
    run = Watched(3)
    for rank in range(3):
        run.exchanging(rank, 1)

    began = time.time()
    time.sleep(5)
    print(f"| nothing, for 5 s | {1e3 * run.pause([0, 1, 2], began):.0f} ms | |", flush=True)

    began = time.time()
    os.kill(run.pid(1), signal.SIGKILL)
    back = run.exchanging(1, 2)
    time.sleep(1)
    tell("a worker's process killed", run.pause([0, 2], began), back - began)

    began = time.time()
    os.kill(actor(f"{run.name}-book")["Pid"], signal.SIGKILL)
    time.sleep(2)
    pause = run.pause([0, 1, 2], began)
    began = time.time()
    os.kill(run.pid(2), signal.SIGKILL)
    back = run.exchanging(2, 2)
    tell("the meeting place killed, then a worker", max(pause, run.pause([0, 1], began)), back - began)
    run.end()

    run = Watched(3, 4)
    until(lambda: sum(bool(run.lives(rank)) for rank in range(4)) == 3)
    there = [rank for rank in range(4) if run.lives(rank)]
    (missing,) = {0, 1, 2, 3}.difference(there)
    for rank in there:
        run.exchanging(rank, 1)
    began = time.time()
    cluster.add_node(num_cpus=1, object_store_memory=SIZE)
    came = run.exchanging(missing, 1)
    tell("a node added", run.pause(there, began), came - began)

    cluster.add_node(num_cpus=1, object_store_memory=SIZE)  # room for whom the next one loses
    where = {actor(f"{run.name}-{rank}")["Address"]["NodeID"]: rank for rank in range(4)}
    node, lost = next((node, where[node.node_id]) for node in nodes if node.node_id in where)
    lives, began = len(run.lives(lost)), time.time()
    cluster.remove_node(node, allow_graceful=False)
    back = run.exchanging(lost, lives + 1)
    tell("a raylet killed", run.pause([rank for rank in range(4) if rank != lost], began), back - began)
    run.end()


def tell(what: str, pause: float, back: float) -> None:
    """A line of the table."""
    print(f"| {what} | {1e3 * pause:.0f} ms | {back:.1f} s |", flush=True)


def share(folder: Path) -> float:
    """The rate of all workers together over what they reach without communication."""
    rates = [tuple(map(float, path.read_text().split())) for path in folder.glob("rate-*")]
    assert len(rates) == 4
    return sum(one[1] for one in rates) / sum(one[0] for one in rates)


def shares(times: int) -> None:
    """The same four workers under Ray and under `freewheel run`, in turn."""
    import freewheel.ray

    found: dict[str, list[float]] = {"freewheel run": [], "Ray": []}
    for _ in range(times):
        for how, list_ in found.items():
            folder = Path(tempfile.mkdtemp(prefix="fw-"))
            if how == "Ray":
                freewheel.ray.run(lambda at=folder: rate(at), 4, folder=folder / "records")
            else:
                command = Path(sys.executable).with_name("freewheel")
                words = ["run", "-n", "4", "--folder", folder / "records", __file__, "--worker", folder]
                subprocess.run([command, *words], check=True, capture_output=True)
            list_.append(share(folder))
            shutil.rmtree(folder)
    for how, list_ in found.items():
        print(f"| {how} | {statistics.median(list_):.3f} | {', '.join(f'{one:.3f}' for one in list_)} |")


def main() -> None:
    """Make a cluster; measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["losses", "share"])
    parser.add_argument("--times", type=int, default=3, help="how often the share is measured")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        rate(given.worker)
        return
    short = tempfile.mkdtemp(prefix="fwr")  # sockets have names of 107 bytes at most
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    os.environ.update(
        RAY_TMPDIR=short, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=path,
        RAY_memory_monitor_refresh_ms="0",
    )  # fmt: skip
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": SIZE},
    )
    try:
        first = cluster.add_node(num_cpus=4 if given.only == "share" else 1, object_store_memory=SIZE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        if given.only != "share":
            print("| event | the others' longest pause beyond a step | back and exchanging after |")
            losses(cluster)
        if given.only != "losses":
            if given.only is None:
                cluster.remove_node(first)
                cluster.add_node(num_cpus=4, object_store_memory=SIZE)
            print("| how | share, median | each |")
            shares(given.times)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(short, ignore_errors=True)


if __name__ == "__main__":
    main()
