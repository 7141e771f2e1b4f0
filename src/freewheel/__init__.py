"""Freewheel: train one model on many workers of which none has to wait for another."""

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
from freewheel.observe.result import Result
from freewheel.planning.plan import Plan
from freewheel.replica import Replica
from freewheel.runtime.attach import Worker
from freewheel.sim.compute import Compute
from freewheel.sim.faults import Fault
from freewheel.sim.links import Links
from freewheel.sim.scenario import Scenario
from freewheel.strategies.adpsgd import ADPSGD
from freewheel.strategies.allreduce import AllReduce
from freewheel.strategies.asgd import ASGD
from freewheel.strategies.dasgd import DASGD
from freewheel.strategies.downpour import Downpour
from freewheel.strategies.dpsgd import DPSGD
from freewheel.strategies.eamsgd import EAMSGD
from freewheel.strategies.easgd import EASGD
from freewheel.strategies.grouping import Grouping
from freewheel.strategies.hierarchical_sasgd import HierarchicalSASGD
from freewheel.strategies.leader import Leader
from freewheel.strategies.nodelay import NoDelay
from freewheel.strategies.nodelay_free import FreeNoDelay
from freewheel.strategies.none import NoCommunication
from freewheel.strategies.sasgd import SASGD
from freewheel.strategy import Strategy
from freewheel.task import Task
from freewheel.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "ADPSGD",
    "ASGD",
    "DASGD",
    "DPSGD",
    "EAMSGD",
    "EASGD",
    "SASGD",
    "AllReduce",
    "Compute",
    "ConfigError",
    "Deadlock",
    "Diverged",
    "Downpour",
    "Fault",
    "FreeNoDelay",
    "FreewheelError",
    "Grouping",
    "HierarchicalSASGD",
    "Leader",
    "Links",
    "NoCommunication",
    "NoDelay",
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
]
