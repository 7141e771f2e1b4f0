"""A plan: forecasts of all strategies, which to use and how, and what would change that."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from freewheel.errors import ConfigError
from freewheel.planning import candidates, choice
from freewheel.planning.choice import Progress, WhatIf
from freewheel.planning.forecast import Forecast
from freewheel.planning.setting import Setting


@dataclass(frozen=True)
class Plan:
    """What came out; plain data."""

    setting: Setting
    forecasts: tuple[Forecast, ...]
    """The most useful first; `none` last."""
    recommended: Forecast
    what_if: tuple[WhatIf, ...]
    left_out: dict[str, str]
    """Strategies that were not simulated, and why."""

    @property
    def attach_line(self) -> str:
        """What the training script says."""
        return f'with fw.attach(model, optimizer, "{self.recommended.strategy}") as worker:'

    def run_line(self, script: Sequence[str] = ("train.py",)) -> str:
        """What is typed to start it."""
        engine = [] if self.setting.alone else ["--ray"]
        return shlex.join(["freewheel", "run", *engine, "-n", str(self.setting.workers), *script])

    def as_json(self) -> dict[str, Any]:
        """For a file; docs/PLAN.md names every key."""
        return {
            "setting": dataclasses.asdict(self.setting),
            "strategies": [one.as_json() for one in self.forecasts],
            "recommended": self.recommended.strategy,
            "attach": self.attach_line,
            "run": self.run_line(),
            "what_if": [dataclasses.asdict(one) for one in self.what_if],
            "left_out": self.left_out,
        }


def make(
    setting: Setting,
    strategies: Sequence[str] = (),
    *,
    steps: int | None = None,
    what_if: bool = True,
    progress: Progress = lambda what, share: None,
) -> Plan:
    """Simulate the strategies (none named: all), rank them, choose, and look at what would change it."""
    specs, left_out = _specs(setting, strategies)
    first = choice.part(progress, 0.0, 0.5 if what_if else 1.0)
    found = choice.forecasts(specs, setting, steps, first)
    answers: list[WhatIf] = []
    if what_if:
        second = choice.part(progress, 0.5, 1.0)
        answers = choice.what_ifs(found, setting, strategies, steps, second)
    return Plan(setting, tuple(found), choice.best(found), tuple(answers), left_out)


def scale(
    setting: Setting,
    sizes: Sequence[int],
    strategies: Sequence[str] = (),
    *,
    steps: int | None = None,
    progress: Progress = lambda what, share: None,
) -> dict[int, list[Forecast]]:
    """The same for several numbers of workers: forecasts by number."""
    settings = {size: replace(setting, workers=size) for size in sizes}  # refused before the first is run
    total, done = sum(sizes), 0
    grown: dict[int, list[Forecast]] = {}
    for size, one in settings.items():
        show = choice.part(progress, done / total, (done + size) / total, f"{size} workers: ")
        grown[size] = choice.forecasts(_specs(one, strategies)[0], one, steps, show)
        done += size
    return grown


def check(setting: Setting, strategies: Sequence[str] = ()) -> None:
    """Refuse what cannot be planned, before time is spent."""
    _specs(setting, strategies)


def _specs(setting: Setting, strategies: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What to simulate, and what not."""
    if setting.workers < 2:
        raise ConfigError("a plan is for 2 workers or more; one trains alone: python train.py.")
    specs = candidates.chosen(strategies, setting) if strategies else candidates.fitting(setting)
    large = candidates.too_large(specs, setting)
    kept = [spec for spec in specs if spec not in large]
    if set(kept) <= {choice.CEILING}:
        if not large:
            raise ConfigError("name at least one strategy that communicates.")
        raise ConfigError(
            f"no strategy fits into {setting.memory_gb or 0:g} GB on each worker: a model of "
            f"{setting.model_mb:g} MB with its gradients and what is exchanged needs "
            f"{min(large.values()):g} GB."
        )
    return kept, dict.fromkeys(large, f"needs more than {setting.memory_gb or 0:g} GB")
