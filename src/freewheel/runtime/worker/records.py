"""What a worker writes down while it trains: its part of the run folder, TensorBoard, a line for the console.

Watching can never stop a run: whatever goes wrong here costs records, with one warning. Everything is written
by a thread of its own, which also takes what other threads have noticed.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.numbers import share, short
from freewheel.records.counters import Timeline
from freewheel.records.journal import Journal
from freewheel.records.schema import WorkerSample

SAMPLE_S = 0.5
CONSOLE_S = 5.0
CLOSE_S = 5.0  # how long the end of a run waits for the last sample to be written
MOST = 1000  # so many events are kept until they are written
NO_SCALARS = ("time", "rank", "life", "began", "resumed_at", "last")

log = logging.getLogger("freewheel")


class Events:
    """What this worker has noticed and nobody has written down yet. Any thread may `note`."""

    def __init__(self) -> None:
        self.begun = False  # whether training has begun: who was there before has not joined
        self.lives: Mapping[int, int] = {}
        self.over = False  # whether this worker leaves: who leaves with it has not died
        self.muted = False  # whether nothing is written any more: a later life of this worker writes
        self._noted: deque[tuple[float, str, int | None, int | None, str]] = deque(maxlen=MOST)

    def note(self, what: str, rank: int | None, text: str) -> None:
        """Something happened to a worker, or to all (None)."""
        late = self.over and what not in ("failed", "checkpoint")
        if late or what == "finished" or (what == "joined" and not self.begun):
            return
        life = None if rank is None else self.lives.get(rank)
        self._noted.append((time.time(), what, rank, life, text))

    def take(self) -> list[tuple[float, str, int | None, int | None, str]]:
        """What was noted since the last time."""
        return [self._noted.popleft() for _ in range(len(self._noted))]


class Recorder:
    """Writes a sample every half second, and what was noted and evaluated; worker 0 also says how it goes."""

    def __init__(
        self,
        sample: Callable[[], WorkerSample],
        events: Events,
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
        """Let run.json be written."""
        if self._journal is not None:
            self._orders.append(partial(self._journal.about, head))

    def evaluated(self, evaluation: dict[str, Any]) -> None:
        """Write down what was measured of the answer."""
        if self._journal is not None:
            self._orders.append(partial(self._journal.evaluation, time.time(), **evaluation))
            if self._ended.is_set():
                self.write_rest()

    def close(self, well: bool) -> None:
        """Write the last sample; `well` says that it is the last there is to say."""
        self._well = well
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def write_rest(self) -> None:
        """Write what was noted since the thread has ended."""
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
        """Do it; the first time that it fails is told, and training goes on without."""
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
            for noted in self._events.take():
                self._journal.event(*noted)

    def _write_sample(self, over: bool) -> None:
        sample: WorkerSample = {"time": time.time(), **self._sample(), "last": over and self._well}
        if self._journal is not None:
            self._journal.sample(sample)
            if self.timeline is not None:
                self._journal.timeline(sample["rank"], self.timeline.take())
        training = sample["state"] == "training"
        if self._console and training and time.monotonic() - self._spoke_s >= CONSOLE_S:
            self._spoke_s = time.monotonic()
            sys.stderr.write(line(sample) + "\n")
        for name, value in sample.items() if self._board is not None else ():
            if isinstance(value, int | float) and name not in NO_SCALARS:
                self._board.add_scalar(f"freewheel/{name}", value, sample["resumed_at"] + sample["steps"])


def open_board(folder: str | Path, rank: int) -> Any:
    """A writer for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tensorboard is not installed: pip install 'freewheel[tensorboard]', or leave the option away."
        ) from None
    return SummaryWriter(str(Path(folder) / f"worker-{rank}"))


def evaluation(measured: Mapping[str, Any]) -> dict[str, float]:
    """What `worker.record` was given, checked: numbers under names."""
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


def line(sample: WorkerSample) -> str:
    """A sample for people."""
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
    return "  ".join(parts)
