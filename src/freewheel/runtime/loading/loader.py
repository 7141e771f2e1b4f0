"""Loading: a worker's batches of each pass, by torch's DataLoader.

All workers have the same order, from the seed and the number of the pass. Pieces of it are dealt to them as
they need them (data/dealing.py), and each cuts its pieces into batches of its own size.

A stream has no index and cannot be dealt. Every worker reads all of it and keeps one of each n samples, by
rank: each is used once, if all have the same stream. A lost worker's samples are not seen, and fast workers
get no more than slow ones.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from freewheel.data.order import Sampled, Seeded, check_batch_size, fingerprint, number
from freewheel.errors import ConfigError, at_least
from freewheel.records.counters import Counters
from freewheel.runtime.loading.sampler import LeaseSampler, Side

T = TypeVar("T")
OWN = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
# DataLoader's other attributes, which scripts may read: as the user has given them.
SHOWN = [name for name in inspect.signature(DataLoader).parameters if name not in OWN]
END = object()

log = logging.getLogger("freewheel")


class BaseLoader:
    """Passes over data, by torch's DataLoader; iterate again for the next pass."""

    batches: DataLoader[Any]
    _counters: Counters

    def __init__(self, side: Side, drop_last: bool, epochs: int | None) -> None:
        at_least("epochs", epochs, 1)
        self.side, self.drop_last, self.epochs = side, drop_last, epochs
        self.begun = self.under_way = False
        self.in_hand = False  # whether the loop has a batch that is not finished
        self.left = False  # whether the last pass was broken off
        self.epoch = 0  # the pass under way, or the first one; each new iteration adds one
        self.given = 0  # how many batches of the pass the loop has been given

    def __getattr__(self, name: str) -> Any:
        if name in SHOWN and "batches" in self.__dict__:
            return getattr(self.batches, name)
        raise AttributeError(f"a worker's loader has no attribute {name!r}")

    def say_lacking(self) -> None:
        """Warn if one whole pass was made, where more were announced."""
        if self.begun and not self.left and self.epoch == 0 and (self.epochs or 0) > 1:
            log.warning(
                "worker %d: the loop made 1 of the loader's %d epochs: one `for` over it is one epoch. "
                "Put it into a loop over epochs",
                self.side.rank,
                self.epochs,
            )

    def goes_on(self, first: BaseLoader) -> bool:
        """Whether this loader continues another one's passes: in use, over the same data, dealt alike."""
        return self.begun and self._identity() == first._identity()

    def _identity(self) -> dict[str, Any]:
        return {"stream": id(self.dataset)}

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one."""
        at_least("epoch", epoch, 0)
        self.epoch, self.begun, self.given = epoch, False, 0

    def _where(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "begun": self.begun, "under_way": self.under_way, "given": self.given}

    def _timed(self, act: Callable[..., T], *given: Any) -> T:
        """Call it, and count how long the loop waits. Every step comes here."""
        self._counters.wait("data", time.perf_counter())
        try:
            return act(*given)
        finally:
            self._counters.go_on(time.perf_counter())


class Loader(BaseLoader):
    """Passes over a dataset, which has a length and is read by index: a Dataset, a tensor, a list.

    The same seed and epoch give the same order, and the same random numbers to the processes that DataLoader
    starts for the pass; those of other workers get others. When the worker is told to stop, a pass ends after
    the batch in hand and no other one begins. A batch is finished when the loop asks for the next one, or
    ends, not when DataLoader's processes have loaded it.

    `epochs` says how many passes the run makes: the last one ends when all workers have finished it, so that
    what a worker leaves behind is still dealt. The options and the attributes are DataLoader's.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        side: Side,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        epochs: int | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        blocks: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if not options.get("in_order", True):
            raise ConfigError(
                "the loader has to know which batch the loop has finished and takes no in_order=False. "
                "Leave it out."
            )
        super().__init__(side, drop_last, epochs)
        length, batched = count(dataset), batch_sampler is not None
        source: Seeded | Sampled = Seeded(length, shuffle, seed, blocks)
        if batched or sampler is not None:
            source = Sampled(batch_sampler if batched else sampler, seed, batched)
        size, drops = (1, False) if batched else (batch_size, drop_last)
        self.leases = LeaseSampler(side, source, size, drops, fingerprint(dataset))
        if batched and source.length > self.leases.dealt:
            log.warning(
                "all workers step together, and %d batches cannot be divided among %d: the last %d of each "
                "pass are left out",
                source.length,
                side.world_size,
                source.length - self.leases.dealt,
            )
        self.batch_size = None if batched else batch_size
        self.batch_sampler = batch_sampler if batched else self.leases
        self.random = None if options.get("generator") is not None else torch.Generator()
        options["generator"] = options.get("generator") or self.random
        self.batches = DataLoader(dataset, batch_sampler=self.leases, **options)
        self.sampler = sampler if sampler is not None else self.batches.sampler

    def __len__(self) -> int:
        return len(self.leases)

    @property
    def step(self) -> float:
        """Which part of a pass one step of every worker is."""
        return self.leases.batch_size * self.side.world_size / self.leases.length

    @property
    def progress(self) -> float:
        """Passes made by all workers together, as a fraction too."""
        return self.leases.progress(self.epoch)

    @property
    def samples(self) -> int:
        """Samples that all workers together have finished, as far as is known here."""
        return round(self.progress * self.leases.length)

    def __iter__(self) -> Iterator[Any]:
        if self.side.stopped():
            return
        leases, self._counters = self.leases, self.side.agent().counters
        if leases.drawn:  # a leaving worker has broken off a pass, and begins another
            self._end(left=True)
        if self.begun:
            self.given = 0
        self.epoch += self.begun
        leases.begin(self.epoch, last=self.epochs is not None and self.epoch >= self.epochs - 1)
        self.begun = self.under_way = True
        if self.random is not None:  # DataLoader seeds its processes from it
            self.random.manual_seed(number(f"processes/{leases.source.seed}/{self.epoch}/{self.side.rank}"))
        left = True
        try:
            while True:
                batches = self._timed(iter, self.batches)
                while (batch := self._timed(next, batches, END)) is not END:
                    self.in_hand = True
                    self.given += 1
                    yield batch
                    self.use()
                    if self.side.stopped():
                        return
                if not self._timed(leases.more):
                    break
            left = False
        finally:
            self.under_way, self.left = False, left
            if not (left and leases.agent.leaving):  # a leaving worker gives all back itself
                self._end(left)

    def _end(self, left: bool) -> None:
        in_hand, self.in_hand = self.in_hand, False
        # Python drops what is raised while a pass is left; the next pass raises it again.
        with contextlib.suppress(ConfigError) if left else contextlib.nullcontext():
            self._timed(self.leases.end, left, in_hand)

    def use(self) -> None:
        """Count the batch in hand as used."""
        self.in_hand = False
        self._counters.samples += self.leases.finish()

    def state_dict(self) -> dict[str, Any]:
        """Where all workers together are in the data: it loads at any number of them, on all of them.

        For after a step: the batch in hand counts as finished. The others are asked, and do not wait; what
        they have in hand is dealt again.
        """
        return self.own_state(whole=True)

    def own_state(self, whole: bool = False) -> dict[str, Any]:
        """The same for this worker alone, or `whole`: all workers' own states together make a checkpoint."""
        state = self.leases.state(self.epoch, int(self.in_hand), whole)
        return {**self._identity(), **self._where(), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the next iteration begins with the batch after it.

        With another seed or sampler, or in parts for another number of workers or in other batches, a pass
        under way begins anew.
        """
        mine = self._identity()
        if state.get("length") != mine["length"]:
            raise ConfigError(
                f"cannot resume: the dataset has {mine['length']} samples, the one of the checkpoint had "
                f"{state.get('length', 'none')}. Give the same dataset, or begin anew."
            )
        mine["order of its sampler"] = state["order"]
        theirs = {**state, "order of its sampler": self.leases.order_sum(state["epoch"])}
        other = [name for name, value in mine.items() if theirs.get(name) != value]
        over = state["begun"] and not state["under_way"]
        self.set_epoch(state["epoch"] + over)
        if not other:
            self.leases.load(state)
            self.given = 0 if over else state["given"]
        elif not over:
            log.warning("pass %d begins anew: the checkpoint was taken with another %s", self.epoch, other[0])

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a state to fit; where all step together, the batches, too."""
        leases, source, parts = self.leases, self.leases.source, self.side.parts
        return {
            "length": leases.length,
            "number of workers": self.side.world_size if parts else 0,
            "batch_size": leases.batch_size if parts else 0,
            "drop_last": leases.drop_last and parts,
            "batch_sampler": source.batched,
            "shuffle or sampler": source.kind,
            "seed": source.seed,
        }


class Every(IterableDataset[Any]):
    """The sample at `place` of each `count` in a row; of an incomplete last row only if `rest`."""

    def __init__(self, stream: Any, place: int, count: int, rest: bool) -> None:
        self.stream, self.place, self.count, self.rest = stream, place, count, rest

    def __iter__(self) -> Iterator[Any]:
        if self.rest:
            return itertools.islice(self.stream, self.place, None, self.count)
        return (group[self.place] for group in zip(*[iter(self.stream)] * self.count, strict=False))


class StreamLoader(BaseLoader):
    """Passes over a stream. A dataset that has `set_epoch` is told which one begins."""

    step = 1.0  # which part of a pass a step is; unknown, so as if it were a whole one

    def __init__(
        self, dataset: Any, batch_size: int, side: Side, *, sharded: bool = False, **options: Any
    ) -> None:
        check_batch_size(batch_size)
        super().__init__(side, options.setdefault("drop_last", False), options.pop("epochs", None))
        rank, world_size = side.rank, side.world_size
        if rank >= world_size and not sharded:
            raise ConfigError(
                f"worker {rank} has joined, and a stream is split among the {world_size} workers that began. "
                "Give sharded=True and a stream of its own, or a dataset with a length."
            )
        if world_size > 1 and not sharded and rank == 0:
            log.warning(
                "a stream cannot be dealt: each of %d workers keeps one of as many samples. What a lost one "
                "had left is not seen. If streams differ by worker, give sharded=True",
                world_size,
            )
        self._every = 1 if sharded else world_size
        kept = dataset if self._every == 1 else Every(dataset, rank, world_size, rest=not side.parts)
        self.dataset, self.batch_size, self.samples = dataset, batch_size, 0
        self.batches = DataLoader(kept, batch_size, **options)

    def __len__(self) -> int:
        each = -(-len(self.dataset) // self._every)  # TypeError as torch's, where a stream has no length
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    @property
    def progress(self) -> float:
        """Passes that this worker has made: how long one is nobody knows before it is over."""
        return float(self.epoch + (self.begun and not self.under_way))

    def __iter__(self) -> Iterator[Any]:
        if self.side.stopped():
            return
        skip, self.given = 0 if self.begun else self.given, 0  # so many were used before the checkpoint
        self.epoch += self.begun
        self.begun = self.under_way = True
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        self._counters = self.side.agent().counters
        batches, self.left = iter(self.batches), True
        try:
            while (batch := self._timed(next, batches, END)) is not END:
                self.given += 1
                if self.given <= skip:
                    continue
                yield batch
                leaves = pytree.tree_leaves(batch)
                sizes = [len(one) for one in leaves if isinstance(one, torch.Tensor) and one.ndim]
                count = min([self.batch_size, *sizes[:1]])  # the last batch may be short
                self._counters.samples += count
                self.samples += count
                if self.side.stopped():
                    return
            self.left = False
        finally:
            self.under_way = False

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is: how many batches of it were given. Nobody knows of the others' streams."""
        return {**self._where(), "ledger": []}

    own_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there: what was given before is read again and left out."""
        over = state["begun"] and not state["under_way"]
        self.set_epoch(state["epoch"] + over)
        self.given = 0 if over else state["given"]


def count(dataset: Any) -> int:
    if hasattr(dataset, "__getitem__"):
        with contextlib.suppress(TypeError):
            return len(dataset)
    raise ConfigError(
        f"a {type(dataset).__name__} has no length and no samples by index, so it cannot be dealt. Give a "
        "dataset with __len__ and __getitem__, or an IterableDataset."
    )


def make(given: Any, asked: dict[str, Any], side: Side) -> Loader | StreamLoader:
    """A loader of a dataset, a stream, or the data of a DataLoader."""
    dataset, options = unpacked(given, asked)
    batch_size = options.pop("batch_size", 1)
    if type(dataset).__module__.startswith("ray.data."):
        from freewheel.ray.data import Rows

        rows = Rows(dataset, options)
        made = Loader(rows, batch_size, side, blocks=rows.lengths, **options)
        rows.ahead = made.leases.next_samples
        return made
    if not isinstance(dataset, IterableDataset):
        options.pop("sharded", None)
        return Loader(dataset, batch_size, side, **options)
    for name in ("sampler", "batch_sampler", "shuffle"):
        if options.pop(name, None):
            raise ConfigError(f"a stream comes in its own order and takes no {name}. Leave it out.")
    for name in ("seed", "in_order"):
        options.pop(name, None)
    return StreamLoader(dataset, batch_size, side, **options)


def unpacked(given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset of a DataLoader, and its options, which the given ones override."""
    options = {name: one for name, one in options.items() if one is not None}
    if not isinstance(given, DataLoader):
        return given, options
    if given.batch_size is None and given.batch_sampler is None:
        raise ConfigError(
            "the DataLoader gives samples, not batches (batch_size=None). Give it a batch_size."
        )
    found: dict[str, Any] = {name: getattr(given, name) for name in (*SHOWN, "drop_last", "in_order")}
    dataset, drawn = found.pop("dataset"), given.sampler
    found["batch_size"] = given.batch_size or 1
    if not isinstance(dataset, IterableDataset):
        if given.batch_size is None:
            found["batch_sampler"] = given.batch_sampler
        elif type(drawn) is SequentialSampler:
            found["shuffle"] = False
        elif type(drawn) is not RandomSampler or drawn.replacement or drawn.num_samples != len(dataset):
            found["sampler"] = drawn
    if not given.num_workers:
        del found["prefetch_factor"], found["multiprocessing_context"]
    return dataset, {**found, **options}
