"""Freewheel: train one model on many workers of which none has to wait for another."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freewheel.api import attach as attach
    from freewheel.api import plan as plan
    from freewheel.api import simulate as simulate
    from freewheel.batchnorm import recalibrate as recalibrate
    from freewheel.errors import ConfigError as ConfigError
    from freewheel.errors import Deadlock as Deadlock
    from freewheel.errors import Diverged as Diverged
    from freewheel.errors import FreewheelError as FreewheelError
    from freewheel.errors import PeerLost as PeerLost
    from freewheel.errors import RunStopped as RunStopped
    from freewheel.errors import UnknownName as UnknownName
    from freewheel.errors import WorkerLost as WorkerLost
    from freewheel.node import Node as Node
    from freewheel.planning.plan import Plan as Plan
    from freewheel.records.result import Result as Result
    from freewheel.replica import Replica as Replica
    from freewheel.runtime.worker.attach import Worker as Worker
    from freewheel.sim.scenario import Compute as Compute
    from freewheel.sim.scenario import Fault as Fault
    from freewheel.sim.scenario import Links as Links
    from freewheel.sim.scenario import Scenario as Scenario
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
    from freewheel.strategy import Strategy as Strategy
    from freewheel.task import Task as Task
    from freewheel.topology import Topology as Topology

__version__ = "0.1.0"

# Where each name is: it is imported when it is used, for torch takes seconds and not all need it.
HOMES = {
    "api": ("attach", "plan", "simulate"),
    "batchnorm": ("recalibrate",),
    "errors": (
        "ConfigError", "Deadlock", "Diverged", "FreewheelError", "PeerLost", "RunStopped", "UnknownName",
        "WorkerLost",
    ),
    "node": ("Node",),
    "planning.plan": ("Plan",),
    "records.result": ("Result",),
    "replica": ("Replica",),
    "runtime.worker.attach": ("Worker",),
    "sim.scenario": ("Compute", "Fault", "Links", "Scenario"),
    "strategy": ("Strategy",),
    "task": ("Task",),
    "topology": ("Topology",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name from where it is, a module of this package, or the class of a strategy: fw.ADPSGD."""
    if name == "__all__":
        strategies = [one.__name__ for one in __getattr__("strategies").ALL.values()]
        return [*(one for names in HOMES.values() for one in names), *strategies]
    for home, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"freewheel.{home}"), name)
    if not name.startswith("_"):
        if importlib.util.find_spec(f"freewheel.{name}") is not None:
            return importlib.import_module(f"freewheel.{name}")
        for strategy in __getattr__("strategies").ALL.values():
            if strategy.__name__ == name:
                return strategy
    raise AttributeError(f"module 'freewheel' has no attribute {name!r}")
