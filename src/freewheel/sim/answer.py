"""The answer the workers would ship, its loss and accuracy, and how far apart their replicas are."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from freewheel.errors import Diverged, WorkerLost
from freewheel.sim.clock import at_once
from freewheel.sim.study import School, Study
from freewheel.sim.worker import SimulatedWorker


class Answer:
    """Measures workers that have weights, with a model of its own."""

    def __init__(self, school: School) -> None:
        self._school = school
        self._study = Study(school, 0, 0) if school.scenario.gradients else None
        self.apart_max = 0.0  # the largest distance between two replicas that was ever measured
        if self._study is not None:
            self._study.model.eval()

    def weights(self, workers: Sequence[SimulatedWorker]) -> Tensor:
        """What the strategy would ship: the mean of the workers' parts."""
        answers = (at_once(worker.strategy.answer(worker.node)) for worker in workers)
        parts = [part for part in answers if part is not None]
        if not parts and self._school.strategy.merges():  # its holder is lost, its heir takes over
            parts = [at_once(worker.node.weights()) for worker in workers]
        if not parts:
            raise WorkerLost("no worker that holds the answer is left.")
        return sum(parts[1:], parts[0]) / len(parts)

    def apart(self, workers: Sequence[SimulatedWorker]) -> tuple[float, float]:
        """The largest distance between two replicas, and the mean squared distance to their mean."""
        if self._study is None:
            return 0.0, 0.0
        discrepancy, consensus = spread([worker.replica.weights for worker in workers])
        self.apart_max = max(self.apart_max, discrepancy)
        return discrepancy, consensus

    def evaluate(
        self, workers: Sequence[SimulatedWorker], last: SimulatedWorker
    ) -> tuple[float | None, float | None]:
        """Loss and accuracy of the answer; `last` has stepped last."""
        if self._study is None:
            return None, None
        model, task, scenario = self._study.model, self._school.task, self._school.scenario
        self._study.replica.load(self.weights(workers))
        models = [worker.study.model for worker in workers if worker.study is not None]
        for name, buffer in model.named_buffers():  # of BatchNorm
            if buffer.is_floating_point() and models:
                buffer.copy_(torch.stack([one.get_buffer(name) for one in models]).mean(0))
        task.recalibrate(model, scenario.workers, scenario.seed)
        loss, accuracy = task.evaluate(model)
        if not math.isfinite(loss):
            # The worker to blame stepped last, unless another one's weights are not even finite.
            first = next((w for w in workers if not w.replica.weights.isfinite().all()), last)
            raise Diverged(
                f"{self._school.strategy.name} diverged: the answer's loss is {loss:g}, first seen after "
                f"worker {first.rank} made its step {first.node.steps} at {last.loop.time():.3f} s. Lower "
                "the learning rate."
            )
        return loss, accuracy


def spread(vectors: list[Tensor]) -> tuple[float, float]:
    """The largest distance between two of the vectors, and their mean squared distance to their mean."""
    n = len(vectors)
    if n < 2:
        return 0.0, 0.0
    gram = vectors[0].new_zeros(n, n)
    for at in range(0, vectors[0].numel(), 65536):  # in pieces: no second copy of all replicas is made
        rows = torch.stack([vector[at : at + 65536] for vector in vectors])
        rows -= rows.mean(0)  # distances stay; small differences of large numbers do not cancel
        gram.addmm_(rows, rows.T)
    norms = gram.diagonal()
    squares = norms.unsqueeze(0) + norms.unsqueeze(1) - 2 * gram
    largest = float(squares.max().clamp_(min=0).sqrt())
    return largest, float(norms.mean()) if largest else 0.0
