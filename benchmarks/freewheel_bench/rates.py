"""Contestants side by side: the same workers without communication, with DDP and with Freewheel, in turns.

A machine's speed drifts, so contestants take turns, in rounds, and the share of each is taken of the rate
without communication in the same round; the median of the rounds is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from freewheel.errors import ConfigError, at_least
from freewheel.settings import setting
from freewheel_bench.contestants import ALONE, DDP, in_step
from freewheel_bench.workers import START_S, Place, Show, Workers

Progress = Callable[[str, float], None]  # called with what is running and which share of the whole is done

Meter = Callable[[], list[int]]  # counters to read when a window begins and when it ends

MARGIN_S = 0.2


@dataclass(frozen=True)
class Load:
    """What every worker does between two communications."""

    workers: int = setting(4, "How many workers.")
    model_mb: float = setting(4.0, "What the model weighs, in MB of fp32.")
    compute_ms: float = setting(50.0, "Time of a gradient; workers sleep through it.")
    slow: Mapping[int, float] = setting(dict, "This worker computes slower; repeatable; none: all are equal.")
    wire: str = setting("fp32", "fp32, or bf16 for half the bytes.")
    gpt: Mapping[str, int] | None = None  # a real GPT on a GPU instead: its layers, width, context, batch

    def __post_init__(self) -> None:
        at_least("--workers", self.workers, 2)
        at_least("--model-mb", self.model_mb, 0.001)
        at_least("--compute-ms", self.compute_ms, 0.1)
        if self.wire not in ("fp32", "bf16"):
            raise ConfigError(f"--wire must be fp32 or bf16, not {self.wire!r}.")
        for rank, factor in self.slow.items():
            if not 0 <= rank < self.workers:
                raise ConfigError(
                    f"--slow: worker {rank} does not exist; there are workers 0 to {self.workers - 1}."
                )
            if not 0.01 <= factor <= 1000:
                raise ConfigError(f"--slow: a factor must be in 0.01 to 1000, not {factor:g}.")


@dataclass(frozen=True)
class Span:
    """How long to measure: seconds for each contestant in each round."""

    seconds: float = setting(10.0, "How long each contestant steps in each round.")
    rounds: int = setting(3, "How often the contestants take turns.")

    def __post_init__(self) -> None:
        at_least("--seconds", self.seconds, 0.1)
        at_least("--rounds", self.rounds, 1)


@dataclass(frozen=True)
class Pace:
    """What one contestant did in one round."""

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
        return sum(float(worker["steps"]) for worker in self.by_worker)

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def measure(
    load: Load,
    strategies: Sequence[str],
    span: Span,
    progress: Progress,
    places: Sequence[Place] | None = None,
    meter: Meter = list,
) -> dict[str, list[Pace]]:
    """Run every contestant in every round; the paces of each contestant, by round."""
    contestants = [ALONE, *strategies, DDP]
    paces: dict[str, list[Pace]] = {contestant: [] for contestant in contestants}
    done = 0
    for turn in range(span.rounds):
        # There and back: a slow drift cancels out.
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):

            def show(share: float, contestant: str = contestant, done: int = done) -> None:
                progress(contestant, (done + share) / (len(contestants) * span.rounds))

            paces[contestant].append(run_contestant(contestant, load, span.seconds, show, places, meter))
            done += 1
    return paces


def run_contestant(
    contestant: str,
    load: Load,
    seconds: float,
    show: Show = lambda share: None,
    places: Sequence[Place] | None = None,
    meter: Meter = list,
) -> Pace:
    """Start the workers of one contestant, let them step through one window of time, see them end."""
    places = places or [Place()] * load.workers
    show(0.0)
    asked = {**asdict(load), "contestant": contestant}
    with Workers("freewheel_bench.contestants", asked, places) as workers:
        workers.collect("ready", within_s=START_S)
        begin = time.monotonic() + MARGIN_S
        workers.tell(begin=begin, end=begin + seconds)
        workers.sleep(begin - time.monotonic())
        counted = meter()
        workers.sleep(begin + seconds - time.monotonic(), show)
        counted = [after - before for before, after in zip(counted, meter(), strict=True)]
        results = workers.collect("result", within_s=START_S + 10 * load.compute_ms / 1e3)
        if not in_step(contestant):
            workers.finish(within_s=START_S)
    return Pace(seconds, results, counted)


def share_of_alone(paces: Mapping[str, Sequence[Pace]], contestant: str) -> float:
    """A contestant's rate as a share of the rate without communication: the median of the rounds."""
    pairs = zip(paces[contestant], paces[ALONE], strict=True)
    return statistics.median(pace.steps_per_s / alone.steps_per_s for pace, alone in pairs)


def median_rate(paces: Sequence[Pace]) -> float:
    return statistics.median(pace.steps_per_s for pace in paces)


def _at(metrics: Mapping[str, Any], keys: Sequence[str]) -> float:
    """A number in nested metrics; 0 for what was not counted."""
    value: Any = metrics
    for key in keys:
        value = value.get(key, {})
    return float(value or 0)
