"""What a run measured, beside what the papers promise for it.

Only rows that follow from the figures of a `Result`. Left out for want of data: AD-PSGD's Lemma 7 needs the
gradient noise of the task. DASGD's γ·Q·S_ij needs the sets of gradients two replicas differ by; its recorded
staleness counts an update as known once it has arrived, before it is in the weights, so it bounds nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from freewheel import theory
from freewheel.records.result import Result
from freewheel.show.rates import step_times_s

PAPER = "Talyansky et al., ICLR 2019 submission"
ABOUT = 0.15  # the relative error allowed where a theory says "about"
LOCKSTEP = ("all", "neighbours")  # values of waits_for under which all workers make as many steps

Kind = Literal["at most", "about"]
Law = tuple[str, Kind, float, str]  # what is bounded, how, by how much, and where from


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
        return self.measured / self.bound if self.bound else None

    @property
    def holds(self) -> bool:
        """Up to rounding; "about" allows 15 %."""
        over, rounding = self.measured - self.bound, 1e-9 + 1e-6 * abs(self.bound)
        return over <= rounding if self.kind == "at most" else abs(over) <= ABOUT * abs(self.bound) + rounding


def bounds(result: Result) -> list[Bound]:
    """Empty where nothing is known about the strategy or the scenario."""
    figures = {
        "largest discrepancy": ("", result.discrepancy_max),
        "largest staleness": ("steps", result.staleness_max),
        "mean gradient delay": ("updates", result.staleness_mean),
        "time per step": ("ms", 1e3 * result.virtual_s * result.workers / max(1, result.worker_steps)),
        "idle share": ("", result.idle_share),
        "worker-steps per second": ("per s", result.steps_per_s),
    }
    rows = []
    for what, kind, bound, source in _laws(result, result.settings.get("strategy", {})):
        unit, measured = figures[what]
        rows.append(Bound(what, measured, bound, unit, source, kind if bound else "at most"))
    return rows


def _laws(result: Result, own: dict[str, Any]) -> Iterator[Law]:
    """`own`: the strategy's settings."""
    if result.strategy in ("nodelay", "nodelay_free") and own.get("tau") is not None:
        yield "largest staleness", "at most", own["tau"], f"τ: {PAPER}"
    if result.strategy == "allreduce":
        yield "largest staleness", "at most", 0.0, "no gradient is late: synchronous SGD"
    yield from _real(result) if result.clock == "wall" else _simulated(result, own)


def _real(result: Result) -> Iterator[Law]:
    """Of real machines, which also do other things: bounds on what their workers could do."""
    workers, lockstep = result.by_worker, result.settings.get("waits_for") in LOCKSTEP
    if lockstep and (len(workers) != result.workers or len({worker["steps"] for worker in workers}) > 1):
        return  # a worker came, went or fell behind
    times_s = list(step_times_s(workers).values())
    if times_s and lockstep:
        source = "n / max t_i, t_i as measured: all wait for the slowest"
        yield "worker-steps per second", "at most", result.workers / max(times_s), source
    elif times_s:
        ideal = sum(1 / t for t in times_s)
        yield "worker-steps per second", "at most", ideal, "Σ 1/t_i, t_i as measured: none ever waits"


def _simulated(result: Result, own: dict[str, Any]) -> Iterator[Law]:
    """Of virtual time, in which a step takes exactly the time it was given."""
    yield from _weights(result, own)
    n, waits_for = result.workers, result.settings.get("waits_for")
    compute = result.scenario.get("compute", {})
    if result.scenario.get("faults") or compute.get("pauses"):
        return
    free = waits_for == "nobody" and own.get("tau") is None
    if free:
        yield "idle share", "at most", 0.0, "nobody waits"
    # A worker's delays add up to the updates of others before its last one; those after it are few.
    delay = theory.asgd_mean_delay(n)
    if result.strategy == "asgd" and n * result.staleness_max <= ABOUT * delay * result.worker_steps:
        yield "mean gradient delay", "about", delay, "n - 1 at any speeds: counting at the server"
    if compute.get("kind") != "constant" or compute.get("of"):
        return
    slow = {int(rank): factor for rank, factor in compute.get("slow", {}).items()}
    times_s = [compute["ms"] / 1e3 * slow.get(rank, 1.0) for rank in range(n)]
    yield from _merging(result, own, times_s)
    # The gradients under way at the end are at most one step per worker.
    if free and result.worker_steps >= 10 * n:
        yield "worker-steps per second", "about", sum(1 / t for t in times_s), "Σ 1/t_i, where nobody waits"
    if waits_for in LOCKSTEP and len(set(times_s)) > 1:
        source = "n / max t_i, where all wait for the slowest"
        yield "worker-steps per second", "at most", n / max(times_s), source


def _weights(result: Result, own: dict[str, Any]) -> Iterator[Law]:
    """How far replicas drift apart: their own steps, each as large as the largest gradient."""
    settings = result.settings
    norm = max((worker.get("gradient_norm_max", 0.0) for worker in result.by_worker), default=0.0)
    # With momentum or AdamW an update is no longer the learning rate times one gradient.
    plain = settings.get("momentum") == 0 and result.scenario.get("optimizer", "sgd") == "sgd"
    if result.loss is None:
        return  # nothing was trained, so nothing can differ
    if result.strategy == "allreduce" and all(one.worker_steps % result.workers == 0 for one in result.curve):
        yield "largest discrepancy", "at most", 0.0, "equal after equal steps: synchronous SGD"
        return
    interval = (own.get("interval") or 0) if own.get("scale") is None else 0
    apart = {
        "allreduce": (0.5, "equal after equal steps: synchronous SGD"),  # between two workers' steps
        "nodelay": (own.get("tau") or 0, f"2·L·τ·η: {PAPER}"),
        "sasgd": (interval, "2·γ·T·G: triangle inequality"),
        # A mean inside a node takes no worker further from the last common model than its members were.
        "hierarchical_sasgd": (interval * own.get("global_every", 0), "2·γ·k·T1·G: triangle inequality"),
    }
    steps, source = apart.get(result.strategy, (0, ""))
    if steps and plain and norm > 0 and "lr" in settings:
        yield "largest discrepancy", "at most", 2 * settings["lr"] * steps * norm, source


def _merging(result: Result, own: dict[str, Any], times_s: list[float]) -> Iterator[Law]:
    """The cost of merges of all workers, where links are equal and carry nothing else."""
    links, n = result.scenario.get("links", {}), result.workers
    unequal = any(factor != 1 for factor in links.get("slow", {}).values())
    if not links or unequal or links["backbone_mbit"] is not None or links["workers_per_node"] > 1:
        return
    latency_s = links["latency_ms"] / 1e3
    bytes_per_s = min(links["mbit"], links.get("out_mbit") or links["mbit"]) * 1e6 / 8
    ring_s = theory.ring_allreduce_s(n, result.settings["model_bytes"], latency_s, bytes_per_s)
    ring_s += 2 * latency_s if n > 1 else 0.0  # "have" and "commit"
    cycles = {"allreduce": 1, "sasgd": own.get("interval"), "nodelay": (own.get("tau") or 0) // 2}
    interval, steps = cycles.get(result.strategy), result.worker_steps / n
    if not interval or steps // interval * interval < 0.9 * steps:
        return  # the law holds for whole intervals only
    step_s = theory.sasgd_step_s(max(times_s), ring_s, interval)
    if result.strategy == "nodelay" and len(set(times_s)) == 1:
        idle = theory.nodelay_idle_share(own["tau"], ring_s, times_s[0])
        yield "idle share", "about", idle, f"a merge beside every τ/2 gradients: {PAPER}"
    if result.strategy == "sasgd":
        yield "time per step", "about", 1e3 * step_s, "t_grad + t_allreduce/T: Cong et al., ICPP 2017"
    if result.strategy == "allreduce":
        source = "max t_i + 2(n-1) hops and 2 short messages: alpha-beta model"
        yield "time per step", "about", 1e3 * step_s, source
