"""From forecasts to a choice: the ranking, what to use, and what would change it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from freewheel.errors import ConfigError
from freewheel.numbers import short, speed
from freewheel.planning import candidates
from freewheel.planning.forecast import Forecast, forecast, reweighed
from freewheel.planning.setting import Setting

TIE = 0.05
"""Forecasts closer than this are alike: the simpler one is taken."""
CONTENDERS = 5
"""How many of the best are looked at again when something changes."""
CEILING = "none"

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


def ranked(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The most useful first; no communication, which is no choice, last."""
    return sorted(forecasts, key=lambda one: (name(one) == CEILING, -one.useful_steps_per_s))


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """The most useful one; among those that are as good, the one that asks least of its user.

    That is: replicas that are equal, then those whose mean is kept, then nobody who waits, then few bytes.
    """
    usable = [one for one in forecasts if name(one) != CEILING]
    if not usable:
        raise ConfigError("there is nothing to choose from: name at least one strategy that communicates.")
    enough = (1 - TIE) * max(one.useful_steps_per_s for one in usable)
    alike = [one for one in usable if one.useful_steps_per_s >= enough]
    return min(alike, key=_asks)


def _asks(one: Forecast) -> tuple[bool, bool, bool, float]:
    return one.discrepancy > 0, not one.keeps_mean, one.waits_for != "nobody", one.bytes_per_step


def name(one: Forecast) -> str:
    """A strategy's name without its settings."""
    return one.strategy.partition(":")[0]


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
            changes.append(
                (f"links of {speed(faster.link_mbit)} and no slow worker", replace(faster, slow={}))
            )
    else:
        changes.append(("one worker 5 times slower", replace(setting, slow={setting.workers - 1: 5.0})))
    changes.append(
        (f"a model of {short(setting.model_mb / 10)} MB", replace(setting, model_mb=setting.model_mb / 10))
    )
    return changes


def what_ifs(
    found: Sequence[Forecast], setting: Setting, specs: Sequence[str], steps: int | None, progress: Progress
) -> list[WhatIf]:
    """Choose again among the best few and the synchronous ones, with one thing different at a time."""
    now = best(found)
    names = [name(one) for one in found if name(one) != CEILING]
    again = [one for one in names if one in (*names[:CONTENDERS], name(now), "allreduce", "sasgd", "nodelay")]
    changes = changed(setting)
    answers = []
    for at, (words, other) in enumerate(changes):
        show = part(progress, at / len(changes), (at + 1) / len(changes), f"if {words}: ")
        kept = [one for one in specs if one.partition(":")[0] in again]
        refit = candidates.chosen(kept or again, other)
        answers.append((words, best(forecasts(refit, other, steps, show))))
    sharper = replace(setting, sensitivity=10 * setting.sensitivity)
    words = "a loss 10 times as sensitive to drift and lag"
    answers.append((words, best([reweighed(one, sharper) for one in found])))
    return [
        WhatIf(words, one.strategy, one.useful_steps_per_s, name(one) != name(now)) for words, one in answers
    ]
