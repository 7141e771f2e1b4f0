"""What all loaders have in common: torch's DataLoader inside, what they show of it, how they count."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from freewheel.errors import at_least
from freewheel.records.counters import Counters
from freewheel.runtime.worker.agent import Agent

T = TypeVar("T")
OWN = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
# What else torch's DataLoader has and scripts look at: as the user has given it.
SHOWN = [name for name in inspect.signature(DataLoader).parameters if name not in OWN]
END = object()

log = logging.getLogger("freewheel")


@dataclass(frozen=True)
class Side:
    """What a loader knows of its worker.

    `agent` gives the communication thread, or raises where there is none. `parts`: all workers step together,
    so that all need as many batches each. `first`: it is the worker's first loader, of the data that are
    trained on. `stopped` is asked before each batch: whether there is to be none.
    """

    agent: Callable[[], Agent]
    rank: int = 0
    world_size: int = 1
    parts: bool = False
    first: bool = False
    stopped: Callable[[], bool] = lambda: False


class BaseLoader:
    """Passes over data, by torch's DataLoader; iterate again for the next pass.

    `epoch` is the number of the pass under way, or of the first one; each new iteration adds one to it.
    """

    batches: DataLoader[Any]
    epochs: int | None
    _counters: Counters

    def __init__(self, side: Side) -> None:
        self.side = side
        self.begun = self.under_way = False
        self.left = False  # whether the last pass was broken off
        self.epoch = self.given = 0  # `given`: how many batches of the pass the loop has been given

    def __getattr__(self, name: str) -> Any:
        """What else torch's DataLoader shows."""
        if name in SHOWN and "batches" in self.__dict__:
            return getattr(self.batches, name)
        raise AttributeError(f"a worker's loader has no attribute {name!r}")

    def say_lacking(self) -> None:
        """Say so if one pass was made, to its end, where more were announced."""
        if self.begun and not self.left and self.epoch == 0 and (self.epochs or 0) > 1:
            log.warning(
                "worker %d: the loop made 1 of the loader's %d epochs: one `for` over it is one epoch. "
                "Put it into a loop over epochs",
                self.side.rank,
                self.epochs,
            )

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one."""
        at_least("epoch", epoch, 0)
        self.epoch, self.begun, self.given = epoch, False, 0

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "begun": self.begun, "under_way": self.under_way, "given": self.given}

    def _timed(self, act: Callable[..., T], *given: Any) -> T:
        """Do it; how long the loop waits for it is counted. Every step comes here."""
        self._counters.wait("data", time.perf_counter())
        try:
            return act(*given)
        finally:
            self._counters.go_on(time.perf_counter())
