"""What a run measured, beside what the papers promise for it.

Only rows that follow from the figures of a `Result`. Left out for want of data: AD-PSGD's Lemma 7 needs the
gradient noise of the task. DASGD's γ·Q·S_ij needs the sets of gradients two replicas differ by; its recorded
staleness counts an update as known once it has arrived, before it is in the weights, so it bounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from freewheel import theory
from freewheel.records.result import Result
from freewheel.show.rates import step_times_s

PAPER = "Talyansky et al., ICLR 2019 submission"
ABOUT = 0.15
"""How far from its value, in parts of it, a figure may lie that a theory gives as "about"."""
LOCKSTEP = ("all", "neighbours")
"""Values of waits_for under which all workers make the same number of steps."""

Kind = Literal["at most", "about"]


@dataclass(frozen=True)
class Bound:
    """One measured figure and what theory says it is at most, or about."""

    name: str
    measured: float
    bound: float
    unit: str
    source: str
    kind: Kind

    @property
    def share(self) -> float | None:
        """Measured over bound; None of a bound of 0."""
        return self.measured / self.bound if self.bound else None

    @property
    def holds(self) -> bool:
        """Whether the run kept to it, up to rounding; "about" allows 15 %."""
        over, rounding = self.measured - self.bound, 1e-9 + 1e-6 * abs(self.bound)
        return over <= rounding if self.kind == "at most" else abs(over) <= ABOUT * abs(self.bound) + rounding


class Facts:
    """A result, and what the theories ask about its settings; None: not known, so that nothing follows."""

    def __init__(self, result: Result) -> None:
        settings, scenario = result.settings, result.scenario
        strategy: dict[str, Any] = settings.get("strategy", {})
        self.result, self.n = result, result.workers
        self.tau: Any = strategy.get("tau")
        self.interval: Any = strategy.get("interval")
        self.scale, self.global_every = strategy.get("scale"), strategy.get("global_every")
        self.lockstep = settings.get("waits_for") in LOCKSTEP
        self.free = settings.get("waits_for") == "nobody" and self.tau is None
        self.real = settings.get("clock") == "wall"
        self.steps = result.worker_steps / result.workers  # of each worker
        compute = scenario.get("compute", {})
        self.undisturbed = not scenario.get("faults") and not compute.get("pauses")
        self.times_s = self._measured_s() if self.real else self._told_s(compute)
        """What a step takes each worker that does not wait."""
        self.ring_s = self._ring_s(scenario.get("links", {}))

        # With momentum or AdamW an update is no longer the learning rate times one gradient.
        plain = settings.get("momentum") == 0 and scenario.get("optimizer", "sgd") == "sgd"
        norm = max((worker.get("gradient_norm_max", 0.0) for worker in result.by_worker), default=0.0)
        known = "lr" in settings and plain and result.loss is not None and norm > 0
        self.update = norm * settings["lr"] if known else None  # the largest step of the weights

    def _told_s(self, compute: dict[str, Any]) -> list[float]:
        """Where a gradient takes each worker the same time in the whole run."""
        if not self.undisturbed or compute.get("kind") != "constant" or compute.get("of"):
            return []
        slow = {int(rank): factor for rank, factor in compute.get("slow", {}).items()}
        return [compute["ms"] / 1e3 * slow.get(rank, 1.0) for rank in range(self.n)]

    def _measured_s(self) -> list[float]:
        workers = self.result.by_worker
        if self.lockstep and (len(workers) != self.n or len({worker["steps"] for worker in workers}) > 1):
            return []  # somebody came, went or fell behind
        return list(step_times_s(workers).values())

    def _ring_s(self, links: dict[str, Any]) -> float | None:
        """What a merge of all workers takes, where all links are equal and nothing else is sent."""
        unequal = any(factor != 1 for factor in links.get("slow", {}).values())
        if not links or unequal or links["backbone_mbit"] is not None or links["workers_per_node"] > 1:
            return None
        latency_s = links["latency_ms"] / 1e3
        bytes_per_s = min(links["mbit"], links.get("out_mbit") or links["mbit"]) * 1e6 / 8
        size = self.result.settings["model_bytes"]
        short_s = 2 * latency_s if self.n > 1 else 0.0  # "have" and "commit"
        return theory.ring_allreduce_s(self.n, size, latency_s, bytes_per_s) + short_s

    @property
    def ideal_per_s(self) -> float | None:
        """Σ 1/t_i: steps in a second if nobody ever waits."""
        return sum(1 / t for t in self.times_s) or None

    @property
    def slowest_per_s(self) -> float | None:
        """n / max t_i: steps in a second if all wait for the slowest."""
        return self.n / max(self.times_s) if self.lockstep and self.times_s else None

    def nodelay_idle(self) -> float | None:
        """While a merge outlasts the gradients beside it; where all workers are equal."""
        if len(set(self.times_s)) != 1 or self.ring_s is None or not self._whole(self.tau // 2):
            return None
        return theory.nodelay_idle_share(self.tau, self.ring_s, self.times_s[0])

    def step_ms(self, interval: int) -> float | None:
        """A gradient of the slowest, and its part of a merge in every interval."""
        if not self.times_s or self.ring_s is None or not self._whole(interval):
            return None
        return 1e3 * theory.sasgd_step_s(max(self.times_s), self.ring_s, interval)

    def _whole(self, interval: int) -> bool:
        """Whether whole intervals make up nearly all of the run: then a mean over one is a mean over it."""
        return self.steps // interval * interval >= 0.9 * self.steps

    def drift(self, steps: int) -> float | None:
        """How far two workers get from each other in so many steps of their own."""
        return None if self.update is None else theory.sasgd_drift(1.0, steps, self.update)

    def one_update(self) -> float | None:
        """Replicas are equal after equally many steps; a sample between two of them sees one update."""
        if self.result.loss is None:
            return None  # nothing was trained, so nothing can differ
        even = all(sample.worker_steps % self.n == 0 for sample in self.result.curve)
        return 0.0 if even else self.update

    def mean_delay(self) -> float | None:
        """The updates of others before a worker's last one; those after it are few in a long run."""
        missing = self.n * self.result.staleness_max / self.result.worker_steps
        expected = theory.asgd_mean_delay(self.n)
        return expected if self.undisturbed and missing <= ABOUT * expected else None


FIGURES: dict[str, tuple[str, Callable[[Facts], float]]] = {
    "largest discrepancy": ("", lambda f: f.result.discrepancy_max),
    "largest staleness": ("steps", lambda f: f.result.staleness_max),
    "mean gradient delay": ("updates", lambda f: f.result.staleness_mean),
    "time per step": ("ms", lambda f: 1e3 * f.result.virtual_s / f.steps),
    "idle share": ("", lambda f: f.result.idle_share),
    "worker-steps per second": ("per s", lambda f: f.result.steps_per_s),
}
"""What is measured: its unit, and how."""

Law = tuple[str, str, Kind, str, Callable[[Facts], float | None]]
"""Whose (nothing: anybody's), what, which kind of bound, where from, and how much; None: nothing."""

LAWS: tuple[Law, ...] = (
    ("nodelay", "largest discrepancy", "at most", f"2·L·τ·η: {PAPER}", lambda f: f.drift(f.tau)),
    ("nodelay", "largest staleness", "at most", f"τ: {PAPER}", lambda f: f.tau),
    ("nodelay", "idle share", "about", f"a merge beside every τ/2 gradients: {PAPER}", Facts.nodelay_idle),
    ("nodelay_free", "largest staleness", "at most", f"τ: {PAPER}", lambda f: f.tau),
    ("sasgd", "largest discrepancy", "at most", "2·γ·T·G: triangle inequality",
     lambda f: f.drift(f.interval) if f.scale is None else None),
    ("sasgd", "time per step", "about", "t_grad + t_allreduce/T: Cong et al., ICPP 2017",
     lambda f: f.step_ms(f.interval)),
    # A mean inside a node takes no worker further from the last common model than its members were.
    ("hierarchical_sasgd", "largest discrepancy", "at most", "2·γ·k·T1·G: triangle inequality",
     lambda f: f.drift(f.interval * f.global_every)),
    ("allreduce", "largest discrepancy", "at most", "equal after equal steps: synchronous SGD",
     Facts.one_update),
    ("allreduce", "largest staleness", "at most", "no gradient is late: synchronous SGD", lambda _: 0.0),
    ("allreduce", "time per step", "about", "max t_i + 2(n-1) hops and 2 short messages: alpha-beta model",
     lambda f: f.step_ms(1)),
    ("asgd", "mean gradient delay", "about", "n - 1 at any speeds: counting at the server", Facts.mean_delay),
    # What waiting for all, or for nobody, means for the speed of any strategy. The gradients under way at the
    # end are at most one step per worker.
    ("", "idle share", "at most", "nobody waits", lambda f: 0.0 if f.free and f.undisturbed else None),
    ("", "worker-steps per second", "about", "Σ 1/t_i, where nobody waits",
     lambda f: f.ideal_per_s if f.free and f.steps >= 10 else None),
    ("", "worker-steps per second", "at most", "n / max t_i, where all wait for the slowest",
     lambda f: f.slowest_per_s if len(set(f.times_s)) > 1 else None),
)  # fmt: skip

REAL_LAWS: tuple[Law, ...] = (
    *(law for law in LAWS if law[1] == "largest staleness"),
    ("", "worker-steps per second", "at most", "Σ 1/t_i, t_i as measured: none ever waits",
     lambda f: None if f.lockstep else f.ideal_per_s),
    ("", "worker-steps per second", "at most", "n / max t_i, t_i as measured: all wait for the slowest",
     lambda f: f.slowest_per_s),
)  # fmt: skip
"""Of real machines, which do other things meanwhile."""


def bounds(result: Result) -> list[Bound]:
    """The rows for one run; none where nothing is known about its strategy or its scenario."""
    facts, found = Facts(result), []
    for whose, what, kind, source, bound_of in REAL_LAWS if facts.real else LAWS:
        if whose in ("", result.strategy) and (bound := bound_of(facts)) is not None:
            unit, measured = FIGURES[what]
            found.append(Bound(what, measured(facts), bound, unit, source, kind if bound else "at most"))
    return found
