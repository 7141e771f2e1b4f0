"""One strategy on the stand-in model in virtual time: what it reaches, and what its steps are worth."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from freewheel import strategies
from freewheel.planning import candidates
from freewheel.planning.cost import steps_needed
from freewheel.planning.probe import Probe
from freewheel.planning.setting import Setting
from freewheel.planning.shorter import shorter
from freewheel.sim.driver import Simulation

FAIR = ("server", "group")
"""Where many talk to one, and wait for its answer, it matters that TCP shares that one's port fairly."""
GROWS = 1.4
"""A drift² whose last third is so many times the third before has not settled."""


@dataclass(frozen=True)
class Forecast:
    """What is expected of one strategy; its fields are the keys of the JSON."""

    strategy: str
    """With its settings, as `fw.attach` takes it."""
    useful_steps_per_s: float
    """Worker-steps per second over steps_needed: the rate of synchronous steps that would get as far."""
    steps_per_s: float
    ideal_share: float
    idle_share: float
    staleness_mean: float
    """In the strategy's own measure."""
    staleness_max: float
    bytes_per_step: float
    drift: float
    """Root mean square distance of a worker from the mean of all, in lengths of one update."""
    discrepancy: float
    """The largest distance between two workers, in lengths of one update."""
    grows: bool
    """Whether they were still drifting apart, or falling behind, at the end: then its cost is too low."""
    lag: float
    """Steps of all workers that the model a gradient is taken at lacks."""
    noise: float
    """Of the answer, against the mean of all gradients."""
    steps_needed: float
    """Worker-steps for one of synchronous SGD, by `cost.py`."""
    why: str
    waits_for: str
    keeps_mean: bool
    memory_gb: float
    """What a worker needs beside activations and data."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def forecast(
    spec: str,
    setting: Setting,
    steps: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Forecast:
    """Simulate a strategy; None: as many steps as it needs to show itself."""
    strategy, probe = strategies.resolve(spec), Probe()
    small = shorter(strategy, setting)
    fair = strategy.waits_for in FAIR
    scenario = small.scenario(steps or candidates.steps(strategy, small), fair)
    if strategy.momentum:  # the strategy insists on one; lr is scaled to it
        scenario = replace(scenario, momentum=None)
    simulation = Simulation(strategy, probe, scenario, progress=lambda done, total: progress(done / total))
    result = simulation.run()
    squares = [sample.consensus for sample in result.curve]
    grows = not strategy.lockstep() and (_grows(squares, 0.01) or _grows(probe.lags, 1.0))
    # Where all step together, whole intervals; else what it has settled to; or where it was at the end.
    begin = 0.0 if strategy.lockstep() else 2 / 3 if grows else 1 / 2
    drift = _mean_from(begin, squares) ** 0.5
    lag = max(0.0, _mean_from(begin, probe.lags))
    needed = steps_needed(setting.workers, drift, lag, probe.noise, setting.sensitivity)
    steps_per_s, ideal = result.steps_per_s, setting.scenario(1).compute.ideal_rate(setting.workers)
    if small is not setting:  # where all wait, each makes as many steps; else each as many as it can
        waits = strategy.lockstep()
        steps_per_s = steps_per_s * setting.workers / small.workers if waits else result.ideal_share * ideal
    return Forecast(
        strategy=spec,
        useful_steps_per_s=steps_per_s / needed,
        steps_per_s=steps_per_s,
        ideal_share=min(1.0, steps_per_s / ideal),
        idle_share=result.idle_share,
        staleness_mean=result.staleness_mean,
        staleness_max=result.staleness_max,
        bytes_per_step=simulation.sent_bytes / simulation.completed,
        drift=drift,
        discrepancy=result.discrepancy_max,
        grows=grows,
        lag=lag,
        noise=probe.noise,
        steps_needed=needed,
        why=strategy.convergence,
        waits_for=strategy.waits_for,
        keeps_mean=strategy.keeps_mean,
        memory_gb=candidates.needed_gb(strategy.name, setting),
    )


def _grows(values: Sequence[float], least: float) -> bool:
    """Whether the last third of a run is well above the third before."""
    third = len(values) // 3
    before = _mean_from(0.5, values[: len(values) - third])
    return _mean_from(2 / 3, values) > max(least, GROWS * before)


def _mean_from(begin: float, values: Sequence[float]) -> float:
    """The mean from a share of the run on."""
    return statistics.fmean(values[int(begin * len(values)) :])


def reweighed(one: Forecast, setting: Setting) -> Forecast:
    """The same run under another sensitivity."""
    needed = steps_needed(setting.workers, one.drift, one.lag, one.noise, setting.sensitivity)
    return replace(one, steps_needed=needed, useful_steps_per_s=one.steps_per_s / needed)
