"""What a run measured, beside what the papers promise for it.

Only rows that follow from the figures of a `Result`. Left out for want of data: AD-PSGD's Lemma 7 needs the
gradient noise of the task. DASGD's γ·Q·S_ij needs the sets of gradients two replicas differ by; its recorded
staleness counts an update as known once it has arrived, before it is in the weights, so it bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from freewheel import theory
from freewheel.records.result import Result
from freewheel.show.rates import step_times_s

Kind = Literal["at most", "at least", "about"]

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


def bounds(result: Result) -> list[Bound]:
    """The rows for one run; none where nothing is known about its strategy or its scenario."""
    run = _Run(result)
    rows: list[Bound] = []
    if result.strategy in _OWN:
        rows += _OWN[result.strategy](run)
    rows += _speed(run)
    if result.settings.get("clock") == "wall":  # the theories' machines do nothing else meanwhile
        return [row for row in rows if row.name == "largest staleness"] + list(_real_speed(run))
    return rows


class _Run:
    """A result, and what the theories ask about its settings."""

    def __init__(self, result: Result) -> None:
        settings, scenario = result.settings, result.scenario
        self.result, self.n = result, result.workers
        self.strategy: dict[str, Any] = settings.get("strategy", {})
        self.waits_for = settings.get("waits_for")
        self.steps = result.worker_steps / result.workers
        """Steps per worker."""
        self.undisturbed = not scenario.get("faults") and not scenario.get("compute", {}).get("pauses")
        self.times_s = self._times_s(scenario)
        self.ring_s = self._ring_s(scenario)

        self.update: tuple[float, float] | None = None
        """The largest gradient norm seen and the learning rate; None without gradients or with momentum."""
        norm = max((worker.get("gradient_norm_max", 0.0) for worker in result.by_worker), default=0.0)
        # With momentum or AdamW an update is no longer the learning rate times one gradient.
        plain = settings.get("momentum") == 0 and scenario.get("optimizer", "sgd") == "sgd"
        if "lr" in settings and plain and result.loss is not None and norm > 0:
            self.update = (norm, settings["lr"])

    def _times_s(self, scenario: dict[str, Any]) -> list[float] | None:
        """What a gradient takes each worker, where that is one number for the whole run."""
        compute = scenario.get("compute", {})
        if not self.undisturbed or compute.get("kind") != "constant" or compute.get("of"):
            return None
        slow = {int(rank): factor for rank, factor in compute.get("slow", {}).items()}
        return [compute["ms"] / 1e3 * slow.get(rank, 1.0) for rank in range(self.n)]

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

    def whole(self, interval: int) -> bool:
        """Whether whole intervals make up nearly all of the run: then a mean over one is a mean over it."""
        return self.steps // interval * interval >= 0.9 * self.steps

    def discrepancy(self, bound: float, source: str) -> Bound:
        return Bound("largest discrepancy", self.result.discrepancy_max, bound, "", source, "at most")

    def staleness(self, bound: float, source: str) -> Bound:
        return Bound("largest staleness", self.result.staleness_max, bound, "steps", source, "at most")

    def step_s(self, bound: float, source: str) -> Bound:
        measured = self.result.virtual_s / self.steps
        return Bound("time per step", 1e3 * measured, 1e3 * bound, "ms", source, "about")

    def rate(self, bound: float, source: str, kind: Kind) -> Bound:
        return Bound("worker-steps per second", self.result.steps_per_s, bound, "per s", source, kind)

    def idle(self, bound: float, source: str, kind: Kind) -> Bound:
        return Bound("idle share", self.result.idle_share, bound, "", source, kind)


def _nodelay(run: _Run) -> Iterator[Bound]:
    paper = "Talyansky et al., ICLR 2019 submission"
    tau = run.strategy["tau"]
    if run.update:
        norm, eta = run.update
        yield run.discrepancy(theory.nodelay_discrepancy(norm, tau, eta), f"2·L·τ·η: {paper}")
    yield run.staleness(tau, f"τ: {paper}")
    if run.times_s and run.ring_s is not None and len(set(run.times_s)) == 1 and run.whole(tau // 2):
        idle = theory.nodelay_idle_share(tau, run.ring_s, run.times_s[0])
        source = f"a merge beside every τ/2 gradients: {paper}"
        yield run.idle(idle, source, "about" if idle else "at most")


def _nodelay_free(run: _Run) -> Iterator[Bound]:
    if run.strategy.get("tau") is not None:
        yield run.staleness(run.strategy["tau"], "τ: Talyansky et al., ICLR 2019 submission")


def _sasgd(run: _Run) -> Iterator[Bound]:
    interval = run.strategy["interval"]
    if run.update and run.strategy.get("scale") is None:
        norm, gamma = run.update
        drift = theory.sasgd_drift(gamma, interval, norm)
        yield run.discrepancy(drift, "2·γ·T·G: triangle inequality")
    if run.times_s and run.ring_s is not None and run.whole(interval):
        step_s = theory.sasgd_step_s(max(run.times_s), run.ring_s, interval)
        yield run.step_s(step_s, "t_grad + t_allreduce/T: Cong et al., ICPP 2017")


def _hierarchical_sasgd(run: _Run) -> Iterator[Bound]:
    if run.update:
        norm, gamma = run.update
        # A mean inside a node takes no worker further from the last common model than its members were.
        interval = run.strategy["interval"] * run.strategy["global_every"]
        yield run.discrepancy(theory.sasgd_drift(gamma, interval, norm), "2·γ·k·T1·G: triangle inequality")


def _allreduce(run: _Run) -> Iterator[Bound]:
    # Replicas are equal after equally many steps. A sample taken while some workers have made a step that
    # the others are about to make sees one update of difference.
    if run.result.loss is None:
        pass  # nothing was trained, so nothing can differ
    elif all(sample.worker_steps % run.n == 0 for sample in run.result.curve):
        yield run.discrepancy(0.0, "identical replicas: synchronous SGD")
    elif run.update:
        norm, eta = run.update
        yield run.discrepancy(norm * eta, "one update, L·η: synchronous SGD")
    yield run.staleness(0.0, "no gradient is late: synchronous SGD")
    if run.times_s and run.ring_s is not None:
        yield run.step_s(
            max(run.times_s) + run.ring_s, "max t_i + 2(n-1) hops and 2 short messages: alpha-beta model"
        )


def _asgd(run: _Run) -> Iterator[Bound]:
    # Each worker's delays add up to the updates of others before its own last one. Those after it are
    # missing: n times the largest delay at worst, which a long run does not feel.
    missing = run.n * run.result.staleness_max / run.result.worker_steps
    expected = theory.asgd_mean_delay(run.n)
    if run.undisturbed and missing <= ABOUT * expected:
        source = "n - 1 at any speeds: counting at the server"
        yield Bound("mean gradient delay", run.result.staleness_mean, expected, "updates", source, "about")


_OWN = {
    "allreduce": _allreduce,
    "sasgd": _sasgd,
    "hierarchical_sasgd": _hierarchical_sasgd,
    "nodelay": _nodelay,
    "nodelay_free": _nodelay_free,
    "asgd": _asgd,
}


def _speed(run: _Run) -> Iterator[Bound]:
    """What waiting for all, or for nobody, means for the speed of any strategy."""
    free = run.waits_for == "nobody" and run.strategy.get("tau") is None
    if free and run.undisturbed:
        yield run.idle(0.0, "nobody waits", "at most")
    if not run.times_s:
        return
    if free and run.steps >= 10:  # the gradients under way at the end are at most one step per worker
        yield run.rate(sum(1 / t for t in run.times_s), "Σ 1/t_i, where nobody waits", "about")
    if run.waits_for in LOCKSTEP and len(set(run.times_s)) > 1:
        yield run.rate(run.n / max(run.times_s), "n / max t_i, where all wait for the slowest", "at most")


def _real_speed(run: _Run) -> Iterator[Bound]:
    """The same for real machines, with the time their steps took while they did not wait."""
    times_s = step_times_s(run.result.by_worker).values()
    if not times_s:
        return
    steps = {worker["steps"] for worker in run.result.by_worker}
    if run.waits_for not in LOCKSTEP:
        yield run.rate(sum(1 / t for t in times_s), "Σ 1/t_i, t_i as measured: none ever waits", "at most")
    elif len(run.result.by_worker) == run.n and len(steps) == 1:  # nobody came, went or fell behind
        source = "n / max t_i, t_i as measured: all wait for the slowest"
        yield run.rate(run.n / max(times_s), source, "at most")
