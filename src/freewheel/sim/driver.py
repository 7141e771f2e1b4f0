"""The simulation: workers, faults and the clock, from the first step to the result."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, Deadlock, Diverged, PeerLost, RunStopped, WorkerLost
from freewheel.moments import adam_rate, check_optimizer
from freewheel.records.counters import Counters
from freewheel.records.result import Result, Sample
from freewheel.sim.clock import VirtualLoop, at_once
from freewheel.sim.fabric import Wire
from freewheel.sim.faults import Fault
from freewheel.sim.gradients import Alone, Together
from freewheel.sim.links import Network
from freewheel.sim.records import SimulatedRecords
from freewheel.sim.scenario import Scenario
from freewheel.sim.trace import Trace
from freewheel.sim.worker import AdamStudy, SimulatedWorker, Study
from freewheel.strategy import Strategy
from freewheel.task import Task

COPY = ("copy",)
LARGE = 256
"""From so many workers on Python's search for garbage takes as long as the run."""


class Simulation:
    """One strategy in one scenario. Make it, `run` it once, look at its `workers` if you like."""

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        scenario: Scenario,
        *,
        progress: Callable[[int, int], None] | None = None,
        trace_file: TextIO | None = None,
        records: SimulatedRecords | None = None,
    ) -> None:
        self.records = records
        strategy.check(scenario.workers)
        self.strategy, self.task, self.scenario = strategy, task, scenario
        self.progress = progress or (lambda _done, _all: None)
        self.budget = scenario.workers * scenario.steps
        self.steps = scenario.steps if strategy.lockstep() else None
        """How many steps each worker makes; None: they share the budget."""
        self.completed = 0
        # Whole rounds, at whose end all workers of a synchronous strategy have made the same steps.
        rounds = scenario.evaluations and -(-scenario.steps // scenario.evaluations)
        self.every = rounds * scenario.workers
        self.finished_s: float | None = None
        self.sent_bytes = 0.0
        """What had left the workers when training ended; what was under way is delivered after that."""
        self.failure: BaseException | None = None
        self.samples: list[Sample] = []
        self.discrepancy_max = 0.0
        self.slower: dict[int, float] = {}
        """How many times slower faults have made each worker."""
        self.past_lives: list[tuple[int, Counters]] = []
        self.used: Counter[tuple[int, int]] = Counter()
        """Dealt batches (pass, place) that workers now dead have used; `all_used` has everybody's."""
        check_optimizer(scenario.optimizer, scenario.momentum, strategy)
        self.momentum = strategy.momentum if scenario.momentum is None else scenario.momentum
        # Momentum adds up 1/(1 - momentum) steps.
        adam = scenario.optimizer == "adamw"
        usual = task.adam_lr if adam else task.lr * (1 - self.momentum)
        self.lr = usual if scenario.lr is None else scenario.lr
        if adam:
            self.lr = adam_rate(self.lr, strategy, scenario.workers)
        self.rates = scenario.rates

        self.device = torch.device(scenario.device if scenario.gradients else "cpu")
        task.prepare(scenario.workers, scenario.seed)
        if self.device.type != "cpu":
            gc.collect()  # an earlier run's replicas
            torch.cuda.empty_cache()
            task.to(self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(scenario.seed)
            self.start_model = task.model().to(self.device)
        weights = [p for p in self.start_model.parameters() if p.requires_grad]
        size = sum(p.numel() for p in weights)
        model_bytes = sum(p.numel() * p.element_size() for p in weights)
        if scenario.model_mb is not None:
            model_bytes = round(scenario.model_mb * 1e6)
        if not scenario.gradients:  # a short vector stands for the model; a ring cuts it into equal parts
            size = scenario.workers * -(-1024 // scenario.workers)
        self.model_bytes, self.blank_size = model_bytes, size

        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.trace = Trace(trace_file)
        network = Network(scenario.links, scenario.workers)
        self.wire = Wire(self.loop, network, self.trace, scenario.workers, model_bytes / size)
        self.gradients: Alone | Together = Alone()
        if scenario.gradients and (
            scenario.device != "cpu" if scenario.batched is None else scenario.batched
        ):
            self.gradients = Together(task, self.start_model)
        self.workers: dict[int, SimulatedWorker] = {}
        for rank in range(scenario.workers):
            try:
                self.workers[rank] = self._worker(rank)
            except torch.cuda.OutOfMemoryError:
                raise ConfigError(
                    f"{scenario.workers} workers do not fit the GPU, which has memory for {rank} replicas: "
                    f"take at most {rank // 2}, which leaves some for gradients."
                ) from None
        self.last = self.workers[0]
        self.judge = self._study(0) if scenario.gradients else None
        if self.judge is not None:
            self.judge.model.eval()

    # -- running --

    def run(self) -> Result:
        """Run to the end of the budget; deliver what is under way; measure."""
        # The models are small: a second thread costs more than it gives, and with one thread the result
        # does not depend on how many cores a machine has.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        if large := self.scenario.workers >= LARGE:  # many objects, and none of them is garbage
            gc.collect()
            gc.freeze()
        try:
            with torch.random.fork_rng(devices=[]):  # dropout draws from torch's own generator
                torch.manual_seed(self.scenario.seed)
                return self._run()
        finally:
            if large:
                gc.unfreeze()
            torch.set_num_threads(threads)

    def _run(self) -> Result:
        if self.records is not None:
            self.records.begin(self)
        for worker in self.workers.values():
            worker.launch(self.steps, None, self._stepped, self._finish_if_done, self._left)
        faults = [self.loop.call_at(fault.at_s, self._strike, fault) for fault in self.scenario.faults]
        try:
            self._advance()
            if self.finished_s is None:
                raise self._standstill()
            for timer in faults:
                timer.cancel()
            for worker in self.workers.values():
                worker.end_training()
            self._advance()
            for worker in self.workers.values():
                worker.replica.boundary()
            result = self._result()
            if self.records is not None:
                self.records.end(None)
            return result
        except BaseException as error:
            if self.records is not None:
                self.records.end(error)
            raise
        finally:
            for timer in faults:
                timer.cancel()
            for worker in self.workers.values():
                worker.die()
            self.failure = None
            self.loop.run_until_idle()  # let cancelled coroutines unwind

    def _advance(self) -> None:
        self.loop.run_until_idle()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _stepped(self, worker: SimulatedWorker) -> None:
        """A worker has completed a step."""
        self.last = worker
        self.completed += 1
        done = self.completed
        if self.every and done % self.every == 0 and done < self.budget:
            self._take_sample()
        elif done % self.scenario.workers == 0:  # a sample measures it too
            self._measure_discrepancy()
        if self.records is not None:
            self.records.stepped()
        if done % 64 == 0:
            self.progress(done, self.budget)
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        """Where all step together, steps of lost workers are not made up for: all end at the same step."""
        if self.steps is not None and self.workers:
            ended = all(worker.ended for worker in self.workers.values())
        else:
            ended = self.completed == self.budget
        if ended:
            self.finished_s = self.loop.time()
            self.sent_bytes = sum(c.bytes_out for _, c in self._lives()) - self.wire.unsent_bytes()
            self.loop.stop()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = self._explain(error) if isinstance(error, PeerLost) else error
            if isinstance(error, PeerLost):
                self.failure.__cause__ = error
        self.loop.stop()

    def _explain(self, error: PeerLost) -> RunStopped:
        return WorkerLost(
            f"{self.strategy.name} stopped at {self.loop.time():.3f} s: it lost worker {error.peer} "
            f"({error.why}), which held the parameter server. Let another worker crash, or use a strategy "
            "without a server: adpsgd, nodelay_free or dasgd."
        )

    def _standstill(self) -> RunStopped:
        """Nothing is left to happen before the budget is used up: say who waits for whom."""
        if not self.workers:
            return WorkerLost(f"no worker is left at {self.loop.time():.3f} s: every one has crashed.")
        waits = {rank: worker.fabric.waits() for rank, worker in self.workers.items()}
        needs = {
            rank: [(peer, tag) for peer, tag in waiting if peer is not None]
            for rank, waiting in waits.items()
        }
        circle = _circle({rank: [peer for peer, _ in waiting] for rank, waiting in needs.items()})
        told = [
            f"worker {rank} waits for worker {peer} ({'/'.join(map(str, tag))})"
            for rank in circle or sorted(needs)
            for peer, tag in needs[rank]
            if not circle or peer in circle
        ]
        return Deadlock(f"deadlock at {self.loop.time():.3f} s: {', '.join(told) or 'all workers wait'}.")

    # -- workers and faults --

    def _study(self, rank: int) -> Study:
        seed = f"data/{self.scenario.seed}/{rank}/{self.wire.life[rank]}"
        decay = self.scenario.weight_decay
        kind = AdamStudy if self.scenario.optimizer == "adamw" else Study
        return kind(self.task, self.start_model, rank, seed, self.momentum, decay)

    def _rate(self, worker: SimulatedWorker) -> float:
        """The learning rate of a worker's next step, by what all have done."""
        done = worker.node.steps if self.steps is not None else self.completed / self.scenario.workers
        return self.lr * self.rates.factor(done) * worker.node.rate_share

    def _worker(self, rank: int) -> SimulatedWorker:
        study = self._study(rank) if self.scenario.gradients else None
        worker = SimulatedWorker(
            rank,
            self.strategy,
            self.scenario,
            self.wire,
            study,
            self.blank_size,
            self._fail,
            self._rate,
            self.gradients,
        )
        worker.node.momentum = self.momentum
        if self.records is not None:
            self.records.watch(worker)
        return worker

    def _strike(self, fault: Fault) -> None:
        """Let a fault happen."""
        rank, wire = fault.rank, self.wire
        self.trace.add((self.loop.time(), "fault", str(fault)))
        if self.records is not None:
            self.records.struck(fault)
        if fault.kind == "crash" and rank in self.workers:
            self._end_life(rank)
            wire.crash(rank)
            if self.strategy.needs(rank):
                self._fail(PeerLost(rank, "crashed"))
            self._finish_if_done()
        elif fault.kind == "leave" and rank in self.workers:
            self.workers[rank].leave()
        elif fault.kind == "restart" and rank not in self.workers:
            self._restart(rank)
        elif fault.kind == "slow" and rank in self.workers:
            self.slower[rank] = self.slower.get(rank, 1.0) * fault.factor
            self.workers[rank].clockwork.factor *= fault.factor
        elif fault.kind == "throttle":
            wire.network.throttle(rank, fault.factor)
        elif fault.kind in ("cut", "heal"):
            act = wire.cut_link if fault.kind == "cut" else wire.heal_link
            peers = range(self.scenario.workers) if fault.peer is None else (fault.peer,)
            for peer in peers:
                if peer != rank:
                    act(rank, peer)

    def _end_life(self, rank: int) -> None:
        worker = self.workers.pop(rank)
        worker.die()
        if worker.study is not None:
            self.gradients.drop(worker.study)
        self.used += worker.used
        self.past_lives.append((rank, worker.node.counters))

    def _left(self, worker: SimulatedWorker) -> None:
        """A worker that was told to leave has said goodbye."""
        if self.workers.get(worker.rank) is worker:
            self.trace.add((self.loop.time(), "left", worker.rank))
            if self.records is not None:
                self.records.left(worker)
            self._end_life(worker.rank)
            self.wire.crash(worker.rank, "it was told to leave", "left")
            if self.strategy.needs(worker.rank):
                self._fail(PeerLost(worker.rank, "it was told to leave"))
            self._finish_if_done()

    def _restart(self, rank: int) -> None:
        """Bring a worker back: it copies a living one's weights over the network before it trains."""
        worker = self._worker(rank)
        worker.clockwork.factor *= self.slower.get(rank, 1.0)
        self.workers[rank] = worker
        join = worker.node.join() if self.strategy.merges() else self._copy(worker)
        worker.launch(self.steps, join, self._stepped, self._finish_if_done, self._left)

    async def _copy(self, worker: SimulatedWorker) -> None:
        """Load a living worker's weights; where nobody has any, begin anew."""
        while donors := [w for w in self.workers.values() if w.ready and w.rank in worker.fabric.members]:
            donor = donors[0]
            worker.fabric.clear()  # what has arrived until now is in the copy
            donor.fabric.post(worker.rank, COPY, at_once(donor.strategy.handover(donor.node)))
            try:
                worker.replica.load((await worker.fabric.receive(COPY, donor.rank)).payload)
                return
            except PeerLost:
                continue

    def _trained(self) -> list[SimulatedWorker]:
        """The workers that have weights worth looking at."""
        return [worker for worker in self.workers.values() if worker.ready]

    def all_used(self) -> Counter[tuple[int, int]]:
        """How often each dealt batch (pass, place) has been used, by the living and the dead."""
        return sum((worker.used for worker in self.workers.values()), self.used)

    # -- measuring --

    def _answer(self) -> Tensor:
        """The model the strategy would ship: the mean of the workers' parts."""
        answers = (at_once(worker.strategy.answer(worker.node)) for worker in self._trained())
        parts = [part for part in answers if part is not None]
        if not parts and self.strategy.merges():  # its holder is lost, and its heir about to take over
            parts = [at_once(worker.node.weights()) for worker in self._trained()]
        if not parts:
            raise WorkerLost(f"no worker that holds the answer is left at {self.loop.time():.3f} s.")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.div_(len(parts))

    def _measure_discrepancy(self) -> tuple[float, float]:
        """The largest distance between two replicas, and the mean squared distance to their mean."""
        if self.judge is None:
            return 0.0, 0.0
        vectors = [worker.replica.weights for worker in self._trained()]
        if not vectors:
            return 0.0, 0.0
        discrepancy, consensus = spread(vectors)
        self.discrepancy_max = max(self.discrepancy_max, discrepancy)
        return discrepancy, consensus

    def _average_buffers(self, model: nn.Module) -> None:
        """Give the answer the mean of the workers' buffers (BatchNorm's statistics)."""
        studies = [worker.study for worker in self._trained() if worker.study is not None]
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point() and studies:
                buffer.copy_(torch.stack([study.model.get_buffer(name) for study in studies]).mean(0))

    def _sample(self) -> Sample:
        loss = accuracy = None
        if self.judge is not None:
            self.judge.replica.load(self._answer())
            self._average_buffers(self.judge.model)
            self.task.recalibrate(self.judge.model, self.scenario.workers, self.scenario.seed)
            loss, accuracy = self.task.evaluate(self.judge.model)
            if not math.isfinite(loss):
                # Who has stepped last, unless somebody's weights are already worse than its loss.
                first = next(
                    (w for w in self.workers.values() if not w.replica.weights.isfinite().all()), self.last
                )
                raise Diverged(
                    f"{self.strategy.name} diverged: the answer's loss is {loss:g}, first seen after worker "
                    f"{first.rank} made its step {first.node.steps} at {self.loop.time():.3f} s. "
                    "Lower the learning rate."
                )
        discrepancy, consensus = self._measure_discrepancy()
        now = self.loop.time() if self.finished_s is None else self.finished_s
        return Sample(now, self.completed, loss, accuracy, discrepancy, consensus)

    def _take_sample(self) -> Sample:
        sample = self._sample()
        self.samples.append(sample)
        if self.records is not None:
            self.records.evaluated(sample)
        return sample

    def _lives(self) -> Iterator[tuple[int, Counters]]:
        yield from self.past_lives
        for rank, worker in self.workers.items():
            yield rank, worker.node.counters

    def _result(self) -> Result:
        scenario, virtual_s = self.scenario, self.finished_s
        assert virtual_s is not None
        last = self._take_sample()
        lives = list(self._lives())
        counters = [c for _, c in lives]
        alive_s = sum(c.alive_s for c in counters)
        stale = sum(c.staleness_count for c in counters)
        steps_per_s = self.completed / virtual_s
        reached = [
            s.virtual_s for s in self.samples if scenario.target and (s.accuracy or 0.0) >= scenario.target
        ]
        self.progress(self.completed, self.budget)
        return Result(
            strategy=self.strategy.name,
            workers=scenario.workers,
            seed=scenario.seed,
            virtual_s=virtual_s,
            worker_steps=self.completed,
            steps_per_s=steps_per_s,
            ideal_share=steps_per_s / scenario.compute.ideal_rate(scenario.workers),
            idle_share=max(0.0, 1 - sum(c.compute_s for c in counters) / alive_s),
            staleness_mean=sum(c.staleness_sum for c in counters) / stale if stale else 0.0,
            staleness_max=float(max(c.staleness_max for c in counters)),
            discrepancy_max=max(self.discrepancy_max, *(c.discrepancy_max for c in counters)),
            bytes_per_step=sum(c.bytes_out for c in counters) / self.completed,
            loss=last.loss,
            accuracy=last.accuracy,
            trace_sha256=self.trace.sha256(),
            target=scenario.target,
            target_s=reached[0] if reached else None,
            curve=tuple(self.samples),
            by_worker=tuple({"rank": rank, **dataclasses.asdict(c)} for rank, c in lives),
            settings=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """What the run was asked to be, as plain data."""
        return {
            "strategy": self.strategy.settings(),
            "scenario": dataclasses.asdict(self.scenario),
            "lr": self.lr * self.strategy.rate_share(self.scenario.workers),
            "momentum": self.momentum,
            "model_bytes": self.model_bytes,
            "waits_for": self.strategy.waits_for,
            "staleness": self.strategy.staleness,
            "ideal_per_s": self.scenario.compute.ideal_rate(self.scenario.workers),
        }


def spread(vectors: list[Tensor]) -> tuple[float, float]:
    """The largest distance between two of the vectors, and their mean squared distance to their mean."""
    n, size = len(vectors), vectors[0].numel()
    if n < 2:
        return 0.0, 0.0
    gram = vectors[0].new_zeros(n, n)
    for at in range(0, size, 65536):  # in pieces, so that no second copy of all replicas is made
        rows = torch.stack([vector[at : at + 65536] for vector in vectors])
        rows -= rows.mean(0)  # distances stay; small differences of large numbers do not cancel
        gram.addmm_(rows, rows.T)
    norms = gram.diagonal()
    squares = norms.unsqueeze(0) + norms.unsqueeze(1) - 2 * gram
    largest = float(squares.max().clamp_(min=0).sqrt())
    return largest, float(norms.mean()) if largest else 0.0


def _circle(graph: dict[int, list[int]]) -> list[int]:
    """A circle in a graph of who waits for whom, or nothing."""
    done: set[int] = set()

    def walk(path: list[int]) -> list[int]:
        for after in graph.get(path[-1], ()):
            if after in path[:-1]:
                return path[path.index(after) :]
            if after not in done and after != path[-1]:
                found = walk([*path, after])
                if found:
                    return found
        done.add(path[-1])
        return []

    return next((circle for start in sorted(graph) if (circle := walk([start]))), [])
