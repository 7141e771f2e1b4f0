"""Which strategies a plan compares, with settings that suit the machines, and how long each is simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from freewheel import strategies, theory
from freewheel.errors import ConfigError
from freewheel.planning.setting import Setting
from freewheel.strategy import Strategy

SHARE = 0.1
"""What a merge that training waits for may cost, as a share of the steps between two merges."""
MOST_STEPS = 64
"""No interval or τ is chosen longer than this."""
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
VECTORS = {"none": 0, "allreduce": 1, "nodelay": 2, "adpsgd": 2, "nodelay_free": 2}
"""Vectors as long as the model that a strategy keeps beside them (docs/benchmarks/real.md)."""
OTHERS = 3
"""The same for the rest, by their code: a base, a snapshot and what arrives."""


def fitting(setting: Setting) -> list[str]:
    """Every strategy, with the settings it needs on these machines."""
    return [_fitted(name, setting) for name in strategies.ALL if possible(name, setting)]


def possible(name: str, setting: Setting) -> bool:
    """Whether a strategy can be used with so many workers."""
    try:
        strategies.resolve(_fitted(name, setting)).check(setting.workers)
    except ConfigError:
        return False
    return True


def _fitted(name: str, setting: Setting) -> str:
    if name == "nodelay":
        tau = theory.nodelay_min_tau(setting.merge_s, setting.grad_s)
        return f"nodelay:tau={min(max(tau, 4), MOST_STEPS)}"
    if name == "sasgd":
        return f"sasgd:interval={_interval(setting)}"
    if name == "hierarchical_sasgd" and setting.workers_per_node > 1 and setting.nodes > 1:
        return f"hierarchical_sasgd:nodes={setting.nodes}"
    return name


def _interval(setting: Setting) -> int:
    """The shortest power of two, from 2 on, at which merges cost little."""
    wanted = setting.merge_s / (SHARE * setting.grad_s)
    return int(min(MOST_STEPS, max(2, 2 ** math.ceil(math.log2(max(1.0, wanted))))))


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
    vectors = COPIES + VECTORS.get(name, OTHERS)
    return (vectors * setting.model_mb + setting.optimizer_mb) / 1e3


LONG = 30_000
"""Worker-steps that may be simulated where one exchange outlasts hundreds of steps."""


def too_large(specs: Sequence[str], setting: Setting) -> list[str]:
    """Those that need more memory than there is; if even training alone does, there is no plan."""
    if setting.memory_gb is None:
        return []
    alone_gb = needed_gb("none", setting)
    if alone_gb > setting.memory_gb:
        raise ConfigError(
            f"a model of {setting.model_mb:g} MB needs at least {alone_gb:g} GB on every worker (weights and "
            f"gradients, without activations), and there are {setting.memory_gb:g} GB. Take a smaller model, "
            "or workers with more memory: Freewheel does not split a model."
        )
    name = {spec: spec.partition(":")[0] for spec in specs}
    return [spec for spec in specs if needed_gb(name[spec], setting) > setting.memory_gb]


def steps(strategy: Strategy, setting: Setting) -> int:
    """Steps of each worker to simulate: several rounds of communication, within what a machine does soon."""
    n, between, merges = setting.workers, _steps_between(strategy), merges_all(strategy)
    took_s = {"none": 0.0, "dasgd": (n - 1) * setting.model_s, "adpsgd": 2 * setting.model_s}
    period = float(between)
    if strategy.waits_for == "nobody":  # steps go on while a round is under way
        period = max(period, took_s.get(strategy.name, setting.merge_s) / setting.grad_s)
    if strategy.waits_for == "server":  # its own worker goes on while n others share its port, there and back
        period = max(period, 2 * setting.model_s / setting.grad_s)
    # A merge beside training shows itself when the one before it is over, too.
    least = 3 if strategy.name in ("nodelay", "nodelay_free") else 1
    enough = LEAST * (1 + 5 * setting.jitter) / period  # rounds for a good mean
    wanted = max(ROUNDS if between < LEAST else 2, enough)
    if merges:
        wanted = max(least, min(wanted, MESSAGES // (2 * n * (n - 1))))
    few = WORKER_STEPS / n
    most = max(LEAST, min(MOST, few), min(least * period, few) if merges else 0)
    if strategy.waits_for in ("nobody", "server") and not merges:  # else it might end before an exchange
        most = max(most, min((4 if strategy.waits_for == "nobody" else 2) * period, LONG / n))
    return max(2, math.ceil(min(wanted * period, most) / between) * between)  # whole intervals


def merges_all(strategy: Strategy) -> bool:
    """Whether it moves the model around rings of many workers, hop by hop."""
    return strategy.name == "nodelay_free" or (strategy.merges() and strategy.name != "dpsgd")


def _steps_between(strategy: Strategy) -> int:
    """How many steps lie between two communications of a strategy."""
    given = vars(strategy)
    interval = given.get("interval") or given.get("every") or (given.get("tau") or 2) // 2
    return max(1, int(interval)) * int(given.get("global_every", 1))
