"""A worker: its life in a run, in the training thread, and all that a script calls of it."""

import contextlib
import copy
import logging
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, Diverged, FreewheelError, RunStopped, WorkerLost
from freewheel.fabric import windows
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import FINISHED, LEFT
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.loading.loader import Loader, StreamLoader, make
from freewheel.runtime.loading.sampler import Side
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.generation import Beginning, Entry, Orphaned, TooLate
from freewheel.runtime.membership.place import Place, address_for
from freewheel.runtime.membership.rendezvous import Rendezvous, launched_options, patiently, stay_registered
from freewheel.runtime.worker import checks, joining
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.answers import flat, shaped, unnamed
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.leaving import Leaving, Left
from freewheel.runtime.worker.records import Account, evaluation
from freewheel.runtime.worker.settings import Settings
from freewheel.runtime.worker.steps import Steps
from freewheel.schedule import Schedule, Scheduler, key_of
from freewheel.strategy import Strategy

T = TypeVar("T")
log = logging.getLogger("freewheel")


class Life:
    """A context manager: from joining a run to leaving it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: Strategy,
        settings: Settings | None = None,
        place: Place | None = None,
        version: str = "",
    ) -> None:
        self._settings, self._version = settings or Settings(), version
        self._model, self._strategy = model, strategy
        self._optimizer = checks.check(model, optimizer, strategy, self._settings.wire)
        # The script's rates, by group; a checkpoint has those of its moment.
        self._rates = {
            key_of(group): None if group.get("lr") is None else float(group["lr"])
            for group in self._optimizer.param_groups
        }
        self._leaving = Leaving(self._settings.leave_s, lambda: self._steps.stepping, self._say_leaving)
        self._place = place or Place.read()
        self.rank, self.world_size = self._place.rank, self._place.world_size
        strategy.check(self.world_size)
        self._checkpoints = Checkpoints(self._between)
        self._account = Account(self.rank, strategy, self._checkpoints)
        self._answer: Answer | None = None
        self._store: Rendezvous | None = None
        self._inside = self._settled = False
        self._agents: Agent | None = None
        self._watched = place is None and self.world_size > 1
        self._outside = checks.warn_outside(self._optimizer, self.rank if self._watched else None)
        self._asked: Callable[[], None] = lambda: None  # the script has asked for the answer after the block
        self._begin_schedule: Callable[[], None] = lambda: None  # at the first step after `scheduler`
        self._looked = False  # whether it has asked at all, or for a mean of its own

    def _first_rates(self) -> None:
        begin, self._begin_schedule = self._begin_schedule, lambda: None
        begin()

    @property
    def _agent(self) -> Agent:
        if self._agents is None:
            raise RunStopped("this worker has not begun: use it in `with fw.attach(…)`, or after start().")
        return self._agents

    def __enter__(self) -> Self:
        if self._agents is not None:
            raise RunStopped("this worker has had its with-block; call attach again for another one.")
        self._outside()
        checks.begun = True
        if self._model in checks.attached:
            raise ConfigError("this model is attached already; leave its with-block first.")
        checks.attached.add(self._model)
        try:
            patiently(self._join, self._place, self._settings.join_timeout_s)
        except BaseException as error:
            checks.attached.discard(self._model)
            if isinstance(error, TooLate) and error.done:
                log.warning("worker %d was started again when the others had ended the run", self.rank)
                raise Left from error
            raise
        return self

    def _join(self) -> None:
        place, timeout_s = self._place, self._settings.join_timeout_s
        end_s = time.monotonic() + timeout_s
        options, life = Options(run=secrets.token_hex(16)), 1
        if place.world_size == 1:  # it may begin alone, and others join it
            options = launched_options(place) or options
        if place.world_size > 1 or options.most > 1:
            self._store = Rendezvous(place, timeout_s)
            options, life = self._store.options(), self._store.incarnation()
            self.world_size = options.workers or place.world_size
            if place.meeting is not None and options.most > self.world_size and self._strategy.needs(0):
                raise ConfigError(
                    f"{self._strategy.name} needs worker 0, whose room may go to a worker that waits for "
                    "some. Leave --max out, and ask for as many workers as there is room for."
                )
        given = self._settings  # overrides what the launcher and the place say
        settings = replace(
            given,
            bind=given.bind or options.bind or place.bind or place.loopback(),
            tls=given.tls or options.tls,
            folder=given.folder or place.folder or options.folder,
            tensorboard=given.tensorboard or options.tensorboard,
        )
        self._account.anew()
        while not self._meet(options, settings, life):  # the next beginning is another run
            if time.monotonic() > end_s:
                raise WorkerLost(f"worker {self.rank} found nobody to begin with in {timeout_s:g} s.")
        self._account.begin(settings, self.world_size, options.typed)
        self._steps = Steps(self._agent, self._checkpoints, self._store, self._first_rates)
        self._inside = True
        self._leaving.watch()

    def _meet(self, options: Options, settings: Settings, life: int) -> bool:
        """Join the others and begin with the same weights; False where nobody has weights left to copy."""
        entry, model, store = Entry(Beginning(0, (self.rank,)), late=False, back=False), "", self._store
        if store is not None:
            entry = store.enter(life, self._strategy)
            alike = checks.settings(self._strategy, self._optimizer, settings.seed)
            model = store.check_model(self._model, alike)
        beginning, account = entry.beginning, self._account
        self._inventory = Inventory(self._model, self._optimizer)
        self._replica = self._inventory.replica
        key, most = bytes.fromhex(beginning.run(options.run)), store.most if store is not None else 1
        gradients = self._strategy.defines("before_step")  # are averaged
        longest = self._replica.gradients.size if gradients else self._replica.size
        me = Identity(
            key, self.rank, most, life, self._version, model, longest, settings.wire, windows.place()
        )
        agent = Agent(me, self._inventory, self._strategy, settings, account.score, account.events)
        self._agents = agent
        try:
            account.open(agent, settings, options.console and self.rank == 0)
            if store is not None:
                bind = settings.bind or ""
                address = address_for(self._place.host) if bind in ("0.0.0.0", "auto") else bind
                bind = address if bind == "auto" else bind
                agent.call(joining.meet(agent, store, entry, bind, address, settings.join_timeout_s))
            path = None if agent.late else settings.resume  # one that comes late copies a living worker
            if self.rank == beginning.ranks[0] and not agent.late:
                beginning.tell(path)
            vectors = self._checkpoints.begin(agent, path, store, beginning)
            agent.call(joining.start(agent, store, vectors))
            if store is not None:
                store.begin(life)
                agent.begin(stay_registered(store, agent.fabric, account.events, agent.lack))
        except Orphaned:
            agent.close("it was left alone")
            return False
        except BaseException as error:
            if store is not None and not account.events.muted:
                store.leave(str(error) or type(error).__name__)
            account.close(None if isinstance(error, TooLate) and error.done else error)
            agent.close("it could not join")
            raise
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._inside:  # it has left before
            return
        leaving, account, fabric = self._leaving, self._account, self._agent.fabric
        leaving.go()
        self._settled = self._steps.end(leaving.left_s / 2 if leaving.asked else 0.0)
        self._inside = False
        account.members, account.windows = list(fabric.members), fabric.kinds()
        checks.attached.discard(self._model)
        self._replica.end_moving()  # a step may have raised
        failure, left = error, False
        try:
            exits = isinstance(error, SystemExit) and error.code in (None, 0)
            # SIGTERM may also have run a handler of the script's that exits, or ended DataLoader's processes.
            told = isinstance(error, SystemExit) or str(error).startswith("DataLoader worker")
            if error is None:
                self._end_well()
            elif isinstance(error, ValueError) and "number of total steps" in str(error):  # OneCycleLR
                error.add_note(
                    "Of a worker's steps nobody knows the number: fast workers take more batches than "
                    'len(loader) says. worker.scheduler("cosine") goes by what all workers have done.'
                )
            elif left := exits or (leaving.asked and told):
                leaving.ask()
                self._depart()
                if exits or not isinstance(error, SystemExit):
                    raise Left from error
        except BaseException as late:
            failure, left = late, left or isinstance(late, Left)
            raise
        finally:
            why = LEFT if left else farewell(failure)
            try:
                account.close(None if left else failure)
            finally:
                if why != FINISHED and self._store is not None and not account.events.muted:
                    self._store.leave(why)  # some may not have joined yet
                self._agent.close(why)
                self._checkpoints.wait()
                if account.recorder is not None:
                    account.recorder.write_rest()
                leaving.unwatch()

    def _end_well(self) -> None:
        account = self._account
        account.ended()
        self._agent.check()
        self._inventory.check()
        self._steps.check_still()
        self._steps.say_idle()
        for loader in self._checkpoints.loaders:
            loader.say_lacking()
        self._checkpoints.close()
        answer: Answer | None = self._patiently(self._agent.finish(self._store), ends=True)
        if answer is None:
            self._depart()
            raise Left
        account.members = list(self._agent.ending.members) or account.members
        said = account.members if self._store is None else self._store.end(account.members)
        if self.rank not in said:
            raise WorkerLost(
                f"worker {self.rank} was silent while the run ended: the answer is the mean of "
                f"worker {', '.join(map(str, said))}. What this worker has is not it; take theirs."
            )
        if not answer[0].isfinite().all():
            raise Diverged(
                f"worker {self.rank} ended with weights that are not finite. Lower the learning rate."
            )
        self._answer = answer
        told = self._looked or self._checkpoints.arranged or self._strategy.keeps_alike
        if self._watched and self.rank == said[0] and not told:
            self._asked = checks.watch_answer()

    def _say_leaving(self) -> None:
        self._agent.leaving = True
        with contextlib.suppress(RuntimeError):  # the communication thread has ended
            self._agent.loop.call_soon_threadsafe(self._agent.node.farewells.announce)

    def _between(self) -> None:
        """At a moment when nothing is half done: leave, if asked to and nothing would be lost."""
        leaving, agent = self._leaving, self._agent
        if leaving.asked and (leaving.half_over or agent.strategy.settled(agent.node)):
            self.__exit__(Left, left := Left(), None)
            raise left

    def _depart(self) -> None:
        self._account.ended()
        self._checkpoints.leave(self._leaving.left_s / 2)
        lacks = self._patiently(self._agent.depart(self._leaving.left_s, self._settled))
        late = f"; in {self._leaving.seconds:g} s it could not hand over {lacks}" if lacks else ""
        self._account.events.note("left", self.rank, LEFT + late)
        log.warning("worker %d has left the run as it was asked to; the others go on%s", self.rank, late)

    def _patiently(self, work: Coroutine[Any, Any, Any], ends: bool = False) -> Any:
        """Wait for the communication thread; corrections that arrive meanwhile are added.

        `ends`: give up, with None, where this worker is to leave and half of its time is over.
        """

        def add() -> bool:
            self._replica.begin_moving()
            self._replica.boundary()
            self._replica.end_moving()
            return ends and self._leaving.half_over

        return self._agent.wait(work, add, 0.01)


def farewell(failure: BaseException | None) -> str:
    if failure is None or isinstance(failure, Diverged):
        return FINISHED if failure is None else str(failure)
    said = f": {failure}" if isinstance(failure, FreewheelError) else ""
    return f"it left with {type(failure).__name__}{said}"


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
        number, parts = len(self._checkpoints.loaders), self._strategy.merges()

        def agent() -> Agent:
            if not self._agent.alive:
                raise RunStopped(
                    "this worker's with-block has ended, and its loaders with it. Read data after it with a "
                    "torch DataLoader of its own."
                )
            return self._agent

        def stopped() -> bool:  # a loader asks before each batch
            self._checkpoints.asked(number)
            return self.stopped

        # After all have begun again these may be fewer: without those that are lost for good.
        beginners = self.world_size if self._agents is None else len(self._agents.first)
        side = Side(agent, self.rank, beginners, parts, not number, stopped)
        options |= {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        loader = make(dataset, {**options, "epochs": epochs}, side)
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

        It counts passes of all workers over the data of a loader, the first that was given epochs or else
        the first, up to `epochs` (default: the loader's). A loop without a loader of the worker's gives
        `steps`, this worker's own. `warmup` is in the same unit; default: a twentieth. The rates are those
        the optimizer had at `attach`.
        """
        if None in self._rates.values():
            raise ConfigError(f"{checks.name_of(self._optimizer)} has no learning rate to schedule.")
        if steps is not None and epochs is not None:
            raise ConfigError(f"worker.scheduler takes epochs={epochs} or steps={steps}, not both.")
        numbers: dict[str, Any] = {"epochs": epochs, "steps": steps, "warmup": warmup}
        for name, given in numbers.items():
            if given is not None and not isinstance(given, Real):
                raise ConfigError(f"worker.scheduler: {name} must be a number, not {given!r}.")
        loader = self._checkpoints.counted()
        end = steps if steps is not None else epochs
        if end is None and loader is not None:
            end = loader.epochs
        if end is None:
            raise ConfigError(
                "a schedule needs an end: give worker.scheduler (or the loader) epochs=, or steps="
            )
        schedule, chosen = Schedule(end, curve, warmup), None

        def factor() -> float:
            nonlocal chosen
            if steps is not None:
                return schedule.factor(self._agent.node.steps)
            loader = chosen or self._checkpoints.counted()
            if self._agents is not None and any(self._steps.made.values()):
                chosen = loader  # loaders that are made later change nothing
                if loader is None:
                    raise ConfigError(
                        "worker.scheduler counts passes over worker.loader's data, and there is no such "
                        "loader. Make one, or give steps= instead of epochs=."
                    )
            if loader is None:
                return schedule.factor(0.0)
            return replace(schedule, step=loader.step).factor(self._checkpoints.passes(loader))

        scheduler = Scheduler(self._optimizer, factor, self._rates)
        self._begin_schedule = scheduler.begin
        return scheduler

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

        Of what each worker has last given under this name, without one on this line of the script: nobody's
        training waits, and who has given nothing yet is not in it. A tensor that holds infinities, as masks
        do, stays this worker's. With `wait` it is waited for until all have given as much: all must call it
        as often, on any line.
        """
        vector = flat(value)
        self._only_inside("mean")
        self._looked |= wait
        if not (name or wait):
            name = unnamed(value, sys._getframe(1))
        self._replica.end_moving()  # a step may have raised
        mean = self._agent.wait(self._agent.means.mean(vector, name, wait))
        assert mean is not None  # nobody gives it up
        found: T = shaped(mean, value)
        return found

    def start(self) -> Self:
        """Begin, in a script that has no place for a with-block; `finish` ends it."""
        worker = self.__enter__()
        checks.watch_end(self.rank, self._unfinished)
        return worker

    def finish(self) -> nn.Module:
        """End what `start` began: wait for the other workers, and return the consensus."""
        if not self._inside:
            raise RunStopped("worker.finish ends what worker.start began, once.")
        self.__exit__(None, None, None)
        return self.consensus()

    def _unfinished(self, why: RunStopped) -> bool:
        inside, left = self._inside, self._leaving.asked
        if inside:
            error = Left() if left else why
            with contextlib.suppress(Left):
                self.__exit__(type(error), error, None)
        return inside and not left

    def consensus(self) -> nn.Module:
        """A copy of the model with the mean of all workers' weights: what to evaluate and to ship.

        Inside the with-block it asks the other workers, whose training goes on; after it, it is the mean of
        what all ended with. Floating buffers in which workers differ (BatchNorm's statistics) are averaged
        too; others are worker 0's.
        """
        agent, answer = self._agent, self._answer
        self._asked()
        self._looked = True
        self._replica.end_moving()  # a step may have raised
        if answer is None:
            self._inventory.check()
            if not self._inside:
                raise RunStopped("there is no consensus: call it in the with-block, or after it ended well.")
            answer = agent.call(agent.answers.consensus())
        clone = checks.without_guard(copy.deepcopy(self._inventory.model))
        clone.zero_grad(set_to_none=True)
        self._inventory.fill(clone, *answer)
        return clone
