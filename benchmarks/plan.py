"""What `freewheel plan` predicts beside what real processes do: the same best strategy, rates within 15 %?

python benchmarks/plan.py                          # equal speeds and one slow worker, as freewheel compare
sudo python benchmarks/plan.py --setting all       # and 4 MB models, on loopback and on links of 100 Mbit/s

Settings: `compare` and `compare-slow` are `freewheel compare` on the digits task (a model of 19 kB); `equal`,
`slow` and `network` are the workers of `freewheel bench`, whose model has a size of one's choice: on the
tasks of compare a link of 100 Mbit/s is not felt. Worker 0 is five times slower where one is.

Two numbers of the plan are about the machine and not about the cluster it stands for: what a message takes at
its ends, and what all messages together may take where workers share the cores. They are measured first, with
allreduce on a tiny and on a larger model than any that is predicted (`calibrate`). A gradient's time is taken
from the same workers without communication. Nothing else is fitted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from freewheel.errors import RunStopped
from freewheel.planning import plan
from freewheel.planning.forecast import Forecast, forecast
from freewheel.planning.setting import Setting
from freewheel.training.job import Job, train_all
from freewheel_bench.contestants import ALONE
from freewheel_bench.namespaces import Network, check_possible
from freewheel_bench.rates import Load, run_contestant
from freewheel_bench.workers import Place

WORKERS, SLOW = 4, {0: 5.0}
STRATEGIES = "allreduce,sasgd:interval=8,nodelay:tau=8,nodelay_free,adpsgd,dasgd,asgd,easgd"
TINY_MB, LARGE_MB, DIGITS_MB = 0.004, 16.0, 0.0193
PAYLOAD = 1448 / 1514
"""The part of an Ethernet frame that is not a header."""
WITHIN = 0.15

Measured = dict[str, float]
"""Worker-steps per second by strategy; `alone` is without communication."""


def main() -> None:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--setting", default="compare,compare-slow", help="names, or all")
    parser.add_argument("--strategy", default=STRATEGIES)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--model-mb", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each contestant is measured; medians"
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    names = list(SETTINGS) if asked.setting == "all" else asked.setting.split(",")
    if "network" in names:
        check_possible()
    machine = calibrate(asked)
    print(f"a message {machine['message_ms']:.2f} ms, all messages {machine['host_mbit']:.0f} Mbit/s")
    rows, found = [], {}
    for name in names:
        found[name] = compared(name, asked, machine)
        rows += found[name]["rows"]
        show(name, found[name])
    off = [row for row in rows if abs(row["ratio"] - 1) > WITHIN]
    print(f"{len(rows) - len(off)} of {len(rows)} rates within {WITHIN:.0%}; best strategy the same in "
          f"{sum(one['same'] for one in found.values())} of {len(found)} settings")  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine, "settings": found}, indent=2) + "\n")


def calibrate(asked: argparse.Namespace) -> dict[str, float]:
    """What a message takes, and what all of them may take, on this machine with so many workers."""

    def merge_s(mb: float) -> float:
        rates = rates_of([ALONE, "allreduce"], Load(WORKERS, mb, asked.compute_ms), asked)
        return WORKERS / rates["allreduce"] - WORKERS / rates[ALONE]

    def simulated_s(message_ms: float) -> float:
        setting = on_one_machine(TINY_MB, asked.compute_ms, {"message_ms": message_ms, "host_mbit": None})
        return WORKERS / forecast("allreduce", setting).steps_per_s

    tiny_s, large_s = merge_s(TINY_MB), merge_s(LARGE_MB)
    messages = (simulated_s(2.0) - simulated_s(1.0)) / 1e-3  # that follow one another in a merge
    moved = 2 * (WORKERS - 1) * LARGE_MB * 8
    return {
        "message_ms": max(0.0, 1e3 * tiny_s / messages),
        "host_mbit": moved / max(1e-3, large_s - tiny_s),
        "merge_tiny_ms": 1e3 * tiny_s,
        "merge_large_ms": 1e3 * large_s,
    }


def on_one_machine(model_mb: float, compute_ms: float, machine: dict[str, Any], **more: Any) -> Setting:
    """Workers that share cores: every message passes them."""
    given = {"link_mbit": 100_000.0, "latency_ms": 0.0, **more}
    known = {key: machine[key] for key in ("message_ms", "host_mbit")}
    return Setting(workers=WORKERS, model_mb=model_mb, compute_ms=compute_ms, **given, **known)


def rates_of(
    names: Sequence[str], load: Load, asked: argparse.Namespace, places: Sequence[Place] | None = None
) -> Measured:
    """Rates of the benchmark's workers, medians of the rounds."""
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(asked.rounds):
        for name in names:
            print(f"\r{load.model_mb:g} MB: {name:<30}", end="", file=sys.stderr)
            rates[name].append(run_contestant(name, load, asked.seconds, places=places).steps_per_s)
    print(f"\r{'':<50}\r", end="", file=sys.stderr)
    return {name: statistics.median(found) for name, found in rates.items()}


def compare(asked: argparse.Namespace, strategies: Sequence[str], slow: dict[int, float]) -> Measured:
    """Rates as `freewheel compare` prints them, on digits; `none` is without communication."""
    steps = max(20, round(asked.seconds * 1e3 / asked.compute_ms))
    base = Job(workers=WORKERS, steps=steps, compute_ms=asked.compute_ms, slow=slow, evaluations=1)
    jobs = [replace(base, strategy=one) for one in ("none", *strategies)]
    rates: dict[str, list[float]] = {job.strategy: [] for job in jobs}
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for job, outcome in zip(jobs, train_all(jobs, Path(folder)), strict=True):
                if isinstance(outcome, RunStopped):
                    raise outcome
                rates[job.strategy].append(outcome.steps_per_s)
    found = {name: statistics.median(each) for name, each in rates.items()}
    return {ALONE: found.pop("none"), **found}


def _by_compare(slow: dict[int, float]) -> Callable[..., tuple[Setting, Measured]]:
    def both(asked: argparse.Namespace, machine: dict[str, Any]) -> tuple[Setting, Measured]:
        measured = compare(asked, asked.strategy.split(","), slow)
        return on_one_machine(DIGITS_MB, step_ms(measured, slow), machine, slow=slow), measured

    return both


def _by_legs(slow: dict[int, float], link_mbit: float | None) -> Callable[..., tuple[Setting, Measured]]:
    def both(asked: argparse.Namespace, machine: dict[str, Any]) -> tuple[Setting, Measured]:
        load, names = (
            Load(WORKERS, asked.model_mb, asked.compute_ms, slow),
            [ALONE, *asked.strategy.split(",")],
        )
        links: dict[str, float] = {}
        if link_mbit is None:
            measured = rates_of(names, load, asked)
        else:
            links = {"link_mbit": PAYLOAD * link_mbit}
            with Network(WORKERS, link_mbit) as network:
                measured = rates_of(names, load, asked, network.places)
        compute_ms = step_ms(measured, slow)
        return on_one_machine(asked.model_mb, compute_ms, machine, slow=slow, **links), measured

    return both


SETTINGS = {
    "compare": _by_compare({}),
    "compare-slow": _by_compare(SLOW),
    "equal": _by_legs({}, None),
    "slow": _by_legs(SLOW, None),
    "network": _by_legs({}, 100.0),
}


def step_ms(measured: Measured, slow: dict[int, float]) -> float:
    """What a step takes a worker that is not slow, without communication."""
    return 1e3 * sum(1 / slow.get(rank, 1.0) for rank in range(WORKERS)) / measured[ALONE]


def compared(name: str, asked: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """One setting: predicted and measured rates, and the best strategy by either."""
    setting, measured = SETTINGS[name](asked, machine)
    predicted = [forecast(spec, setting) for spec in asked.strategy.split(",")]
    real = [
        replace(
            one,
            steps_per_s=measured[one.strategy],
            useful_steps_per_s=measured[one.strategy] / one.steps_needed,
        )
        for one in predicted
    ]
    best, best_real = plan.best(predicted), plan.best(real)
    rows = [row(name, one, measured[one.strategy]) for one in plan.ranked(predicted)]
    return {
        "rows": rows,
        "best_predicted": best.strategy,
        "best_measured": best_real.strategy,
        "same": best.strategy == best_real.strategy,
        "alone_steps_per_s": measured[ALONE],
        "setting": asdict(setting),
    }


def row(name: str, one: Forecast, measured: float) -> dict[str, Any]:
    """One strategy in one setting."""
    return {
        "setting": name,
        "strategy": one.strategy,
        "predicted_steps_per_s": one.steps_per_s,
        "measured_steps_per_s": measured,
        "ratio": one.steps_per_s / measured,
    }


def show(name: str, found: dict[str, Any]) -> None:
    """A table of one setting."""
    print(f"\n{name}: without communication {found['alone_steps_per_s']:.1f} steps/s")
    print(f"{'strategy':<22}{'predicted':>11}{'measured':>11}{'ratio':>8}")
    for one in found["rows"]:
        off = "" if abs(one["ratio"] - 1) <= WITHIN else "  !"
        print(f"{one['strategy']:<22}{one['predicted_steps_per_s']:>11.2f}"
              f"{one['measured_steps_per_s']:>11.2f}{one['ratio']:>8.2f}{off}")  # fmt: skip
    print(f"best: predicted {found['best_predicted']}, measured {found['best_measured']}")


if __name__ == "__main__":
    main()
