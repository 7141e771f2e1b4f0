"""A simulated run written down as a real one is: docs/RECORDS.md, in virtual seconds.

Samples are taken when a worker has completed a step: a timer would keep the clock running where nothing is
left to happen. Nothing here moves the clock, draws a number or sends anything, so traces do not change.
"""

from pathlib import Path
from typing import Any

import torch

from freewheel.records.counters import Timeline
from freewheel.records.files import fresh
from freewheel.records.journal import Journal
from freewheel.records.result import Result
from freewheel.records.schema import run_json
from freewheel.sim.driver import Simulation
from freewheel.sim.scenario import Fault, Scenario
from freewheel.sim.worker import SimulatedWorker
from freewheel.strategy import Strategy
from freewheel.task import Task

SAMPLES = 400  # of each worker, if nobody waits; a few more otherwise
BYTES, SAMPLE_BYTES, PEER_BYTES = 100_000_000, 900, 25  # all samples at most; about one, and each peer in it
MOST_PEERS = 256  # runs of more workers have no peers in their samples
MOST_TIMELINES = 64  # runs of more workers have no timelines
WORDS = {"crash": "died", "restart": "restarted", "cut": "cut", "heal": "joined"}


class RecordedSimulation(Simulation):
    """A simulation that writes a folder; an earlier run's records in it are removed."""

    def __init__(
        self,
        strategy: Strategy,
        task: Task,
        scenario: Scenario,
        folder: Path,
        about: dict[str, Any],
        **how: Any,
    ) -> None:
        super().__init__(strategy, task, scenario, **how)
        fresh(folder)
        self._journal, self._about = Journal(folder, "simulator"), about
        compute, workers = scenario.compute, scenario.workers
        step_s = workers / compute.ideal_rate(workers)
        if strategy.lockstep():
            step_s = max(map(compute.mean_s, range(workers)))
        self._likely_s = scenario.steps * step_s
        size = workers * (SAMPLE_BYTES + PEER_BYTES * workers * (workers <= MOST_PEERS))
        self._most = max(20, min(SAMPLES, BYTES // size))

    def _worker(self, rank: int) -> SimulatedWorker:
        worker = super()._worker(rank)

        def note(what: str, about: int | None, text: str) -> None:
            life = None if about is None else self.wire.life[about]
            self._journal.event(self.loop.time(), what, about, life, text, by=rank)

        worker.fabric.notice = note
        if self.scenario.workers <= MOST_TIMELINES:
            worker.counters.timeline = Timeline(self.loop.time, worker.life)
        return worker

    def _run(self) -> Result:
        about = run_json(
            torch=torch.__version__,
            clock="virtual",
            strategy=self.strategy.name,
            workers=self.scenario.workers,
            seed=self.scenario.seed,
            settings=self.settings(),
            target=self.scenario.target,
            **self._about,
        )
        self._journal.about(about)
        self._write_all()
        try:
            found = super()._run()
        except BaseException as error:
            self._journal.event(self._now_s, "failed", None, None, f"{type(error).__name__}: {error}")
            self._write_all()
            raise
        self._write_all(last=True)
        return found

    def _stepped(self, worker: SimulatedWorker) -> None:
        super()._stepped(worker)
        if self.loop.time() >= self._next_s:
            self._write_all()

    def _take_sample(self) -> None:
        super()._take_sample()
        measured = {**vars(self.samples[-1]), "discrepancy_max": self._answer.apart_max}
        time_s = measured.pop("virtual_s")
        if not self.scenario.gradients:  # there is nothing that could be apart
            measured = {"worker_steps": self.completed}
        self._journal.evaluation(time_s, **measured)

    def _strike(self, fault: Fault) -> None:
        if fault.kind != "leave":  # such a worker goes later, and the others notice
            what = WORDS.get(fault.kind, "slowed")
            life = self.wire.life[fault.rank] + (fault.kind == "restart")
            self._journal.event(self.loop.time(), what, fault.rank, life, str(fault), peer=fault.peer)
        super()._strike(fault)

    def _end_life(self, worker: SimulatedWorker, why: str, what: str) -> None:
        self._write(worker, last=what == "left")
        super()._end_life(worker, why, what)

    def _write_all(self, last: bool = False) -> None:
        for worker in self.workers.values():
            self._write(worker, last)
        # After its likely end a run is sampled ever more rarely.
        self._next_s = self._now_s + max(self._now_s, self._likely_s) / self._most

    def _write(self, worker: SimulatedWorker, last: bool = False) -> None:
        worker.counters.measure = True  # for the next sample
        sample = worker.sample(self._now_s, last)
        if self.scenario.workers > MOST_PEERS:
            sample["peers"] = {}
        self._journal.sample(sample)
        if worker.counters.timeline is not None:
            self._journal.timeline(worker.rank, worker.counters.timeline.take())
