"""What is simulated, apart from the strategy: the settings of a run as one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from freewheel.errors import ConfigError, at_least
from freewheel.schedule import Schedule
from freewheel.sim.compute import Compute
from freewheel.sim.faults import Fault
from freewheel.sim.links import Links
from freewheel.task import check_device


@dataclass(frozen=True)
class Scenario:
    """Workers, machines, network, faults, budget and seed."""

    workers: int = 8
    steps: int = 200
    """Worker-steps per worker: the budget is workers × steps, which fast workers may use up."""
    compute: Compute = field(default_factory=Compute)
    links: Links = field(default_factory=Links)
    faults: Sequence[Fault] = ()
    seed: int = 0
    device: str = "cpu"
    """Where gradients are computed."""
    batched: bool | None = None
    """Whether gradients that overlap are computed in one call; None: on a GPU."""
    gradients: bool = True
    """False: timing only, no model is trained."""
    optimizer: str = "sgd"
    """sgd or adamw."""
    lr: float | None = None
    """None: the task's own."""
    momentum: float | None = None
    """None: the strategy's own."""
    weight_decay: float = 0.0
    schedule: str = "constant"
    """How the rate falls: constant, linear or cosine."""
    warmup: float | None = None
    """Steps of each worker over which the rate grows; None: a twentieth of the budget."""
    model_mb: float | None = None
    """What a model weighs on the wire; None: what the task's model weighs."""
    target: float | None = None
    """An accuracy; the time until it is reached is reported."""
    batches: int = 0
    """Batches of a pass that are dealt to the workers by leases, one for each step; 0: none are dealt."""
    evaluations: int = 25
    """How often the loss, accuracy and discrepancy of the answer are measured along the way."""

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1)
        at_least("steps", self.steps, 1)
        if self.workers > 10_000 or self.workers * self.steps > 10**9:
            raise ConfigError(
                f"{self.workers} workers × {self.steps} steps is more than can be simulated here. "
                "Allowed: 10,000 workers, and a billion worker-steps in all."
            )
        at_least("evaluations", self.evaluations, 0)
        at_least("weight_decay", self.weight_decay, 0)
        self.rates  # noqa: B018  # refuses what cannot be
        at_least("batches", self.batches, 0)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed must be at least 0 and below 2**63, not {self.seed}.")
        if self.lr is not None and not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ConfigError(f"the learning rate must be 0 or more, not {self.lr:g}.")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"the momentum must be at least 0 and below 1, not {self.momentum:g}.")
        if self.model_mb is not None and not (self.model_mb > 0 and math.isfinite(self.model_mb)):
            raise ConfigError(f"the model's size must be above 0 MB, not {self.model_mb:g}.")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"the target accuracy must lie between 0 and 1, not {self.target:g}.")
        check_device(self.device)
        self.compute.check(self.workers)
        self.links.check(self.workers)
        self._check_faults()

    @cached_property
    def rates(self) -> Schedule:
        """How the learning rate goes."""
        return Schedule(self.steps, self.schedule, self.warmup)

    def _check_faults(self) -> None:
        """Refuse faults of workers that do not exist, or do not live at that time."""
        dead: set[int] = set()
        for fault in sorted(self.faults, key=lambda fault: fault.at_s):
            fault.check(self.workers)
            if fault.kind == "restart":
                if fault.rank not in dead:
                    raise ConfigError(f"fault {fault}: worker {fault.rank} lives then; let it crash before.")
                dead.remove(fault.rank)
            elif fault.kind in ("crash", "slow") and fault.rank in dead:
                raise ConfigError(f"fault {fault}: worker {fault.rank} is dead then; restart it before.")
            if fault.kind == "crash":
                dead.add(fault.rank)
