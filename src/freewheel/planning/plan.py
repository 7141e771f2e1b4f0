"""A plan: forecasts of all strategies, which to use and how, and what would change that."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from freewheel.errors import ConfigError
from freewheel.numbers import short, speed
from freewheel.planning.forecast import CEILING, Forecast, chosen, fitting, forecast, reweighed, too_large
from freewheel.planning.setting import Setting

TIE = 0.05
"""Forecasts closer than this are alike: the simpler one is taken."""
CONTENDERS = 5
"""How many of the best are looked at again when something changes."""

PREFERENCES: tuple[tuple[Callable[[Forecast], float], str], ...] = (
    (lambda f: f.discrepancy > 0, "keeps all replicas equal"),
    (lambda f: not f.keeps_mean, "keeps the mean of all replicas, so no update is lost"),
    (lambda f: f.waits_for != "nobody", "waits for nobody, {0.name} for {0.waits_for}"),
    (lambda f: f.bytes_per_step, "sends less"),
)
"""What strategies ask of their users, the weightiest first, and what is said of one that asks less."""

Progress = Callable[[str, float], None]
"""Called with what is being simulated and which share of the whole is done."""


@dataclass(frozen=True)
class WhatIf:
    """The best strategy if one thing were different."""

    change: str
    strategy: str
    useful_steps_per_s: float
    changes: bool
    """Whether it is another strategy than the plan's."""


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
            "setting": asdict(self.setting),
            "strategies": [asdict(one) for one in self.forecasts],
            "recommended": self.recommended.strategy,
            "attach": self.attach_line,
            "run": self.run_line(),
            "what_if": [asdict(one) for one in self.what_if],
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
    specs, left_out = check(setting, strategies)
    found = forecasts(specs, setting, steps, part(progress, 0.0, 0.5 if what_if else 1.0))
    rest = part(progress, 0.5, 1.0)
    answers = what_ifs(found, setting, strategies, steps, rest) if what_if else []
    return Plan(setting, tuple(found), best(found), tuple(answers), left_out)


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
        show = part(progress, done / total, (done + size) / total, f"{size} workers: ")
        grown[size] = forecasts(check(one, strategies)[0], one, steps, show)
        done += size
    return grown


def check(setting: Setting, strategies: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What to simulate, and what not; refuses what cannot be planned, before time is spent."""
    if setting.workers < 2:
        raise ConfigError("a plan is for 2 workers or more; one trains alone: python train.py.")
    specs = chosen(strategies, setting) if strategies else fitting(setting)
    large = too_large(specs, setting)
    kept = [spec for spec in specs if spec not in large]
    if set(kept) <= {CEILING}:
        if not large:
            raise ConfigError("name at least one strategy that communicates.")
        raise ConfigError(
            f"no strategy fits into {setting.memory_gb or 0:g} GB on each worker: a model of "
            f"{setting.model_mb:g} MB with its gradients and what is exchanged needs "
            f"{min(large.values()):g} GB."
        )
    return kept, dict.fromkeys(large, f"needs more than {setting.memory_gb or 0:g} GB")


# -- ranking and choosing --


def ranked(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The most useful first; no communication, which is no choice, last."""
    return sorted(forecasts, key=lambda one: (one.name == CEILING, -one.useful_steps_per_s))


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """The most useful one; among those that are as good, the one that asks least of its user."""
    usable = [one for one in forecasts if one.name != CEILING]
    if not usable:
        raise ConfigError("there is nothing to choose from: name at least one strategy that communicates.")
    enough = (1 - TIE) * max(one.useful_steps_per_s for one in usable)
    alike = [one for one in usable if one.useful_steps_per_s >= enough]
    return min(alike, key=lambda one: [asks(one) for asks, _ in PREFERENCES])


def forecasts(
    specs: Sequence[str], setting: Setting, steps: int | None, progress: Progress
) -> list[Forecast]:
    """One forecast for each strategy, ranked."""
    found = []
    for at, spec in enumerate(specs):
        show = part(progress, at / len(specs), (at + 1) / len(specs))
        found.append(forecast(spec, setting, steps, functools.partial(show, spec)))
    return ranked(found)


def part(progress: Progress, begin: float, end: float, prefix: str = "") -> Progress:
    """Progress of what is a part of the whole."""
    return lambda what, share: progress(f"{prefix}{what}", begin + (end - begin) * share)


def changed(setting: Setting) -> list[tuple[str, Setting]]:
    """What might be different, in words and as a setting."""
    changes = []
    faster = replace(setting, link_mbit=10 * setting.link_mbit, host_mbit=None)
    if not setting.alone:
        changes.append((f"links of {speed(faster.link_mbit)}", faster))
    if setting.slow_link:
        changes.append(("no slow link", replace(setting, slow_link={})))
    if setting.slow:
        changes.append(("no slow worker", replace(setting, slow={})))
        if not setting.alone:
            both = f"links of {speed(faster.link_mbit)} and no slow worker"
            changes.append((both, replace(faster, slow={})))
    else:
        changes.append(("one worker 5 times slower", replace(setting, slow={setting.workers - 1: 5.0})))
    smaller = replace(setting, model_mb=setting.model_mb / 10)
    return [*changes, (f"a model of {short(smaller.model_mb)} MB", smaller)]


def what_ifs(
    found: Sequence[Forecast], setting: Setting, specs: Sequence[str], steps: int | None, progress: Progress
) -> list[WhatIf]:
    """Choose again among the best few and the synchronous ones, with one thing different at a time."""
    now = best(found)
    names = [one.name for one in found if one.name != CEILING]
    again = [one for one in names if one in (*names[:CONTENDERS], now.name, "allreduce", "sasgd", "nodelay")]
    changes = changed(setting)
    answers = []
    for at, (words, other) in enumerate(changes):
        show = part(progress, at / len(changes), (at + 1) / len(changes), f"if {words}: ")
        kept = [one for one in specs if one.partition(":")[0] in again]
        refit = chosen(kept or again, other)
        answers.append((words, best(forecasts(refit, other, steps, show))))
    sharper = replace(setting, sensitivity=10 * setting.sensitivity)
    words = "a loss 10 times as sensitive to drift and lag"
    answers.append((words, best([reweighed(one, sharper) for one in found])))
    return [
        WhatIf(words, one.strategy, one.useful_steps_per_s, one.name != now.name) for words, one in answers
    ]
