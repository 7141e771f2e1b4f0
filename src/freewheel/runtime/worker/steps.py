"""A worker's steps, in the training thread: the optimizer's step hooks, where training meets communication.

before the step     strategies that must wait for others do it here
the step            weights move; where a closure computes in it, they stand still until they have moved
after the step      strategies that must wait do it here; then the boundary adds what is pending
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import ConfigError, PeerLost, RunStopped
from freewheel.moments import QuasiGlobal
from freewheel.runtime.checkpoint.taker import Checkpoints
from freewheel.runtime.worker import firsts, guards
from freewheel.runtime.worker.agent import Agent, explained
from freewheel.runtime.worker.gradients import Gradients
from freewheel.runtime.worker.optimizers import members, parameters
from freewheel.strategy import Strategy

GRACE_S = 5.0
"""How long a step may wait for a worker whose loop has ended."""
LONG_ALONE = 100
"""After so many steps of one optimizer without another something may be wrong."""

log = logging.getLogger("freewheel")


class Steps:
    """The hooks of optimizers, from `Steps(…)` to `end`; a step is complete when all have stepped."""

    def __init__(self, agent: Agent, checkpoints: Checkpoints) -> None:
        self._agent, self._replica, self._optimizer = agent, agent.replica, agent.inventory.optimizer
        self._members = members(self._optimizer)
        self._gradients: dict[int, tuple[int, Gradients]] = {}  # with how many parameters it had then
        self._rates: list[tuple[dict[str, Any], Any]] = []
        """Groups of the optimizer with their rates, while it steps with a part of them."""
        self._inventory, self._checkpoints = agent.inventory, checkpoints
        strategy = agent.strategy
        self._before = strategy.before_step if strategy.defines("before_step") else None
        self._after = strategy.after_step if strategy.defines("after_step") else None
        self._wakes = strategy.defines("background")
        # A strategy with a staleness of its own records it; for the others the node's measure is taken.
        self._measured = type(strategy).staleness is not Strategy.staleness
        self._stale = agent.node.unmerged_steps
        self.first = agent.counters.steps
        self.made = dict.fromkeys(map(id, self._members), 0)  # how often each has stepped
        self._stepped: set[int] = set()  # since the last step was complete
        self.stepping = False
        """Whether an optimizer steps just now, and nothing may interrupt it."""
        self._work: concurrent.futures.Future[None] | None = None  # of the last step that waited
        self._harmless = weakref.WeakSet[torch.optim.Optimizer]()  # they train another model
        self._began_s, self._blocked_s = time.perf_counter(), 0.0
        """When training began to compute, and how long it had waited for data and checkpoints by then."""
        self._computed_s = 0.0
        self._quasi_global = QuasiGlobal(self._optimizer) if strategy.quasi_global else None
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in self._members]
        self._hooks += [one.register_step_post_hook(self._after_step) for one in self._members]
        guards.watchers.append(self.refuse)
        several = agent.me.world_size > 1
        self._unguard = guards.guard(agent.inventory.model) if several else None
        self._begins = several and not agent.late and not self.first  # first gradients are to be compared

    def end(self, within_s: float) -> bool:
        """Let the steps be the optimizers' own again; whether the strategy has done its part in the last."""
        done = True
        if self._work is not None:
            concurrent.futures.wait([self._work], within_s)
            self._work.cancel()
            done = not self._work.cancelled() and self._work.exception() is None
            while self._replica.parked and self._agent.alive:
                time.sleep(1e-3)
        guards.watchers.remove(self.refuse)
        for hook in self._hooks:
            hook.remove()
        if self._unguard is not None:
            self._unguard()
        self._restore_rates()
        for _, one in self._gradients.values():
            one.let_go()
        return done

    def check_still(self) -> None:
        """Warn if weights were changed between steps, where others may have averaged meanwhile."""
        if self._unguard is not None:
            self._inventory.check_still()

    def say_idle(self) -> None:
        """Say so if nothing was merged because an optimizer has not stepped, though there was data."""
        dealt = [one.given for one in self._checkpoints.loaders]
        idle = [type(one).__name__ for one in self._members if not self.made[id(one)]]
        if idle and (any(dealt) or not dealt):
            log.warning(
                "%s made no step in the with-block, so nothing was merged. Give attach what the loop steps",
                ", ".join(idle),
            )

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer steps: ConfigError if it trains this model, unless one of ours has called it."""
        if id(optimizer) in self.made or self.stepping or optimizer in self._harmless:
            return
        for one in parameters(optimizer):
            if (name := self._inventory.names.get(id(one))) is not None:
                raise ConfigError(
                    f"an optimizer ({type(optimizer).__name__}) that attach was not given steps the "
                    f"parameter {name}. Give attach all optimizers of the model: fw.attach(model, [a, b])."
                )
        self._harmless.add(optimizer)

    def _restore_rates(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer is about to step."""
        replica = self._replica
        replica.end_moving()  # the last step may have raised, and the communication thread may be waiting
        self._inventory.look()
        if self._agent.failure is not None:
            self._agent.check()
        counters = self._agent.node.counters
        blocked = counters.blocked_s["data"] + counters.blocked_s["checkpoint"]
        self._computed(time.perf_counter() - self._began_s, blocked - self._blocked_s)
        self._restore_rates()  # the last step may have raised
        if not self._stepped:
            self.check_still()
            if not self._measured:
                counters.stale(self._stale)
        if self._before is not None:
            self._choose_gradients(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._compare_first(optimizer)
            self._merge_gradients(0.0)
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

    def _choose_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the strategy see those of the optimizer that steps."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                f"{self._agent.strategy.name} would average gradients that are still scaled: a "
                f"{type(optimizer).__name__} with fused=True unscales them in its step. Leave fused out."
            )
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._gradients.get(id(optimizer), (-1,))[0] != held:
            self._gradients[id(optimizer)] = held, self._replica.gradients_of(parameters(optimizer))
        self._replica.gradients = self._gradients[id(optimizer)][1]

    def _compare_first(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it be noticed where two workers begin with the same samples."""
        if self._begins:
            self._begins = False
            if found := firsts.summed(parameters(optimizer)):
                self._agent.begin(self._agent.firsts.tell(found))

    def _computed(self, seconds: float, blocked_s: float = 0.0) -> None:
        counters = self._agent.node.counters
        counters.compute_s += seconds - blocked_s
        if counters.timeline is not None:
            counters.timeline.gradient(seconds - blocked_s)
        self._computed_s += seconds

    def _merge_gradients(self, loss: float) -> float:
        """Let the strategy do what it does before a step; the loss, which it may have averaged."""
        if self._before is not None:
            self._replica.gradients.loss = loss
            self._wait(self._before)
            return self._replica.gradients.loss
        return loss

    def _beside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose gradients are merged, and during which weights that have not moved stand still."""
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
                mean = self._merge_gradients(0.0 if loss is None else float(value))
                if loss is not None and len(self._agent.fabric.members) > 1:
                    loss = loss.new_tensor(mean) if isinstance(loss, Tensor) else mean
            replica.begin_moving()
            return loss

        return compute

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
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
        """All have stepped."""
        node, replica = self._agent.node, self._replica
        self._stepped.clear()
        node.computed(self._computed_s, node.counters.steps - self.first + 1)
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
        self._inventory.stands()
        self._stale = node.unmerged_steps
        self._checkpoints.stepped(node.counters.steps)

    async def _parked(self, act: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Beside a step, while the training thread waits: corrections need not wait for the boundary."""
        self._replica.parked = True
        try:
            await act(self._agent.node)
        finally:
            self._replica.parked = False  # in this thread: nothing is added once the other has gone on

    def _wait(self, act: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Let training wait for the strategy."""
        agent, strategy = self._agent, self._agent.strategy
        began_s = time.perf_counter()
        self._replica.catch_up()
        drained_s = time.perf_counter() - began_s  # a device has computed so long
        agent.counters.compute_s += drained_s
        self._computed_s += drained_s
        agent.counters.wait("peers", time.perf_counter())
        stepping, self.stepping = self.stepping, True
        work = self._work = agent.begin(self._parked(act))
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
            raise explained(strategy, error) from error
        finally:
            agent.counters.go_on(time.perf_counter())
