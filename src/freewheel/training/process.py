"""One worker process of jobs: ``python -m freewheel.training.process FOLDER...``, a folder for each job."""

import contextlib
import functools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from freewheel import api, strategies, tasks
from freewheel.errors import Diverged, FreewheelError
from freewheel.records.journal import Journal
from freewheel.runtime.worker.attach import Worker
from freewheel.sim.answer import spread
from freewheel.strategies.grouping import Grouping
from freewheel.task import Task, optimizer_of
from freewheel.tempo import Tempo
from freewheel.training.budget import Budget
from freewheel.training.ddp import DdpBooks, parallel
from freewheel.training.job import DDP, Job

Part = tuple[int, Tensor | None, dict[str, Tensor], int]  # a rank, its vector, buffers and steps
WARM_UP = 5


class Samples:
    """The answer from time to time, kept and evaluated when training is over, which that would slow down.

    How far the replicas are apart costs little and is written at once.
    """

    def __init__(self, job: Job, active: bool, journal: Journal, lockstep: bool) -> None:
        self.job, self.active, self.next = job, active, 0
        self.journal, self._lockstep = journal, lockstep
        # When, after how many steps of all workers, its weights; BatchNorm's statistics are measured later.
        self.kept: list[tuple[float, int, Tensor]] = []
        self.pending: Any = None

    def due(self, share: float) -> bool:
        if not self.active or share * self.job.evaluations < self.next:
            return False
        self.next = math.floor(share * self.job.evaluations) + 1
        return True

    def keep(self, parts: list[Part], replicas: list[Part]) -> None:
        """Keep the mean of the workers' parts, write how far their replicas are apart.

        Where all step together, only replicas of the most common step are compared.
        """
        vectors = [part.cpu() for _, part, _, _ in parts if part is not None]
        now, made = time.time(), sum(steps for *_, steps in parts)
        self.kept.append((now, made, functools.reduce(torch.add, vectors) / len(vectors)))
        if self._lockstep:
            ((common, _),) = Counter(steps for *_, steps in replicas).most_common(1)
            replicas = [one for one in replicas if one[-1] == common]
        vectors = [vector.float() for _, vector, _, _ in replicas if vector is not None]
        apart = {}
        if len(vectors) >= min(2, self.job.workers):
            apart = dict(zip(("discrepancy", "consensus"), spread(vectors), strict=True))
        self.journal.evaluation(now, worker_steps=made, **apart)

    def ask(self, worker: Worker) -> None:
        """Collect the parts beside training."""

        async def collect() -> None:
            answers = worker._agent.answers
            parts = [part async for part in answers.parts()]
            served = any(vector is None for _, vector, _, _ in parts)  # the answer is the server's
            self.keep(parts, [part async for part in answers.parts(own=True)] if served else parts)

        if self.pending is None or self.pending.done():  # a slow network: better fewer samples than many
            self.pending = worker._agent.begin(collect())

    def write(self, task: Task, model: nn.Module, final: nn.Module, ended: float, made: int) -> None:
        """Evaluate all that was kept, and the final model after `made` steps."""
        for at, steps, weights in self.kept:
            vector_to_parameters(weights.to(self.job.device), model.parameters())
            self._measure(task, model, at, steps)
        # The last sample may have come after the end.
        self._measure(task, final, max([ended, *(at for at, *_ in self.kept)]), made)

    def _measure(self, task: Task, model: nn.Module, at: float, steps: int) -> None:
        task.recalibrate(model.eval(), self.job.workers, self.job.seed)
        loss, accuracy = task.evaluate(model)
        self.journal.evaluation(at, worker_steps=steps, loss=loss, accuracy=accuracy)


def main(folders: list[Path]) -> None:
    rank = int(os.environ["RANK"])
    for number, folder in enumerate(folders):
        failed = ""
        try:
            run(folder, number)
        except FreewheelError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            failed = str(error)
        (folder / f"outcome-{rank}.json").write_text(json.dumps(failed))


def run(folder: Path, number: int) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.backends.cudnn.benchmark = True  # all batches have one size: search for the fastest convolution
    loop = Loop(folder, number)
    ended, final = (with_ddp if loop.strategy is None else attached)(loop)
    if loop.samples.active:
        fresh = loop.task.model().to(loop.device)
        loop.samples.write(loop.task, fresh, final, ended, loop.budget.made())


class Loop:
    """The training loop of one worker, as a user writes it, for DDP and for strategies."""

    def __init__(self, folder: Path, number: int) -> None:
        self.job = job = Job.load(folder / "job.json")
        self.rank = rank = int(os.environ["RANK"])
        self.folder, self.device = folder, torch.device(job.device)
        self.task = tasks.resolve(job.task)
        self.task.prepare(job.workers, job.seed)
        self.task.to(self.device)
        torch.manual_seed(job.seed)
        self.model = self.task.model().to(self.device)
        self.generator = torch.Generator().manual_seed(random.Random(f"{job.seed}/{rank}").getrandbits(62))
        self.strategy = None if job.strategy == DDP else strategies.resolve(job.strategy)
        self.optimizer = optimizer_of(job, self.task, self.strategy, self.model.parameters())
        self.lr: float = self.optimizer.param_groups[0]["lr"]
        self.tempo = Tempo(self.model)
        own_s = self.tempo.measure(self._compute, WARM_UP)
        self.step_s = max(own_s, job.compute_ms / 1e3) * job.slow.get(rank, 1.0)  # without communication
        self.tempo.take(self.step_s, own_s)
        self.optimizer.zero_grad()
        lockstep = self.strategy is None or self.strategy.lockstep()
        self.budget = Budget(job, lockstep, number, self.step_s)
        fastest = min(range(job.workers), key=lambda one: (job.slow.get(one, 1.0), one))
        self.samples = Samples(job, rank == fastest, Journal(folder, rank), lockstep)

    def run(
        self,
        module: nn.Module,
        turns: Iterator[float],
        report: Callable[[Tensor], None],
        sample: Callable[[int], None],
    ) -> float:
        """Make a step for each turn and report its loss; the time when all was computed.

        `sample` is called with a number of steps when the answer is to be kept.
        """
        rates = self.job.rates
        for step, share in enumerate(turns):
            self.optimizer.param_groups[0]["lr"] = self.lr * rates.factor(share * rates.steps)
            if self.samples.due(share):
                sample(step)
            self.tempo.begin()
            loss = self._backward(module)
            self.tempo.rest()
            if step % 20 == 0 and not math.isfinite(loss.item()):
                raise Diverged(
                    f"{self.job.strategy} diverged: worker {self.rank} got a loss of {loss.item():g} in its "
                    f"step {step}. Lower the learning rate."
                )
            report(loss)
            self.optimizer.step()
        self.tempo.end()
        self._wait()
        return time.time()

    def _compute(self) -> None:
        self._backward(self.model)
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _backward(self, model: nn.Module) -> Tensor:
        loss = self.task.loss(model, self.task.batch(self.rank, self.generator))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def attached(loop: Loop) -> tuple[float, nn.Module]:
    """Train with a strategy of ours; when it ended, and the answer."""
    job, samples = loop.job, loop.samples
    resume = job.checkpoint if job.resume else None
    settings: dict[str, Any] = {"wire": job.wire, "seed": job.seed, "folder": loop.folder, "resume": resume}
    worker = api.attach(loop.model, loop.optimizer, job.strategy, **settings)
    worker.about(name=job.task, target=job.target, **job.scenario())
    with worker:
        if job.checkpoint is not None:
            draws = SimpleNamespace(  # the generator that draws its batches
                state_dict=lambda: {"generator": loop.generator.get_state()},
                load_state_dict=lambda state: loop.generator.set_state(state["generator"]),
            )
            worker.checkpoint(job.checkpoint, every=job.every or 100, extra={"draws": draws})
        if job.resume:
            loop.budget.go_on(loop.rank, worker.metrics()["resumed_at"])
        strategy, group = worker._agent.strategy, None
        if isinstance(strategy, Grouping):
            group = lambda: (strategy.group, not strategy.together)  # noqa: E731
        turns = loop.budget.steps(group)
        ended = loop.run(loop.model, turns, worker.report, lambda _: samples.ask(worker))
    if samples.pending is not None:
        with contextlib.suppress(Exception):
            samples.pending.result(timeout=10)
    return ended, worker.consensus()


def with_ddp(loop: Loop) -> tuple[float, nn.Module]:
    """The same with DDP."""
    # A prefix of its own, lest what an earlier job left in the store is taken for this one's.
    job, model, store = loop.job, loop.model, PrefixStore(str(loop.folder), loop.budget.plain)

    def sample(step: int) -> None:
        weights = parameters_to_vector(model.parameters()).detach()
        part: Part = (loop.rank, weights, {}, step * job.workers)
        loop.samples.keep([part], [part] * job.workers)  # its replicas are equal

    with (
        parallel(model, store=store, rank=loop.rank, world_size=job.workers) as module,
        DdpBooks(job, loop.folder, loop.rank, loop.step_s, model) as books,
    ):
        if loop.rank == 0:
            books.about(loop.lr, loop.optimizer)
        return loop.run(module, loop.budget.steps(), books.report, sample), model


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
