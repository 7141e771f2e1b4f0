"""What the tests share: runs whose workers can be looked at, and networks that do not matter."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import freewheel as fw
from freewheel import strategies, tasks
from freewheel.sim.clock import VirtualLoop, at_once
from freewheel.sim.driver import Simulation
from freewheel.sim.worker import SimulatedWorker

FAST = fw.Links(mbit=1e6, latency_ms=1e-4)
"""A network too fast to matter."""

JITTER = fw.Compute(kind="uniform", spread=0.2)
"""Compute times that keep workers from walking in step."""


def seeds(count: int, quick: int) -> list[Any]:
    """Cases that differ by chance alone: the first few in every run, all of them among the slow tests."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(count)]


def play(loop: VirtualLoop, work: Coroutine[Any, Any, Any]) -> Any:
    """Run one coroutine to its end; what it leaves scheduled stays scheduled."""
    task = loop.create_task(work)
    task.add_done_callback(lambda _: loop.stop())
    loop.run_until_idle()
    return task.result()


def make(strategy: str | fw.Strategy, task: str | fw.Task = "quadratic", **settings: Any) -> Simulation:
    """A simulation that has not run yet; its learning rate is the same from the first step."""
    scenario = fw.Scenario(**{"warmup": 0, **settings})
    return Simulation(strategies.resolve(strategy), tasks.resolve(task), scenario)


def run(strategy: str | fw.Strategy, task: str | fw.Task = "quadratic", **settings: Any) -> Simulation:
    """A simulation that has run; its result is in `.result`."""
    simulation = make(strategy, task, **settings)
    simulation.result = simulation.run()  # type: ignore[attr-defined]
    return simulation


def timing(strategy: str | fw.Strategy, **settings: Any) -> fw.Result:
    """The result of a run without gradients."""
    return make(strategy, gradients=False, **settings).run()


def after_every_step(simulation: Simulation, look: Callable[[], None]) -> None:
    """Call `look` whenever a worker has completed a step."""
    inner = simulation._stepped

    def stepped(worker: SimulatedWorker) -> None:
        look()
        inner(worker)

    simulation._stepped = stepped  # type: ignore[method-assign]


def replicas(simulation: Simulation) -> torch.Tensor:
    """All replicas, with what is pending, one row each."""
    return torch.stack(
        [at_once(worker.replica.snapshot()) for _, worker in sorted(simulation.workers.items())]
    )


def largest_distance(rows: torch.Tensor) -> float:
    """The largest distance between two rows."""
    return float(torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").max())


def record_updates(simulation: Simulation) -> list[torch.Tensor]:
    """The sum of all optimizer updates, kept up to date in a list of one."""
    total = [torch.zeros_like(replicas(simulation)[0])]

    def watch(study: Any) -> None:
        inner = study.step

        def step(lr: float) -> None:
            before = study.replica.weights.clone()
            inner(lr)
            total[0] += study.replica.weights - before

        study.step = step

    for worker in simulation.workers.values():
        watch(worker.study)
    return total
