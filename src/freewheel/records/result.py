"""What a run gives: figures, curves and settings, as plain data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

Lives = Iterable[Mapping[str, Any]]  # the last sample of each life of each worker; see `schema.WorkerSample`


@dataclass(frozen=True)
class Sample:
    """The state of a run at one moment."""

    virtual_s: float
    worker_steps: int
    loss: float | None
    accuracy: float | None
    discrepancy: float  # the largest ‖x_i - x_j‖
    consensus: float  # mean_i ‖x_i - mean‖², AD-PSGD's M_k


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

    @property
    def scenario(self) -> dict[str, Any]:
        """What was simulated or trained by `train` and `compare`; empty for a script's own settings."""
        found: dict[str, Any] = self.settings.get("scenario", {})
        ours = self.clock == "virtual" or found.keys() >= {"task", "compute_ms", "slow", "evaluations"}
        return found if ours else {}

    @property
    def clock(self) -> str:
        """wall or virtual."""
        return str(self.settings.get("clock", "virtual"))

    def as_json(self) -> dict[str, Any]:
        """All figures as plain data, with the strategy's settings and the rate in use."""
        about = {"settings": self.settings.get("strategy"), "lr": self.settings.get("lr")}
        return {key: getattr(self, key) for key in JSON_KEYS} | about


# The figures that a file of results holds of each run.
JSON_KEYS = tuple(one.name for one in fields(Result) if one.name not in ("curve", "by_worker", "settings"))
JSON_KEYS += ("clock",)


def result(
    lives: Sequence[Mapping[str, Any]],
    curve: Sequence[Sample],
    took_s: float,
    ideal_per_s: float | None,
    *,
    apart: float,
    loss: float | None = None,
    target: float | None,
    **about: Any,
) -> Result:
    """`loss`: if none was evaluated; `apart`: the largest distance measured between any two replicas."""

    def total(name: str) -> float:
        return sum(life.get(name) or 0.0 for life in lives)

    def last(name: str) -> float | None:
        return next((value for one in reversed(curve) if (value := getattr(one, name)) is not None), None)

    steps, lived_s = int(total("steps")), total("elapsed_s")
    reached = (one.virtual_s for one in curve if target and (one.accuracy or 0.0) >= target)
    return Result(
        virtual_s=took_s,
        worker_steps=steps,
        steps_per_s=steps / took_s if took_s else 0.0,
        # Step times vary, so a run may be a little faster than its ideal.
        ideal_share=min(1.0, steps / took_s / ideal_per_s) if took_s and ideal_per_s else 1.0,
        idle_share=max(0.0, 1 - total("compute_s") / lived_s) if lived_s else 0.0,
        staleness_mean=staleness_mean(lives) or 0.0,
        staleness_max=float(max(life["staleness_max"] for life in lives)),
        discrepancy_max=max([apart, *(life.get("discrepancy_max") or 0.0 for life in lives)]),
        bytes_per_step=total("bytes_out") / steps,
        loss=loss if (evaluated := last("loss")) is None else evaluated,
        accuracy=last("accuracy"),
        target=target,
        target_s=next(reached, None),
        curve=tuple(curve),
        by_worker=tuple(dict(life) for life in lives),
        **about,
    )


def staleness_mean(lives: Lives) -> float | None:
    """The mean over everything noted in these lives; 0 if nothing was, None if records do not say."""
    told = []
    for life in lives:
        mean, counts = life.get("staleness_mean"), life.get("staleness_counts") or {}
        if mean is not None:  # a life without counts noted every step
            told.append((sum(counts.values()) if counts or not mean else life["steps"], mean))
    noted = sum(many for many, _ in told) or 1
    return sum(many * mean for many, mean in told) / noted if told else None
