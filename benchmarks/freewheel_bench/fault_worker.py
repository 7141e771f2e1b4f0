"""One worker of a benchmark of faults: it steps until it is ended, and tells when.

Its batches come from the loader, so that whoever waits for one to be dealt is seen to pause.
"""

from __future__ import annotations

import time

from freewheel_bench.parent import Parent, job

BATCHES = 1_000_000  # more than are used


def main() -> None:
    parent, asked = Parent(), job()
    import torch

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports much of torch that is not there yet
    parent.say(imported=time.monotonic())
    import freewheel as fw
    from freewheel_bench.contestants import Weights

    model, first = Weights(asked["model_mb"]), True
    broadcasts = asked["strategy"].startswith("dasgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    with fw.attach(model, optimizer, asked["strategy"], bind=asked["address"]) as worker:
        for _ in worker.loader(torch.arange(BATCHES), 1):
            if first:
                parent.say(ready=time.monotonic())
                first = False
            time.sleep(asked["compute_ms"] / 1e3)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            metrics = worker.metrics()
            merged = metrics["exchanges"]["done"] + metrics["merges"]["done"]
            if broadcasts:
                merged = metrics["bytes_in"] // (asked["model_mb"] * 1e6)
            parent.say(step=time.monotonic(), merged=merged, members=len(metrics["members"]))
    worker.consensus()  # else it is said that nobody has asked for it


if __name__ == "__main__":
    main()
