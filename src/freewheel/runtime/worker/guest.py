"""A worker whose training loop belongs to another library: a trainer that draws ahead, counts and schedules.

The trainer's budget and schedule become the run's: an epoch, a step or a scheduler's step is one of all
workers together, as if the script ran alone over the same samples.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from freewheel.errors import ConfigError
from freewheel.runtime.loading.loader import END, SHOWN, Loader
from freewheel.runtime.membership.place import Place, local_rank
from freewheel.runtime.worker import checks
from freewheel.runtime.worker.attach import Worker
from freewheel.strategy import Strategy


class Guest:
    """A worker in another library's loop, and how much of that loop's budget all workers have used."""

    def __init__(self, worker: Worker) -> None:
        checks.trust(worker._model)  # its trainer saves what it is given
        self.worker, self.inside = worker.start(), True
        self.passes: Passes | None = None
        self._per_step, self._base, self._first = 1, 0, worker._agent.counters.steps

    def leave(self, model: nn.Module) -> None:
        """End the run well; the model then has the mean of all workers' weights."""
        if not self.inside:
            return
        self._close()
        answer = self.worker.finish()
        with torch.no_grad():
            mine, mean = ([*one.parameters(), *one.buffers()] for one in (model, answer))
            torch._foreach_copy_(mine, mean)

    def fail(self, error: BaseException) -> None:
        if self.inside:
            with contextlib.suppress(Exception):  # what failed may be what is needed to say so
                self._close()
            self.worker.__exit__(type(error), error, error.__traceback__)

    def _close(self) -> None:
        self.inside = False
        if self.passes is not None:
            self.passes.close()

    def deal(
        self,
        given: Any,
        *,
        epochs: int | None,
        seed: int,
        ahead: int,
        per_step: int,
        bounded: bool = False,
        position: Any = None,
    ) -> Passes:
        """Deal a DataLoader's samples to all workers; `ahead`: how many batches the loop draws too early.

        `per_step` batches make one step of the plain loop. `position` is where an earlier run was.
        """
        self._per_step = per_step
        loader = self.worker.loader(plain(given), seed=seed, epochs=epochs)
        assert isinstance(loader, Loader)
        self.passes = Passes(loader, given, ahead, bounded)
        if position is not None:
            loader.load_state_dict(position["loader"])
            self._base = position["steps"]
        return self.passes

    def seek(self) -> int:
        """A late worker goes to the pass the others are in; returns how many passes were over before it."""
        passes, over = self.passes, 0
        if passes is None or not self.worker._agent.late:
            return over
        while not (self.worker.stopped or passes.over or passes.found()):
            over += 1
        self._base = self._dealt()
        return over

    def steps(self, after: bool = False) -> int:
        """Steps of the plain loop made by all workers, as far as is known; `after` a step of this one."""
        # Where all workers step together each must count alike, from its own steps.
        if self.worker._strategy.merges() or self.passes is None:
            own = self.worker._agent.counters.steps - self._first
            return self._base + own * self.worker.world_size
        return max(self._base, self._dealt(after))

    def _dealt(self, after: bool = False) -> int:
        assert self.passes is not None
        leases, (part, whole) = self.passes.loader.leases, math.modf(self.worker.progress)
        batches = whole * leases.count + part * leases.length / leases.batch_size
        unused = self.passes.early - (self.passes.in_use() if after else 0)
        return (int(batches + 1e-6) - unused) // self._per_step

    def catch_up(self, scheduler: Any, frequency: int, step: Callable[[], Any], after: bool = False) -> None:
        """Step a scheduler as often as the plain loop would have."""
        if (made := getattr(scheduler, "last_epoch", None)) is None:
            return
        due = self.steps(after) // frequency
        if (total := getattr(scheduler, "total_steps", None)) is not None:  # OneCycleLR refuses more
            due = min(due, total - (not after))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # not yet, here
            for _ in range(made, due):
                step()

    def position(self) -> dict[str, Any] | None:
        """Where all workers are in the data, as plain data for a checkpoint after a step."""
        if self.passes is None or not self.inside:
            return None
        loader, used = self.passes.loader, self.passes.in_use()
        data = loader.leases.queue.data

        async def moment() -> tuple[int, Any]:
            """Steps and ledger of the same moment: others report theirs at any time."""
            data.collect()
            return self.steps(after=True), loader.leases.finished(data.ledger, used)

        steps, finished = self.worker._agent.call(moment())
        return {"steps": steps, "loader": {**loader.own_state(), "ledger": [finished]}}


class GuestCallback:
    """Makes a trainer one worker of a run, while it trains; the settings are those of `fw.attach`.

    `deal=False` leaves the training data to the script: each worker goes through its own DataLoader.
    """

    resumes: ClassVar[str]  # what the trainer takes to do so
    _guest: Guest | None = None

    def __init__(self, strategy: str | Strategy = "adpsgd", *, deal: bool = True, **settings: Any) -> None:
        if "resume" in settings:
            raise ConfigError(f"FreewheelCallback takes no resume: give {self.resumes}, as ever.")
        self._strategy, self._deals, self._settings = strategy, deal, settings
        self._place = Place.read()
        self._say_ranks()

    def _say_ranks(self) -> None:
        """Tell the trainer's library which worker this is."""

    @property
    def worker(self) -> Worker | None:
        """What `fw.attach` gives, once training has begun."""
        return self._guest.worker if self._guest is not None else None

    @property
    def _inside(self) -> Guest:
        assert self._guest is not None
        return self._guest


class Passes:
    """The batches dealt to this worker, one pass per iteration, without a length; in all else the DataLoader.

    The loop draws `ahead` batches more than it has used: a batch counts as finished so many later, or when
    the pass has no more. A `bounded` loop ends a pass after as many steps as there are samples for; where a
    pass has more, left over from earlier ones, the next iteration goes on with it.
    """

    def __init__(self, loader: Loader, given: Any, ahead: int, bounded: bool) -> None:
        self.loader, self.given, self.ahead, self.bounded = loader, given, ahead, bounded
        self.early = 0  # batches that count as finished and which the loop may not have used yet
        self._drawn = 0
        self._pass: Iterator[Any] | None = None
        self._again: tuple[Any, ...] = ()  # a batch that was drawn and is to be given again
        self._newest: Any = None
        leases = loader.leases
        self._finish, self._more = leases.finish, leases.more
        leases.finish, leases.more = self._finish_later, self._finish_rest  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["given"], name)

    def __iter__(self) -> Iterator[Any]:
        if self._pass is not None and self.loader.under_way and self.bounded:
            self._again = self._again or (self._newest,)  # the loop stopped before the end of the pass
        if not self._again:
            self.close()
            self._drawn = self.early = 0
            self._pass = None if self.over else iter(self.loader)
        return self._draw()

    def _draw(self) -> Iterator[Any]:
        again, self._again = self._again, ()
        yield from again
        while self._pass is not None and (batch := next(self._pass, END)) is not END:
            self._newest = batch
            yield batch

    def close(self) -> None:
        if isinstance(self._pass, Generator):
            self._pass.close()
        self._pass, self._again, self._newest = None, (), None

    @property
    def over(self) -> bool:
        loader = self.loader
        next_pass = loader.epoch + (loader.begun and not loader.under_way)
        return loader.epochs is not None and next_pass >= loader.epochs

    def found(self) -> bool:
        """Begin the next pass; False if it has no batch for this worker."""
        first = next(iter(self), END)
        self._again = () if first is END else (first,)
        return first is not END

    def in_use(self) -> int:
        """How many batches the loop has been given to use, beyond those it merely holds."""
        return self.early or min(max(1, self.ahead), len(self.loader.leases.drawn))

    def _finish_later(self) -> int:
        self._drawn, self.early = self._drawn + 1, 0
        return self._finish() if self._drawn > self.ahead else 0

    def _finish_rest(self) -> bool:
        drawn, counters = self.loader.leases.drawn, self.loader.leases.agent.counters
        self.early = len(drawn)
        while drawn:
            counters.samples += self._finish()
        self._drawn = 0
        return self._more()


def plain(given: Any) -> DataLoader[Any]:
    """A DataLoader whose samples can be dealt; Accelerate's as it was before."""
    if not isinstance(given, DataLoader) or isinstance(given.dataset, IterableDataset):
        what = given.dataset if isinstance(given, DataLoader) else given
        raise ConfigError(
            f"training data come from a {type(what).__name__}, which cannot be dealt to workers. Give a "
            "torch DataLoader of a dataset with a length, or deal=False and share them out yourself."
        )
    batches = given.batch_sampler
    if given.batch_size is not None or type(batches) is not BatchSampler:
        return given
    options: dict[str, Any] = {name: getattr(given, name) for name in SHOWN if name != "pin_memory_device"}
    if not given.num_workers:
        del options["prefetch_factor"], options["multiprocessing_context"]
    options |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last, "sampler": batches.sampler}
    return DataLoader(**options, in_order=given.in_order)


def one_gpu() -> None:
    """Show this process one GPU alone, by its local rank: trainers would use all there are."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(one) for one in range(torch.cuda.device_count())]
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank() % len(names)]
