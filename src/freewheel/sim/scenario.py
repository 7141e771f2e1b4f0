"""What is simulated, apart from the strategy and the task.

Faults happen at given virtual times:

crash:3@0.5        worker 3 dies at 0.5 s
restart:3@1.0      and comes back at 1.0 s with a copy of a living worker's weights
leave:3@0.5        worker 3 is told to leave: at a boundary it hands over what only it has, and goes
cut:3@0.5          worker 3 can reach nobody; cut:3-5@0.5 cuts one link
heal:3@2.0         the reverse
slow:3x10@0.5      worker 3 computes 10 times slower from then on (x0.1: faster again)
throttle:3x10@0.5  its link is 10 times slower from then on
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, UnknownName, above_zero, at_least
from freewheel.settings import Training, setting

# Around a mean: uniform from 1 - spread to 1 + spread times it; lognormal's spread is the logarithm's.
MODELS = ("constant", "uniform", "exponential", "lognormal", "trace")
KINDS = ("crash", "restart", "leave", "cut", "heal", "slow", "throttle")
_NUMBER = r"(\d*\.?\d+(?:[eE][+-]?\d+)?)"
_FORM = re.compile(rf"(\w+):(\d+)(?:-(\d+))?(?:x{_NUMBER})?@{_NUMBER}$")


@dataclass(frozen=True)
class Compute:
    """Compute times: a distribution around a mean; each worker draws its own."""

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
        if self.kind not in MODELS:
            raise UnknownName("compute model", self.kind, MODELS)
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


@dataclass(frozen=True)
class Links:
    """What the network is like; speeds in Mbit/s, times in ms."""

    mbit: float = setting(1000.0, "Bandwidth of each worker, in and out.", flag="--link-mbit")
    out_mbit: float | None = setting(None, "Bandwidth out, where it differs.", rare=True)
    latency_ms: float = setting(0.2, "Latency of every link.", rare=True)
    slow: Mapping[int, float] = setting(
        dict, "RANK:FACTOR, this worker's link is slower; repeatable.", flag="--slow-link", rare=True
    )
    backbone_mbit: float | None = setting(None, "A backbone all messages between nodes share.", rare=True)
    workers_per_node: int = setting(1, "Workers that share a machine, in order of rank.", rare=True)
    node_mbit: float = 100_000.0
    node_latency_ms: float = 0.01
    fair: bool = False
    """Whether a port passes all its messages at once, instead of one after the other."""

    def __post_init__(self) -> None:
        speeds = {"link": self.mbit, "outgoing": self.out_mbit, "backbone": self.backbone_mbit}
        for name, value in (*speeds.items(), ("node", self.node_mbit)):
            if value is not None:
                above_zero(f"the {name} bandwidth in Mbit/s", value)
        at_least("the latency", self.latency_ms, 0)
        at_least("the latency inside a node", self.node_latency_ms, 0)
        at_least("workers per node", self.workers_per_node, 1)
        for rank, factor in self.slow.items():
            above_zero(f"the slow-link factor of worker {rank}", factor)


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one worker, or to the link between two, at a virtual time."""

    kind: str
    rank: int
    at_s: float
    peer: int | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("fault", self.kind, KINDS)
        if not (0 <= self.at_s < math.inf and 0 < self.factor < math.inf):
            raise ConfigError(f"fault {self}: the time must be 0 s or more and the factor above 0.")
        if self.peer is not None and self.kind not in ("cut", "heal"):
            raise ConfigError(f"fault {self}: only cut and heal take two workers.")
        if self.peer == self.rank:
            raise ConfigError(f"fault {self}: a worker has no link to itself.")
        if (self.factor != 1.0) != (self.kind in ("slow", "throttle")):
            raise ConfigError(
                f"fault {self}: slow and throttle take a factor, as in slow:{self.rank}x10@{self.at_s:g}; no "
                "other fault does."
            )

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"-{self.peer}"
        factor = "" if self.factor == 1.0 else f"x{self.factor:g}"
        return f"{self.kind}:{self.rank}{peer}{factor}@{self.at_s:g}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one fault in the form above."""
        match = _FORM.match(text.strip())
        if not match:
            raise ConfigError(
                f"cannot read the fault {text!r}. Write KIND:WORKER@SECONDS, as in crash:3@0.5, cut:3-5@0.5 "
                f"or slow:3x10@0.5; kinds: {', '.join(KINDS)}."
            )
        kind, rank, peer, factor, at_s = match.groups()
        return cls(kind, int(rank), float(at_s), int(peer) if peer else None, float(factor or 1.0))


@dataclass(frozen=True)
class Scenario(Training):
    """Workers, machines, network, faults, budget and seed."""

    compute: Compute = field(default_factory=Compute)
    links: Links = field(default_factory=Links)
    faults: Sequence[Fault] = ()
    batched: bool | None = None
    """Whether gradients that overlap are computed in one call; None: on a GPU."""
    gradients: bool = setting(True, "Timing only: train nothing.", flag="--no-gradients", rare=True)
    model_mb: float | None = setting(
        None, "What the model weighs on the wire; default: the task's.", rare=True
    )
    batches: int = 0
    """Batches of a pass that are dealt to the workers by leases, one for each step; 0: none are dealt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers > 10_000 or self.workers * self.steps > 10**9:
            raise ConfigError(
                f"{self.workers} workers × {self.steps} steps is more than can be simulated here. "
                "Allowed: 10,000 workers, and a billion worker-steps in all."
            )
        at_least("evaluations", self.evaluations, 0)
        at_least("batches", self.batches, 0)
        if self.model_mb is not None:
            above_zero("the model's size in MB", self.model_mb)
        self.compute.check(self.workers)
        dead: set[int] = set()
        for fault in sorted(self.faults, key=lambda fault: fault.at_s):
            if fault.kind == "restart" and fault.rank not in dead:
                raise ConfigError(f"fault {fault}: worker {fault.rank} lives then; let it crash before.")
            if fault.kind in ("crash", "slow") and fault.rank in dead:
                raise ConfigError(f"fault {fault}: worker {fault.rank} is dead then; restart it before.")
            if fault.kind in ("crash", "restart"):
                dead ^= {fault.rank}
        for what, ranks in (
            ("slow", self.compute.slow),
            ("pause", [rank for rank, _, _ in self.compute.pauses]),
            ("compute", self.compute.of),
            ("slow link", self.links.slow),
            ("fault", [one for fault in self.faults for one in (fault.rank, fault.peer) if one is not None]),
        ):
            for rank in ranks:
                if not 0 <= rank < self.workers:
                    raise ConfigError(
                        f"{what}: there is no worker {rank}, only workers 0 to {self.workers - 1}."
                    )
