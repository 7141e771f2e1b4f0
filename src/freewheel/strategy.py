"""The contract of a strategy: what a worker exchanges, with whom, when, and how it is merged.

A strategy is a dataclass: its fields are its settings. Every worker gets a copy of its own and may keep
state on it (made in `start`). It sees a `Node` and nothing else: no clock, no socket, no thread.

The order of things at a worker:

    start                            once, before the first step; all workers hold the same weights
    compute a gradient
    before_step                      gradients are ready, weights have not moved; training waits for it
    the optimizer's step
    after_step                       weights have moved; training waits for it
    boundary: corrections are added  then the next gradient

    background                       runs beside all of this and never makes training wait
    leave                            where a worker leaves before the others: its last word

What a strategy does not define costs nothing.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

from torch import Tensor

from freewheel.node import Node

LONGEST = 64  # the longest interval or τ that a strategy chooses by itself
Waits = Literal["nobody", "server", "group", "neighbours", "all"]


class Machines(Protocol):
    """What a plan knows of the machines: how many, and how long a gradient, a model, a merge takes."""

    @property
    def workers(self) -> int: ...

    @property
    def workers_per_node(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def grad_s(self) -> float: ...

    @property
    def model_s(self) -> float: ...  # one model over a link

    @property
    def merge_s(self) -> float: ...  # of a ring of all workers


@dataclass
class Strategy:
    """Base of all strategies; alone it lets every worker train for itself."""

    name: ClassVar[str]
    reference: ClassVar[str]
    """Authors, title, venue: what to cite."""

    waits_for: ClassVar[Waits] = "nobody"
    """Whose progress a step may have to wait for. "all" and "neighbours" run in lockstep."""

    keeps_mean: ClassVar[bool] = False
    """Whether the mean of all replicas moves only by the optimizers' updates."""

    staleness: ClassVar[str] = "own gradients that no other worker has seen"
    """What its staleness figures count."""

    convergence: ClassVar[str] = "no rate known here"
    """What theory says it costs in convergence, and whose theory; a plan shows it."""

    keeps_vectors: ClassVar[int] = 3
    """How many vectors as long as the model it keeps beside weights and gradients."""

    reduces: ClassVar[bool] = False
    """Whether its merges add up the vectors of all workers, or of many."""

    merges_beside: ClassVar[bool] = False
    """Whether training goes on during its merges."""

    quasi_global = False
    """Whether momentum follows the weights' whole movement, mixing included; a setting of some."""

    momentum: ClassVar[float] = 0.0
    """The momentum to use it with, unless a caller chooses one."""

    always_stops: ClassVar[bool] = False
    """Whether `after_step` is overridden further down than `stops`, which then knows nothing of it."""

    def __init_subclass__(cls) -> None:
        has = next(vars(one) for one in cls.__mro__ if {"stops", "after_step"} & vars(one).keys())
        cls.always_stops = "stops" not in has

    @property
    def keeps_alike(self) -> bool:
        """Whether all replicas are equal after each step: their gradients are averaged before it."""
        return self.waits_for == "all" and self.defines("before_step")

    def rate_share(self, workers: int) -> float:
        """The part of the learning rate each of so many workers steps with.

        1 where updates are averaged; 1/n where the updates of n workers add up on one model. So a learning
        rate is always that of the averaged update.
        """
        return 1.0

    @classmethod
    def suited(cls, machines: Machines) -> dict[str, int]:
        """The settings that suit these machines, where they differ from the defaults."""
        return {}

    @classmethod
    def round_s(cls, machines: Machines) -> float:
        """How long one round of its communication takes, about."""
        return machines.merge_s

    def check(self, world_size: int) -> None:
        """Refuse settings that cannot work with this many workers (raise ConfigError)."""

    async def start(self, node: Node) -> None:
        """Before the first step, on every worker."""

    async def before_step(self, node: Node) -> None:
        """Gradients are ready, weights have not moved."""

    async def after_step(self, node: Node) -> None:
        """The optimizer has moved the weights."""

    def stops(self, node: Node) -> bool:
        """Whether training is to stop for `after_step` at this boundary; asked in the training thread."""
        return True

    async def background(self, node: Node) -> None:
        """Beside training."""

    def meet(self, mine: Tensor, theirs: Tensor) -> Tensor:
        """The correction to this worker in an exchange; the other side moves as far the other way.

        Element by element: it is given the same piece of both vectors, one piece after the other, on the
        device where they lie, in any thread, and one side computes it for both.
        `theirs` may be overwritten (and returned); `mine` must stay as it is.
        """
        raise NotImplementedError(f"{type(self).__name__} called node.exchange without defining meet")

    async def answer(self, node: Node) -> Tensor | None:
        """This worker's part in the answer, which is the mean of all parts; None: it has no part."""
        return await node.weights()

    async def handover(self, node: Node) -> Tensor:
        """The weights a worker that joins begins with, if it copies this one."""
        return await node.weights()

    def entered(self, node: Node, weights: Tensor) -> None:
        """This worker was cut off, and has just taken over another worker's weights and steps."""

    def settled(self, node: Node) -> bool:
        """Whether a worker may leave at this boundary without anything it has learned being lost.

        Where workers merge, or have a server: once its last steps are merged.
        """
        return self.waits_for == "nobody" or node.unmerged_steps == 0

    async def leave(self, node: Node) -> None:
        """This worker leaves at a boundary, after its last step: hand over what only it has."""
        if self.defines("meet"):
            await node.hand_over()

    def donor(self, joiner: int, among: Sequence[int], world_size: int) -> int:
        """Whose weights a worker that comes into a view copies."""
        return among[0]

    # -- for those who drive a strategy --

    def vectors(self) -> dict[str, Tensor]:
        """The vectors it keeps from one step to the next, by name: a checkpoint holds them too."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def settings(self) -> dict[str, int | float | str | None]:
        """Its settings as plain data, before `start`."""
        return {
            name: value if isinstance(value, int | float | str | None) else str(value)
            for name, value in vars(self).items()
        }

    def copy(self) -> Self:
        """A copy with the same settings, for one worker."""
        return copy.copy(self)

    def defines(self, method: str) -> bool:
        """Whether the strategy, with these settings, overrides one of the methods above."""
        return getattr(type(self), method) is not getattr(Strategy, method)

    @classmethod
    def needs(cls, rank: int) -> bool:
        """Whether a run cannot go on without this worker."""
        return cls.waits_for == "server" and rank == 0

    @classmethod
    def merges(cls) -> bool:
        """Whether workers merge in views, and those who come begin in one."""
        return cls.waits_for in ("all", "neighbours", "group")

    @classmethod
    def lockstep(cls) -> bool:
        """Whether all workers make the same number of steps."""
        return cls.waits_for in ("all", "neighbours")

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]
