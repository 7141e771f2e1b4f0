"""Grouping SGD: synchronous among workers of similar speed, asynchronous between the groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from freewheel.errors import ConfigError, at_least
from freewheel.fabric.base import Note
from freewheel.fabric.merges import EVERYBODY, Group, Merge, View
from freewheel.node import Node
from freewheel.strategies.asgd import ASGD, SERVER, add


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

    Settings: ratio (how much slower the slowest of a group may be than its fastest), warmup (those steps),
    raw (pushes count in full, whatever the size of their group).
    Late, lost and doubled messages: a late worker delays its group only. When one is lost or joins, all step
    together for a warm-up and form groups anew. The first worker of the view is the server: if it is lost,
    the next goes on from the model it read last, and other groups' updates since then are lost. A step whose
    push is cut off is pushed with the next; if its lead is lost in that moment, it counts twice.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate("grouping", workers=4, steps=40, compute=fw.Compute(slow={3: 4}))

    Reference: "Grouping-SGD", CCGrid 2019.
    Differences: only the abstract was at hand. One server, not one for each layer; a push counts by the size
    of its group, so that all workers' data count the same and a round of all groups is one step.
    """

    name = "grouping"
    reference = "Grouping-SGD, CCGrid 2019"
    convergence = "late by groups, not by workers (CCGrid 2019); no rate known here"
    reduces = True
    waits_for = "group"
    staleness = "gradient delay: updates of other groups the server took in between"

    ratio: float = 1.5
    warmup: int = 2

    def rate_share(self, workers: int) -> float:
        return 1.0  # inside a group gradients are averaged, and between groups pushes count by their share

    def check(self, world_size: int) -> None:
        at_least("grouping: warmup", self.warmup, 1)
        if not self.ratio >= 1:
            raise ConfigError(f"grouping: ratio must be at least 1, not {self.ratio:g}.")

    async def start(self, node: Node) -> None:
        self.x = await node.snapshot(keep=True)
        self.centre = self.x.clone() if node.rank == SERVER else None
        self._be_one_group(node.view)

    def _be_one_group(self, view: View) -> None:
        self.view, self.group, self.together, self.new = view, view.members, self.warmup, True

    async def before_step(self, node: Node) -> None:
        node.set_gradient(await node.merge(lambda merge: merge.mean(node.gradient()), self._mates))

    def _mates(self, view: View) -> Group:
        if view != self.view:
            self._be_one_group(view)
        return (EVERYBODY if self.together else 1 + self.group[0]), self.group

    async def after_step(self, node: Node) -> None:
        s = await node.snapshot(keep=True)
        pull = await node.try_merge(
            lambda merge: self._push_and_pull(node, merge, s),
            lambda view: self._mates(view) if view == self.view else None,
        )
        if pull is None:
            return  # a worker was lost, or the view has changed: the next push holds this step, too
        self.x, delay, speeds = pull
        if node.rank == self.group[0] and not self.new:
            node.stale(delay)
        self.new = False  # before its first answer a lead has read no version of the server's model
        node.correct(self.x - s)
        if speeds:
            groups = by_speed({rank: note[0] for rank, note in speeds.items()}, self.ratio)
            self.group = next(group for group in groups if node.rank in group)
        self.together = max(0, self.together - 1)

    async def _push_and_pull(
        self, node: Node, merge: Merge, s: Tensor
    ) -> tuple[Tensor, float, dict[int, Note]]:
        """The server's model, the updates it took in between, and at the end of the warm-up all speeds."""
        lead, x, delay = merge.members[0], None, 0
        if node.rank == lead:
            share = 1.0 if self.raw else len(merge.members) / len(merge.view.members)
            answer = await node.ask(merge.view.members[0], share * (s - self.x))
            self.x = s  # pushed, whatever becomes of the merge
            x, delay = answer.vector, answer.delay
        x = await merge.broadcast(lead, x)
        return x, delay, await merge.gather((node.step_s,)) if self.together == 1 else {}

    async def background(self, node: Node) -> None:
        serving = None
        while True:
            first = node.view.members[0] == node.rank
            if first and serving is None:
                self.centre = self.centre if self.centre is not None else self.x.clone()
                serving = node.beside(node.serve(self.centre, add))
            elif serving is not None and not first:
                serving.cancel()
                serving = self.centre = None
            await node.view_change()

    def entered(self, node: Node, weights: Tensor) -> None:
        self.x = weights
        if self.centre is not None:
            self.centre.copy_(self.x)
