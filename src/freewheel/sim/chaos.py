"""Chaos: random faults in virtual time, and the laws that must hold whatever happens.

A seed draws the faults of a run: workers crash and come back, links are cut, throttled and healed, workers
are slowed down or paused (they neither compute nor answer). All faults end before the run does, so that
workers have time to find together.

    no deadlock     the run ends by itself, without an error
    mean            the corrections of all workers sum to zero, where the strategy keeps the mean; but for
                    half exchanges and merges, and those a worker was in when it crashed
    samples         every batch of every finished pass was used; no more were used twice than were counted,
                    unless a worker died that had been cut off
    views           the members of one view agree on who is in it; at the end of a waiting strategy's run all
                    workers whose loop goes on are in one view
    staleness       never above the strategy's own bound

Staleness, views and leases (no two workers hold the same batch, unless a link was cut) are checked after
every step and every fault, the mean then too if no exchange is under way; the first breach is reported. The
rest is checked at the end.
"""

import random
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.sim.driver import Simulation
from freewheel.sim.scenario import Compute, Fault, Links, Scenario
from freewheel.sim.worker import SimulatedWorker
from freewheel.strategy import Strategy
from freewheel.task import Task

STEP_S, STEPS, BATCHES = 0.01, 120, 96
FAULTS_END_S = 0.6 * STEPS * STEP_S
SILENT_S = 0.08
PAUSED = 1e4  # how many times slower a paused worker computes
TOLERANCE = 1e-6


@dataclass
class Outcome:
    """A seed's faults by kind, and the laws that did not hold, each with what was found."""

    strategy: str
    seed: int
    faults: Counter[str]
    broken: list[str]


def draw(rng: random.Random, workers: int) -> tuple[list[Fault], Counter[str]]:
    faults: list[Fault] = []
    kinds: Counter[str] = Counter()
    free_s = [0.0] * workers  # when each worker's last fault is over
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(1 / 0.04)) < 0.8 * FAULTS_END_S:
        ready = [rank for rank in range(workers) if free_s[rank] <= at_s]
        if len(ready) < 3:
            continue
        rank, other = rng.sample(ready, 2)
        end_s = min(at_s + rng.choice([0.005, 0.03, 0.1, 0.2]), FAULTS_END_S)
        kind = rng.choice(["crash", "crash", "cut", "link", "slow", "throttle", "pause"])
        kinds[kind] += 1
        free_s[rank] = end_s + 1e-3
        if kind == "crash":
            faults += [Fault("crash", rank, at_s), Fault("restart", rank, end_s)]
        if kind == "link":
            free_s[other] = end_s + 1e-3
            faults += [Fault("cut", rank, at_s, other), Fault("heal", rank, end_s, other)]
        if kind in ("cut", "pause"):
            faults += [Fault("cut", rank, at_s), Fault("heal", rank, end_s)]
        if kind in ("slow", "throttle", "pause"):
            what = "throttle" if kind == "throttle" else "slow"
            factor = PAUSED if kind == "pause" else rng.choice([2.0, 5.0, 20.0])
            faults += [Fault(what, rank, at_s, factor=factor), Fault(what, rank, end_s, factor=1 / factor)]
    return faults, kinds


class Chaos(Simulation):
    """A simulation that checks the laws."""

    corrections: Tensor | float = 0.0  # the sum of all corrections of all lives
    excused = 0  # exchanges and merges that a worker was in when it crashed
    broken = ""  # the first breach that was seen while the run went on, and when

    def _worker(self, rank: int) -> SimulatedWorker:
        worker = super()._worker(rank)
        inner = worker.replica.correct

        def correct(vector: Tensor, own: bool = False) -> None:
            self.corrections = self.corrections + vector
            inner(vector, own)

        worker.replica.correct = correct  # type: ignore[method-assign]
        return worker

    def _strike(self, fault: Fault) -> None:
        worker = self.workers.get(fault.rank)
        if fault.kind == "crash" and worker is not None:
            free = getattr(worker.strategy, "free", None)
            merging = self.strategy.waits_for != "nobody" or (free is not None and free.busy)
            self.excused += merging or not worker.node.idle
        super()._strike(fault)
        self._look()

    def _stepped(self, worker: SimulatedWorker) -> None:
        super()._stepped(worker)
        self._look()

    def _look(self) -> None:
        if self.broken:
            return
        found = self._staleness() or self._agreement() or self._leases()
        if self.strategy.defines("meet") and all(worker.node.idle for worker in self.workers.values()):
            found = found or self._mean()
        if found:
            self.broken = f"{found} (at {self.loop.time():.4f} s)"

    def counted(self, what: str, outcome: str) -> int:
        return sum(getattr(one, what)[outcome] for one in self.counters())

    def found(self) -> list[str]:
        laws = (self.broken, self._mean(), self._samples(), self._view(), self._staleness())
        return [broken for broken in laws if broken]

    def _mean(self) -> str:
        gaps = self.excused + self.counted("exchanges", "half") + self.counted("merges", "half")
        kept = all(worker.strategy.keeps_mean for worker in self.workers.values())
        off = float(torch.as_tensor(self.corrections).abs().max())
        broken = kept and not gaps and off > TOLERANCE
        return f"mean: corrections sum to {off:.3g}, not to 0" if broken else ""

    def _samples(self) -> str:
        hands = [worker.hand for worker in self.workers.values() if worker.hand is not None]
        over = min((hand.number for hand in hands), default=0) - 1  # what is left of the last is still dealt
        for number in range(over):
            if missing := sum(not self.used[number, place] for place in range(BATCHES)):
                return f"samples: {missing} batches of pass {number} were never used"
        twice = sum(count - 1 for count in self.used.values() if count > 1)
        again = sum(one.samples_again for one in self.counters())
        if twice > again and not {"cut", "crash"} <= {fault.kind for fault in self.scenario.faults}:
            return f"samples: {twice} batches were used twice, {again} were counted"
        return ""

    def _agreement(self) -> str:
        if not self.strategy.merges():
            return ""
        views = {worker.rank: worker.node.view for worker in self._trained()}
        for rank, view in views.items():
            for peer in view.members:
                theirs = views.get(peer, view)
                if theirs.number == view.number and theirs.members != view.members:
                    return f"views: {rank} says {view}, {peer} says {theirs}"
        return ""

    def _leases(self) -> str:
        if any(fault.kind == "cut" and fault.at_s <= self.loop.time() for fault in self.scenario.faults):
            return ""
        holders: dict[tuple[int, int], int] = {}
        for worker in self.workers.values():
            for batch in worker.hand.ready if worker.hand is not None else ():
                other = holders.setdefault((batch.number, batch.place), worker.rank)
                if other != worker.rank:
                    where = f"batch {batch.place} of pass {batch.number}"
                    return f"samples: {other} and {worker.rank} hold {where}"
        return ""

    def _view(self) -> str:
        views = {worker.rank: worker.node.view for worker in self._trained() if not worker.ended}
        apart = self.strategy.merges() and len(set(views.values())) > 1
        return f"views: at the end they are {views}" if apart else ""

    def _staleness(self) -> str:
        bound = getattr(self.strategy, "tau", None)
        most = max((one.staleness_max for one in self.counters()), default=0.0)
        return f"staleness: {most:g}, above {bound}" if bound is not None and most > bound else ""


def run(strategy: Strategy, name: str, task: Task, seed: int, workers: int) -> Outcome:
    rng = random.Random(f"chaos/{name}/{seed}")
    faults, kinds = draw(rng, workers)
    scenario = Scenario(
        workers=workers,
        steps=STEPS,
        compute=Compute(1e3 * STEP_S, "uniform", 0.2),
        links=Links(latency_ms=0.2, mbit=1000.0),
        faults=faults,
        seed=seed,
        batches=BATCHES,
        evaluations=0,
        momentum=rng.choice((0.0, 0.9)),
    )
    chaos = Chaos(strategy, task, scenario)
    chaos.wire.silence_s = SILENT_S
    try:
        chaos.run()
    except Exception as error:
        return Outcome(name, seed, kinds, [f"no deadlock: {type(error).__name__}: {error}"])
    return Outcome(name, seed, kinds, chaos.found())
