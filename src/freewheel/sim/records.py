"""A simulated run written down as a real one is: docs/RECORDS.md, in virtual seconds.

Samples are taken when somebody has completed a step: a timer of its own would keep the clock running where
nothing is left to happen. Nothing here moves the clock, draws a number or sends anything, so the trace of a
run is the same with and without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from freewheel.records.counters import Timeline
from freewheel.records.files import fresh
from freewheel.records.journal import Journal
from freewheel.records.result import Sample
from freewheel.records.schema import run_json
from freewheel.sim.fabric import Wire
from freewheel.sim.faults import Fault
from freewheel.sim.scenario import Scenario
from freewheel.sim.worker import SimulatedWorker

SAMPLES = 400
"""So many samples a worker gets if the run lasts as long as if nobody waited; a few more if it does not."""
BYTES, SAMPLE_BYTES, PEER_BYTES = 100_000_000, 900, 25
"""What all samples together may take; what one does, and each peer in it."""
MOST_PEERS = 256
"""In runs of more workers samples do not say who was met."""
MOST_TIMELINES = 64
"""Nor is every step of every worker written down."""
WORDS = {"crash": "died", "restart": "restarted", "cut": "cut", "heal": "joined"}


class Records:
    """Hears what happens in a simulation, and writes nothing."""

    def begin(
        self,
        workers: Mapping[int, SimulatedWorker],
        wire: Wire,
        scenario: Scenario,
        strategy: str,
        settings: dict[str, Any],
        likely_s: float,
    ) -> None:
        """The workers are there, and nothing has happened yet; `likely_s`: how long, if nobody waits."""

    def watch(self, worker: SimulatedWorker) -> None:
        """A worker begins a life."""

    def stepped(self) -> None:
        """Somebody has completed a step."""

    def evaluated(self, sample: Sample, apart_max: float) -> None:
        """The answer was measured."""

    def struck(self, fault: Fault) -> None:
        """A fault is about to happen."""

    def left(self, worker: SimulatedWorker) -> None:
        """A worker has said goodbye."""

    def end(self, now_s: float, failure: BaseException | None = None) -> None:
        """Nothing more happens."""


class SimulatedRecords(Records):
    """Writes the folder of one simulation; records of an earlier run in it are removed."""

    def __init__(self, folder: Path, *, version: str, name: str, command: str) -> None:
        fresh(folder)
        self._journal = Journal(folder, "simulator")
        self._version, self._name, self._command = version, name, command
        self._begun = False

    def begin(
        self,
        workers: Mapping[int, SimulatedWorker],
        wire: Wire,
        scenario: Scenario,
        strategy: str,
        settings: dict[str, Any],
        likely_s: float,
    ) -> None:
        """See Records."""
        self._workers, self._wire = workers, wire
        self._peers = len(workers) <= MOST_PEERS
        size = SAMPLE_BYTES + PEER_BYTES * len(workers) * self._peers
        self._most = max(20, min(SAMPLES, BYTES // (len(workers) * size)))
        self._likely_s = likely_s
        self._journal.about(
            run_json(
                freewheel=self._version,
                torch=torch.__version__,
                clock="virtual",
                name=self._name,
                command=self._command,
                strategy=strategy,
                workers=scenario.workers,
                seed=scenario.seed,
                settings=settings,
                target=scenario.target,
            )
        )
        self._begun = True
        self._sample_all()

    def watch(self, worker: SimulatedWorker) -> None:
        """See Records."""

        def note(what: str, rank: int | None, text: str) -> None:
            if self._begun:
                life = None if rank is None else self._wire.life[rank]
                self._journal.event(self._wire.loop.time(), what, rank, life, text, by=worker.rank)

        worker.fabric.notice = note
        if worker.node.world_size <= MOST_TIMELINES:
            worker.node.counters.timeline = Timeline(worker.loop.time, worker.life)

    def stepped(self) -> None:
        """See Records."""
        if self._wire.loop.time() >= self._next_s:
            self._sample_all()

    def evaluated(self, sample: Sample, apart_max: float) -> None:
        """See Records."""
        timing = sample.loss is None
        self._journal.evaluation(
            sample.virtual_s,
            worker_steps=sample.worker_steps,
            loss=sample.loss,
            accuracy=sample.accuracy,
            discrepancy=None if timing else sample.discrepancy,
            consensus=None if timing else sample.consensus,
            discrepancy_max=None if timing else apart_max,
        )

    def struck(self, fault: Fault) -> None:
        """See Records."""
        if fault.kind == "crash" and fault.rank in self._workers:
            self._sample(self._workers[fault.rank], self._wire.loop.time())
        if fault.kind == "leave":  # it goes later, and the others notice it
            return
        what = WORDS.get(fault.kind, "slowed")
        life = self._wire.life[fault.rank] + (fault.kind == "restart")
        self._journal.event(self._wire.loop.time(), what, fault.rank, life, str(fault), peer=fault.peer)

    def left(self, worker: SimulatedWorker) -> None:
        """See Records."""
        self._sample(worker, self._wire.loop.time(), last=True)

    def end(self, now_s: float, failure: BaseException | None = None) -> None:
        """See Records."""
        for worker in self._workers.values():
            self._sample(worker, now_s, last=failure is None)
        if failure is not None:
            self._journal.event(now_s, "failed", None, None, f"{type(failure).__name__}: {failure}")
        self._journal.close()

    def _sample_all(self) -> None:
        now_s = self._wire.loop.time()
        for worker in self._workers.values():
            self._sample(worker, now_s)
        # A run that lasts longer than was likely is sampled ever more rarely.
        self._next_s = now_s + max(now_s, self._likely_s) / self._most

    def _sample(self, worker: SimulatedWorker, now_s: float, last: bool = False) -> None:
        counters = worker.node.counters
        counters.measure = True  # for the next sample
        sample = worker.sample(now_s, last)
        if not self._peers:
            sample["peers"] = {}
        self._journal.sample(sample)
        if counters.timeline is not None:
            self._journal.timeline(worker.rank, counters.timeline.take())
