"""Grouping SGD: synchronous among workers of similar speed, asynchronous between the groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freewheel.errors import ConfigError, at_least
from freewheel.strategies.asgd import ASGD, SERVER

if TYPE_CHECKING:
    from freewheel.node import Node


def by_speed(step_s: Mapping[int, float], ratio: float) -> list[tuple[int, ...]]:
    """Deal workers into groups whose slowest takes at most `ratio` times as long as its fastest."""
    groups: list[list[int]] = []
    for rank in sorted(step_s, key=lambda rank: (step_s[rank], rank)):
        if groups and step_s[rank] <= ratio * step_s[groups[-1][0]]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [tuple(sorted(group)) for group in groups]


@dataclass
class Grouping(ASGD):
    """All-reduce inside groups of workers of similar speed; a parameter server between the groups.

        in a group:     g <- mean of the group's gradients;  one optimizer step, the same in all of them
        its first one:  push u = (x - server's x at the last pull)·(group's share of the workers);
                        hand the server's x to the group
        server:         x <- x + u        in the order of arrival

    Groups are formed after a few synchronous steps in which speeds are measured.

    Settings: ratio (how much slower the slowest of a group may be than its fastest), warmup (those steps).
    Late, lost and doubled messages: a late worker delays its group only; a lost one stops its group and
    with it the run.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate("grouping", workers=4, steps=40, compute=fw.Compute(slow={3: 4}))

    Reference: "Grouping-SGD", CCGrid 2019.
    Differences: only the abstract was at hand. One server instead of one for each layer; a push counts by
    the size of its group, so that every worker's data count the same and a round of all groups is one step.
    """

    name = "grouping"
    reference = "Grouping-SGD, CCGrid 2019"
    waits_for = "group"
    staleness = "gradient delay: updates of other groups the server took in between"

    ratio: float = 1.5
    warmup: int = 2

    def rate_share(self, world_size: int) -> float:
        """Inside a group gradients are averaged, and between groups pushes count by their share."""
        return 1.0

    def check(self, world_size: int) -> None:
        """At least one step is needed to measure speeds."""
        at_least("grouping: warmup", self.warmup, 1)
        if not self.ratio >= 1:
            raise ConfigError(f"grouping: ratio must be at least 1, not {self.ratio:g}.")

    async def start(self, node: Node) -> None:
        """Begin as one group."""
        await super().start(node)
        self.group = tuple(range(node.world_size))
        self.new = node.rank != self.group[0]
        self.began = node.steps  # a resumed run measures speeds anew

    async def before_step(self, node: Node) -> None:
        """Average the gradients of the group."""
        node.set_gradient(await node.mean(node.gradient(), self.group, tag=("group", node.steps)))

    async def after_step(self, node: Node) -> None:
        """One push and pull for the group; at the end of the warm-up, form the groups."""
        tag, lead = ("model", node.steps), self.group[0]
        s = node.snapshot()
        x = None
        if node.rank == lead:
            share = len(self.group) / node.world_size
            answer = await node.ask(SERVER, share * (s - self.x))
            if not self.new:  # before its first answer a lead has read no version of the server's model
                node.stale(answer.delay)
            self.new = False
            x = answer.vector
        self.x = await node.broadcast(lead, x, self.group, tag)
        node.correct(self.x - s)
        if node.steps == self.began + self.warmup:
            speeds = await node.gather((node.step_s,), tag=("speed",))
            groups = by_speed({rank: note[0] for rank, note in speeds.items()}, self.ratio)
            self.group = next(group for group in groups if node.rank in group)
