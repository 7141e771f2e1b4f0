"""How long a gradient takes, for each worker and step."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, UnknownName, above_zero, at_least

# Around a mean: uniform from 1 - spread to 1 + spread times it; lognormal's spread is the logarithm's.
KINDS = ("constant", "uniform", "exponential", "lognormal", "trace")


@dataclass(frozen=True)
class Compute:
    """Compute times: a distribution around a mean, for each worker its own random numbers."""

    ms: float = 10.0
    kind: str = "constant"
    spread: float = 0.3
    slow: Mapping[int, float] = field(default_factory=dict)
    """Rank to factor: this worker takes that many times as long."""
    pauses: Sequence[tuple[int, float, float]] = ()
    """(rank, at_s, for_s): a step that begins after at_s is held up once by for_s."""
    trace: Sequence[Sequence[float]] = ()
    """For kind "trace": rows of step times in ms, one column for all workers or one for each; repeated."""
    of: Mapping[int, Compute] = field(default_factory=dict)
    """Rank to a model of its own; `slow` and `pauses` of the whole still count."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("compute model", self.kind, KINDS)
        above_zero("the compute time", self.ms)
        most = 1 if self.kind == "uniform" else 10
        if not 0 <= self.spread <= most:
            raise ConfigError(
                f"the spread of {self.kind} compute times must lie between 0 and {most}, not {self.spread:g}."
            )
        if self.kind == "trace" and not self.trace:
            raise ConfigError("compute times from a trace need a file with at least one row: trace:FILE.")
        for rank, factor in self.slow.items():
            above_zero(f"the slowness of worker {rank}", factor)
        for rank, own in self.of.items():
            if own.slow or own.pauses or own.of:
                raise ConfigError(
                    f"the compute model of worker {rank} may not have slow, pauses or of itself."
                )
        for rank, *times_s in self.pauses:
            at_least(f"the times of the pause of worker {rank}", min(times_s), 0)

    @classmethod
    def parse(cls, text: str, **rest: Any) -> Compute:
        """Read "constant", "uniform:0.2", "exponential", "lognormal:0.3" or "trace:FILE"."""
        kind, _, value = text.partition(":")
        given: dict[str, Any] = {"kind": kind, **rest}
        if kind == "trace":
            given["trace"] = _read(value)
        elif value and kind in ("constant", "exponential"):
            raise ConfigError(f"compute times that are {kind} have no spread; write {kind!r}, not {text!r}.")
        elif value:
            try:
                given["spread"] = float(value)
            except ValueError:
                raise ConfigError(f"the spread in {text!r} must be a number, as in lognormal:0.3.") from None
        return cls(**given)

    def check(self, workers: int) -> None:
        """Refuse a trace of another width."""
        for row in (row for model in (self, *self.of.values()) for row in model.trace):
            if len(row) not in (1, workers):
                raise ConfigError(
                    f"a trace row has {len(row)} step times; it needs 1, or {workers}, one for each worker."
                )

    def mean_s(self, rank: int) -> float:
        """The mean time of a step in seconds, pauses left out."""
        model = self.of.get(rank, self)
        times_ms = [row[rank % len(row)] for row in model.trace] if model.kind == "trace" else [model.ms]
        return sum(times_ms) / len(times_ms) / 1e3 * self.slow.get(rank, 1.0)

    def ideal_rate(self, workers: int) -> float:
        """Σ 1/t_i: steps per second of all workers if nobody ever waited."""
        return sum(1 / self.mean_s(rank) for rank in range(workers))


class Clockwork:
    """One worker's step times."""

    def __init__(self, compute: Compute, rank: int, rng: random.Random, now: float = 0.0) -> None:
        self.rank, self.rng = rank, rng
        self.model = compute.of.get(rank, compute)
        self.factor = compute.slow.get(rank, 1.0)  # how many times slower it is; a fault may change it
        self.steps = 0
        pauses = ((at_s, for_s) for who, at_s, for_s in compute.pauses if who == rank and at_s >= now)
        self.pauses = sorted(pauses, reverse=True)

    def next_s(self, now: float) -> tuple[float, float]:
        """How long the next gradient takes, and a pause before it, in seconds."""
        pause = 0.0
        while self.pauses and self.pauses[-1][0] <= now:
            pause += self.pauses.pop()[1]
        model, spread = self.model, self.model.spread
        took = model.ms / 1e3
        if model.kind == "uniform":
            took *= self.rng.uniform(1 - spread, 1 + spread)
        elif model.kind == "exponential":
            took *= self.rng.expovariate(1.0)
        elif model.kind == "lognormal":
            took *= self.rng.lognormvariate(-(spread**2) / 2, spread)
        elif model.kind == "trace":
            row = model.trace[self.steps % len(model.trace)]
            took = row[self.rank % len(row)] / 1e3
        self.steps += 1
        return took * self.factor, pause


def _read(path: str) -> list[list[float]]:
    """Step times in ms: lines of numbers, with spaces or commas between them."""
    try:
        lines = Path(path).read_text().replace(",", " ").splitlines()
        trace = [list(map(float, line.split())) for line in lines if line and not line.startswith("#")]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the trace of step times {path!r}: {error}. Give lines of numbers: times in ms."
        ) from None
    if not all(row and all(0 < ms < math.inf for ms in row) for row in trace):
        raise ConfigError(f"the step times in the trace {path!r} must be above 0 ms, some in every line.")
    return trace
