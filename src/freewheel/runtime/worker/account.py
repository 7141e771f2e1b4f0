"""What a worker says of itself: samples, what run.json says of the run, what was measured of the answer."""

from __future__ import annotations

import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.records.journal import Journal
from freewheel.records.schema import WorkerSample, run_json, typed, worker_sample
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.worker import optimizers
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.records import Events, Recorder, open_board
from freewheel.runtime.worker.settings import Settings
from freewheel.strategy import Strategy


class Account:
    """One worker's account of itself, in the training thread; a Recorder writes it down beside training."""

    def __init__(self, rank: int, strategy: Strategy, checkpoints: Checkpoints) -> None:
        self._rank, self._strategy, self._checkpoints = rank, strategy, checkpoints
        self.about: dict[str, Any] = {}
        self.loss: Tensor | float = math.nan
        self.state = "joining"
        self.members: list[int] = []  # within reach when the with-block ended, then in the answer
        self.windows: dict[int, str] = {}  # how vectors travelled to them
        self._life, self._began_steps = 1, 0
        self._began_s = self._ended_s = 0.0
        self._began: float | None = None  # the same on the clock of the wall
        self.anew()

    def anew(self) -> None:
        """The worker tries to join, maybe again."""
        self.events = Events()
        self.recorder: Recorder | None = None

    def open(self, agent: Agent, settings: Settings, console: bool) -> None:
        """There is a communication thread, the first or that of another beginning: begin to write."""
        self._agent, rank = agent, self._rank
        if self.recorder is None:
            self._life, journal = agent.me.incarnation, None
            if settings.folder is not None:
                journal = Journal(Path(settings.folder), rank)
                self._life = max(self._life, journal.last_life(rank) + 1)  # of this run or another one here
            board = None if settings.tensorboard is None else open_board(settings.tensorboard, rank)
            self.recorder = Recorder(
                self._sample, self.events, journal, life=self._life, console=console, board=board
            )
        agent.counters.timeline = self.recorder.timeline

    def begin(self, settings: Settings, workers: int, command: str | None) -> None:
        """Training begins. run.json is written by the first of those who begin, or where there is none."""
        agent = self._agent
        self._began_steps = agent.counters.steps
        self._began_s, self._began = time.perf_counter(), time.time()
        self.state, self.events.begun = "training", True
        if self.recorder is None or settings.folder is None or agent.fabric.members[0] != self._rank:
            return
        if not agent.late or not Path(settings.folder, "run.json").exists():
            self.recorder.about(self._run_json(settings, workers, command))

    def ended(self) -> None:
        """The loop has ended: no time counts any more."""
        self.state, self._ended_s = "finished", time.perf_counter()

    def close(self, failure: BaseException | None) -> None:
        """Write the last sample."""
        if failure is not None:
            self.events.note("failed", self._rank, f"{type(failure).__name__}: {failure}".rstrip(": "))
        self.events.over = True
        if self.recorder is not None:
            self.recorder.close(well=failure is None)

    def measured(self, evaluation: dict[str, float]) -> None:
        """Write down what was measured of the answer."""
        if self.recorder is None:
            raise ConfigError("call worker.record inside the with-block, or after it.")
        like = self._checkpoints.like_first()
        dealt = sum(one.samples for one in like) if like else None
        self.recorder.evaluated({"samples": dealt, **evaluation})

    def score(self) -> float:
        """What a strategy compares workers by: the loss that was last reported."""
        loss = float(self.loss)
        if not math.isnan(loss):
            return loss
        if self._agent.counters.steps - self._began_steps > 1:
            raise ConfigError(
                f"{self._strategy.name} compares the workers' losses: call worker.report(loss) in every step."
            )
        return math.inf

    def _sample(self) -> WorkerSample:
        self._agent.counters.measure = True  # for the next sample
        return self.said()

    def said(self) -> WorkerSample:
        """What there is to say now."""
        now_s, agent = self._ended_s or time.perf_counter(), self._agent
        counters, fabric = agent.counters, agent.fabric
        return worker_sample(
            counters,
            rank=self._rank,
            life=self._life,
            state=self.state,
            began=self._began,
            steps=counters.steps - self._began_steps if self._began is not None else 0,
            resumed_at=self._began_steps,
            elapsed_s=now_s - self._began_s if self._began_s else 0.0,
            compute_s=counters.compute_s,
            blocked_s=counters.blocked(now_s),
            checkpoints=dict(self._checkpoints.counts),
            progress=self._checkpoints.progress,
            windows=self.windows or fabric.kinds(),
            members=self.members or list(fabric.members),
            view=agent.node.view.number,
            loss=float(self.loss),
            node=socket.gethostname(),
        )

    def _run_json(self, settings: Settings, workers: int, command: str | None) -> dict[str, Any]:
        strategy, inventory, said = self._strategy, self._agent.inventory, dict(self.about)
        name, target = said.pop("name", None), said.pop("target", None)
        group = inventory.optimizer.param_groups[0]
        return run_json(
            freewheel=self._agent.me.version,
            torch=torch.__version__,
            clock="wall",
            name=name or Path(sys.argv[0]).name or "python",
            command=command or typed(),
            strategy=strategy.name,
            settings={
                "strategy": strategy.settings(),
                "scenario": {
                    "optimizer": optimizers.name(inventory.optimizer),
                    "wire": settings.wire,
                    **said,
                },
                "lr": float(group["lr"]) * strategy.rate_share(workers) if "lr" in group else None,
                "momentum": float(group.get("momentum") or 0.0),
                "model_bytes": sum(one.nbytes for one in inventory.trained.values()),
                "waits_for": strategy.waits_for,
                "staleness": strategy.staleness,
            },
            workers=workers,
            seed=settings.seed,
            target=None if target is None else float(target),  # numpy's and torch's numbers too
        )
