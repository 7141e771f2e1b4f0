"""A worker: what `fw.attach` gives. The training thread's side; the communication thread's is the agent.

Its life is here: it joins, trains and leaves. What happens at each step is in steps.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import math
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, Diverged, FreewheelError, RunStopped, WorkerLost, at_least
from freewheel.fabric import windows
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import FINISHED, LEFT
from freewheel.records.journal import Journal
from freewheel.records.run_json import typed
from freewheel.records.schema import WorkerSample, worker_sample
from freewheel.records.timeline import Timeline
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.launch import keys
from freewheel.runtime.membership.generation import Beginning, Orphaned, TooLate
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.registrar import stay_registered
from freewheel.runtime.membership.rendezvous import Options, Rendezvous, address_for, options_alone, patiently
from freewheel.runtime.worker import checks, optimizers, steps, unfinished
from freewheel.runtime.worker.agent import STOP, Agent
from freewheel.runtime.worker.buffers import set_buffers
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.leaving import Leaving, Left, ends, exits_well
from freewheel.runtime.worker.live_replica import live_replica
from freewheel.runtime.worker.means import flat, shaped
from freewheel.runtime.worker.overwriting import without_guard
from freewheel.runtime.worker.peer_copy import Rest
from freewheel.runtime.worker.records import Events, Recorder, describe, evaluation, open_board
from freewheel.runtime.worker.steps import Steps
from freewheel.schedule import Schedule, Scheduler, of_loader
from freewheel.strategy import Strategy

if TYPE_CHECKING:
    from freewheel.runtime.loading.loader import Loader
    from freewheel.runtime.loading.streams import StreamLoader

T = TypeVar("T")
log = logging.getLogger("freewheel")


class Worker:
    """One worker of a run: a context manager around a training loop that need not change."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        strategy: Strategy,
        *,
        version: str,
        place: Place | None = None,
        wire: Literal["fp32", "bf16"] = "fp32",
        bind: str | None = None,
        tls: str | Path | None = None,
        folder: str | Path | None = None,
        tensorboard: str | Path | None = None,
        resume: str | Path | None = None,
        seed: int = 0,
        join_timeout_s: float = 300.0,
        heartbeat_s: float = 2.0,
        leave_s: float | None = None,
    ) -> None:
        checks.model_itself(model)
        self._model, self._optimizer, self._strategy = model, optimizers.joined(optimizer), strategy
        checks.check(model, self._optimizer)
        given = [group.get("lr") for group in self._optimizer.param_groups]
        self._rates = [lr.item() if isinstance(lr, Tensor) else lr for lr in given]
        """As the script has set them: a checkpoint has those of its moment."""
        self._wire, self._bind, self._tls = checks.wire_type(wire, strategy), bind, tls
        at_least("heartbeat_s", heartbeat_s, 0.1)
        self._heartbeat_s = heartbeat_s
        self._tensorboard, self._resume = tensorboard, resume
        self._checkpoints = Checkpoints(self._optimizer)
        self._checkpoints.between = self._between
        self._leaving = Leaving(leave_s, lambda: self._steps.stepping, self._say_leaving)
        self._folder, self._seed, self._timeout_s, self._version = folder, seed, join_timeout_s, version
        self._place = place or Place.read()
        self.rank, self.world_size = self._place.rank, self._place.world_size
        self._beginners = self.world_size  # fewer where some are lost for good and all begin again
        strategy.check(self.world_size)
        self._answer: Answer | None = None
        self._loss: Tensor | float = math.nan
        self._began_s = self._ended_s = 0.0
        self._began: float | None = None  # the same on the clock of the wall
        self._began_steps = 0
        self._members: list[int] = []  # within reach when the with-block ended, then in the answer
        self._windows: dict[int, str] = {}  # how vectors travelled to them
        self._life, self._state = 1, "joining"
        self._about: dict[str, Any] = {}
        self._journal: Journal | None = None
        self._recorder: Recorder | None = None
        self._events = Events()
        self._store: Rendezvous | None = None
        self._inside = self._settled = False
        self._agents: Agent | None = None
        outside = unfinished.watch_outside if place is None and self.world_size > 1 else lambda _: None
        self._outside = steps.warn_outside(self._optimizer, lambda: outside(self.rank))

    # -- for the user --

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

        side = Side(
            lambda: self._agent_inside,
            self.rank,
            self._beginners,
            parts=self._strategy.merges(),
            first=not self._checkpoints.loaders,
            stopped=self._checkpoints.watching(lambda: self.stopped),
            check=self._check,
        )
        asked = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        loader = make(dataset, {**asked, "epochs": epochs, **options}, side)
        self._checkpoints.made(loader)
        return loader

    @property
    def progress(self) -> float:
        """Passes of all workers together over the first loader's data, by loaders like it too; a fraction."""
        return float(sum(one.progress for one in self._checkpoints.like_first()))

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
        if steps is not None:
            schedule = Schedule(steps, curve, warmup)
            return Scheduler(self._optimizer, schedule, lambda: self._agent.counters.steps, rates)
        schedule = of_loader(next(iter(self._checkpoints.loaders), None), curve, epochs, warmup)
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
        if not self._inside:
            raise ConfigError("call worker.checkpoint inside the with-block.")
        self._check()
        self._checkpoints.arrange(Path(path), every, keep, extra)

    @property
    def stopped(self) -> bool:
        """Whether a worker has called `stop`."""
        return self._agent.stopped

    def stop(self) -> None:
        """Let the loaders of all workers end after their current batch."""
        self._agent.stopped = True
        self._agent.begin(self._agent.tell_all(STOP))

    def leave(self) -> None:
        """Leave before the others, as after SIGTERM: when the loop comes for its next batch, or has stepped.

        What it has not used goes to others, what it has learned stays with them. The script ends with code 0.
        """
        if not self._inside:
            raise ConfigError("call worker.leave inside the with-block, or between start and finish.")
        self._leaving.ask()

    def report(self, loss: Tensor | float) -> None:
        """Say what the training loss is, for the records and for strategies that compare workers."""
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ConfigError(f"report takes one number, not a tensor of shape {tuple(loss.shape)}.")
        if not isinstance(loss, Tensor | float | int):
            raise ConfigError(f"report takes a number, not {loss!r}.")
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def about(self, *, name: str | None = None, target: float | None = None, **settings: Any) -> None:
        """Say what this run is, for its run.json: before the with-block.

        `name` is for people, `target` an accuracy to time, the rest settings that are worth knowing later.
        """
        if self._agents is not None:
            raise ConfigError("call worker.about before the with-block: run.json is written when it begins.")
        if target is not None and not 0 < target <= 1:
            raise ConfigError(f"about: target is an accuracy between 0 and 1, not {target:g}.")
        self._about |= settings | {"name": name, "target": target}

    def record(self, **measured: Tensor | float) -> None:
        """Write down what was measured of the answer: loss, accuracy, and any other number by its name.

        In the with-block or after it. Reports and the dashboard draw each of them, as in
        `record(perplexity=12.5)`. What is no number at all is refused; nan is written as unknown.
        """
        checked = evaluation(measured)
        if self._recorder is None:
            raise ConfigError("call worker.record inside the with-block, or after it.")
        like = self._checkpoints.like_first()
        dealt = sum(one.samples for one in like) if like else None
        self._recorder.evaluated({"samples": dealt, **checked})

    def metrics(self) -> dict[str, Any]:
        """What this worker has done so far, as plain data."""
        return {**self._said(), "steps": self._agent.counters.steps}

    def mean(self, value: T, name: str = "", *, wait: bool = False) -> T:
        """The mean over workers of a number, a tensor, or a list or dict of them, in the same form.

        Of what each worker has last given under this name: nobody's training waits, and who has given
        nothing yet is not in it. A tensor that holds infinities, as masks do, stays this worker's. With
        `wait` it is waited for until all have given as much: all must call it as often.
        """
        vector = flat(value)
        if not self._inside:
            raise ConfigError("call worker.mean inside the with-block, or between start and finish.")
        self._replica.end_moving()  # a step may have raised
        asked = self._agent.begin(self._agent.means.mean(vector, name, wait))
        while True:
            try:
                found: T = shaped(asked.result(timeout=0.2)[0], value)
                return found
            except concurrent.futures.TimeoutError:
                self._check()

    def start(self) -> Self:
        """Begin, in a script that has no place for a with-block; `finish` ends it."""
        worker = self.__enter__()
        unfinished.watch(self.rank, self._unfinished)
        return worker

    def finish(self) -> nn.Module:
        """End what `start` began: wait for the other workers, and return the consensus."""
        if not self._inside:
            raise RunStopped("worker.finish ends what worker.start began, once.")
        self.__exit__(None, None, None)
        return self.consensus()

    def _unfinished(self, why: RunStopped) -> bool:
        """The script has ended: the others are not to wait for this worker."""
        if self._inside and self._leaving.asked:
            self.__exit__(Left, Left(), None)
            return False
        if inside := self._inside:
            self.__exit__(RunStopped, why, None)
        return inside

    def consensus(self) -> nn.Module:
        """A copy of the model with the mean of all workers' weights: what to evaluate and to ship.

        Inside the with-block it asks the other workers, whose training goes on; after it, it is the mean of
        what all ended with. Floating buffers in which workers differ (BatchNorm's statistics) are averaged
        too; others are worker 0's.
        """
        agent = self._agent
        if self._answer is None:
            self._inventory.check()
        self._replica.end_moving()  # a step may have raised
        if self._answer is None and not self._inside:
            raise RunStopped("there is no consensus: call it in the with-block, or after it has ended well.")
        weights, buffers = self._answer or agent.call(agent.consensus())
        clone = without_guard(copy.deepcopy(self._inventory.model))
        clone.zero_grad(set_to_none=True)
        self._inventory.fill(clone, self._replica, weights)
        set_buffers(clone, buffers)
        return clone

    # -- life --

    @property
    def _agent(self) -> Agent:
        if self._agents is None:
            raise RunStopped("this worker has not begun: use it in `with fw.attach(…)`, or after start().")
        return self._agents

    @property
    def _agent_inside(self) -> Agent:
        """For what deals batches, which nobody does after the block."""
        if self._agents is not None and not self._agents.alive:
            raise RunStopped("this worker's with-block has ended, and its loaders with it. Use them inside.")
        return self._agent

    def __enter__(self) -> Self:
        if self._agents is not None:
            raise RunStopped("this worker has had its with-block; call attach again for another one.")
        self._outside()
        unfinished.begun = True
        checks.enter(self._model)
        try:
            patiently(self._join, self._place, self._timeout_s)
        except BaseException as error:
            checks.leave(self._model)
            if isinstance(error, TooLate) and error.done:
                log.warning(
                    "worker %d was started again when the others had ended the run: it ends, with exit code "
                    "0. They have the answer",
                    self.rank,
                )
                raise Left from error
            raise
        return self

    def _join(self) -> None:
        place, end_s = self._place, time.monotonic() + self._timeout_s
        options, life = options_alone(place) or Options(run=secrets.token_hex(16)), 1
        if place.world_size > 1 or options.most > 1:
            self._store = Rendezvous(place, self._timeout_s)
            options, life = self._store.options(), self._store.incarnation()
            self.world_size = options.workers or place.world_size
            checks.room(self._strategy, place.meeting is not None and options.most > self.world_size)
        bind = self._bind or options.bind or place.bind or place.loopback()
        self._recorder, self._events = None, Events()
        while not self._meet(options, life, bind):  # the next beginning is another run
            if time.monotonic() > end_s:
                raise WorkerLost(f"worker {self.rank} found nobody to begin with in {self._timeout_s:g} s.")
        self._began_steps = self._agent.counters.steps
        self._began_s, self._began = time.perf_counter(), time.time()
        self._state, self._events.begun = "training", True
        self._write_about(options)
        self._steps = Steps(self._agent, self._optimizer, self._inventory, self._checkpoints)
        self._inside = True
        self._leaving.watch()

    def _meet(self, options: Options, life: int, bind: str) -> bool:
        """Come together with the others and begin with the same weights; False: nobody has them any more."""
        beginning, entry, model = Beginning(0, (self.rank,)), None, ""
        if self._store is not None:
            entry = self._store.enter(life, self._strategy)
            settings = checks.settings(self._strategy, self._optimizer, self._seed)
            beginning, model = entry.beginning, self._store.check_model(self._model, settings)
        self._beginners = len(beginning.ranks)
        self._replica = live_replica(self._model)
        self._inventory = Inventory(self._model, self._optimizer)
        self._rest = Rest(self._inventory, self._optimizer)
        self._agents = self._make_agent(options, beginning.run(options.run), life, model)
        try:
            self._begin_records(options)
            if self._store is not None and entry is not None:
                address = address_for(self._place.host) if bind in ("0.0.0.0", "auto") else bind
                bind = address if bind == "auto" else bind
                self._agent.call(self._agent.join(self._store, entry, bind, address, self._timeout_s))
            path = None if self._agent.late else self._resume  # one that comes late copies a living worker
            if self.rank == beginning.ranks[0] and not self._agent.late:
                beginning.tell(path)
            vectors = self._checkpoints.begin(self._agent, self._inventory, path, self._store, beginning)
            self._agent.call(self._agent.start(vectors))
            if self._store is not None:
                self._store.begin(life)
                agent = self._agent
                agent.begin(stay_registered(self._store, agent.fabric, self._events, agent.lack))
        except Orphaned:
            self._agent.close("it was left alone")
            return False
        except BaseException as error:
            if self._store is not None and not self._events.muted:
                self._store.leave(str(error) or type(error).__name__)
            self._end_records(None if isinstance(error, TooLate) and error.done else error)
            self._agent.close("it could not join")
            raise
        return True

    def _make_agent(self, options: Options, run: str, life: int, model: str) -> Agent:
        tls, averages = self._tls or options.tls, self._strategy.defines("before_step")  # gradients
        me = Identity(
            bytes.fromhex(run),
            self.rank,
            self._store.most if self._store is not None else 1,
            life,
            self._version,
            model,
            longest=self._replica.gradients.size if averages else self._replica.size,
            wire="bf16" if self._wire else "fp32",
            place=windows.place(),
        )
        return Agent(
            me,
            self._replica,
            self._strategy,
            seed=self._seed,
            wire=self._wire,
            tls=keys.contexts(Path(tls)) if tls else None,
            score=self._score,
            rest=self._rest,
            heartbeat_s=self._heartbeat_s,
            events=self._events,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._inside:  # it has left before
            return
        self._leaving.go()
        self._settled = self._steps.end(self._leaving.left_s / 2 if self._leaving.asked else 0.0)
        self._inside, self._members = False, list(self._agent.fabric.members)
        self._windows = self._agent.fabric.kinds()
        checks.leave(self._model)
        self._replica.end_moving()  # a step may have raised
        failure, left = error, False
        if error is not None and "number of total steps" in str(error):  # OneCycleLR
            error.add_note(checks.TOO_MANY_STEPS)
        try:
            if error is None:
                self._end_well()
            elif left := (self._leaving.asked and ends(error)) or exits_well(error):
                self._leaving.ask()
                self._depart()
                if not isinstance(error, SystemExit) or exits_well(error):
                    raise Left from error
        except Left:
            left = True
            raise
        except BaseException as late:
            failure = late
            raise
        finally:
            self._leaving.unwatch()
            why = FINISHED if failure is None else f"it left with {type(failure).__name__}"
            if isinstance(failure, Diverged):
                why = str(failure)
            elif isinstance(failure, FreewheelError):
                why += f": {failure}"
            if left:
                why, failure = LEFT, None
            try:
                self._end_records(failure)
            finally:
                if (left or error is not None) and self._store is not None and not self._events.muted:
                    self._store.leave(why)  # some may not have joined yet
                self._agent.close(why)
                self._checkpoints.wait()
                if self._recorder is not None:
                    self._recorder.write_rest()

    def _end_well(self) -> None:
        """The loop has ended: wait for the others, and take the mean."""
        self._state, self._ended_s = "finished", time.perf_counter()
        self._check()
        self._inventory.check()
        self._steps.check_still()
        self._steps.say_idle(self.rank)
        self._checkpoints.close()
        try:
            answer = self._patiently(self._agent.finish(self._store), ends=True)
        except Left:
            self._depart()
            raise
        self._members = list(self._agent.ending.members) or self._members
        self._events.over = True
        said = self._members if self._store is None else self._store.end(self._members)
        if self.rank not in said:
            raise WorkerLost(
                f"worker {self.rank} was silent while the run ended: the answer is the mean of "
                f"worker {', '.join(map(str, said))}. What this worker has is not it; take theirs."
            )
        checks.finite(answer[0], self.rank)
        self._answer = answer

    # -- leaving before the others --

    def _say_leaving(self) -> None:
        self._agent.leaving = True
        with contextlib.suppress(RuntimeError):  # the communication thread has ended
            self._agent.begin(self._agent.announce())

    def _between(self) -> None:
        """Nothing is half done: leave here, if that was asked for and nothing would be lost."""
        leaving, agent = self._leaving, self._agent
        if leaving.asked and (leaving.half_over or agent.strategy.settled(agent.node)):
            self.__exit__(Left, left := Left(), None)
            raise left

    def _depart(self) -> None:
        """Hand everything over."""
        self._state, self._ended_s = "finished", time.perf_counter()
        self._checkpoints.leave(self._leaving.left_s / 2)
        lacks = self._patiently(self._agent.depart(self._leaving.left_s, self._settled))
        self._events.note("left", self.rank, self._leaving.outcome(lacks))

    # -- records --

    def _begin_records(self, options: Options) -> None:
        folder = self._folder or self._place.folder or options.folder
        board = self._tensorboard or options.tensorboard
        if self._recorder is not None:
            return
        self._life = self._agent.me.incarnation
        if folder is not None:
            self._journal = Journal(Path(folder), self.rank)
            if last := self._journal.last_life(self.rank):  # of this run, or of another in the same folder
                self._life = max(self._life, last + 1)
        timeline = Timeline(time.time, self._life) if self._journal is not None else None
        self._agent.counters.timeline = timeline
        self._recorder = Recorder(
            self._sample,
            self._events,
            self._journal,
            timeline=timeline,
            console=options.console and self.rank == 0,
            board=open_board(board, self.rank) if board is not None else None,
        )

    def _sample(self) -> WorkerSample:
        self._agent.counters.measure = True  # for the next sample
        return self._said()

    def _said(self) -> WorkerSample:
        now_s, counters = self._ended_s or time.perf_counter(), self._agent.counters
        return worker_sample(
            counters,
            rank=self.rank,
            life=self._life,
            state=self._state,
            began=self._began,
            steps=counters.steps - self._began_steps if self._began is not None else 0,
            resumed_at=self._began_steps,
            elapsed_s=now_s - self._began_s if self._began_s else 0.0,
            compute_s=counters.compute_s,
            blocked_s=counters.blocked(now_s),
            checkpoints=dict(self._checkpoints.counts),
            progress=self.progress,
            windows=self._windows or self._agent.fabric.kinds(),
            members=self._members or list(self._agent.fabric.members),
            view=self._agent.node.view.number,
            loss=float(self._loss),
            node=socket.gethostname(),
        )

    def _write_about(self, options: Options) -> None:
        """Let run.json be written: by the first of those who begin, or where there is none."""
        first, late = self._agent.fabric.members[0] == self.rank, self._agent.late
        if self._journal is None or self._recorder is None or not first:
            return
        if late and self._journal.folder.joinpath("run.json").exists():
            return
        about = {"wire": "bf16" if self._wire else "fp32", **self._about}
        more: dict[str, Any] = {"freewheel": self._version, "workers": self.world_size, "seed": self._seed}
        made_of = self._model, self._optimizer, self._strategy
        self._recorder.about(describe(*made_of, about=about, command=options.typed or typed(), **more))

    def _end_records(self, failure: BaseException | None) -> None:
        if failure is not None:
            self._events.note("failed", self.rank, f"{type(failure).__name__}: {failure}".rstrip(": "))
        self._events.over = True
        if self._recorder is not None:
            self._recorder.close(well=failure is None)

    def _patiently(self, work: Coroutine[Any, Any, Any], ends: bool = False) -> Any:
        """Wait for the communication thread; corrections that arrive meanwhile are added.

        `ends`: Left, where this worker is to leave and has waited for the others for half of its time.
        """
        future = self._agent.begin(work)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=0.01)
                self._replica.begin_moving()
                self._replica.boundary()
                self._replica.end_moving()
                if done:
                    return future.result()
                if ends and self._leaving.half_over:
                    raise Left
                self._check()
        finally:
            future.cancel()

    def _check(self) -> None:
        """Raise what failed beside training."""
        steps.check(self._agent)

    def _score(self) -> float:
        made = self._agent.counters.steps - self._began_steps
        return checks.score(float(self._loss), made, self._strategy)
