"""A worker's steps, in the training thread: the optimizer's step hooks, where training meets communication.

before the step     strategies that must wait for others do so
the step            weights move; where a closure computes in it, they stand still until they have moved
after the step      strategies that must wait do so; then the boundary adds what is pending
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
import weakref
import zlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, PeerLost, RunStopped
from freewheel.fabric.secret import Forged, derive
from freewheel.moments import QuasiGlobal
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker import checks
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.checks import members, parameters
from freewheel.runtime.worker.live_replica import Gradients
from freewheel.strategy import Strategy

GRACE_S = 5.0  # how long a step may wait for a worker whose loop has ended
LONG_ALONE = 100  # after so many steps of one optimizer, `say_idle` looks for others that never step

log = logging.getLogger("freewheel")


class Steps:
    """The hooks of optimizers, from `Steps(…)` to `end`; a step is complete when all have stepped."""

    def __init__(
        self,
        agent: Agent,
        checkpoints: Checkpoints,
        store: Rendezvous | None,
        first_rates: Callable[[], None],  # sets those of a new schedule
    ) -> None:
        self._first_rates = first_rates
        self._agent, self._replica, self._optimizer = agent, agent.replica, agent.inventory.optimizer
        self._members = members(self._optimizer)
        self._gradients: dict[int, tuple[int, Gradients]] = {}  # with how many parameters it had then
        self._rates: list[tuple[dict[str, Any], Any]] = []  # of groups, while they step with a share of them
        self._inventory, self._checkpoints = agent.inventory, checkpoints
        strategy = agent.strategy
        self._before = strategy.before_step if strategy.defines("before_step") else None
        self._after = strategy.after_step if strategy.defines("after_step") else None
        self._wakes = strategy.defines("background")
        # A strategy with a staleness of its own records it; for the others the node's measure counts.
        self._measured = type(strategy).staleness is not Strategy.staleness
        self._stale = agent.node.unmerged_steps
        self._first = next(iter(self._inventory.trained.values()))  # whoever overwrites any, overwrites it
        self._stood, self._warned = self._first._version, False
        self._began_at = agent.counters.steps
        self.made = dict.fromkeys(map(id, self._members), 0)  # how often each has stepped
        self._stepped: set[int] = set()  # since the last step was complete
        self.stepping = False  # whether an optimizer steps just now, and nothing may interrupt it
        self._work: concurrent.futures.Future[None] | None = None  # of the last step that waited
        self._harmless = weakref.WeakSet[torch.optim.Optimizer]()  # they train another model
        # When computing began, and the total wait for data and checkpoints by then:
        self._began_s, self._blocked_s = time.perf_counter(), 0.0
        self._computed_s = 0.0
        self._lbfgs, self._corrected = list[torch.optim.Optimizer](), self._corrections()
        self._quasi_global = QuasiGlobal(self._optimizer) if strategy.quasi_global else None
        self._undo = contextlib.ExitStack()
        for one in self._members:
            self._undo.callback(one.register_step_pre_hook(self._before_step).remove)
            self._undo.callback(one.register_step_post_hook(self._after_step).remove)
        checks.watchers.append(self.refuse)
        self._undo.callback(checks.watchers.remove, self.refuse)
        self._several = store is not None
        if self._several:
            checks.guard(agent.inventory.model, strategy.keeps_alike, self._undo)
            if self._before is None:
                self._lbfgs = [one for one in self._members if isinstance(one, torch.optim.LBFGS)]
            if self._lbfgs:
                log.warning(
                    "LBFGS goes far in one step, and %s averages weights in which workers then differ. Take "
                    "allreduce, which averages its gradients",
                    strategy.name,
                )
        self._compares = None if agent.late or self._began_at else store  # until there are gradients

    def end(self, within_s: float) -> bool:
        """Remove the hooks; False if the strategy has not done its part in the last step."""
        done = True
        if self._work is not None:
            concurrent.futures.wait([self._work], within_s)
            self._work.cancel()
            done = not self._work.cancelled() and self._work.exception() is None
            while self._replica.parked and self._agent.alive:
                time.sleep(1e-3)
        self._undo.close()
        self._restore_rates()
        for _, one in self._gradients.values():
            one.let_go()
        return done

    def check_still(self) -> None:
        """Warn, once, if the script has moved weights between steps: exchanges do not know of it."""
        if self._several and not self._warned and self._first._version != self._stood:
            self._warned = True
            log.warning(
                "weights were changed outside the optimizer's step, others may have averaged with either. "
                "Small changes (clamping) do no harm; to restore or evaluate others take a copy of the model"
            )

    def say_idle(self) -> None:
        """Warn if an optimizer has not stepped though there was data: nothing was merged then."""
        dealt = [one.given for one in self._checkpoints.loaders]
        idle = [type(one).__name__ for one in self._members if not self.made[id(one)]]
        if idle and (any(dealt) or not dealt):
            log.warning(
                "%s made no step in the with-block, so nothing was merged. Give attach what the loop steps",
                ", ".join(idle),
            )

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """ConfigError if an optimizer that is not attached trains this model, unless ours has called it."""
        if id(optimizer) in self.made or self.stepping or optimizer in self._harmless:
            return
        for one in parameters(optimizer):
            if (name := self._inventory.names.get(id(one))) is not None:
                raise ConfigError(
                    f"an optimizer ({type(optimizer).__name__}) that attach was not given steps the "
                    f"parameter {name}. Give attach all optimizers of the model: fw.attach(model, [a, b])."
                )
        self._harmless.add(optimizer)

    def _corrections(self) -> int:
        """A number that changes when weights are corrected, and not by an optimizer's step."""
        return sum(block.weights._version for block in self._replica.blocks)

    def _restore_rates(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        replica = self._replica
        replica.end_moving()  # the last step may have raised; the communication thread may be waiting
        self._inventory.look()
        if self._agent.failure is not None:
            self._agent.check()
        counters = self._agent.node.counters
        blocked = counters.blocked_s["data"] + counters.blocked_s["checkpoint"]
        self._computed(time.perf_counter() - self._began_s, blocked - self._blocked_s)
        self._restore_rates()  # the last step may have raised
        self._first_rates()
        if not self._stepped:
            self.check_still()
            if not self._measured:
                counters.stale(self._stale)
        if self._before is not None:  # let the strategy see those of the optimizer that steps
            if getattr(optimizer, "grad_scale", None) is not None:
                raise ConfigError(
                    f"{self._agent.strategy.name} would average gradients that are still scaled: a "
                    f"{type(optimizer).__name__} with fused=True unscales them in its step. Leave fused out."
                )
            held = sum(len(group["params"]) for group in optimizer.param_groups)
            if self._gradients.get(id(optimizer), (-1,))[0] != held:
                self._gradients[id(optimizer)] = held, Gradients(replica, parameters(optimizer))
            replica.gradients = self._gradients[id(optimizer)][1]
        if self._lbfgs and self._corrected != (now := self._corrections()):
            self._corrected = now
            for one in self._lbfgs:
                one.state.clear()  # its curvature is of weights that only it moved
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._compare_first(optimizer)
            if self._before is not None:
                self._wait(self._before)
        share = self._agent.strategy.rate_share(len(self._agent.fabric.members))
        if share != 1:  # the updates of all workers add up
            self._rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
            for group, rate in self._rates:
                group["lr"] = rate * share
        self.stepping = True
        replica.begin_moving()
        if self._quasi_global is not None:
            self._quasi_global.begin()
        if not callable(closure):
            return None
        beside = self._beside(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": beside}
        return (args[0], beside, *args[2:]), kwargs

    def _compare_first(self, optimizer: torch.optim.Optimizer) -> None:
        if self._compares is not None:
            if found := summed(parameters(optimizer)):
                self._agent.begin(asyncio.to_thread(compare, self._compares, found))
            self._compares = None

    def _computed(self, seconds: float, blocked_s: float = 0.0) -> None:
        counters = self._agent.node.counters
        counters.compute_s += seconds - blocked_s
        if counters.timeline is not None:
            counters.timeline.gradient(seconds - blocked_s)
        self._computed_s += seconds

    def _beside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, with its gradients merged; while weights have not moved yet they count as still."""
        replica, trained = self._replica, list(parameters(optimizer))
        began = [one._version for one in trained]

        def compute() -> Any:
            if began == [one._version for one in trained]:
                replica.end_moving()
            began_s = time.perf_counter()
            loss = closure()
            self._compare_first(optimizer)
            self._computed(time.perf_counter() - began_s)
            if self._before is not None:
                replica.end_moving()  # others may need a copy before they can merge
                value = loss.detach() if isinstance(loss, Tensor) else loss
                replica.gradients.loss = 0.0 if loss is None else float(value)
                self._wait(self._before)
                if loss is not None and len(self._agent.fabric.members) > 1:
                    mean = replica.gradients.loss
                    loss = loss.new_tensor(mean) if isinstance(loss, Tensor) else mean
            replica.begin_moving()
            return loss

        return compute

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._restore_rates()
        if optimizer is self._members[0]:
            group = optimizer.param_groups[0]
            self._agent.node.rated(group.get("lr"), group.get("initial_lr", 0.0))
        self._stepped.add(id(optimizer))
        self.made[id(optimizer)] += 1
        if len(self._stepped) == len(self._members):
            self._complete()
        else:
            self._replica.end_moving()
            if self.made[id(optimizer)] == LONG_ALONE:
                self.say_idle()
        blocked = self._agent.node.counters.blocked_s
        self._blocked_s = blocked["data"] + blocked["checkpoint"]
        self._began_s = time.perf_counter()
        self.stepping = False

    def _complete(self) -> None:
        node, replica = self._agent.node, self._replica
        self._stepped.clear()
        node.computed(self._computed_s, node.counters.steps - self._began_at + 1)
        self._computed_s = 0.0
        node.counters.steps += 1
        self._checkpoints.used()
        strategy = self._agent.strategy
        if self._after is not None and (strategy.always_stops or strategy.stops(node)):
            replica.end_moving()
            self.stepping = False
            self._wait(self._after)
            self.stepping = True
            replica.begin_moving()
        replica.boundary()
        if self._quasi_global is not None:
            self._quasi_global.end()
        replica.end_moving()
        if self._wakes and node.due():  # nobody else is woken: that costs both threads time
            with contextlib.suppress(RuntimeError):  # the loop is closed: this worker has left
                self._agent.loop.call_soon_threadsafe(node.stepped)
        self._stood = self._first._version
        self._stale = node.unmerged_steps
        self._checkpoints.stepped(node.counters.steps)

    def _wait(self, act: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        agent, strategy = self._agent, self._agent.strategy
        began_s = time.perf_counter()
        self._replica.catch_up()
        drained_s = time.perf_counter() - began_s  # a device has computed so long
        agent.counters.compute_s += drained_s
        self._computed_s += drained_s
        agent.counters.wait("peers", time.perf_counter())

        async def parked() -> None:  # corrections need not wait for the boundary
            self._replica.parked = True
            try:
                await act(agent.node)
            finally:
                self._replica.parked = False  # in this thread: nothing is added once the other has gone on

        stepping, self.stepping = self.stepping, True
        work = self._work = agent.begin(parked())
        self.stepping = stepping
        waited_s = 0.0
        try:
            while True:
                try:
                    return work.result(timeout=1.0)
                except concurrent.futures.TimeoutError:
                    if work.done():
                        return work.result()  # which may be a timeout of its own
                    ended = agent.call(agent.waits_for_finished())
                waited_s = waited_s + 1.0 if ended is not None else 0.0
                if waited_s >= GRACE_S and strategy.waits_for in ("all", "neighbours", "group"):
                    work.cancel()
                    raise RunStopped(
                        f"{strategy.name} needs every worker in every step, and the loop of worker "
                        f"{ended} has ended. Give all workers the same number of steps."
                    )
        except PeerLost as error:
            agent.check(error)
        finally:
            agent.counters.go_on(time.perf_counter())


@torch.no_grad()
def summed(parameters: Iterable[nn.Parameter]) -> int:
    """A checksum of the gradients' norms; 0 if there are none, or they are zero or not finite."""
    norms: list[Tensor] = []
    for gradient in (one.grad for one in parameters if one.grad is not None):
        numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
        norms.append(torch.linalg.vector_norm(numbers, dtype=torch.float64))
    found = torch.stack(norms).tolist() if norms else []
    return zlib.crc32(repr(found).encode()) if any(found) and all(map(math.isfinite, found)) else 0


def compare(rendezvous: Rendezvous, mine: int) -> None:
    """Warn, once, if the first gradients of another worker have the same checksum.

    All begin with the same weights. So the first gradients of two workers are the same, to the bit, if both
    took the same batch, and practically never else: scripts that share data out are left alone.
    """
    rank, secret = str(rendezvous.place.rank), rendezvous.place.secret
    name = derive(secret, "gradients", str(mine)).hex()  # everybody can read names in the store
    with contextlib.suppress(RuntimeError, OSError, Forged):  # the store is gone, or has a stranger's word
        other = rendezvous.first(f"gradients/{name}", rank)
        if other != rank and rendezvous.first("alike", rank) == rank:
            log.warning(
                "workers %d and %d began with the same gradients, to the bit: they train on the same samples."
                " Let worker.loader share them out; where a dataset draws them, seed it by worker.rank",
                *sorted(map(int, (other, rank))),
            )
