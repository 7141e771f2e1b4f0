"""Freewheel: train one model on many workers of which none has to wait for another."""

from typing import TYPE_CHECKING, Any

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
from freewheel.runtime.worker.attach import Worker
from freewheel.sim.compute import Compute
from freewheel.sim.faults import Fault
from freewheel.sim.links import Links
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task
from freewheel.topology import Topology

if TYPE_CHECKING:  # at run time `__getattr__` finds them, and those that others add
    from freewheel.strategies.adpsgd import ADPSGD as ADPSGD
    from freewheel.strategies.allreduce import AllReduce as AllReduce
    from freewheel.strategies.asgd import ASGD as ASGD
    from freewheel.strategies.dasgd import DASGD as DASGD
    from freewheel.strategies.downpour import Downpour as Downpour
    from freewheel.strategies.dpsgd import DPSGD as DPSGD
    from freewheel.strategies.eamsgd import EAMSGD as EAMSGD
    from freewheel.strategies.easgd import EASGD as EASGD
    from freewheel.strategies.grouping import Grouping as Grouping
    from freewheel.strategies.hierarchical_sasgd import HierarchicalSASGD as HierarchicalSASGD
    from freewheel.strategies.leader import Leader as Leader
    from freewheel.strategies.nodelay import NoDelay as NoDelay
    from freewheel.strategies.nodelay_free import FreeNoDelay as FreeNoDelay
    from freewheel.strategies.none import NoCommunication as NoCommunication
    from freewheel.strategies.sasgd import SASGD as SASGD

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
