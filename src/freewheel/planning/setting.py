"""What a plan is about: workers, model, compute times and links."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from freewheel.errors import ConfigError
from freewheel.settings import setting
from freewheel.sim.scenario import Compute, Links, Scenario

MOST_WORKERS, MOST_MB = 1024, 1e7  # forecasts for more workers take too long


@dataclass(frozen=True)
class Setting:
    """The machines and the model of a plan; sizes in MB, times in ms, speeds in Mbit/s."""

    workers: int
    model_mb: float
    compute_ms: float  # mean time of a gradient on a worker that is not slow
    link_mbit: float = setting(1000.0, "Bandwidth of each worker, in and out; or --hosts.")
    latency_ms: float = setting(0.2, "Latency of every link; or --hosts.", rare=True)
    slow: Mapping[int, float] = setting(dict, "RANK:FACTOR, this worker computes slower; repeatable.")
    slow_link: Mapping[int, float] = setting(
        dict, "RANK:FACTOR, this worker's link is slower; repeatable.", rare=True
    )
    jitter: float = setting(0.0, "How much a worker's steps vary, e.g. 0.1: deviation of the logarithm.")
    workers_per_node: int = setting(1, "Workers that share a machine, in order of rank.")
    memory_gb: float | None = setting(
        None, "What each worker has; strategies that need more are left out.", rare=True
    )
    optimizer_mb: float = 0.0  # what the optimizer keeps in memory
    message_ms: float = setting(0.5, "What a message takes at its ends, beside the wire.", rare=True)
    node_mbit: float = 10_000.0  # how fast workers of one machine talk to each other
    # What all messages together may take: workers that share a machine share its cores. None: no limit.
    host_mbit: float | None = None
    sensitivity: float = setting(
        1.0, "How much drift and lag cost in convergence, against what digits shows.", rare=True
    )
    seed: int = setting(0, "One seed, one plan.", rare=True)

    def __post_init__(self) -> None:
        if self.workers > MOST_WORKERS or self.model_mb > MOST_MB:
            raise ConfigError(
                f"a plan is for at most {MOST_WORKERS} workers and models of {MOST_MB:,.0f} MB."
            )
        if not 0 <= self.jitter <= 3:
            raise ConfigError(
                f"the jitter is a share of the step time, as 0.1; it must not be {self.jitter:g}."
            )
        times = {"latency": self.latency_ms, "message's own time": self.message_ms}
        for what, value in (*times.items(), ("memory", self.memory_gb)):
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"the {what} must be 0 or more and finite, not {value:g}.")
        if not 0 < self.sensitivity < math.inf:
            raise ConfigError(f"the sensitivity must be above 0, not {self.sensitivity:g}.")
        self.scenario(1)  # checks the rest
        if self.workers > self.workers_per_node and self.workers % self.workers_per_node:
            raise ConfigError(
                f"{self.workers} workers cannot be split into machines of {self.workers_per_node}: every "
                "machine must have as many."
            )

    @property
    def nodes(self) -> int:
        return -(-self.workers // self.workers_per_node)

    @property
    def alone(self) -> bool:
        return self.nodes == 1

    def scenario(self, steps: int, fair: bool = False) -> Scenario:
        """The setting for the simulator; `fair`: messages share ports instead of queueing at them."""
        kind = "lognormal" if self.jitter else "constant"
        return Scenario(
            workers=self.workers,
            steps=steps,
            seed=self.seed,
            momentum=0.0,
            warmup=0,
            model_mb=self.model_mb,
            compute=Compute(ms=self.compute_ms, kind=kind, spread=self.jitter, slow=dict(self.slow)),
            links=Links(
                mbit=self.link_mbit,
                latency_ms=self.latency_ms + self.message_ms,
                slow=dict(self.slow_link),
                backbone_mbit=self._shared_mbit,
                workers_per_node=self.workers_per_node,
                node_mbit=self.node_mbit,
                node_latency_ms=self.message_ms,
                fair=fair,
            ),
            evaluations=steps,  # after every round: between two merges and after them
        )

    @property
    def _shared_mbit(self) -> float | None:
        """The speed that all messages share; None if the links together cannot exceed it."""
        if self.host_mbit is None or self.host_mbit >= self.workers * self.link_mbit:
            return None
        return self.host_mbit

    # -- times that choices are made by --

    @property
    def grad_s(self) -> float:
        """A gradient of a worker that is not slow."""
        return self.compute_ms / 1e3

    @property
    def model_s(self) -> float:
        """One model over one link, the slowest of them where they differ."""
        slowest = max((1.0, *self.slow_link.values()))
        mbit = self.node_mbit if self.alone else self.link_mbit / slowest
        if self._shared_mbit is not None:  # all send at once
            mbit = min(mbit, self._shared_mbit / self.workers)
        return self.model_mb * 8 / mbit

    @property
    def merge_s(self) -> float:
        """A ring of all workers: 2(n-1) hops with 1/n of the model each."""
        n = self.workers
        hop_s = (self.message_ms + (0.0 if self.alone else self.latency_ms)) / 1e3
        return 2 * (n - 1) * (hop_s + self.model_s / n)
