"""A node as its driver sees it: the simulator, or a worker's communication thread.

The driver says when a step was made and when exchanges may begin, and brings the node into views and out.
"""

import random
from typing import Any

from torch import Tensor

from freewheel.fabric.base import Fabric, Meet, Message, Note, Pull, Spawn
from freewheel.fabric.exchange import Exchanges
from freewheel.fabric.farewell import Farewells
from freewheel.fabric.views import Merges, Views
from freewheel.node import Node
from freewheel.replica import Replica
from freewheel.strategy import Strategy


class NodeDriver(Node):
    """A node with what strategies do not see; the party of its exchanges, farewells and views."""

    def __init__(
        self, fabric: Fabric, replica: Replica, random: random.Random, spawn: Spawn, strategy: Strategy
    ) -> None:
        super().__init__(fabric, replica, random, spawn)
        self._strategy = strategy
        self._exchanges = Exchanges(fabric, self, spawn, random)
        self.unused = replica.unused
        self.farewells = Farewells(fabric, self, self._exchanges, spawn, random)
        self.views = Views(fabric, spawn, lambda peer, among: strategy.donor(peer, among, self.world_size))
        self._merges = Merges(self.views, self._give, self._take, self._count_merge)
        self._highest_lr = self._last_lr = 0.0
        self._joining = False

    def computed(self, seconds: float, number: int) -> None:
        """Note how long a gradient took, the `number`-th of this life."""
        self.step_s += (seconds - self.step_s) / number
        self._recent_s.append(seconds)

    def rated(self, lr: Any, initial_lr: float = 0.0) -> None:
        """Note the rate of the last step; `initial_lr`: the one a schedule began with, in any life."""
        if isinstance(lr, int | float):  # a tensor's would wait for its device
            self._highest_lr = max(self._highest_lr, lr, initial_lr)
            if lr != self._last_lr:  # a growing rate counts as whole
                self.rate_left = lr / self._highest_lr if lr < self._last_lr else 1.0
            self._last_lr = lr

    def due(self) -> bool:
        """Whether the strategy waits for the step that was just made."""
        return self._stepped is not None and self.steps >= self._awaited_step

    def stepped(self) -> None:
        if self._stepped is not None and self.due():
            if not self._stepped.done():
                self._stepped.set_result(None)
            self._stepped = None

    @property
    def idle(self) -> bool:
        return self._exchanges.partner is None

    def begin_at(self, steps: int) -> None:
        """Go on counting where an earlier run ended."""
        self.counters.steps = self._seen_steps = self._snapshot_steps = self._merged_steps = steps

    def hold(self, joins: bool) -> None:
        """Be busy for exchanges until `release`: this worker has no weights yet.

        Farewells of others go on without it if it `joins` a run under way; else they wait.
        """
        self._exchanges.partner, self.farewells.calls.away = self.rank, joins

    def release(self) -> None:
        self._exchanges.free()
        self.farewells.calls.away = False

    def end_calls(self) -> None:
        """Begin no more exchanges, for this worker's loop has ended; it still answers calls."""
        self._exchanges.ended = True

    def listen(self) -> None:
        """Answer other workers' exchanges and farewells from now on."""
        if self._strategy.defines("meet"):
            self._spawn(self._exchanges.serve())
        self.farewells.serve()

    @property
    def meet(self) -> Meet:
        return self._strategy.meet

    def met(self, peer: int, correction: Tensor) -> None:
        """Count an exchange; its correction is a part, usually half, of how far the two were apart."""
        measure = self.counters.measure
        part = self.meet.share if isinstance(self.meet, Pull) else 0.5
        apart = self._norm(correction) / part if measure else None
        self.counters.met(peer, apart, self._exchanges.took_s)
        self._merged_steps = self._snapshot_steps
        self._replica.correct(correction, own=True)

    def count(self, outcome: str) -> None:
        self.counters.exchanges[outcome] += 1

    # -- views --

    async def join(self) -> int | None:
        """Join the view of a run that went on without this worker; whose weights it copied, if anybody's."""
        self.rejoined = self._joining = True
        self.views.begin((self.rank,), newborn=True)
        await self._merges.enter()
        self._joining = False
        return None if self.views.source < 0 else self.views.source

    def leave(self, together: bool = False) -> None:
        """Take part in no further view; `together`: in the first one stay until somebody joins.

        Those who began together must end together.
        """

        async def leave() -> None:
            waits = together and not self.view.number
            while waits and not self.views.joined:
                await self.view_change()
            self.views.leave(self._merges.called)

        if self.views.begun:
            self._spawn(leave())  # after a merge that the last step has begun

    async def _give(self) -> tuple[Tensor, Note]:
        return await self._strategy.handover(self), (self._called_step,)

    async def _take(self, message: Message) -> None:
        """Go on with another worker's weights, from its step."""
        vector, (step,) = message.of(self._replica.size), message.numbers(1, 1)
        more = step - self._called_step
        self._ahead += more
        self._called_step += more
        self._seen_steps, self._awaited_step = self._seen_steps + more, self._awaited_step + more
        self._snapshot_steps = self._merged_steps = self.steps
        await self._replica.take_over(vector)
        if not self._joining:
            self._strategy.entered(self, vector)
