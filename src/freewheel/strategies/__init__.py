"""One algorithm per file, in the order and letters of its paper."""

from __future__ import annotations

from freewheel import names
from freewheel.errors import ConfigError
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

ALL: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        AllReduce,
        SASGD,
        HierarchicalSASGD,
        NoDelay,
        FreeNoDelay,
        ADPSGD,
        DPSGD,
        DASGD,
        ASGD,
        Downpour,
        EASGD,
        EAMSGD,
        Leader,
        Grouping,
        NoCommunication,
    )
}


def resolve(spec: str | Strategy) -> Strategy:
    """A strategy from its name, ``name:setting=value``, or itself."""
    if isinstance(spec, type):
        raise ConfigError(f"a strategy is an object, not a class: write {spec.__name__}(), or a name.")
    return spec if isinstance(spec, Strategy) else names.build("strategy", spec, ALL)


def resolve_all(text: str) -> list[Strategy]:
    """Strategies from a comma-separated list; ``all`` is every one of them."""
    specs = [name for part in names.split(text) for name in (ALL if part == "all" else [part])]
    if not specs:
        raise ConfigError(f"no strategy given. Known: {', '.join(ALL)}; or all.")
    return [resolve(spec) for spec in specs]


__all__ = ["ALL", "resolve", "resolve_all"]
