"""Loading: a worker's batches of each pass, by torch's DataLoader.

All workers shuffle in the same way, from the seed and the number of the pass, and cut the same order into
batches, which are dealt to them as they need them (data/dealing.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from freewheel.data.order import number
from freewheel.errors import ConfigError, at_least
from freewheel.runtime.leases import Leases

if TYPE_CHECKING:
    from freewheel.observe.counters import Counters
    from freewheel.runtime.agent import Agent

T = TypeVar("T")
log = logging.getLogger("freewheel")
DEALT_HERE = ("sampler", "batch_sampler")
"""Options of torch's DataLoader that would deal the samples in another way."""
END = object()


class Loader:
    """Passes over a dataset, by torch's DataLoader; iterate again for the next pass.

    `epoch` is the number of the pass under way, or of the first one; each new iteration adds one to it. The
    same seed and epoch give the same order, and the same random numbers to the processes that DataLoader
    starts for the pass; those of other workers get others. When `stopped` says so, a pass ends after the
    batch in hand and no other one begins.

    A batch counts as finished when the loop asks for the next one, or ends: what DataLoader's processes have
    loaded ahead does not.

    `epochs` says how many passes the run makes: the last one then ends when all workers have finished, so
    that what one of them leaves behind is still dealt.

    `dataset` has a length and is read by index: a Dataset, a tensor, a list. The options are DataLoader's
    (`num_workers`, `collate_fn`, `pin_memory`, …).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        agent: Callable[[], Agent],
        rank: int = 0,
        world_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        epochs: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        parts: bool = False,
        check: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        for name in DEALT_HERE:
            if name in options:
                raise ConfigError(
                    f"the loader deals the samples to the workers and takes no {name}. "
                    "Leave it out, or use torch's DataLoader and deal by worker.rank and worker.world_size."
                )
        if not options.get("in_order", True):
            raise ConfigError(
                "the loader has to know which batch the loop has finished and takes no in_order=False. "
                "Leave it out."
            )
        at_least("epochs", epochs, 1)
        self.stopped, self.rank, self.agent = stopped, rank, agent
        self.dealer = Leases(
            agent, count(dataset), batch_size, world_size, shuffle, seed, drop_last, epochs, check, parts
        )
        self.random = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self.random)
        self.batches: DataLoader[Any] = DataLoader(dataset, batch_sampler=self.dealer, **options)
        self.begun = False
        self.in_hand = self.under_way = False
        self.given = 0
        """How many batches of the pass the loop has been given."""

    @property
    def epoch(self) -> int:
        """The number of the pass under way, or of the first one."""
        return self.dealer.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one."""
        at_least("epoch", epoch, 0)
        self.dealer.epoch = epoch
        self.begun, self.given = False, 0

    @property
    def progress(self) -> float:
        """Passes made by all workers together, as a fraction too."""
        return self.dealer.progress()

    def goes_on(self, first: Loader) -> bool:
        """Whether this is another one's next pass: in use, over as many samples, dealt in the same way."""
        return self.begun and self._identity() == first._identity()

    @property
    def samples(self) -> int:
        """Samples that all workers together have finished, as far as is known here."""
        return round(self.progress * self.dealer.length)

    def __len__(self) -> int:
        return len(self.dealer)

    def __iter__(self) -> Iterator[Any]:
        if self.stopped():
            return
        dealer = self.dealer
        if self.begun:
            self.given = 0
        dealer.begin(dealer.epoch + self.begun)
        self.begun = self.under_way = True
        if self.random is not None:  # DataLoader seeds its processes from it
            self.random.manual_seed(number(f"processes/{dealer.seed}/{dealer.epoch}/{self.rank}"))
        left, counters = True, self.agent().counters
        try:
            while True:
                batches = self._timed(lambda: iter(self.batches))
                while (batch := self._next(batches, counters)) is not END:
                    self.in_hand = True
                    self.given += 1
                    yield batch
                    self.in_hand = False
                    counters.samples += dealer.finish()
                    if self.stopped():
                        return
                if not self._timed(dealer.more):
                    break
            left = False
        finally:
            in_hand, self.in_hand = self.in_hand, False
            self.under_way = False
            self._timed(lambda: dealer.end(left, in_hand))

    def _next(self, batches: Iterator[Any], counters: Counters) -> Any:
        """The next batch, or END; how long the loop waits for it is counted. Every step comes here."""
        counters.wait("data", time.perf_counter())
        try:
            return next(batches, END)
        finally:
            counters.go_on(time.perf_counter())

    def _timed(self, act: Callable[[], T]) -> T:
        counters = self.agent().counters
        counters.wait("data", time.perf_counter())
        try:
            return act()
        finally:
            counters.go_on(time.perf_counter())

    def state_dict(self) -> dict[str, Any]:
        """Where the passes are: for a checkpoint taken after a step, so the batch in hand counts as finished.

        In a run of many workers it holds what this worker has finished.
        """
        dealer = self.dealer
        return {
            **self._identity(),
            "begun": self.begun,
            "under_way": self.under_way,
            "given": self.given,
            **dealer.state(self.in_hand),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next iteration begins with the batch after it.

        In other batches, with another seed, or in parts for another number of workers, the pass begins anew.
        """
        mine = self._identity()
        if state["length"] != mine["length"]:
            raise ConfigError(
                f"cannot resume: the dataset has {mine['length']} samples, the one of the checkpoint had "
                f"{state['length']}. Give the same dataset, or begin anew."
            )
        other = [name for name, value in mine.items() if state[name] != value]
        if other:
            log.warning(
                "pass %d begins anew: the checkpoint was taken with another %s",
                state["epoch"],
                " and ".join("number of workers" if name == "parts" else name for name in other),
            )
            self.set_epoch(state["epoch"])
            return
        self.dealer.load(state)
        self.begun, self.given = state["begun"] and not state["under_way"], state["given"]

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a state to mean the same."""
        dealer = self.dealer
        names = ("length", "batch_size", "seed", "shuffle", "drop_last")
        parts = dealer.world_size if dealer.parts else 0  # else it suits any number of workers
        return {"parts": parts, **{name: getattr(dealer, name) for name in names}}


def count(dataset: Any) -> int:
    """How many samples a dataset has; refuses one that cannot be read by index."""
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"a {type(dataset).__name__} has no length and no samples by index, so it cannot be dealt: "
            "nobody could say which samples are finished, nor give a lost worker's to another. Give a "
            "dataset with __len__ and __getitem__, or use torch's DataLoader and let each worker keep every "
            "world_size-th sample, from its rank on (worker.rank, worker.world_size). Then fast workers take "
            "no more than slow ones, and what a lost worker had left is not seen in that pass."
        ) from None
