"""A plan: forecasts of all strategies, which to use and how, and what would change that."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from freewheel.numbers import short, speed
from freewheel.planning.forecast import CEILING, Forecast, candidates, forecast, steps_needed
from freewheel.planning.setting import Setting

TIE = 0.05  # forecasts closer than this are alike: the simpler one is taken
CONTENDERS = 5  # how many of the best are looked at again when something changes
SYNCHRONOUS = ("allreduce", "sasgd", "nodelay")
Progress = Callable[[str, float], None]  # is told what is simulated, and which share of the whole is done


@dataclass(frozen=True)
class WhatIf:
    """The best strategy if one thing were different, and whether that is not the plan's."""

    change: str
    strategy: str
    useful_steps_per_s: float
    changes: bool


@dataclass(frozen=True)
class Plan:
    """Which strategy to use, and why; the forecasts are ranked, `none` last."""

    setting: Setting
    forecasts: tuple[Forecast, ...]
    recommended: Forecast
    what_if: tuple[WhatIf, ...]
    left_out: dict[str, str]

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
    _, left_out = candidates(strategies, setting)
    (found,) = _forecasts([("", setting)], strategies, steps, progress, end=0.5 if what_if else 1.0)
    answers = _what_ifs(found, setting, strategies, steps, progress) if what_if else []
    return Plan(setting, tuple(found), best(found), tuple(answers), left_out)


def scale(
    setting: Setting,
    sizes: Sequence[int],
    strategies: Sequence[str] = (),
    *,
    steps: int | None = None,
    progress: Progress = lambda what, share: None,
) -> dict[int, list[Forecast]]:
    """Ranked forecasts for each of several numbers of workers."""
    # Sizes that cannot be are refused before the first is simulated.
    settings = [(f"{size} workers: ", replace(setting, workers=size)) for size in sizes]
    return dict(zip(sizes, _forecasts(settings, strategies, steps, progress), strict=True))


def ranked(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """The most useful first; no communication, which nobody can choose, last."""
    return sorted(forecasts, key=lambda one: (one.name == CEILING, -one.useful_steps_per_s))


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """The most useful one; of those within TIE of it, the one that asks least of its user."""
    usable = [one for one in forecasts if one.name != CEILING]
    enough = (1 - TIE) * max(one.useful_steps_per_s for one in usable)
    alike = [one for one in usable if one.useful_steps_per_s >= enough]
    return min(alike, key=asks)


def asks(one: Forecast) -> tuple[float, ...]:
    """What it costs its user, the worst first: unequal replicas, lost updates, waiting, bytes."""
    return one.discrepancy > 0, not one.keeps_mean, one.waits_for != "nobody", one.bytes_per_step


def _forecasts(
    settings: Sequence[tuple[str, Setting]],
    asked: Sequence[str],
    steps: int | None,
    progress: Progress,
    begin: float = 0.0,
    end: float = 1.0,
) -> Iterator[list[Forecast]]:
    """Ranked forecasts in each of the named settings; progress goes from `begin` to `end`."""
    for at, (name, setting) in enumerate(settings):
        specs, found = candidates(asked, setting)[0], []
        for number, spec in enumerate(specs, 1):
            found.append(forecast(spec, setting, steps))
            done = (at + number / len(specs)) / len(settings)
            progress(name + spec, begin + (end - begin) * done)
        yield ranked(found)


def changed(setting: Setting) -> list[tuple[str, Setting]]:
    faster = replace(setting, link_mbit=10 * setting.link_mbit, host_mbit=None)
    smaller = replace(setting, model_mb=setting.model_mb / 10)
    changes = [(f"a model of {short(smaller.model_mb)} MB", smaller)]
    if not setting.alone:
        changes.append((f"links of {speed(faster.link_mbit)}", faster))
    if setting.slow_link:
        changes.append(("no slow link", replace(setting, slow_link={})))
    if setting.slow:
        changes.append(("no slow worker", replace(setting, slow={})))
    else:
        changes.append(("one worker 5 times slower", replace(setting, slow={setting.workers - 1: 5.0})))
    return changes


def _what_ifs(
    found: Sequence[Forecast], setting: Setting, specs: Sequence[str], steps: int | None, progress: Progress
) -> list[WhatIf]:
    """Choose again among the best few and the synchronous ones, with one thing different at a time."""
    now = best(found)
    names = [one.name for one in found if one.name != CEILING]
    again = {*names[:CONTENDERS], now.name, *SYNCHRONOUS}
    asked = [spec for spec in specs or names if spec.partition(":")[0] in again]
    changes = changed(setting)
    settings = [(f"if {words}: ", other) for words, other in changes]
    chosen = [best(one) for one in _forecasts(settings, asked, steps, progress, begin=0.5)]
    sharper = []
    for one in found:
        needed = steps_needed(setting.workers, one.drift, one.lag, one.noise, 10 * setting.sensitivity)
        sharper.append(replace(one, steps_needed=needed, useful_steps_per_s=one.steps_per_s / needed))
    words = [*(words for words, _ in changes), "a loss 10 times as sensitive to drift and lag"]
    return [
        WhatIf(change, one.strategy, one.useful_steps_per_s, one.name != now.name)
        for change, one in zip(words, [*chosen, best(sharper)], strict=True)
    ]
