"""A forecast: one strategy on a stand-in model in virtual time, how fast it is and what its steps are worth.

Also which strategies a plan compares, with settings that suit the machines, and how long each is simulated.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from freewheel import strategies
from freewheel.errors import ConfigError
from freewheel.planning.setting import Setting
from freewheel.sim.driver import Simulation
from freewheel.strategy import Strategy
from freewheel.task import Task

# -- the stand-in model --
SIZE, SIGNAL = 256, 0.1  # against noise of length 1: near an optimum, gradients are mostly noise


class Probe(Task):
    """The stand-in model: gradients that are one part signal, the same for all, and ten parts noise.

    Its weights are a vector x that begins at 0; its loss is linear, with a new slope for every gradient. The
    slope's first number is the signal, always the same; the others are noise of length 1. So distances of
    replicas are counted in updates; how far the first number of a replica is behind says how many gradients
    it lacks; and how much noise is left in the answer says whether it was averaged.
    """

    lr: ClassVar[float] = 1.0

    def prepare(self, workers: int, seed: int) -> None:
        self.workers, self.size = workers, workers * -(-SIZE // workers)  # a ring cuts it into equal parts
        self.lags: list[float] = []  # for each gradient: how many steps of all its replica lacked
        self.before = [0] * workers  # how many gradients had been taken when each worker took its last
        self.total = torch.zeros(self.size)

    def model(self) -> nn.Module:
        return nn.ParameterList([torch.zeros(self.size)])

    def batch(self, worker: int, generator: torch.Generator) -> tuple[int, Tensor]:
        slope = torch.randn(self.size, generator=generator).div_(self.size**0.5)
        slope[0] = SIGNAL
        return worker, slope

    def loss(self, model: nn.Module, batch: tuple[int, Tensor]) -> Tensor:
        """Its gradient is minus the slope, so a step of rate 1 moves x by the slope."""
        (worker, slope), (x,) = batch, model.parameters()
        self.lags.append(self.before[worker] / self.workers - float(x[0].detach()) / SIGNAL)
        self.total += slope
        self.before[worker] = len(self.lags)
        return -torch.dot(x, slope)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """Minus the way made; keeps the answer's noise, relative to that of the mean of all gradients."""
        (x,), ideal = model.parameters(), self.total[1:].norm().item() / self.workers
        self.noise = (x[1:].norm().item() / ideal) ** 2 if ideal else 1.0
        return -x[0].item(), None

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """Minus the way made, plus how far noise has carried this worker."""
        (x,) = model.parameters()
        return -x[0].item() + x[1:].square().sum().item()


# -- what is simulated, and for how long --
CEILING = "none"  # no communication: the most that can be reached, and nothing to choose
ROUNDS = 5  # of its communication, for which a strategy is simulated
LEAST, MOST = 24, 500  # simulated steps of each worker
WORKER_STEPS, MESSAGES = 30_000, 40_000  # about what a simulation may have: of all workers, and of merges
COPIES = 2  # weights and gradients, which training alone needs


def candidates(asked: Sequence[str], setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Which strategies to simulate of those asked for (none: all), with settings that suit the machines.

    Also those that are left out because they need too much memory, each with the reason.
    """
    if setting.workers < 2:
        raise ConfigError("a plan is for 2 workers or more; one trains alone: python train.py.")
    specs: list[str] = []
    left_out: dict[str, str] = {}
    for spec in asked or strategies.ALL:
        strategy = strategies.resolve(spec)
        if ":" not in spec:
            spec = ":".join([spec, *(f"{key}={value}" for key, value in strategy.suited(setting).items())])
        try:
            strategies.resolve(spec).check(setting.workers)
        except ConfigError:
            if asked:
                raise
            continue
        if setting.memory_gb is not None and needed_gb(strategy, setting) > setting.memory_gb:
            left_out[spec] = f"needs more than {setting.memory_gb:g} GB"
        elif spec not in specs:
            specs.append(spec)
    if not set(specs) <= {CEILING}:
        return specs, left_out
    if not left_out:
        raise ConfigError("name at least one strategy that communicates.")
    least = min(needed_gb(strategies.resolve(spec), setting) for spec in left_out)
    raise ConfigError(
        f"no strategy fits into {setting.memory_gb or 0:g} GB on each worker: a model of "
        f"{setting.model_mb:g} MB needs at least {least:g} GB. Freewheel does not split a model."
    )


def needed_gb(strategy: Strategy, setting: Setting) -> float:
    """What a worker needs in memory, activations and data left out."""
    return ((COPIES + strategy.keeps_vectors) * setting.model_mb + setting.optimizer_mb) / 1e3


def steps_shown(strategy: Strategy, setting: Setting) -> int:
    """Steps of each worker to simulate: several rounds of communication, but not for too long."""
    n, between = setting.workers, steps_between(strategy)
    period = float(between)
    if strategy.waits_for == "nobody":  # steps go on while a round is under way
        period = max(period, strategy.round_s(setting) / setting.grad_s)
    if strategy.waits_for == "server":  # its own worker goes on while all share its port, there and back
        period = max(period, 2 * setting.model_s / setting.grad_s)
    rounds = max(ROUNDS, LEAST * (1 + 5 * setting.jitter) / period)  # enough for a good mean
    if strategy.reduces:
        rounds = min(rounds, MESSAGES // (2 * n * (n - 1)))
    most = max(LEAST, min(MOST, WORKER_STEPS / n))
    return max(2, math.ceil(min(rounds * period, most) / between) * between)  # whole intervals


def steps_between(strategy: Strategy) -> int:
    """Steps from one round of its communication to the next."""
    given = vars(strategy)
    interval = given.get("interval") or given.get("every") or (given.get("tau") or 2) // 2
    return max(1, int(interval)) * int(given.get("global_every", 1))


# -- what is expected --
LAG, DRIFT = 0.3, 4e-4  # what they cost, see `steps_needed`
MOST_IN_A_RING = 64  # larger rings are simulated with fewer workers
FAIR = ("server", "group")  # many wait for one, whose port TCP shares fairly
GROWS = 1.4  # a drift² whose last third is so many times the third before has not settled


@dataclass(frozen=True)
class Forecast:
    """What is expected of a strategy; the fields are the JSON's keys, which docs/PLAN.md explains."""

    strategy: str
    useful_steps_per_s: float
    steps_per_s: float
    ideal_share: float
    idle_share: float
    staleness_mean: float
    staleness_max: float
    bytes_per_step: float
    drift: float
    discrepancy: float
    grows: bool
    lag: float
    noise: float
    steps_needed: float
    why: str
    waits_for: str
    keeps_mean: bool
    memory_gb: float

    @property
    def name(self) -> str:
        """The strategy's name without its settings."""
        return self.strategy.partition(":")[0]

    @property
    def useful_share(self) -> float:
        """Useful steps over the ideal rate; without communication, all steps."""
        return self.ideal_share / (1.0 if self.name == CEILING else self.steps_needed)


def of(found: Sequence[Forecast], name: str) -> Forecast | None:
    return next((one for one in found if one.name == name), None)


def forecast(spec: str, setting: Setting, steps: int | None = None) -> Forecast:
    """Simulate a strategy; steps None: as many as `steps_shown` says."""
    strategy, probe = strategies.resolve(spec), Probe()
    small = shorter(strategy, setting)
    scenario = small.scenario(steps or steps_shown(strategy, small), strategy.waits_for in FAIR)
    if strategy.momentum:  # the strategy insists on one; lr is scaled to it
        scenario = replace(scenario, momentum=None)
    simulation = Simulation(strategy, probe, scenario)
    result = simulation.run()
    squares, together = [sample.consensus for sample in result.curve], strategy.lockstep()
    begin = 0.0 if together else 1 / 2  # in lockstep, whole intervals; else what it has settled to
    drift = _mean_from(begin, squares) ** 0.5
    lag = max(0.0, _mean_from(begin, probe.lags))
    needed = steps_needed(setting.workers, drift, lag, probe.noise, setting.sensitivity)
    steps_per_s, ideal = result.steps_per_s, setting.scenario(1).compute.ideal_rate(setting.workers)
    if small is not setting and together:  # each makes as many steps
        steps_per_s = steps_per_s * setting.workers / small.workers
    elif small is not setting:  # each makes as many as it can
        steps_per_s = result.ideal_share * ideal
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
        grows=not together and (_grows(squares, 0.01) or _grows(probe.lags, 1.0)),
        lag=lag,
        noise=probe.noise,
        steps_needed=needed,
        why=strategy.convergence,
        waits_for=strategy.waits_for,
        keeps_mean=strategy.keeps_mean,
        memory_gb=needed_gb(strategy, setting),
    )


def _grows(values: Sequence[float], least: float) -> bool:
    """Whether the last third of a run is well above the third before."""
    third = len(values) // 3
    return _mean_from(2 / 3, values) > max(least, GROWS * statistics.fmean(values[third : 2 * third + 1]))


def _mean_from(begin: float, values: Sequence[float]) -> float:
    return statistics.fmean(values[int(begin * len(values)) :])


def steps_needed(workers: int, drift: float, lag: float, noise: float, sensitivity: float) -> float:
    """Worker-steps for one of synchronous SGD: noise + S·(LAG·lag + DRIFT·n·drift²), 1 or more.

    Lag and drift are counted in updates; noise is what is left in the answer, relative to that of the mean of
    all gradients; S is the sensitivity. docs/PLAN.md says why, and where the constants come from.
    """
    return max(1.0, noise) + sensitivity * (LAG * max(0.0, lag) + DRIFT * workers * drift**2)


def shorter(strategy: Strategy, setting: Setting) -> Setting:
    """The setting with fewer workers, if the strategy merges all of very many; else the setting itself.

    A ring of n workers is 2(n-1) hops, each with the latency and 1/n of the model, and 2n(n-1) messages. With
    fewer workers, a longer latency and a slightly larger model it takes as long, and it still waits for the
    slowest worker.
    """
    n, m = setting.workers, MOST_IN_A_RING - MOST_IN_A_RING % setting.workers_per_node
    if n <= MOST_IN_A_RING or m < 2 or not strategy.reduces:
        return setting
    hops = (n - 1) / (m - 1)

    def slowest(given: Mapping[int, float]) -> dict[int, float]:
        return dict(enumerate(sorted(given.values(), reverse=True)[: m // 2]))

    return replace(
        setting,
        workers=m,
        model_mb=setting.model_mb * hops * m / n,
        latency_ms=setting.latency_ms * hops,
        message_ms=setting.message_ms * hops,
        slow=slowest(setting.slow),
        slow_link=slowest(setting.slow_link),
    )
