"""The functions people call: names become objects here, and only here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from freewheel import strategies, tasks
from freewheel.observe.result import Result
from freewheel.sim.driver import Simulation
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task


def simulate(
    strategy: str | Strategy,
    task: str | Task = "digits",
    scenario: Scenario | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    trace_file: TextIO | None = None,
    **settings: Any,
) -> Result:
    """Train a task with a strategy in virtual time and return what was measured.

    The settings are those of `Scenario` (workers, steps, compute, links, faults, seed, …), given as
    keywords or as one value. The same arguments give the same result, to the last event.

        >>> import freewheel as fw
        >>> fast = fw.simulate("adpsgd", workers=4, steps=50, compute=fw.Compute(slow={0: 10}))
        >>> slow = fw.simulate("allreduce", workers=4, steps=50, compute=fw.Compute(slow={0: 10}))
        >>> round(fast.steps_per_s / slow.steps_per_s)
        8
    """
    if scenario is not None and settings:
        raise TypeError("give the settings as a Scenario or as keywords, not both")
    simulation = Simulation(
        strategies.resolve(strategy),
        tasks.resolve(task),
        scenario or Scenario(**settings),
        progress=progress,
        trace_file=trace_file,
    )
    return simulation.run()
