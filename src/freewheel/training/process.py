"""One worker process of jobs: ``python -m freewheel.training.process FOLDER...``, a folder for each job."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from freewheel import api, strategies, tasks
from freewheel.errors import Diverged, FreewheelError, RunStopped
from freewheel.fabric import secret
from freewheel.observe.journal import Journal
from freewheel.replica import Replica, flatten
from freewheel.runtime.attach import Worker
from freewheel.runtime.buffers import buffers_of, mean_buffers, set_buffers
from freewheel.runtime.entries import Entries
from freewheel.sim.driver import spread
from freewheel.strategies.grouping import Grouping
from freewheel.task import Task
from freewheel.training.ddp import DdpBooks
from freewheel.training.job import DDP, Job

Part = tuple[int, Tensor | None, dict[str, Tensor], int]
"""A rank, its vector, buffers and steps."""
WARM_UP = 5
HANDFUL_S = 0.1


class Pace:
    """How long a step takes: what it computes, and what it sleeps to be slower."""

    def __init__(self, job: Job, rank: int, compute: Callable[[], Any]) -> None:
        took = []
        for _ in range(WARM_UP):
            begin = time.perf_counter()
            compute()
            took.append(time.perf_counter() - begin)
        own_s = statistics.median(took)
        self.step_s = max(own_s, job.compute_ms / 1e3) * job.slow.get(rank, 1.0)
        """What a step takes without communication."""
        self.sleep_s = self.step_s - own_s

    def __call__(self) -> None:
        """Sleep as long as a slower machine would have computed."""
        if self.sleep_s > 0:
            time.sleep(self.sleep_s)


class Budget:
    """The worker-steps of all workers: those who wait for nobody take them as they need them, in handfuls."""

    def __init__(self, job: Job, lockstep: bool, number: int, step_s: float) -> None:
        self.job, self.lockstep, self.total = job, lockstep, job.workers * job.steps
        self._key = f"training/{number}/steps"
        # A slow worker takes few at a time: at the end the others would wait until its last ones are made.
        self._handful = max(1, min(10, job.steps // 20, int(HANDFUL_S / step_s)))
        self._begun = 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.plain = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        self.store = Entries(self.plain, secret.of_environment(os.environ))

    def go_on(self, rank: int, steps: int) -> None:
        """Begin where a checkpoint was taken: this worker had made so many steps, the others say theirs."""
        self._begun = steps
        if not self.lockstep:
            self.store.set(f"{self._key}/{rank}", str(steps))
            others = range(self.job.workers)
            self._begun = sum(int(self.store.get(f"{self._key}/{other}")) for other in others)
        if self._begun >= (self.job.steps if self.lockstep else self.total):
            raise RunStopped(
                f"the checkpoint in {self.job.checkpoint} has all {self.job.steps} steps of this run. "
                "Give --steps a larger number to go on from it."
            )

    def steps_of_groups(self, group: Callable[[], tuple[Sequence[int], bool]]) -> Iterator[float]:
        """The same where workers step in groups: one takes steps for all of its group, so all end together.

        `group` says which it is now, and whether it stays so.
        """
        made = 0
        while True:
            members, stays = group()
            name = f"{self._key}/{'-'.join(map(str, members))}/{made}"
            if self.store.add(name, 1) == 1:
                handful = self._handful if stays else 1
                begin = int(self.store.add(self._key, handful * len(members))) - handful * len(members)
                self.store.set(f"{name}/dealt", f"{begin + self._begun} {handful}")
            begin, handful = map(int, self.store.get(f"{name}/dealt").split())
            for step in range(begin, min(begin + handful * len(members), self.total), len(members)):
                yield step / self.total
                made += 1
            if begin + handful * len(members) >= self.total:
                return

    def steps(self) -> Iterator[float]:
        """One turn for each step, with the share of the budget that is used up."""
        if self.lockstep:
            for step in range(self._begun, self.job.steps):
                yield step / self.job.steps
            return
        while True:
            begin = self.store.add(self._key, self._handful) - self._handful + self._begun
            for step in range(begin, min(begin + self._handful, self.total)):
                yield step / self.total
            if begin + self._handful >= self.total:
                return


class Draws:
    """Where a worker is in the random numbers that draw its batches, for a checkpoint."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Tensor]:
        """As it is now."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The way back."""
        self._generator.set_state(state["generator"])


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
            mean += vector
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
            agent = worker._agent
            parts = [part async for part in agent.parts()]
            served = any(vector is None for _, vector, _, _ in parts)  # a server has the answer
            self.keep(parts, [part async for part in agent.parts(own=True)] if served else parts)

        self.pending = [one for one in self.pending if not one.done()]
        if not self.pending:  # a slow network: better fewer samples than many under way
            self.pending.append(worker._agent.begin(collect()))

    def write(self, task: Task, model: nn.Module, final: nn.Module, ended: float) -> None:
        """Measure all that was kept, and the answer at the end, for the records."""
        model.eval()
        replica = Replica(flatten(model.named_parameters(), gradients=False))
        for sample in self.kept:
            replica.load(sample["weights"].to(replica.dtype))
            set_buffers(model, sample["buffers"])
            task.recalibrate(model, self.job.workers, self.job.seed)
            loss, accuracy = task.evaluate(model)
            steps = sample["worker_steps"]
            self.journal.evaluation(sample["time"], worker_steps=steps, loss=loss, accuracy=accuracy)
        final.eval()
        task.recalibrate(final, self.job.workers, self.job.seed)
        loss, accuracy = task.evaluate(final)
        # One that was asked for at the end may have come after it.
        at = max([ended, *(sample["time"] for sample in self.kept)])
        steps = self.job.workers * self.job.steps
        self.journal.evaluation(at, worker_steps=steps, loss=loss, accuracy=accuracy)


def main(folders: list[Path]) -> None:
    """Run all jobs; one that fails does not keep the next from being run."""
    rank = int(os.environ["RANK"])
    for number, folder in enumerate(folders):
        failed = ""
        try:
            run(folder, number)
        except FreewheelError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            failed = str(error)
        (folder / f"outcome-{rank}.json").write_text(json.dumps({"failed": failed}))


def run(folder: Path, number: int) -> None:
    """Train; what came of it is in the records."""
    job = Job.load(folder / "job.json")
    rank, device = int(os.environ["RANK"]), torch.device(job.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    task = tasks.resolve(job.task)
    task.prepare(job.workers, job.seed)
    task.to(device)
    torch.manual_seed(job.seed)
    model = task.model().to(device)
    generator = torch.Generator().manual_seed(random.Random(f"{job.seed}/{rank}").getrandbits(62))
    strategy = None if job.strategy == DDP else strategies.resolve(job.strategy)
    # As in the simulator: momentum adds up 1/(1 - momentum) steps.
    momentum = job.momentum if job.momentum is not None else (strategy.momentum if strategy else 0.0)
    lr = task.lr * (1 - momentum) if job.lr is None else job.lr
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum, nesterov=momentum > 0, weight_decay=job.weight_decay
    )

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = task.loss(model, task.batch(rank, generator))
        loss.backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return loss

    pace = Pace(job, rank, compute)
    optimizer.zero_grad()
    lockstep = strategy is None or strategy.lockstep()
    budget = Budget(job, lockstep, number, pace.step_s)
    fastest = min(range(job.workers), key=lambda one: (job.slow.get(one, 1.0), one))
    samples = Samples(job, rank == fastest, Journal(folder, rank), lockstep)
    train = _with_ddp if strategy is None else _attached
    final, ended = train(job, folder, rank, model, optimizer, task, generator, pace, budget, samples, lr)
    if samples.active:
        samples.write(task, task.model().to(device), final, ended)


def _set_lr(optimizer: torch.optim.Optimizer, job: Job, lr: float, share: float) -> None:
    optimizer.param_groups[0]["lr"] = lr * job.rates.factor(share * job.steps)


def _check(loss: Tensor, job: Job, rank: int, step: int) -> None:
    if not math.isfinite(loss.item()):
        raise Diverged(
            f"{job.strategy} diverged: worker {rank} got a loss of {loss.item():g} in its step {step}. "
            "Lower the learning rate."
        )


def _attached(
    job: Job,
    folder: Path,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    generator: torch.Generator,
    pace: Pace,
    budget: Budget,
    samples: Samples,
    lr: float,
) -> tuple[nn.Module, float]:
    """The loop as a user writes it."""
    settings: dict[str, Any] = {"wire": job.wire, "seed": job.seed, "folder": folder}
    settings["resume"] = job.checkpoint if job.resume else None
    worker = api.attach(model, optimizer, job.strategy, **settings)
    worker.about(name=job.task, target=job.target, **job.scenario())
    with worker:
        if job.checkpoint is not None:
            worker.checkpoint(job.checkpoint, every=job.every, extra={"draws": Draws(generator)})
        if job.resume:
            budget.go_on(rank, worker.metrics()["resumed_at"])
        steps, strategy = budget.steps(), worker._agent.strategy
        if isinstance(strategy, Grouping):
            steps = budget.steps_of_groups(lambda: (strategy.group, not strategy.together))
        for step, share in enumerate(steps):
            _set_lr(optimizer, job, lr, share)
            if samples.due(share):
                samples.ask(worker)
            loss = task.loss(model, task.batch(rank, generator))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            pace()
            worker.report(loss)
            if step % 20 == 0:
                _check(loss.detach(), job, rank, step)
            optimizer.step()
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        ended = time.time()
    for one in samples.pending:
        with contextlib.suppress(Exception):
            one.result(timeout=10)
    return worker.consensus(), ended


def _with_ddp(
    job: Job,
    folder: Path,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    generator: torch.Generator,
    pace: Pace,
    budget: Budget,
    samples: Samples,
    lr: float,
) -> tuple[nn.Module, float]:
    """The same loop with DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    # A name of its own: what an earlier job left in the store would be taken for this one's.
    store = PrefixStore(str(folder), budget.plain)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.workers)
    replica = Replica(flatten(model.named_parameters(), gradients=False))
    parallel = DistributedDataParallel(model)
    dist.barrier()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with DdpBooks(job, folder, rank, pace.step_s, size) as books:
        if rank == 0:
            books.about(lr, optimizer)
        for step, share in enumerate(budget.steps()):
            _set_lr(optimizer, job, lr, share)
            if samples.due(share):
                buffers = copy.deepcopy(buffers_of(model))
                part = (rank, replica.weights.cpu().clone(), buffers, step * job.workers)
                samples.keep([part], [part] * job.workers)  # its replicas are equal
            loss = task.loss(parallel, task.batch(rank, generator))
            optimizer.zero_grad()
            pace()
            loss.backward()  # type: ignore[no-untyped-call]
            if step % 20 == 0:
                _check(loss.detach(), job, rank, step)
            books.loss = loss.detach()
            optimizer.step()
            books.steps += 1
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        ended = time.time()
    dist.barrier()
    dist.destroy_process_group()
    return model, ended


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
