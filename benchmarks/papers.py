"""The papers' experiments in virtual time: what the simulator measures beside what theory says.

    python benchmarks/papers.py

All figures come from seeds, so they are the same on every machine.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import track
from rich.table import Table

import freewheel as fw
from freewheel import theory
from freewheel.tasks import Quadratic

COMPUTE_S = 0.01
FAST = fw.Links(mbit=1e6, latency_ms=1e-4)
console = Console(width=120)


def timing(strategy: str, **settings: object) -> fw.Result:
    """A run without gradients."""
    return fw.simulate(strategy, "quadratic", gradients=False, **settings)


def show(title: str, headings: list[str], rows: list[list[object]]) -> None:
    """Print a table."""
    console.print(title, style="bold", highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table, "")


def straggler() -> None:
    """One of 16 workers is s times slower: worker-steps per compute time."""
    names = ["allreduce", "dpsgd", "nodelay", "adpsgd", "nodelay_free", "dasgd"]
    rows = []
    for s in track((1, 2, 10, 100), "straggler", transient=True):
        row: list[object] = [s, 16 / s]
        for name in names:
            steps = 32 if name in names[:3] else 200
            links = FAST if name in names[:3] else fw.Links()
            compute = fw.Compute(slow={0: s})
            result = timing(name, workers=16, steps=steps, compute=compute, links=links)
            row.append(result.steps_per_s * COMPUTE_S)
        rows.append([*row[:5], 15 + 1 / s, *row[5:]])
    headings = ["s", "16/s", *names[:3], "15 + 1/s", *names[3:]]
    show("One of 16 workers s times slower: worker-steps per compute time", headings, rows)


def discrepancy() -> None:
    """Largest distance between two replicas, against workers and tau."""
    rows = []
    for n in track((2, 4, 8, 16, 32), "discrepancy", transient=True):
        row: list[object] = [n]
        for name in ("asgd", "nodelay:tau=4", "nodelay:tau=8", "nodelay:tau=16"):
            task = Quadratic(clip=1.0)
            row.append(fw.simulate(name, task, workers=n, steps=64, lr=0.02, links=FAST).discrepancy_max)
        rows.append(row)
    rows.append(["2·L·τ·η", "–", *(2 * 1.0 * tau * 0.02 for tau in (4, 8, 16))])
    show(
        "Largest ‖x_i − x_j‖, quadratic with gradients of norm ≤ 1, η = 0.02",
        ["workers", "asgd (gradient delay)", "nodelay τ=4", "τ=8", "τ=16"],
        rows,
    )


def idle() -> None:
    """Idle share of nodelay against tau."""
    n, megabytes, links = 8, 0.4, fw.Links(mbit=100, latency_ms=0.1)
    t_merge = theory.ring_allreduce_s(n, megabytes * 1e6, 1e-4, 100e6 / 8)
    rows: list[list[object]] = []
    for tau in (2, 4, 6, 8, 10, 12, 14, 16):
        result = timing(f"nodelay:tau={tau}", workers=n, steps=10 * tau, model_mb=megabytes, links=links)
        rows.append([tau, result.idle_share, theory.nodelay_idle_share(tau, t_merge, COMPUTE_S)])
    title = f"nodelay: idle share; 2·t_merge/t_grad = {2 * t_merge / COMPUTE_S:.2f}"
    show(title, ["τ", "measured", "theory"], rows)


def interval() -> None:
    """Time per step of sasgd against its interval."""
    t_allreduce = theory.ring_allreduce_s(8, 1e6, 2e-4, 125e6)
    rows: list[list[object]] = []
    for t in (1, 2, 4, 8, 16):
        result = timing(f"sasgd:interval={t}", workers=8, steps=64, model_mb=1.0)
        rows.append([t, 1e3 * result.virtual_s / 64, 1e3 * theory.sasgd_step_s(COMPUTE_S, t_allreduce, t)])
    show("sasgd, 8 workers, 1 MB, 1 Gbit/s: ms per step", ["T", "measured", "t_grad + t_ar/T"], rows)


def server() -> None:
    """Worker-steps per second against the number of workers, with a 1 MB model."""
    rows: list[list[object]] = []
    for n in track((2, 4, 8, 16, 32, 64), "server", transient=True):
        rates = [timing(s, workers=n, steps=40, model_mb=1.0).steps_per_s for s in ("asgd", "adpsgd")]
        rows.append([n, *rates, n / COMPUTE_S])
    show("1 MB model, 1 Gbit/s: worker-steps per second", ["workers", "asgd", "adpsgd", "ideal"], rows)


def slow_link() -> None:
    """One worker's link is 100 times slower."""
    rows: list[list[object]] = []
    for name in ("allreduce", "asgd", "adpsgd", "nodelay_free", "dasgd"):
        rates = [
            timing(name, workers=8, steps=100, model_mb=1.0, links=fw.Links(slow=slow)).steps_per_s
            for slow in ({}, {3: 100.0})
        ]
        rows.append([name, *rates, rates[1] / rates[0]])
    show("8 workers, 1 MB, one link 100× slower: worker-steps/s", ["strategy", "equal", "slow", "kept"], rows)


if __name__ == "__main__":
    for experiment in (straggler, discrepancy, idle, interval, server, slow_link):
        experiment()
