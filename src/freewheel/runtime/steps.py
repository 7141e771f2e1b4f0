"""A worker's steps, in the training thread: the optimizer's step hooks, where training meets communication.

before the step     strategies that must wait for others do it here
the step            weights move
after the step      strategies that must wait do it here; then the boundary adds what is pending
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from freewheel.errors import PeerLost, RunStopped, WorkerLost
from freewheel.moments import QuasiGlobal, momentum_buffers
from freewheel.runtime.agent import Agent
from freewheel.runtime.checkpoint import Checkpoints
from freewheel.runtime.checks import Homes
from freewheel.strategy import Strategy

GRACE_S = 5.0
"""How long a step may wait for a worker whose loop has ended."""


class Steps:
    """The hooks of an optimizer whose steps are a worker's, from `Steps(…)` to `end`."""

    def __init__(
        self, agent: Agent, optimizer: torch.optim.Optimizer, homes: Homes, checkpoints: Checkpoints
    ) -> None:
        self._agent, self._replica, self._optimizer = agent, agent.replica, optimizer
        self._rates: list[tuple[dict[str, Any], Any]] = []
        """The optimizer's learning rates, while it steps with a part of them."""
        self._homes, self._checkpoints = homes, checkpoints
        strategy = agent.strategy
        self._before = strategy.before_step if strategy.defines("before_step") else None
        self._after = strategy.after_step if strategy.defines("after_step") else None
        self._wakes = strategy.defines("background")
        # A strategy with a staleness of its own records it; for the others the node's measure is taken.
        self._measured = type(strategy).staleness is not Strategy.staleness
        self._stale = agent.node.unmerged_steps
        self.first = agent.counters.steps
        """How many steps were made before this life."""
        self._began_s = time.perf_counter()
        self._blocked_s = 0.0
        """How long training had waited for data and checkpoints when it began to compute."""
        self._quasi_global: QuasiGlobal | None = None
        if strategy.quasi_global:
            self._quasi_global = QuasiGlobal(momentum_buffers(optimizer)[0])
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def end(self) -> None:
        """Let the optimizer's steps be its own again."""
        for hook in self._hooks:
            hook.remove()
        self._restore_rates()

    def _share_rates(self) -> None:
        """Let the optimizer step with a part of its rates, where the updates of all workers add up."""
        if (share := self._agent.node.rate_share) != 1:
            groups = [group for group in self._optimizer.param_groups if "lr" in group]
            self._rates = [(group, group["lr"]) for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * share

    def _restore_rates(self) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates = []

    def _before_step(self, *_: Any) -> None:
        """The optimizer is about to step."""
        node, replica = self._agent.node, self._replica
        replica.end_moving()  # the last step may have raised, and the communication thread may be waiting
        self._homes.look()
        if self._agent.failure is not None:
            check(self._agent)
        counters = node.counters
        computed_s = time.perf_counter() - self._began_s
        blocked = counters.blocked_s
        counters.compute_s += computed_s - (blocked["data"] + blocked["checkpoint"] - self._blocked_s)
        node.computed(computed_s, counters.steps - self.first + 1)
        if not self._measured:
            counters.stale(self._stale)
        if self._before is not None:
            self._wait(functools.partial(self._parked, self._before))
        self._restore_rates()  # the last step may have raised
        self._share_rates()
        replica.begin_moving()
        if self._quasi_global is not None:
            self._quasi_global.begin(momentum_buffers(self._optimizer)[1])

    def _after_step(self, *_: Any) -> None:
        """The optimizer has stepped."""
        node, replica = self._agent.node, self._replica
        self._restore_rates()
        node.counters.steps += 1
        if self._after is not None:
            replica.end_moving()
            self._wait(functools.partial(self._parked, self._after))
            replica.begin_moving()
        replica.boundary()
        if self._quasi_global is not None:
            self._quasi_global.end(momentum_buffers(self._optimizer)[2])
        replica.end_moving()
        if self._wakes:
            self._agent.stepped()
        self._stale = node.unmerged_steps
        self._checkpoints.stepped(node.counters.steps)
        blocked = node.counters.blocked_s
        self._blocked_s = blocked["data"] + blocked["checkpoint"]
        self._began_s = time.perf_counter()

    async def _parked(self, act: Callable[[Any], Coroutine[Any, Any, None]], node: Any) -> None:
        """Beside a step, while the training thread waits: corrections need not wait for the boundary."""
        self._replica.parked = True
        try:
            await act(node)
        finally:
            self._replica.parked = False  # in this thread: nothing is added once the other has gone on

    def _wait(self, act: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Let training wait for the strategy."""
        agent, strategy = self._agent, self._agent.strategy
        self._replica.catch_up()
        agent.counters.wait("peers", time.perf_counter())
        work = agent.begin(act(agent.node))
        waited_s = 0.0
        try:
            while True:
                try:
                    work.result(timeout=1.0)
                    return
                except concurrent.futures.TimeoutError:
                    ended = agent.call(agent.waits_for_finished())
                    waited_s = waited_s + 1.0 if ended is not None else 0.0
                    if waited_s >= GRACE_S and strategy.waits_for in ("all", "neighbours", "group"):
                        work.cancel()
                        raise RunStopped(
                            f"{strategy.name} needs every worker in every step, and the loop of worker "
                            f"{ended} has ended. Give all workers the same number of steps."
                        ) from None
        except PeerLost as error:
            raise _explained(strategy, error) from error
        finally:
            agent.counters.go_on(time.perf_counter())


def check(agent: Agent) -> None:
    """Raise what failed beside training."""
    failure = agent.failure
    if isinstance(failure, PeerLost):
        raise _explained(agent.strategy, failure) from failure
    if failure is not None:
        raise failure


def _explained(strategy: Strategy, error: PeerLost) -> RunStopped:
    return WorkerLost(
        f"{strategy.name} stopped: it lost worker {error.peer} ({error.why}), which it cannot do "
        "without: it held the server. Strategies without one go on, such as adpsgd or allreduce."
    )
