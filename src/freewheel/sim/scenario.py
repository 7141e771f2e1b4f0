"""What is simulated, apart from the strategy: the settings of a run as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.errors import ConfigError, above_zero, at_least
from freewheel.settings import Training, setting
from freewheel.sim.compute import Compute
from freewheel.sim.faults import Fault
from freewheel.sim.links import Links


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
        self._check_faults()
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

    def _check_faults(self) -> None:
        """Refuse faults of workers that do not exist, or do not live at that time."""
        dead: set[int] = set()
        for fault in sorted(self.faults, key=lambda fault: fault.at_s):
            if fault.kind == "restart":
                if fault.rank not in dead:
                    raise ConfigError(f"fault {fault}: worker {fault.rank} lives then; let it crash before.")
                dead.remove(fault.rank)
            elif fault.kind in ("crash", "slow") and fault.rank in dead:
                raise ConfigError(f"fault {fault}: worker {fault.rank} is dead then; restart it before.")
            if fault.kind == "crash":
                dead.add(fault.rank)
