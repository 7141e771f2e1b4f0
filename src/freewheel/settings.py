"""Settings: fields of dataclasses that say what they mean, so that commands can offer them as options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from freewheel.errors import ConfigError, at_least

if TYPE_CHECKING:  # torch takes seconds, and help on the options needs none
    from freewheel.schedule import Schedule


def setting(default: Any, meaning: str, *, flag: str = "", rare: bool = False) -> Any:
    """`flag`: the option's name where it is not the field's; `rare`: only `--help-all` shows it."""
    metadata = {"meaning": meaning, "flag": flag, "rare": rare}
    if isinstance(default, Callable):  # type: ignore[arg-type]
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Training:
    """How many workers train for how long, with which optimizer and rate."""

    workers: int = setting(8, "How many workers.")
    steps: int = setting(200, "Budget: workers × steps in all; fast workers may use it up.")
    seed: int = setting(0, "Of weights, batches and peers.", rare=True)
    device: str = setting("cpu", "cpu or cuda, which all workers share.")
    optimizer: str = setting("sgd", "sgd or adamw.", rare=True)
    lr: float | None = setting(
        None,
        "Learning rate of the averaged update (shown where a worker's own differs); default: the task's.",
    )
    momentum: float | None = setting(None, "Nesterov momentum; default: the strategy's.", rare=True)
    weight_decay: float = setting(0.0, "Weight decay.", rare=True)
    schedule: str = setting(
        "constant", "How the rate falls after the warm-up: constant, linear or cosine.", rare=True
    )
    warmup: float | None = setting(
        None, "Steps of each worker (--seconds: seconds) in which it grows; default: 5 %; 0: none.", rare=True
    )
    target: float | None = setting(None, "Accuracy to time, e.g. 0.9.")
    evaluations: int = 25  # how often the loss and accuracy of the answer are measured along the way

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1)
        at_least("steps", self.steps, 1)
        at_least("weight-decay", self.weight_decay, 0)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"the seed must be at least 0 and below 2**63, not {self.seed}.")
        if self.lr is not None and not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ConfigError(f"the learning rate must be 0 or more, not {self.lr:g}.")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"the momentum must be at least 0 and below 1, not {self.momentum:g}.")
        if self.target is not None and not 0 < self.target <= 1:
            raise ConfigError(f"the target accuracy must lie between 0 and 1, not {self.target:g}.")
        self.rates  # noqa: B018  # refuses what cannot be
        import torch

        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"device must be cpu or cuda, not {self.device!r}.")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda: this machine has no CUDA device that torch can use; take cpu.")

    @cached_property
    def rates(self) -> Schedule:
        """The schedule of learning rates."""
        from freewheel.schedule import Schedule

        return Schedule(self.steps, self.schedule, self.warmup)
