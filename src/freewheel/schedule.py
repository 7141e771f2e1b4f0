"""How the learning rate changes while a budget is used up: a warm-up, then a curve.

A schedule counts what all workers have done together. By its own steps, a worker that is five times slower
would warm up five times as long, and end at a rate that all others have left behind.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from freewheel.errors import ConfigError

CURVES: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}  # what is left of the rate once a share of what follows the warm-up is done
WARMUP = 0.05  # the share of the budget in which the rate grows, by default


@dataclass(frozen=True)
class Schedule:
    """A budget of `steps`, of which the first `warmup` let the rate grow; in steps or in any other unit."""

    steps: float
    curve: str = "constant"
    warmup: float | None = None  # None: a twentieth of the budget
    step: float = 1.0  # what one step of all workers adds to what is done: the first has a rate above 0

    def __post_init__(self) -> None:
        if self.curve not in CURVES:
            raise ConfigError(f"schedule must be one of {', '.join(CURVES)}, not {self.curve!r}.")
        if not 0 < self.steps < math.inf:
            raise ConfigError(f"a schedule needs an end: give a budget above 0, not {self.steps:g}.")
        if self.warmup is not None and not 0 <= self.warmup <= self.steps:
            raise ConfigError(
                f"a warm-up of {self.warmup:g} does not fit a budget of {self.steps:g}: "
                f"give 0 (none) to {self.steps:g}."
            )

    def factor(self, done: float) -> float:
        """What the rate is multiplied by, once so much is done."""
        warmup = WARMUP * self.steps if self.warmup is None else self.warmup
        if done < warmup:
            return (done + self.step) / (warmup + self.step)
        rest = self.steps - warmup
        return CURVES[self.curve](min(1.0, (done - warmup) / rest) if rest else 1.0)


def key_of(group: dict[str, Any]) -> int:
    """What a group of parameters is known by, wherever it stands and whatever was loaded into it."""
    return id(next(iter(group["params"]), group))


class Scheduler(LRScheduler):
    """A schedule for an optimizer, as torch.optim.lr_scheduler has them: call `step` after the optimizer's.

    The rate follows from what is done and nothing else, so a worker that joins or resumes is at the right
    place at once.
    """

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[], float], rates: Mapping[int, float | None]
    ) -> None:
        self._factor = factor
        self._rates: dict[int, float] = {key: rate for key, rate in rates.items() if rate is not None}
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group of parameters; one that came later begins with its own."""
        factor = self._factor()
        return [self._rate(group) * factor for group in self.optimizer.param_groups]

    def _rate(self, group: dict[str, Any]) -> float:
        if (key := key_of(group)) not in self._rates:
            rate = group["lr"]
            like = [
                one for one in self.optimizer.param_groups if one["lr"] is rate and key_of(one) in self._rates
            ]
            if isinstance(rate, Tensor) and like:  # torch gave it the tensor of another group
                group["lr"] = rate.clone()
                self._rates[key] = self._rates[key_of(like[0])]
            else:
                self._rates[key] = float(rate)
        return self._rates[key]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is done is in the loader's state, and the rates are in the script."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the rates that belong to what is done."""
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def begin(self) -> None:
        """At the first step: a worker that has joined has only now heard how far the others are.

        Not where the script or another scheduler has set other rates meanwhile.
        """
        groups = self.optimizer.param_groups
        if all(float(group["lr"]) == float(rate) for group, rate in zip(groups, self._last_lr, strict=False)):
            self.load_state_dict({})
