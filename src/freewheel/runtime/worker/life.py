"""A worker's life, in the training thread: it joins, trains and leaves. What scripts call is in attach.py."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, Diverged, FreewheelError, RunStopped, WorkerLost
from freewheel.fabric import windows
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import FINISHED, LEFT
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.generation import Beginning, Entry, Orphaned, TooLate
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.registrar import stay_registered
from freewheel.runtime.membership.rendezvous import Rendezvous, address_for, launched_options, patiently
from freewheel.runtime.worker import checks, guards, joining
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.ending import Answer
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.leaving import Leaving, Left
from freewheel.runtime.worker.records import Account
from freewheel.runtime.worker.settings import Settings
from freewheel.runtime.worker.steps import Steps
from freewheel.strategy import Strategy

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
        given = [group.get("lr") for group in self._optimizer.param_groups]
        # As the script has set them: a checkpoint has those of its moment.
        self._rates = [lr.item() if isinstance(lr, Tensor) else lr for lr in given]
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
        watched = place is None and self.world_size > 1
        self._outside = guards.warn_outside(self._optimizer, self.rank if watched else None)

    @property
    def _agent(self) -> Agent:
        if self._agents is None:
            raise RunStopped("this worker has not begun: use it in `with fw.attach(…)`, or after start().")
        return self._agents

    def __enter__(self) -> Self:
        if self._agents is not None:
            raise RunStopped("this worker has had its with-block; call attach again for another one.")
        self._outside()
        guards.begun = True
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
        given = self._settings  # goes before what the launcher and the place say
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
        self._steps = Steps(self._agent, self._checkpoints)
        self._inside = True
        self._leaving.watch()

    def _meet(self, options: Options, settings: Settings, life: int) -> bool:
        """Come together with the others and begin with the same weights; False: nobody has them any more."""
        entry, model, store = Entry(Beginning(0, (self.rank,)), late=False, back=False), "", self._store
        if store is not None:
            entry = store.enter(life, self._strategy)
            alike = checks.settings(self._strategy, self._optimizer, settings.seed)
            model = store.check_model(self._model, alike)
        beginning, account = entry.beginning, self._account
        self._inventory = Inventory(self._model, self._optimizer)
        self._replica = self._inventory.replica
        gradients = self._strategy.defines("before_step")  # are averaged
        me = Identity(
            bytes.fromhex(beginning.run(options.run)),
            self.rank,
            store.most if store is not None else 1,
            life,
            self._version,
            model,
            longest=self._replica.gradients.size if gradients else self._replica.size,
            wire=settings.wire,
            place=windows.place(),
        )
        agent = self._agents = Agent(
            me, self._inventory, self._strategy, settings, account.score, account.events
        )
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
            # A handler of the script's exits there, or the processes that load its data were told, too.
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
            self._close(None if left else failure, LEFT if left else farewell(failure))

    def _close(self, failure: BaseException | None, why: str) -> None:
        """Say goodbye, and write down what there is."""
        account = self._account
        try:
            account.close(failure)
        finally:
            if why != FINISHED and self._store is not None and not account.events.muted:
                self._store.leave(why)  # some may not have joined yet
            self._agent.close(why)
            self._checkpoints.wait()
            if account.recorder is not None:
                account.recorder.write_rest()
            self._leaving.unwatch()

    def _end_well(self) -> None:
        """The loop has ended: wait for the others, and take the mean."""
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

    def _say_leaving(self) -> None:
        self._agent.leaving = True
        with contextlib.suppress(RuntimeError):  # the communication thread has ended
            self._agent.loop.call_soon_threadsafe(self._agent.node.farewells.announce)

    def _between(self) -> None:
        """Nothing is half done: leave here, if that was asked for and nothing would be lost."""
        leaving, agent = self._leaving, self._agent
        if leaving.asked and (leaving.half_over or agent.strategy.settled(agent.node)):
            self.__exit__(Left, left := Left(), None)
            raise left

    def _depart(self) -> None:
        """Hand everything over."""
        self._account.ended()
        self._checkpoints.leave(self._leaving.left_s / 2)
        lacks = self._patiently(self._agent.depart(self._leaving.left_s, self._settled))
        late = f"; in {self._leaving.seconds:g} s it could not hand over {lacks}" if lacks else ""
        self._account.events.note("left", self.rank, LEFT + late)

    def _patiently(self, work: Coroutine[Any, Any, Any], ends: bool = False) -> Any:
        """Wait for the communication thread; corrections that arrive meanwhile are added.

        `ends`: None, where this worker is to leave and has waited for the others for half of its time.
        """

        def add() -> bool:
            self._replica.begin_moving()
            self._replica.boundary()
            self._replica.end_moving()
            return ends and self._leaving.half_over

        return self._agent.wait(work, add, 0.01)


def farewell(failure: BaseException | None) -> str:
    """What a worker tells the others as it goes."""
    if failure is None or isinstance(failure, Diverged):
        return FINISHED if failure is None else str(failure)
    said = f": {failure}" if isinstance(failure, FreewheelError) else ""
    return f"it left with {type(failure).__name__}{said}"
