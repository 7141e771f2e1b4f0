"""A worker: what `fw.attach` gives, and all that a script calls of it. Its life in the run is in life.py."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import Tensor, nn

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.worker import guards, optimizers
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.leaving import Left
from freewheel.runtime.worker.life import Life
from freewheel.runtime.worker.means import flat, shaped
from freewheel.runtime.worker.records import evaluation
from freewheel.schedule import Schedule, Scheduler

if TYPE_CHECKING:
    from freewheel.runtime.loading.loader import Loader
    from freewheel.runtime.loading.streams import StreamLoader

T = TypeVar("T")


class Worker(Life):
    """One worker of a run: a context manager around a training loop that need not change."""

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        epochs: int | None = None,
        **options: Any,
    ) -> Loader | StreamLoader:
        """Batches dealt to this worker; over all workers every sample once a pass. See `Loader`.

        `dataset` may be a DataLoader of torch's, whose options then count where none are given here.
        """
        from freewheel.runtime.loading.base import Side
        from freewheel.runtime.loading.loader import make

        number, parts = len(self._checkpoints.loaders), self._strategy.merges()

        def agent() -> Agent:
            if self._agents is not None and not self._agents.alive:
                raise RunStopped(
                    "this worker's with-block has ended, and its loaders with it. Read data after it with a "
                    "torch DataLoader of its own."
                )
            return self._agent

        def stopped() -> bool:  # a loader asks before each batch
            self._checkpoints.asked(number)
            return self.stopped

        # Fewer begin where some are lost for good and all begin again.
        beginners = self.world_size if self._agents is None else len(self._agents.first)
        side = Side(agent, self.rank, beginners, parts, not number, stopped)
        asked = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        loader = make(dataset, {**asked, "epochs": epochs, **options}, side)
        self._checkpoints.made(loader)
        return loader

    @property
    def progress(self) -> float:
        """Passes of all workers together over the first loader's data, by loaders like it too; a fraction."""
        return self._checkpoints.progress

    def scheduler(
        self,
        curve: str = "cosine",
        *,
        epochs: float | None = None,
        steps: int | None = None,
        warmup: float | None = None,
    ) -> Scheduler:
        """A learning-rate scheduler that goes by what all workers have done; call its `step` after each step.

        It counts passes of all workers over the first loader's data, up to `epochs` (default: the loader's).
        A loop without a loader of the worker's gives `steps`, this worker's own. `warmup` is in the same
        unit; default: a twentieth. The rates are those the optimizer had at `attach`.
        """
        rates = [lr for lr in self._rates if lr is not None]
        if len(rates) < len(self._rates):
            raise ConfigError(f"{optimizers.name(self._optimizer)} has no learning rate to schedule.")
        if steps is not None and epochs is not None:
            raise ConfigError(f"worker.scheduler takes epochs={epochs:g} or steps={steps}, not both.")
        if steps is not None:
            schedule = Schedule(steps, curve, warmup)
            return Scheduler(self._optimizer, schedule, lambda: self._agent.counters.steps, rates)
        loader = next(iter(self._checkpoints.loaders), None)
        epochs = loader.epochs if epochs is None and loader is not None else epochs
        if epochs is None:
            raise ConfigError(
                "a schedule needs an end: give worker.scheduler (or the loader) epochs=, or steps="
            )
        schedule = Schedule(epochs, curve, warmup, loader.step if loader is not None else 1.0)
        return Scheduler(self._optimizer, schedule, lambda: self.progress, rates)

    def checkpoint(
        self,
        path: str | Path,
        *,
        every: int | None = 100,
        keep: int = 3,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Let a checkpoint be written to this folder every so many steps, beside training; None: one now.

        The last `keep` stay. `extra` names what else belongs to training and has state_dict and
        load_state_dict (a scheduler, a GradScaler); in a resumed run they get their state back here.
        """
        self._only_inside("checkpoint")
        self._agent.check()
        self._checkpoints.arrange(Path(path), every, keep, extra)

    @property
    def stopped(self) -> bool:
        """Whether a worker has called `stop`."""
        return self._agent.stopped

    def stop(self) -> None:
        """Let the loaders of all workers end after their current batch."""
        self._agent.stop()

    def leave(self) -> None:
        """Leave before the others, as after SIGTERM: when the loop comes for its next batch, or has stepped.

        What it has not used goes to others, what it has learned stays with them. The script ends with code 0.
        """
        self._only_inside("leave")
        self._leaving.ask()

    def _only_inside(self, what: str) -> None:
        if not self._inside:
            raise ConfigError(f"call worker.{what} inside the with-block, or between start and finish.")

    def report(self, loss: Tensor | float) -> None:
        """Say what the training loss is, for the records and for strategies that compare workers."""
        if not isinstance(loss, Tensor | float | int) or (isinstance(loss, Tensor) and loss.numel() != 1):
            raise ConfigError(f"report takes one number, not {loss!r}.")
        self._account.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def about(self, *, name: str | None = None, target: float | None = None, **settings: Any) -> None:
        """Say what this run is, for its run.json: before the with-block.

        `name` is for people, `target` an accuracy to time, the rest settings that are worth knowing later.
        """
        if self._agents is not None:
            raise ConfigError("call worker.about before the with-block: run.json is written when it begins.")
        if target is not None and not 0 < target <= 1:
            raise ConfigError(f"about: target is an accuracy between 0 and 1, not {target:g}.")
        self._account.about |= settings | {"name": name, "target": target}

    def record(self, **measured: Tensor | float) -> None:
        """Write down what was measured of the answer: loss, accuracy, and any other number by its name.

        In the with-block or after it. Reports and the dashboard draw each of them, as in
        `record(perplexity=12.5)`. What is no number at all is refused; nan is written as unknown.
        """
        self._account.measured(evaluation(measured))

    def metrics(self) -> dict[str, Any]:
        """What this worker has done so far, as plain data."""
        steps = self._agent.counters.steps
        return {**self._account.said(), "steps": steps}

    def mean(self, value: T, name: str = "", *, wait: bool = False) -> T:
        """The mean over workers of a number, a tensor, or a list or dict of them, in the same form.

        Of what each worker has last given under this name: nobody's training waits, and who has given
        nothing yet is not in it. A tensor that holds infinities, as masks do, stays this worker's. With
        `wait` it is waited for until all have given as much: all must call it as often.
        """
        vector = flat(value)
        self._only_inside("mean")
        self._replica.end_moving()  # a step may have raised
        mean = self._agent.wait(self._agent.means.mean(vector, name, wait))
        assert mean is not None  # nobody gives it up
        found: T = shaped(mean, value)
        return found

    def start(self) -> Self:
        """Begin, in a script that has no place for a with-block; `finish` ends it."""
        worker = self.__enter__()
        guards.watch_end(self.rank, self._unfinished)
        return worker

    def finish(self) -> nn.Module:
        """End what `start` began: wait for the other workers, and return the consensus."""
        if not self._inside:
            raise RunStopped("worker.finish ends what worker.start began, once.")
        self.__exit__(None, None, None)
        return self.consensus()

    def _unfinished(self, why: RunStopped) -> bool:
        """The script has ended: the others are not to wait for this worker."""
        inside, left = self._inside, self._leaving.asked
        if inside:
            error = Left() if left else why
            self.__exit__(type(error), error, None)
        return inside and not left

    def consensus(self) -> nn.Module:
        """A copy of the model with the mean of all workers' weights: what to evaluate and to ship.

        Inside the with-block it asks the other workers, whose training goes on; after it, it is the mean of
        what all ended with. Floating buffers in which workers differ (BatchNorm's statistics) are averaged
        too; others are worker 0's.
        """
        agent, answer = self._agent, self._answer
        self._replica.end_moving()  # a step may have raised
        if answer is None:
            self._inventory.check()
            if not self._inside:
                raise RunStopped("there is no consensus: call it in the with-block, or after it ended well.")
            answer = agent.call(agent.answers.consensus())
        clone = guards.without_guard(copy.deepcopy(self._inventory.model))
        clone.zero_grad(set_to_none=True)
        self._inventory.fill(clone, *answer)
        return clone
