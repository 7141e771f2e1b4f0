"""PyTorch's DistributedDataParallel, and its records as far as they can be known from outside.

DDP does not say how long it waits: what a step takes beyond its own computing is counted as waiting for the
others. What a ring would send is counted as sent.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freewheel import __version__
from freewheel.records.counters import CAUSES, Counters, Noticed
from freewheel.records.journal import Journal
from freewheel.records.schema import WorkerSample, run_json, typed, worker_sample
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.rendezvous import launched_options
from freewheel.runtime.worker.records import Recorder
from freewheel.training.job import DDP, Job


@contextlib.contextmanager
def parallel(model: nn.Module, **group: Any) -> Iterator[nn.Module]:
    """DDP on gloo, set to hide most of its reduction behind the backward pass (docs/benchmarks/real.md).

    Buckets of a quarter of the model leave early; below 1 MB they cost more than they hide, and DDP's default
    of 25 MB holds many a model in one. The view saves a copy of all gradients.
    """
    torch.distributed.init_process_group("gloo", **group)
    bucket_mb = max(1.0, sum(one.nbytes for one in model.parameters()) / 4e6)
    made = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    torch.distributed.barrier()
    yield made
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class DdpBooks(contextlib.AbstractContextManager["DdpBooks"]):
    """The records of one worker, whose loop reports every step."""

    def __init__(self, job: Job, folder: Path, rank: int, step_s: float, model: nn.Module) -> None:
        self._job, self._rank, self._step_s = job, rank, step_s
        self._model_bytes = sum(one.nbytes for one in model.parameters())
        self._others = tuple(one for one in range(job.workers) if one != rank)
        self._counters, self._loss = Counters(), torch.tensor(float("nan"))
        self._began, self._state = time.time(), "training"
        self._began_s = self._stepped_s = time.perf_counter()
        self._ended_s = 0.0
        self._recorder = Recorder(self._sample, Noticed(), Journal(folder, rank))

    def report(self, loss: Tensor) -> None:
        before_s, self._stepped_s = self._stepped_s, time.perf_counter()
        waited_s = max(0.0, self._stepped_s - before_s - self._step_s)
        counters, self._loss = self._counters, loss
        counters.steps += 1
        counters.merges["done"] += 1
        counters.merged[self._others] = counters.steps
        if (timeline := self._recorder.timeline) is not None:
            timeline.gradient(self._stepped_s - before_s - waited_s, waited_s)
            timeline.merge(self._others, waited_s)

    def about(self, lr: float, optimizer: torch.optim.Optimizer) -> None:
        job = self._job
        self._recorder.about(
            run_json(
                freewheel=__version__,
                torch=torch.__version__,
                clock="wall",
                name=job.task,
                command=getattr(launched_options(Place.read()), "typed", None) or typed(),
                strategy=DDP,
                workers=job.workers,
                seed=job.seed,
                settings={
                    "strategy": {},
                    "scenario": {"optimizer": type(optimizer).__name__, **job.scenario()},
                    "lr": lr,
                    "momentum": optimizer.param_groups[0].get("momentum", 0.0),
                    "model_bytes": self._model_bytes,
                    "waits_for": "all",
                    "staleness": "none",
                },
                target=job.target,
            )
        )

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self._ended_s = time.perf_counter()
        self._state = "finished" if error is None else self._state
        self._recorder.close(well=error is None)

    def _sample(self) -> WorkerSample:
        counters, workers = self._counters, self._job.workers
        elapsed_s = (self._ended_s or time.perf_counter()) - self._began_s
        compute_s = min(elapsed_s, counters.steps * self._step_s)
        sent = round(counters.steps * 2 * (workers - 1) / workers * self._model_bytes)  # as a ring would
        counters.bytes_out = counters.bytes_in = sent
        return worker_sample(
            counters,
            rank=self._rank,
            life=1,
            state=self._state,
            began=self._began,
            steps=counters.steps,
            elapsed_s=elapsed_s,
            compute_s=compute_s,
            blocked_s=dict.fromkeys(CAUSES, 0.0) | {"peers": elapsed_s - compute_s},
            members=list(range(workers)),
            loss=float(self._loss),
        )
