"""SGD without gradient delay, free-running: merges follow the network, never a slow worker's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from freewheel.errors import PeerLost, at_least
from freewheel.strategy import Strategy

if TYPE_CHECKING:
    from freewheel.fabric.base import Tag
    from freewheel.node import Node

WANT: Tag = ("merge", "want")
BEGIN: Tag = ("merge", "begin")


@dataclass
class FreeNoDelay(Strategy):
    """Merge all models in the background as often as the network allows; no worker waits.

        whenever some worker has `every` updates that are in no merge:
        s_j <- snapshot of every worker, wherever it is in its step;   P = mean_j s_j
        x_i <- x_i + (P - s_i)        at each worker's next boundary

    A slow worker gives a snapshot that has moved little; the others do not wait for its gradient. The
    worker of lowest rank leads: it begins each merge, and lets it count only once all have the result,
    so a merge counts everywhere or nowhere.

    Settings: every (updates that call for a merge), tau (a worker that many gradients ahead of its last
    merge waits for the next; None: it never waits).
    Late, lost and doubled messages: a merge in which a worker is lost is dropped on all sides and done
    again with the others; if the leader is lost while it says "commit", some may have heard it (counted
    as half) and the next merge evens it out.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate("nodelay_free", workers=4, steps=40, compute=fw.Compute(slow={0: 5}))
        >>> result.idle_share < 0.01
        True

    Reference: Talyansky et al., ICLR 2019 submission, Algorithm 1.
    Differences: Algorithm 1 begins a merge when every worker has a gradient; this one when any has.
    """

    name = "nodelay_free"
    reference = "Talyansky et al., ICLR 2019 submission, Algorithm 1, without waiting for every gradient"
    keeps_mean = True

    every: int = 1
    tau: int | None = None

    def check(self, world_size: int) -> None:
        """Both count steps."""
        at_least("nodelay_free: every", self.every, 1)
        at_least("nodelay_free: tau", self.tau, self.every)

    async def start(self, node: Node) -> None:
        """Numbers of merges start anywhere, so that those of a worker's earlier life mean nothing."""
        self.number = node.random.randrange(2**40)
        self.asked = 0

    async def after_step(self, node: Node) -> None:
        """At the bound τ: wait for a merge."""
        while self.tau is not None and node.unmerged_steps >= self.tau and await self.ask(node):
            pass

    async def background(self, node: Node) -> None:
        """Ask for a merge whenever there is something to merge."""
        node.beside(self.lead(node))
        node.beside(self.follow(node))
        while True:
            await node.next_step()
            if node.unmerged_steps >= self.every:
                await self.ask(node)

    async def ask(self, node: Node) -> bool:
        """Ask the leader for a merge after the last one known here; return when it is over.

        False: the one asked does not think it is the leader, which passes when both see the same workers.
        """
        self.asked += 1
        leader, reply = node.members[0], ("merge", "over", self.asked)
        try:
            await node.send(leader, WANT, note=(self.asked, self.number))
            number, leads = (await node.receive(reply, leader)).note
        except PeerLost:
            return True  # there is another leader to ask
        self.number = int(number)
        return bool(leads)

    async def lead(self, node: Node) -> None:
        """As the worker of lowest rank: begin a merge, see that all have its result, let it count."""
        number = self.number
        while True:
            want = await node.receive(WANT)
            asked, known = want.note
            # Who asks without knowing of the last merge may be in it: it looks again first.
            leads = node.rank == node.members[0]
            if known == number and leads:
                number += 1
                await self.conduct(node, number)
            node.post(want.sender, ("merge", "over", int(asked)), note=(number, leads))

    async def conduct(self, node: Node, number: int) -> None:
        """One merge: begin, collect "I have it" from all members, say commit or drop."""
        members = node.members
        for peer in members:
            node.post(peer, BEGIN, note=(number, *members))
        verdict = 1.0
        try:
            for _ in members:
                verdict = min(verdict, (await node.receive(("merge", "have", number), among=members)).note[0])
                if not verdict:
                    break  # the others wait in a ring that is broken
        except PeerLost:
            verdict = 0.0
        node.forget(("merge", "have", number))
        for peer in members:
            node.post(peer, ("merge", "verdict", number), note=(verdict,))

    async def follow(self, node: Node) -> None:
        """Take part in the merges that the leader begins."""
        while True:
            begin = await node.receive(BEGIN)
            leader, number = begin.sender, int(begin.note[0])
            members = [int(rank) for rank in begin.note[1:]]
            s = node.snapshot()
            merge = node.beside(self.take_part(node, s, members, leader, number))
            try:
                verdict = (await node.receive(("merge", "verdict", number), leader)).note[0]
            except PeerLost:
                node.counters.merges["half"] += merge.done()
                verdict = 0.0
            p = merge.result() if verdict else None
            if p is not None:
                node.correct(p - s)
            else:
                merge.cancel()
                node.forget(("mean", "merge", number))
            node.counters.merges["dropped" if p is None else "done"] += 1

    async def take_part(
        self, node: Node, s: Tensor, members: list[int], leader: int, number: int
    ) -> Tensor | None:
        """The mean of the snapshots, or None if a member was lost; tells the leader which."""
        p = None
        try:
            # Two who see different leaders must not sit in two rings that wait for each other.
            if leader == node.members[0]:
                p = await node.mean(s, members, tag=("merge", number))
        except PeerLost:
            pass
        node.post(leader, ("merge", "have", number), note=(float(p is not None),))
        return p
