"""One worker of a soak: it learns digits from a loader, and writes down every batch it has finished.

What it writes is the evidence that the loader's law is judged by, so it does not ask the loader: the samples
of a batch are in the batch. Each line is one write, made before the loop asks for the next batch, so a worker
that is killed has written whole lines, and what it has written it has done.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it
from torch import Tensor
from torch.utils.data import TensorDataset

import freewheel as fw
from freewheel.runtime.loading import loader as _loader  # noqa: F401  (imported by the first use)
from freewheel.tasks.digits import Digits
from freewheel_bench.parent import Parent, job


def main() -> None:
    parent, asked = Parent(), job()
    torch.set_num_threads(1)
    task, images, labels = _digits(Path(asked["folder"]))
    rank, life = os.environ["RANK"], asked["life"]
    journal = (Path(asked["folder"]) / f"{rank}-{life}.samples").open("ab", buffering=0)  # one write a line
    parent.say(imported=time.monotonic())
    torch.manual_seed(asked["seed"])
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), asked["lr"])
    with fw.attach(model, optimizer, asked["strategy"], bind=asked["address"]) as worker:
        data = TensorDataset(images, labels, torch.arange(len(labels)))
        loader = worker.loader(data, asked["batch_size"], seed=asked["seed"], epochs=asked["passes"])
        parent.say(ready=time.monotonic())
        for _ in range(asked["passes"]):
            for inputs, targets, samples in loader:
                time.sleep(asked["step_ms"] / 1e3)
                optimizer.zero_grad()
                task.loss(model, (inputs, targets)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                journal.write((" ".join(map(str, samples.tolist())) + "\n").encode())
                parent.say(step=time.monotonic(), **_known(worker))
        again = worker.metrics()["samples_again"]
    parent.say(result={**_answer(task, model, worker.consensus()), "again": again})


def _digits(folder: Path) -> tuple[Digits, Tensor, Tensor]:
    """The task, from where the benchmark has put its images: importing scikit-learn takes its time."""
    task = Digits()
    for name, value in torch.load(folder / "digits.pt").items():
        setattr(task, name, value)
    return task, task.images, task.labels


def _known(worker: Any) -> dict[str, Any]:
    metrics = worker.metrics()
    return {
        "merged": metrics["exchanges"]["done"] + metrics["merges"]["done"],
        "members": len(metrics["members"]),
        "progress": metrics["progress"],
        "again": metrics["samples_again"],
    }


def _answer(task: Digits, model: torch.nn.Module, consensus: torch.nn.Module) -> dict[str, Any]:
    """What this worker ended with, and how far it is from what all ended with together."""
    mine, ours = (
        torch.cat([one.detach().flatten() for one in net.parameters()]) for net in (model, consensus)
    )
    _, accuracy = task.evaluate(consensus)
    return {
        "finite": bool(mine.isfinite().all()),
        "apart": float((mine - ours).norm() / ours.norm()),
        "answer": hashlib.sha256(ours.numpy().tobytes()).hexdigest()[:16],
        "accuracy": accuracy,
    }


if __name__ == "__main__":
    main()
