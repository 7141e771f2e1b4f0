"""A worker's records: the run folder, TensorBoard, the console.

Watching can never stop a run: what goes wrong here costs records, with one warning. A thread of its own
writes everything, also what other threads have noticed.
"""

import logging
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.numbers import share, short
from freewheel.records.counters import Noticed, Timeline
from freewheel.records.journal import Journal
from freewheel.records.schema import WorkerSample, run_json, typed, worker_sample
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.worker import checks
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.settings import Settings
from freewheel.strategy import Strategy

SAMPLE_S = 0.5
CONSOLE_S = 5.0
CLOSE_S = 5.0  # how long `close` waits for the last sample to be written
NO_SCALARS = ("time", "rank", "life", "began", "resumed_at", "last")

log = logging.getLogger("freewheel")


class Account:
    """What one worker reports of itself, in the training thread; a Recorder writes it beside training."""

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
        self.events = Noticed()
        self.recorder: Recorder | None = None

    def open(self, agent: Agent, settings: Settings, console: bool) -> None:
        """Begin to write, for a communication thread: the first, or that of another beginning."""
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
        """Training begins. The lowest rank there is writes run.json, a late one only where there is none."""
        agent = self._agent
        self._began_steps = agent.counters.steps
        self._began_s, self._began = time.perf_counter(), time.time()
        self.state, self.events.begun = "training", True
        if self.recorder is None or settings.folder is None or agent.fabric.members[0] != self._rank:
            return
        if not agent.late or not Path(settings.folder, "run.json").exists():
            self.recorder.about(self._run_json(settings, workers, command))

    def ended(self) -> None:
        """The loop has ended: no more time is counted."""
        self.state, self._ended_s = "finished", time.perf_counter()

    def close(self, failure: BaseException | None) -> None:
        if failure is not None:
            self.events.note("failed", self._rank, f"{type(failure).__name__}: {failure}".rstrip(": "))
        self.events.over = True
        if self.recorder is not None:
            self.recorder.close(well=failure is None)

    def measured(self, evaluation: dict[str, float]) -> None:
        if self.recorder is None:
            raise ConfigError("call worker.record inside the with-block, or after it.")
        loaders = self._checkpoints.loaders
        dealt = sum(one.samples for one in self._checkpoints.like(loaders[0])) if loaders else None
        self.recorder.evaluated({"samples": dealt, **evaluation})

    def score(self) -> float:
        """The loss reported last, by which strategies compare workers."""
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
        scenario = {"optimizer": checks.name_of(inventory.optimizer), "wire": settings.wire, **said}
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
                "scenario": scenario,
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


class Recorder:
    """Writes a sample every half second, events and evaluations; and the console lines of one worker."""

    def __init__(
        self,
        sample: Callable[[], WorkerSample],
        events: Noticed,
        journal: Journal | None,
        *,
        life: int = 1,
        console: bool = False,
        board: Any = None,
    ) -> None:
        self._sample, self._events, self._journal = sample, events, journal
        self.timeline = Timeline(time.time, life) if journal is not None else None
        self._console, self._board, self._spoke_s = console, board, time.monotonic()
        self._orders: deque[Callable[[], object]] = deque()  # what is to be written beside samples and events
        self._failed = self._well = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-records", daemon=True)
        if journal is not None or console or board is not None:
            self._thread.start()

    def about(self, head: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._orders.append(partial(self._journal.about, head))

    def evaluated(self, evaluation: dict[str, Any]) -> None:
        if self._journal is not None:
            self._orders.append(partial(self._journal.evaluation, time.time(), **evaluation))
            if self._ended.is_set():
                self.write_rest()

    def close(self, well: bool) -> None:
        """Write the last sample; `well`: this worker has ended without a failure."""
        self._well = well
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def write_rest(self) -> None:
        """Write what was noted after the thread had ended."""
        if not self._thread.is_alive():
            self._guarded(self._write_notes)

    def _run(self) -> None:
        wait_s, over = 0.0, False
        while not over:
            over = self._ended.wait(wait_s)
            self._guarded(self._write_notes)
            self._guarded(partial(self._write_sample, over))
            wait_s = SAMPLE_S
        if self._board is not None:
            self._guarded(self._board.close)

    def _guarded(self, act: Callable[[], object]) -> None:
        """Act; the first failure is logged, and training goes on without records."""
        try:
            if not self._events.muted:
                act()
        except Exception as error:
            if not self._failed:
                log.warning("records: %s: %s. Training goes on without", type(error).__name__, error)
            self._failed = True

    def _write_notes(self) -> None:
        if self._journal is not None:
            while self._orders:
                self._orders.popleft()()
            while self._events.noted:
                self._journal.event(*self._events.noted.popleft())

    def _write_sample(self, over: bool) -> None:
        sample: WorkerSample = {"time": time.time(), **self._sample(), "last": over and self._well}
        if self._journal is not None and self.timeline is not None:  # both or neither
            self._journal.sample(sample)
            self._journal.timeline(sample["rank"], self.timeline.take())
        training = sample["state"] == "training"
        if self._console and training and time.monotonic() - self._spoke_s >= CONSOLE_S:
            self._spoke_s = time.monotonic()
            parts = [
                f"{sample['elapsed_s']:.0f} s",
                f"step {sample['resumed_at'] + sample['steps']}",
                f"{sample['steps_per_s']:.1f} steps/s",
                f"waiting {share(sample['blocked_share'])}",
                f"exchanges {sample['exchanges']['done'] + sample['merges']['done']}",
                f"staleness {sample['staleness_mean']:.1f}",
            ]
            if sample["loss"] is not None and not math.isnan(sample["loss"]):
                parts.append(f"loss {short(sample['loss'], 4)}")
            sys.stderr.write("  ".join(parts) + "\n")
        for name, value in sample.items() if self._board is not None else ():
            if isinstance(value, int | float) and name not in NO_SCALARS:
                self._board.add_scalar(f"freewheel/{name}", value, sample["resumed_at"] + sample["steps"])


def open_board(folder: str | Path, rank: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard is not installed: pip install 'freewheel[tensorboard]', or leave the option away."
        ) from None
    return SummaryWriter(str(Path(folder) / f"worker-{rank}"))


def evaluation(measured: Mapping[str, Any]) -> dict[str, float]:
    if not measured:
        raise ConfigError("record takes at least one number under a name, as in record(accuracy=0.9).")
    checked: dict[str, float] = {}
    for name, given in measured.items():
        if not name.isidentifier() or name in ("time", "time_s", "metrics"):
            raise ConfigError(f"record: {name!r} is no name; give a word, as in record(perplexity=12.5).")
        try:
            if isinstance(given, str | bytes):
                raise TypeError
            value = float(given.detach() if isinstance(given, Tensor) else given)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(f"record: {name} must be one number, not {given!r}.") from None
        if name == "accuracy" and math.isfinite(value) and not 0 <= value <= 1:
            raise ConfigError(f"record: accuracy must lie between 0 and 1, not {value:g}.")
        checked[name] = int(value) if name in ("samples", "worker_steps") and value.is_integer() else value
    return checked
