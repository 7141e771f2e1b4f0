"""SGD without gradient delay, free-running: merges follow the network, never a slow worker's gradient."""

from __future__ import annotations

import asyncio
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
REACH: Tag = ("merge", "reach")
MOVES = -2
"""In the place of a lost worker: nobody is lost, but the weights move for longer than others should wait."""


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
    again with the others, and of two members that cannot reach each other one is left out; if the leader
    is lost while it says "commit", some may have heard it (counted as half) and the next merge evens it
    out. A worker at τ that can be in no merge waits until it can.

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
    convergence = "as nodelay, τ what the network allows: unbounded unless tau is set"
    keeps_vectors = 2
    reduces = merges_beside = True
    keeps_mean = True

    every: int = 1
    tau: int | None = None

    def check(self, world_size: int) -> None:
        """Both count steps."""
        at_least("nodelay_free: every", self.every, 1)
        at_least("nodelay_free: tau", self.tau, self.every)

    def defines(self, method: str) -> bool:
        """Without τ no step waits."""
        return super().defines(method) and not (method == "after_step" and self.tau is None)

    async def start(self, node: Node) -> None:
        """Numbers of merges start anywhere, so that those of a worker's earlier life mean nothing."""
        self.number = node.random.randrange(2**40)
        self.asked = 0
        self.taking: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        """A merge counted here, or a worker came or went."""
        self.apart: set[tuple[int, int]] = set()
        """As leader: pairs of workers that cannot reach each other, though both are within reach."""
        self.moving: set[int] = set()
        """As leader: workers whose weights were found moving for long, until they ask again."""

    async def after_step(self, node: Node) -> None:
        """At the bound τ: wait for a merge."""
        while self.tau is not None and node.unmerged_steps >= self.tau:
            self.news.clear()
            if not await self.ask(node) and node.unmerged_steps >= self.tau:
                await self.news.wait()  # asking again changes nothing before that

    async def background(self, node: Node) -> None:
        """Ask for a merge whenever there is something to merge."""
        node.beside(self.lead(node))
        node.beside(self.follow(node))
        node.beside(self.watch(node))
        node.beside(self.hear(node))
        while True:
            await node.next_step()
            if node.unmerged_steps >= self.every:
                await self.ask(node)

    async def ask(self, node: Node) -> bool:
        """Ask the leader for a merge after the last one known here; return when it is over.

        False: there was none with this worker in it, and will be none until workers come or go.
        """
        self.asked += 1
        leader, reply = node.members[0], ("merge", "over", self.asked)
        try:
            await node.send(leader, WANT, note=(self.asked, self.number))
            self.number, useful = (await node.receive(reply, leader)).numbers(2, 2)
        except PeerLost:
            return True  # there is another leader to ask
        return bool(useful)

    async def leave(self, node: Node) -> None:
        """Go once a merge has this worker's last step."""
        while node.unmerged_steps and len(node.members) > 1:
            if not await self.ask(node):
                return

    async def watch(self, node: Node) -> None:
        """When others come or go: look again, if this worker is at τ, and let the leader try again."""
        while True:
            await node.members_change()
            self.news.set()
            node.post(node.members[0], REACH)

    # -- as the worker of lowest rank --

    async def lead(self, node: Node) -> None:
        """Begin a merge when one is wanted, see that all have its result, let it count."""
        number = self.number
        merges = 0
        while True:
            want = await node.receive(WANT)
            self.moving.discard(want.sender)
            try:
                asked, known = want.numbers(2, 2)
            except PeerLost:
                continue
            leads = node.rank == node.members[0]
            useful = leads
            # Who asks without knowing of the last merge may be in it: it looks again first.
            if known == number and leads:
                number, merges = number + 1, merges + 1
                if merges % 8 == 0:
                    self.apart.clear()  # the word that a link has healed may come before that it was cut
                members = self.choose(node)
                await self.conduct(node, number, members)
                useful = want.sender in members
            node.post(want.sender, ("merge", "over", asked), note=(number, useful))

    async def hear(self, node: Node) -> None:
        """Forget who could not reach a worker that now reaches others than before."""
        while True:
            sender = (await node.receive(REACH)).sender
            self.apart = {pair for pair in self.apart if sender not in pair}

    def choose(self, node: Node) -> list[int]:
        """The members of the next merge: all within reach, and of a pair that is apart only the first."""
        members: list[int] = []
        for rank in node.members:
            if rank not in self.moving and not any((other, rank) in self.apart for other in members):
                members.append(rank)
        return members

    async def conduct(self, node: Node, number: int, members: list[int]) -> None:
        """One merge: begin, collect "I have it" from all members, say commit or drop."""
        have_tag: Tag = ("merge", "have", number)
        for peer in members:
            node.post(peer, BEGIN, note=(number, *members))
        verdict = 1
        try:
            for _ in members:
                have = await node.receive(have_tag, among=members)
                verdict, lost = have.numbers(2, 2)
                if not verdict:  # the others wait in a ring that is broken
                    if lost == MOVES:
                        self.moving.add(have.sender)
                    elif lost in node.members:
                        self.apart.add((min(have.sender, lost), max(have.sender, lost)))
                    break
        except PeerLost:
            verdict = 0
        node.forget(have_tag)
        for peer in members:
            node.post(peer, ("merge", "verdict", number), note=(verdict,))

    # -- as a member --

    async def follow(self, node: Node) -> None:
        """Take part in the merges that are begun, one at a time."""
        while True:
            begin = await node.receive(BEGIN)
            try:
                number, *members = begin.numbers(2)
                if node.rank not in members or len(set(members)) < len(members):
                    raise begin.bad("members that cannot be")
            except PeerLost:
                continue
            if self.taking is not None and not self.taking.done():
                if begin.sender != node.members[0]:
                    node.post(begin.sender, ("merge", "have", number), note=(0.0, -1.0))
                    continue
                # Two leaders, who see different workers, must not hold two rings that wait for each other:
                # the one that leads by what this worker sees goes first.
                self.taking.cancel()
            self.taking = node.beside(self.take_part(node, begin.sender, number, members))

    async def take_part(self, node: Node, leader: int, number: int, members: list[int]) -> None:
        """Give a snapshot, get the mean; correct if the leader says that all have it."""
        merge = node.beside(self.merge(node, members, leader, number))
        outcome = "dropped"
        try:
            (verdict,) = (await node.receive(("merge", "verdict", number), leader)).numbers(1, 1)
            # Who leads well says so only once this worker has told it that it has the mean.
            if verdict and merge.done() and (offset := merge.result()) is not None:
                node.correct(offset, own=True)
                outcome = "done"
                self.news.set()
        except PeerLost:
            if merge.done() and merge.result() is not None:
                outcome = "half"  # the leader may have told others
        finally:
            merge.cancel()
            node.forget(("merge", "verdict", number))
            node.count_merge(outcome, members)

    async def merge(self, node: Node, members: list[int], leader: int, number: int) -> Tensor | None:
        """How far the mean is from this worker's snapshot, or None if a member was lost; tells the leader."""
        offset, lost = None, -1
        try:
            if (s := await node.snapshot_soon()) is not None:
                offset = await node.offset(s, members, tag=("merge", number))
            else:
                lost = MOVES
        except PeerLost as error:
            lost = error.peer
        finally:
            node.post(leader, ("merge", "have", number), note=(float(offset is not None), float(lost)))
        return offset
