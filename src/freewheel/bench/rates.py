"""Legs side by side: the same workers without communication, with DDP and with Freewheel, taking turns.

A machine's speed drifts, so legs take turns, in rounds, and a leg's share is taken of the rate without
communication in the same round; the median of the rounds is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from freewheel.bench.legs import ALONE, DDP, in_step
from freewheel.bench.processes import Place, Processes, free_port
from freewheel.errors import ConfigError, at_least

Progress = Callable[[str, float], None]
"""Called with what is running and which share of the whole is done."""

Meter = Callable[[], list[int]]
"""Counters to read when a window begins and when it ends."""

START_S = 120.0  # importing torch in several processes on a busy machine takes its time
MARGIN_S = 0.2


@dataclass(frozen=True)
class Load:
    """What every worker does between two communications."""

    workers: int = 4
    model_mb: float = 4.0
    compute_ms: float = 50.0
    slow: Mapping[int, float] = field(default_factory=dict)
    wire: str = "fp32"
    gpt: Mapping[str, int] | None = None
    """A real GPT on a GPU instead: its layers, width, context, batch."""

    def __post_init__(self) -> None:
        at_least("--workers", self.workers, 2)
        at_least("--model-mb", self.model_mb, 0.001)
        at_least("--compute-ms", self.compute_ms, 0.1)
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                raise ConfigError(
                    f"--slow: worker {rank} does not exist; there are workers 0 to {self.workers - 1}."
                )
            if not 0.01 <= factor <= 1000:
                raise ConfigError(f"--slow: a factor must be in 0.01 to 1000, not {factor:g}.")


@dataclass(frozen=True)
class Span:
    """How long to measure: seconds for each leg in each round."""

    seconds: float = 10.0
    rounds: int = 3

    def __post_init__(self) -> None:
        at_least("--seconds", self.seconds, 0.1)
        at_least("--rounds", self.rounds, 1)


@dataclass(frozen=True)
class Pace:
    """What one leg did in one round."""

    seconds: float
    by_worker: list[dict[str, Any]]
    metered: list[int]

    def total(self, *keys: str) -> float:
        """What all workers counted of this in the window, by the worker's metrics."""
        return sum(_at(worker["after"], keys) - _at(worker["before"], keys) for worker in self.by_worker)

    @property
    def blocked_share(self) -> float:
        """Share of the window in which training threads waited for communication, by their own count."""
        return self._mean_share(
            worker["after"]["blocked_share"] * worker["after"]["elapsed_s"]
            - worker["before"]["blocked_share"] * worker["before"]["elapsed_s"]
            for worker in self.by_worker
        )

    @property
    def waiting_share(self) -> float:
        """Share of the window in which training threads could have run and did not, whatever the reason."""
        return self._mean_share(
            worker["overslept_s"] + worker["stepping_s"] - worker["cpu_s"] for worker in self.by_worker
        )

    def _mean_share(self, seconds: Iterable[float]) -> float:
        return sum(seconds) / (self.seconds * len(self.by_worker))

    @property
    def steps(self) -> float:
        """Steps of all workers."""
        return sum(float(worker["steps"]) for worker in self.by_worker)

    @property
    def steps_per_s(self) -> float:
        """Steps of all workers in a second."""
        return self.steps / self.seconds


def measure(
    load: Load,
    strategies: Sequence[str],
    span: Span,
    progress: Progress,
    places: Sequence[Place] | None = None,
    meter: Meter = list,
) -> dict[str, list[Pace]]:
    """Run every leg in every round; the paces of each leg, by round."""
    legs = [ALONE, *strategies, DDP]
    paces: dict[str, list[Pace]] = {leg: [] for leg in legs}
    done = 0
    for turn in range(span.rounds):
        for leg in legs if turn % 2 == 0 else reversed(legs):  # there and back: a slow drift cancels out

            def show(share: float, leg: str = leg, done: int = done) -> None:
                progress(leg, (done + share) / (len(legs) * span.rounds))

            paces[leg].append(run_leg(leg, load, span.seconds, show, places, meter))
            done += 1
    return paces


def run_leg(
    leg: str,
    load: Load,
    seconds: float,
    show: Callable[[float], None] = lambda share: None,
    places: Sequence[Place] | None = None,
    meter: Meter = list,
) -> Pace:
    """Start the workers of one leg, let them step through one window of time, see them end."""
    places = places or [Place()] * load.workers
    begin = time.monotonic() + START_S

    def tick() -> None:
        show(min(1.0, max(0.0, (time.monotonic() - begin) / seconds)))

    asked = {**asdict(load), "leg": leg, "bind": [place.address for place in places]}
    with Processes("freewheel.bench.legs", asked, places, free_port(), tick) as workers:
        workers.collect("ready", within_s=START_S)
        begin = time.monotonic() + MARGIN_S
        workers.tell(begin=begin, end=begin + seconds)
        workers.wait_until(begin)
        counted = meter()
        workers.wait_until(begin + seconds)
        counted = [after - before for before, after in zip(counted, meter(), strict=True)]
        results = workers.collect("result", within_s=START_S + 10 * load.compute_ms / 1e3)
        if not in_step(leg):
            workers.finish(within_s=START_S)
    return Pace(seconds, results, counted)


def share_of_alone(paces: Mapping[str, Sequence[Pace]], leg: str) -> float:
    """A leg's rate as a share of the rate without communication: the median of the rounds."""
    pairs = zip(paces[leg], paces[ALONE], strict=True)
    return statistics.median(pace.steps_per_s / alone.steps_per_s for pace, alone in pairs)


def median_rate(paces: Sequence[Pace]) -> float:
    """Worker-steps per second: the median of the rounds."""
    return statistics.median(pace.steps_per_s for pace in paces)


def _at(metrics: Mapping[str, Any], keys: Sequence[str]) -> float:
    """A number in nested metrics; 0 for what was not counted."""
    value: Any = metrics
    for key in keys:
        value = value.get(key, {})
    return float(value or 0)
