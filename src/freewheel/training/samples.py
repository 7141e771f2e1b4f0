"""What the answer is worth along the way."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from torch import Tensor, nn

from freewheel.records.journal import Journal
from freewheel.replica import Replica, flatten
from freewheel.runtime.worker.attach import Worker
from freewheel.runtime.worker.buffers import mean_buffers, set_buffers
from freewheel.sim.answer import spread
from freewheel.task import Task
from freewheel.training.job import Job

Part = tuple[int, Tensor | None, dict[str, Tensor], int]
"""A rank, its vector, buffers and steps."""


class Samples:
    """The answer from time to time, kept to be looked at when training is over: that would slow it down.

    How far the replicas are apart costs little and is written down at once.
    """

    def __init__(self, job: Job, active: bool, journal: Journal, lockstep: bool) -> None:
        self.job, self.active, self.next = job, active, 0
        self.journal, self._lockstep = journal, lockstep
        self.kept: list[dict[str, Any]] = []
        self.pending: list[Any] = []

    def due(self, share: float) -> bool:
        """Whether it is time for another one."""
        if not self.active or share * self.job.evaluations < self.next:
            return False
        self.next = math.floor(share * self.job.evaluations) + 1
        return True

    def keep(self, parts: list[Part], replicas: list[Part]) -> None:
        """Remember the mean of the workers' parts, and how far their replicas are apart."""
        vectors = [part for _, part, _, _ in parts if part is not None]
        mean = vectors[0].clone()
        for vector in vectors[1:]:
            mean += vector.to(mean.device)  # short ones come as they were sent, in the host's memory
        buffers = mean_buffers([buffers for _, _, buffers, _ in sorted(parts, key=lambda one: one[0])])
        now, made = time.time(), sum(steps for *_, steps in parts)
        mean.div_(len(vectors))
        self.kept.append({"time": now, "worker_steps": made, "weights": mean, "buffers": buffers})
        self.journal.evaluation(now, worker_steps=made, **self._apart(replicas))

    def _apart(self, replicas: list[Part]) -> dict[str, float]:
        """Distances; where all step together, of those that had made as many steps when they were asked."""
        if self._lockstep:
            ((common, _),) = Counter(steps for *_, steps in replicas).most_common(1)
            replicas = [one for one in replicas if one[-1] == common]
        vectors = [vector.float() for _, vector, _, _ in replicas if vector is not None]
        if len(vectors) < min(2, self.job.workers):
            return {}
        discrepancy, consensus = spread(vectors)
        return {"discrepancy": discrepancy, "consensus": consensus}

    def ask(self, worker: Worker) -> None:
        """Collect the parts beside training."""

        async def collect() -> None:
            answers = worker._agent.answers
            parts = [part async for part in answers.parts()]
            served = any(vector is None for _, vector, _, _ in parts)  # a server has the answer
            self.keep(parts, [part async for part in answers.parts(own=True)] if served else parts)

        self.pending = [one for one in self.pending if not one.done()]
        if not self.pending:  # a slow network: better fewer samples than many under way
            self.pending.append(worker._agent.begin(collect()))

    def write(self, task: Task, model: nn.Module, final: nn.Module, ended: float, made: int) -> None:
        """Measure all that was kept, and the answer after all that was made, for the records."""
        model.eval()
        replica = Replica(flatten(model.named_parameters(), gradients=False))

        def measure(one: nn.Module, at: float, steps: int) -> None:
            task.recalibrate(one, self.job.workers, self.job.seed)
            loss, accuracy = task.evaluate(one)
            self.journal.evaluation(at, worker_steps=steps, loss=loss, accuracy=accuracy)

        for sample in self.kept:
            replica.load(sample["weights"].to(replica.dtype))
            set_buffers(model, sample["buffers"])
            measure(model, sample["time"], sample["worker_steps"])
        # One that was asked for at the end may have come after it.
        measure(final.eval(), max([ended, *(sample["time"] for sample in self.kept)]), made)
