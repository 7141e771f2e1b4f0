"""What a run gives: figures, curves and settings, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Sample:
    """The state of a run at one moment."""

    virtual_s: float
    worker_steps: int
    loss: float | None
    accuracy: float | None
    discrepancy: float
    """The largest ‖x_i - x_j‖."""
    consensus: float
    """mean_i ‖x_i - mean‖², AD-PSGD's M_k."""


@dataclass(frozen=True)
class Result:
    """The figures of one run; times in virtual seconds."""

    strategy: str
    workers: int
    seed: int
    virtual_s: float
    worker_steps: int
    steps_per_s: float
    """Worker-steps per virtual second."""
    ideal_share: float
    """steps_per_s over Σ 1/t_i, the rate at which nobody ever waits."""
    idle_share: float
    """The share of worker-time in which no gradient is being computed."""
    staleness_mean: float
    staleness_max: float
    discrepancy_max: float
    bytes_per_step: float
    loss: float | None
    accuracy: float | None
    trace_sha256: str
    target: float | None
    target_s: float | None
    """When the accuracy first reached the target; None: never, or there was none."""
    curve: tuple[Sample, ...]
    by_worker: tuple[dict[str, Any], ...]
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        # Steps vary, and a run may be a little faster than its usual steps: no share is more than the whole.
        object.__setattr__(self, "ideal_share", min(1.0, self.ideal_share))

    @property
    def scenario(self) -> dict[str, Any]:
        """What was simulated; of a real run what `train` and `compare` say, if it looks as they say it.

        A script's own settings stand among those, and may have any name.
        """
        found: dict[str, Any] = self.settings.get("scenario", {})
        if self.settings.get("clock") != "wall":
            return found
        slow = found.get("slow")
        fits = {
            "steps": isinstance(found.get("steps"), int),
            "compute_ms": isinstance(found.get("compute_ms"), int | float),
            "slow": isinstance(slow, dict) and all(isinstance(one, int | float) for one in slow.values()),
        }
        return {name: found[name] for name, good in fits.items() if good}

    @property
    def clock(self) -> str:
        """Whose seconds these are: wall or virtual."""
        return str(self.settings.get("clock", "virtual"))

    def as_json(self) -> dict[str, Any]:
        """The figures under their documented names."""
        return {key: getattr(self, key) for key in JSON_KEYS}


JSON_KEYS = tuple(one.name for one in fields(Result) if one.name not in ("curve", "by_worker", "settings"))
JSON_KEYS += ("clock",)
"""What a file of results holds of each run."""
