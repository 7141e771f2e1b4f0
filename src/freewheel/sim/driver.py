"""The simulation: workers, faults and the clock, from the first step to the result."""

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch
from torch import Tensor

from freewheel.errors import ConfigError, Deadlock, PeerLost, RunStopped, WorkerLost
from freewheel.records.counters import Counters
from freewheel.records.result import Result, Sample, result
from freewheel.records.schema import WorkerSample
from freewheel.sim.answer import Answer
from freewheel.sim.clock import Trace, VirtualLoop, at_once
from freewheel.sim.fabric import Wire
from freewheel.sim.links import Network
from freewheel.sim.scenario import Fault, Scenario
from freewheel.sim.study import Gradients, School
from freewheel.sim.worker import SimulatedWorker
from freewheel.strategy import Strategy
from freewheel.task import Task

COPY = ("copy",)
OFTEN = 50_000  # new objects until garbage is looked for: thousands of workers have that many under way


@contextlib.contextmanager
def _alone(seed: int) -> Iterator[None]:
    """One thread, a rare search for garbage, not among the workers, and a seed for torch's generator.

    With one thread the result does not depend on how many cores a machine has; models are small anyway.
    """
    threads, often = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.freeze()
    if 0 < often[0] < OFTEN:
        gc.set_threshold(OFTEN, *often[1:])
    try:
        with torch.random.fork_rng(devices=[]):  # dropout draws from it
            torch.manual_seed(seed)
            yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*often)
        torch.set_num_threads(threads)


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
    ) -> None:
        strategy.check(scenario.workers)
        self.strategy, self.task, self.scenario = strategy, task, scenario
        self.progress = progress or (lambda _done, _all: None)
        self.budget = scenario.workers * scenario.steps
        self.completed = 0
        # Whole rounds, at whose end all workers of a synchronous strategy have made the same steps.
        rounds = scenario.evaluations and -(-scenario.steps // scenario.evaluations)
        self.every = rounds * scenario.workers
        self.finished_s: float | None = None
        self.sent_bytes = 0.0  # what had left the workers then; what was under way is delivered after that
        self.failure: BaseException | None = None
        self.samples: list[Sample] = []
        self.slower = [1.0] * scenario.workers  # how many times slower faults have made each
        self._past: list[tuple[Counters, WorkerSample]] = []  # of lives that have ended, as they ended
        self.used: Counter[tuple[int, int]] = Counter()  # by pass and place: how often a batch was used
        self.school = School(task, strategy, scenario)
        self.loop = VirtualLoop()  # type: ignore[abstract]
        self.trace = Trace(trace_file)
        network = Network(scenario.links, scenario.workers)
        self.wire = Wire(self.loop, network, self.trace, scenario.workers, self.school.value_bytes)
        self.gradients = Gradients(self.school)
        self.workers: dict[int, SimulatedWorker] = {}
        try:
            for rank in range(scenario.workers):
                self.workers[rank] = self._worker(rank)
        except torch.cuda.OutOfMemoryError:
            raise ConfigError(
                f"{scenario.workers} workers do not fit the GPU, which has memory for {len(self.workers)} "
                "replicas: take at most half as many, which leaves some for gradients."
            ) from None
        self.last = self.workers[0]
        self._answer = Answer(self.school)

    # -- running --

    def run(self) -> Result:
        """Use up the budget, then deliver what is under way, then measure."""
        with _alone(self.scenario.seed):
            try:
                return self._run()
            finally:
                for worker in self.workers.values():
                    worker.die()
                self.failure = None
                self.loop.run_until_idle()  # let cancelled coroutines unwind

    def _run(self) -> Result:
        for worker in self.workers.values():
            worker.launch(self._train(worker))
        faults = [self.loop.call_at(fault.at_s, self._strike, fault) for fault in self.scenario.faults]
        try:
            self._advance()
        finally:
            for timer in faults:
                timer.cancel()
        if self.finished_s is None:
            raise self._standstill()
        for worker in self.workers.values():
            worker.end_training()
        self._advance()
        for worker in self.workers.values():
            worker.replica.boundary()
        return self._result()

    def _advance(self) -> None:
        self.loop.run_until_idle()
        if self.failure is not None:
            raise self.failure

    def _standstill(self) -> RunStopped:
        now_s = self.loop.time()
        if not self.workers:
            return WorkerLost(f"no worker is left at {now_s:.3f} s: every one has crashed.")
        told = [
            f"worker {rank} waits for worker {peer} ({'/'.join(map(str, tag))})"
            for rank, worker in self.workers.items()
            for peer, tag in worker.fabric.waits()
            if peer is not None
        ]
        return Deadlock(f"deadlock at {now_s:.3f} s: {', '.join(told) or 'all workers wait'}.")

    async def _train(self, worker: SimulatedWorker) -> None:
        await worker.begin(self._join(worker) if worker.life > 1 else None)
        while worker.node.steps < worker.limit:
            await worker.step(self._rate)
            self._stepped(worker)
            if worker.leaving and worker.strategy.settled(worker.node):
                await worker.depart()
                self.loop.call_soon(self._left, worker)
                return
        worker.ended = True
        worker.node.leave()
        self._finish_if_done()

    def _stepped(self, worker: SimulatedWorker) -> None:
        self.last = worker
        self.completed += 1
        done = self.completed
        if self.every and done % self.every == 0 and done < self.budget:
            self._take_sample()
        elif done % self.scenario.workers == 0:  # a sample measures it too
            self._answer.apart(self._trained())
        if done % 64 == 0:
            self.progress(done, self.budget)
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        """Stop the clock at the end of the budget; in lockstep when all have made their own steps."""
        if self.strategy.lockstep() and self.workers:
            ended = all(worker.ended for worker in self.workers.values())
        else:
            ended = self.completed == self.budget
        if ended:
            self.finished_s = self.loop.time()
            self.sent_bytes = sum(one.bytes_out for one in self.counters()) - self.wire.unsent_bytes()
            self.loop.stop()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, PeerLost):
            lost = WorkerLost(
                f"{self.strategy.name} stopped at {self.loop.time():.3f} s: it lost worker {error.peer} "
                f"({error.why}), which held the parameter server. Let another worker crash, or use a "
                "strategy without a server: adpsgd, nodelay_free or dasgd."
            )
            lost.__cause__ = error
            error = lost
        self.failure = self.failure or error
        self.loop.stop()

    # -- workers and faults --

    def _rate(self, worker: SimulatedWorker) -> float:
        """A worker's next learning rate, which goes by what all have done."""
        done = worker.node.steps if self.strategy.lockstep() else self.completed / self.scenario.workers
        rate = self.school.lr * self.scenario.rates.factor(done)
        worker.node.rated(rate, self.school.lr)
        return rate * self.strategy.rate_share(len(worker.node.members))

    def _worker(self, rank: int) -> SimulatedWorker:
        return SimulatedWorker(rank, self.school, self.wire, self.gradients, self.used, self._fail)

    def _strike(self, fault: Fault) -> None:
        rank, wire, worker = fault.rank, self.wire, self.workers.get(fault.rank)
        self.trace.add((self.loop.time(), "fault", str(fault)))
        if fault.kind == "throttle":
            wire.network.throttle(rank, fault.factor)
        elif fault.kind in ("cut", "heal"):
            act = wire.cut_link if fault.kind == "cut" else wire.heal_link
            for peer in range(self.scenario.workers) if fault.peer is None else (fault.peer,):
                if peer != rank:
                    act(rank, peer)
        elif fault.kind == "restart" and worker is None:
            self.workers[rank] = worker = self._worker(rank)
            worker.clockwork.factor *= self.slower[rank]
            worker.launch(self._train(worker))
        elif worker is None:
            return
        elif fault.kind == "crash":
            self._end_life(worker, "crashed", "died")
        elif fault.kind == "leave":
            worker.leaving = True  # at the next boundary
            worker.node.farewells.announce()
        elif fault.kind == "slow":
            self.slower[rank] *= fault.factor
            worker.clockwork.factor *= fault.factor

    def _end_life(self, worker: SimulatedWorker, why: str, what: str) -> None:
        del self.workers[worker.rank]
        worker.die()
        if worker.study is not None:
            self.gradients.drop(worker.study)
            gc.collect()  # its weights; what was there before the run is left out, so this is quick
        self._past.append((worker.counters, worker.sample(self.loop.time())))
        self.wire.crash(worker.rank, why, what)
        if self.strategy.needs(worker.rank):
            self._fail(PeerLost(worker.rank, why))
        self._finish_if_done()

    def _left(self, worker: SimulatedWorker) -> None:
        if self.workers.get(worker.rank) is worker:
            self.trace.add((self.loop.time(), "left", worker.rank))
            self._end_life(worker, "it was told to leave", "left")

    async def _join(self, worker: SimulatedWorker) -> None:
        """Join the view of those who train; else copy a living worker; else begin anew."""
        if self.strategy.merges() and await worker.node.join() is not None:
            return
        while donors := [one for one in self._trained() if worker.fabric.reaches(one.rank)]:
            donor = donors[0]
            worker.fabric.clear()  # what has arrived until now is in the copy
            donor.fabric.post(worker.rank, COPY, at_once(donor.strategy.handover(donor.node)))
            with contextlib.suppress(PeerLost):
                worker.replica.load((await worker.fabric.receive(COPY, donor.rank)).payload)
                return

    def answer(self) -> Tensor:
        return self._answer.weights(self._trained())

    def _trained(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.ready]

    # -- measuring --

    @property
    def _now_s(self) -> float:
        """Now, but no later than the end of training: messages are delivered after it."""
        return self.loop.time() if self.finished_s is None else self.finished_s

    def _take_sample(self) -> None:
        trained = self._trained()
        loss, accuracy = self._answer.evaluate(trained, self.last)
        sample = Sample(self._now_s, self.completed, loss, accuracy, *self._answer.apart(trained))
        self.samples.append(sample)

    def counters(self) -> Iterator[Counters]:
        yield from (counters for counters, _ in self._past)
        yield from (worker.counters for worker in self.workers.values())

    def _result(self) -> Result:
        scenario, took_s = self.scenario, self._now_s
        self._take_sample()
        self.progress(self.completed, self.budget)
        present = [worker.sample(took_s, last=True) for worker in self.workers.values()]
        return result(
            [*(life for _, life in self._past), *present],
            self.samples,
            took_s,
            scenario.compute.ideal_rate(scenario.workers),
            strategy=self.strategy.name,
            workers=scenario.workers,
            seed=scenario.seed,
            apart=self._answer.apart_max,
            trace_sha256=self.trace.sha256(),
            target=scenario.target,
            settings=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.settings(),
            "scenario": dataclasses.asdict(self.scenario),
            "lr": self.school.lr * self.strategy.rate_share(self.scenario.workers),
            "momentum": self.school.momentum,
            "model_bytes": self.school.model_bytes,
            "waits_for": self.strategy.waits_for,
            "staleness": self.strategy.staleness,
            "ideal_per_s": self.scenario.compute.ideal_rate(self.scenario.workers),
        }
