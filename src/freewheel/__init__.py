"""Freewheel: train one model on many workers of which none has to wait for another."""

from typing import Any

from freewheel import strategies
from freewheel.api import attach, plan, simulate
from freewheel.batchnorm import recalibrate
from freewheel.errors import (
    ConfigError,
    Deadlock,
    Diverged,
    FreewheelError,
    PeerLost,
    RunStopped,
    UnknownName,
    WorkerLost,
)
from freewheel.node import Node
from freewheel.planning.plan import Plan
from freewheel.records.result import Result
from freewheel.replica import Replica
from freewheel.runtime.attach import Worker
from freewheel.sim.compute import Compute
from freewheel.sim.faults import Fault
from freewheel.sim.links import Links
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task
from freewheel.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "Compute",
    "ConfigError",
    "Deadlock",
    "Diverged",
    "Fault",
    "FreewheelError",
    "Links",
    "Node",
    "PeerLost",
    "Plan",
    "Replica",
    "Result",
    "RunStopped",
    "Scenario",
    "Strategy",
    "Task",
    "Topology",
    "UnknownName",
    "Worker",
    "WorkerLost",
    "attach",
    "plan",
    "recalibrate",
    "simulate",
    *(strategy.__name__ for strategy in strategies.ALL.values()),
]


def __getattr__(name: str) -> Any:
    """The classes of strategies: fw.ADPSGD."""
    for strategy in strategies.ALL.values():
        if strategy.__name__ == name:
            return strategy
    raise AttributeError(f"module 'freewheel' has no attribute {name!r}")
