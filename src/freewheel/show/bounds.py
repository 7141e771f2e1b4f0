"""What a run measured, beside what the papers promise for it.

Only rows that follow from the figures of a `Result`. Left out for want of data: AD-PSGD's Lemma 7 needs the
gradient noise of the task. DASGD's γ·Q·S_ij needs the sets of gradients two replicas differ by; its recorded
staleness counts an update as known once it has arrived, before it is in the weights, so it bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from freewheel import theory
from freewheel.records.result import Result
from freewheel.show.rates import step_times_s

Kind = Literal["at most", "at least", "about"]

PAPER = "Talyansky et al., ICLR 2019 submission"
ABOUT = 0.15
"""How far from its value, in parts of it, a figure may lie that a theory gives as "about"."""
SHORT_BYTES = 64
"""What a message without a vector weighs."""
LOCKSTEP = ("all", "neighbours")
"""Values of waits_for under which all workers make the same number of steps."""


@dataclass(frozen=True)
class Bound:
    """One measured figure and what theory says it is at most, at least or about."""

    name: str
    measured: float
    bound: float
    unit: str
    source: str
    kind: Kind

    @property
    def share(self) -> float:
        """Measured over bound; for a bound of 0, 1 where it holds and infinite where it does not."""
        if self.bound == 0:
            return 1.0 if self.holds else math.inf
        return self.measured / self.bound

    @property
    def holds(self) -> bool:
        """Whether the run kept to it, up to rounding; "about" allows 15 %."""
        over = self.measured - self.bound
        rounding = 1e-9 + 1e-6 * abs(self.bound)
        if self.kind == "at most":
            return over <= rounding
        if self.kind == "at least":
            return over >= -rounding
        return abs(over) <= ABOUT * abs(self.bound) + rounding


class Facts:
    """A result, and what the theories ask about its settings; None: not known, so that nothing follows."""

    def __init__(self, result: Result) -> None:
        settings, scenario = result.settings, result.scenario
        self.result, self.n = result, result.workers
        strategy: dict[str, Any] = settings.get("strategy", {})
        self.tau: Any = strategy.get("tau")
        self.interval: Any = strategy.get("interval")
        self.scale, self.global_every = strategy.get("scale"), strategy.get("global_every")
        self.lockstep = settings.get("waits_for") in LOCKSTEP
        self.free = settings.get("waits_for") == "nobody" and self.tau is None
        self.real = settings.get("clock") == "wall"
        self.steps = result.worker_steps / result.workers
        """Steps per worker."""
        self.undisturbed = not scenario.get("faults") and not scenario.get("compute", {}).get("pauses")
        self.times_s = self._measured_s() if self.real else self._times_s(scenario)
        self.ring_s = self._ring_s(scenario)

        # With momentum or AdamW an update is no longer the learning rate times one gradient.
        plain = settings.get("momentum") == 0 and scenario.get("optimizer", "sgd") == "sgd"
        norm = max((worker.get("gradient_norm_max", 0.0) for worker in result.by_worker), default=0.0)
        known = "lr" in settings and plain and result.loss is not None and norm > 0
        self.update = norm * settings["lr"] if known else None
        """The largest step of the weights: the largest gradient norm seen times the learning rate."""

    def _times_s(self, scenario: dict[str, Any]) -> list[float] | None:
        """What a gradient takes each worker, where that is one number for the whole run."""
        compute = scenario.get("compute", {})
        if not self.undisturbed or compute.get("kind") != "constant" or compute.get("of"):
            return None
        slow = {int(rank): factor for rank, factor in compute.get("slow", {}).items()}
        return [compute["ms"] / 1e3 * slow.get(rank, 1.0) for rank in range(self.n)]

    def _measured_s(self) -> list[float] | None:
        """The same of real machines: what their steps took while they did not wait."""
        workers = self.result.by_worker
        steps = {worker["steps"] for worker in workers}
        if self.lockstep and (len(workers) != self.n or len(steps) > 1):  # somebody came, went or fell behind
            return None
        return list(step_times_s(workers).values()) or None

    def _ring_s(self, scenario: dict[str, Any]) -> float | None:
        """What a merge of all workers takes, where all links are equal; only where nothing else is sent."""
        links = scenario.get("links", {})
        unequal = any(factor != 1 for factor in links.get("slow", {}).values())
        if not links or unequal or links["backbone_mbit"] is not None or links["workers_per_node"] > 1:
            return None
        messages = sum(worker.get("messages_out", 0) for worker in self.result.by_worker)
        sent = sum(worker.get("bytes_out", 0) for worker in self.result.by_worker)
        # Of n + 1 messages n are hops of the ring, one is short: "have" or "commit", which take a latency
        # each. Taking the size of a hop from the run brings the header in, which counts where many workers
        # share a small model.
        hops = messages * self.n / (self.n + 1)
        hop_bytes = (sent - (messages - hops) * SHORT_BYTES) / hops if messages else 0.0
        latency_s = links["latency_ms"] / 1e3
        bytes_per_s = min(links["mbit"], links.get("out_mbit") or links["mbit"]) * 1e6 / 8
        ring_s = theory.ring_allreduce_s(self.n, self.n * hop_bytes, latency_s, bytes_per_s)
        return ring_s + 2 * latency_s if messages else ring_s

    @property
    def ideal_per_s(self) -> float | None:
        """Σ 1/t_i: steps in a second if nobody ever waits."""
        return sum(1 / t for t in self.times_s) if self.times_s else None

    def nodelay_idle(self) -> float | None:
        """While a merge outlasts the gradients beside it; where all workers are equal."""
        equal = self.times_s and len(set(self.times_s)) == 1 and self._whole(self.tau // 2)
        if not self.times_s or not equal or self.ring_s is None:
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
        """Replicas are equal after equally many steps.

        A sample taken when only some have made their next step sees one update of difference.
        """
        if self.result.loss is None:
            return None  # nothing was trained, so nothing can differ
        even = all(sample.worker_steps % self.n == 0 for sample in self.result.curve)
        return 0.0 if even else self.update

    def mean_delay(self) -> float | None:
        """Each worker's delays add up to the updates of others before its own last one.

        Those after it are missing: n times the largest delay at worst, which a long run does not feel.
        """
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
     lambda f: f.n / max(f.times_s) if f.lockstep and f.times_s and len(set(f.times_s)) > 1 else None),
)  # fmt: skip

REAL_LAWS: tuple[Law, ...] = (
    *(law for law in LAWS if law[1] == "largest staleness"),
    ("", "worker-steps per second", "at most", "Σ 1/t_i, t_i as measured: none ever waits",
     lambda f: None if f.lockstep else f.ideal_per_s),
    ("", "worker-steps per second", "at most", "n / max t_i, t_i as measured: all wait for the slowest",
     lambda f: f.n / max(f.times_s) if f.lockstep and f.times_s else None),
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
