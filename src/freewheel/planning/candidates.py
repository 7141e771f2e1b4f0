"""Which strategies a plan compares, with settings that suit the machines, and how long each is simulated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from freewheel import strategies
from freewheel.errors import ConfigError
from freewheel.planning.setting import Setting
from freewheel.strategy import Strategy

ROUNDS = 5
"""How many rounds of its communication a strategy is watched for."""
LEAST, MOST = 24, 300
"""Steps of each worker that are simulated."""
MESSAGES = 40_000
"""Messages of merges that a simulated run may have, about."""
WORKER_STEPS = 16_000
"""Steps of all workers that it may have."""
COPIES = 2
"""Weights and gradients: what training alone needs."""


def fitting(setting: Setting) -> list[str]:
    """Every strategy that can be used by so many workers, with the settings it needs on these machines."""
    found = []
    for name in strategies.ALL:
        with contextlib.suppress(ConfigError):
            spec = _fitted(name, setting)
            strategies.resolve(spec).check(setting.workers)
            found.append(spec)
    return found


def _fitted(name: str, setting: Setting) -> str:
    settings = strategies.ALL[name].suited(setting)
    return ":".join([name, *(f"{key}={value}" for key, value in settings.items())])


def chosen(specs: Sequence[str], setting: Setting) -> list[str]:
    """The strategies asked for; a name without settings gets those that fit."""
    found = []
    for spec in specs:
        strategy = strategies.resolve(spec)
        strategy.check(setting.workers)
        found.append(_fitted(spec, setting) if ":" not in spec else spec)
    return list(dict.fromkeys(found))


def needed_gb(name: str, setting: Setting) -> float:
    """What a worker must have in memory, activations and data left out."""
    vectors = COPIES + strategies.ALL[name].keeps_vectors
    return (vectors * setting.model_mb + setting.optimizer_mb) / 1e3


LONG = 30_000
"""Worker-steps that may be simulated where one exchange outlasts hundreds of steps."""


def too_large(specs: Sequence[str], setting: Setting) -> dict[str, float]:
    """Those that need more memory than there is, and how many GB; training alone must fit."""
    if setting.memory_gb is None:
        return {}
    alone_gb = needed_gb("none", setting)
    if alone_gb > setting.memory_gb:
        raise ConfigError(
            f"a model of {setting.model_mb:g} MB needs at least {alone_gb:g} GB on every worker (weights and "
            f"gradients, without activations), and there are {setting.memory_gb:g} GB. Take a smaller model, "
            "or workers with more memory: Freewheel does not split a model."
        )
    needed = {spec: needed_gb(spec.partition(":")[0], setting) for spec in specs}
    return {spec: gb for spec, gb in needed.items() if gb > setting.memory_gb}


def steps(strategy: Strategy, setting: Setting) -> int:
    """Steps of each worker to simulate: several rounds of communication, within what a machine does soon."""
    n, between = setting.workers, _steps_between(strategy)
    period = float(between)
    if strategy.waits_for == "nobody":  # steps go on while a round is under way
        period = max(period, strategy.round_s(setting) / setting.grad_s)
    if strategy.waits_for == "server":  # its own worker goes on while n others share its port, there and back
        period = max(period, 2 * setting.model_s / setting.grad_s)
    # A merge beside training shows itself when the one before it is over, too.
    least = 3 if strategy.reduces and strategy.merges_beside else 1
    enough = LEAST * (1 + 5 * setting.jitter) / period  # rounds for a good mean
    wanted = max(ROUNDS if between < LEAST else 2, enough)
    if strategy.reduces:
        wanted = max(least, min(wanted, MESSAGES // (2 * n * (n - 1))))
    few = WORKER_STEPS / n
    most = max(LEAST, min(MOST, few), min(least * period, few) if strategy.reduces else 0)
    if strategy.waits_for in ("nobody", "server") and not strategy.reduces:
        # else it might end before an exchange
        most = max(most, min((4 if strategy.waits_for == "nobody" else 2) * period, LONG / n))
    return max(2, math.ceil(min(wanted * period, most) / between) * between)  # whole intervals


def _steps_between(strategy: Strategy) -> int:
    """How many steps lie between two communications of a strategy."""
    given = vars(strategy)
    interval = given.get("interval") or given.get("every") or (given.get("tau") or 2) // 2
    return max(1, int(interval)) * int(given.get("global_every", 1))
