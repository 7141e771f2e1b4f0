"""What is simulated, apart from the strategy: the settings of a run as one value, links and faults among them.

Faults happen at given virtual times:

crash:3@0.5        worker 3 dies at 0.5 s
restart:3@1.0      and comes back at 1.0 s with a copy of a living worker's weights
leave:3@0.5        worker 3 is told to leave: it hands over what it has at a boundary, and goes
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

from freewheel.errors import ConfigError, UnknownName, above_zero, at_least
from freewheel.settings import Training, setting
from freewheel.sim.compute import Compute

KINDS = ("crash", "restart", "leave", "cut", "heal", "slow", "throttle")
_NUMBER = r"(\d*\.?\d+(?:[eE][+-]?\d+)?)"
_FORM = re.compile(rf"(\w+):(\d+)(?:-(\d+))?(?:x{_NUMBER})?@{_NUMBER}$")


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
