"""What recording costs a step of 5 ms: the same loop with a run folder and without one.

    python benchmarks/recording.py

Both sides take turns. A step computes by sleeping. What recording costs is CPU time of the whole process, of
all its threads, beyond that of the loop without a folder: nobody waits for it, but it holds Python's lock.
The worker writes as one that has met 63 others. On a busy machine the difference of the two sides is mostly
noise, so a sample is also timed by itself. What is counted in every step is counted without a folder, too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

import freewheel as fw
from freewheel.records.counters import Counters
from freewheel.runtime.worker.records import SAMPLE_S

STEP_S, STEPS, ROUNDS, PEERS, TURNS = 0.005, 600, 5, 63, 1000


def timed(folder: Path | None) -> float:
    """Milliseconds of CPU time a step takes."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 8)
    with fw.attach(model, optimizer, "none", folder=folder) as worker:
        for peer in range(1, PEERS + 1):
            worker._agent.counters.met(peer, 1 / 3)
        begin = time.process_time()
        for _ in range(STEPS):
            time.sleep(STEP_S)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)
        took = time.process_time() - begin
    return 1e3 * took / STEPS


def sample_ms(folder: Path) -> float:
    """Milliseconds of CPU time that one sample takes."""
    model = torch.nn.Linear(8, 1)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none", folder=folder) as worker:
        for peer in range(1, PEERS + 1):
            worker._agent.counters.met(peer, 1 / 3)
        recorder = worker._account.recorder
        assert recorder is not None
        begin = time.thread_time()
        for _ in range(TURNS):
            recorder._write_sample(False)
        return 1e3 * (time.thread_time() - begin) / TURNS


def counting_ms() -> float:
    """Milliseconds that one step's counting takes: its staleness, and three waits."""
    counters = Counters()
    begin = time.thread_time()
    for k in range(TURNS):
        counters.stale(k % 8)
        for cause in ("data", "peers", "peers"):
            counters.wait(cause, time.perf_counter())
            counters.go_on(time.perf_counter())
    return 1e3 * (time.thread_time() - begin) / TURNS


def main() -> None:
    """Measure, print."""
    torch.set_num_threads(1)
    step_ms = 1e3 * STEP_S
    with tempfile.TemporaryDirectory() as home:
        timed(Path(home) / "warm-up")
        both = [(timed(Path(home) / str(k)), timed(None)) for k in range(ROUNDS)]
        sample = sample_ms(Path(home) / "sample")
    recorded, plain = (statistics.median(column) for column in zip(*both, strict=True))
    extra = statistics.median(one - other for one, other in both)
    print(
        f"CPU time of a step: with a folder {recorded:.3f} ms, without {plain:.3f} ms; the difference is "
        f"{100 * extra / step_ms:.2f} % of {step_ms:g} ms"
    )
    for one, other in both:
        print(f"  with {one:.3f} ms, without {other:.3f} ms")
    print(
        f"a sample: {sample:.2f} ms every {SAMPLE_S:g} s, {0.1 * sample / SAMPLE_S:.2f} % of the time; "
        f"counting: {100 * counting_ms() / step_ms:.2f} % of a step"
    )


if __name__ == "__main__":
    main()
