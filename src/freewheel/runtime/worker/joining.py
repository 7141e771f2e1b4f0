"""How a worker joins its run: it meets the others, and begins with the weights they have.

In the communication thread. Nothing here happens again once training has begun.
"""

import asyncio
import logging
from collections.abc import Iterable

from torch import Tensor

from freewheel.errors import ConfigError, PeerLost, WorkerLost
from freewheel.fabric.base import RUNTIME, Tag
from freewheel.fabric.handshake import OTHER_KEYS
from freewheel.runtime.membership.generation import Entry, Orphaned
from freewheel.runtime.membership.rendezvous import POLL_S, Rendezvous, Waiting
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.agent import Agent

START: Tag = (RUNTIME, "start")
START_S = 1.0  # how long to wait for the first weights before asking for them

log = logging.getLogger("freewheel")


async def meet(
    agent: Agent, rendezvous: Rendezvous, entry: Entry, bind: str, address: str, timeout_s: float
) -> None:
    """Connect with all that the run begins with; a late worker, with all there are."""
    rank, fabric, strategy = agent.me.rank, agent.fabric, agent.strategy
    agent.late, agent.first = entry.late, entry.beginning.ranks
    try:
        port = fabric.open(bind)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {bind}: {error.strerror or error}. Give bind an address of this machine."
        ) from None
    await asyncio.to_thread(rendezvous.publish, address, port, agent.me.incarnation)
    if agent.late:
        await _reach(agent, rendezvous, timeout_s)
        return
    gone, waiting, end = dict[int, str](), Waiting(rank, timeout_s), agent.loop.time() + timeout_s
    while missing := set(agent.first).difference(fabric.members, gone):
        # The higher rank calls; a worker that was restarted calls everybody.
        await _call(agent, rendezvous, [peer for peer in missing if peer < rank or entry.back])
        for peer in missing:
            if (why := await asyncio.to_thread(rendezvous.absent, peer)) is not None:
                gone[peer] = why
        waiting.say(sorted(missing))
        if agent.loop.time() > end:
            raise WorkerLost(
                f"worker {rank} waited {timeout_s:g} s for worker {', '.join(map(str, sorted(missing)))} to "
                "join. Start all workers, or give attach a longer join_timeout_s."
            )
        await asyncio.sleep(POLL_S)
    for peer, why in gone.items():
        if strategy.needs(peer) or strategy.merges():
            raise WorkerLost(f"{strategy.name} needs worker {peer}, which is not coming: {why.rstrip('.')}.")
    agent.lack(gone)
    # Workers that had met an earlier incarnation of this one may have begun without it.
    agent.late = entry.back and await asyncio.to_thread(rendezvous.begun)


async def _reach(agent: Agent, rendezvous: Rendezvous, timeout_s: float) -> None:
    """Connect with one that can be copied, then with all others; Orphaned where nobody is left."""
    fabric, strategy, end = agent.fabric, agent.strategy, agent.loop.time() + timeout_s
    needed = {peer for peer in agent.first if strategy.needs(peer)}
    while True:
        living = await asyncio.to_thread(rendezvous.living)
        await _call(agent, rendezvous, living)
        if set(living).intersection(fabric.members) and needed.issubset(fabric.members):
            return await _call(agent, rendezvous, range(rendezvous.most))
        if await asyncio.to_thread(rendezvous.lost, strategy):
            raise Orphaned("nobody is left to go on from")
        if len(fabric.members) == 1 and await asyncio.to_thread(rendezvous.over):
            raise await asyncio.to_thread(rendezvous.too_late, agent.me.incarnation)
        if agent.loop.time() > end:
            who = ", ".join(map(str, living)) or "those it began with"
            raise WorkerLost(
                f"worker {agent.me.rank} was started again and has reached nobody to go on from for "
                f"{timeout_s:g} s: worker {who} is lost or out of reach. If it is lost, start the run again: "
                "with resume it goes on from the last checkpoint."
            )
        await asyncio.sleep(POLL_S)


async def _call(agent: Agent, rendezvous: Rendezvous, peers: Iterable[int]) -> None:
    for peer in peers:
        if agent.fabric.reaches(peer) or await asyncio.to_thread(rendezvous.absent, peer) is not None:
            continue
        known = await asyncio.to_thread(rendezvous.look_up, peer)
        try:
            if known is not None:
                await agent.fabric.connect(peer, *known[:2])
        except PeerLost as error:
            refused = "refused this worker" in error.why and "called already" not in error.why
            if refused or OTHER_KEYS in error.why:
                raise ConfigError(
                    f"worker {agent.me.rank} cannot join: {error}. Give all the same settings and --tls."
                ) from None


async def start(
    agent: Agent, rendezvous: Rendezvous | None = None, resumed: dict[str, Tensor] | None = None
) -> None:
    """Begin with worker 0's weights, or a living worker's; then let the strategy run.

    A resumed run begins with the weights each worker has, and with the strategy's vectors as given.
    """
    strategy, node, fabric = agent.strategy, agent.node, agent.fabric
    node.listen()
    node.hold(joins=agent.late)
    if agent.late:
        assert rendezvous is not None
        await _take_over(agent, rendezvous)
    elif len(fabric.members) > 1 and resumed is None:
        await _begin_alike(agent)
    elif len(fabric.members) > 1 and strategy.waits_for == "nobody" and not strategy.keeps_mean:
        # Updates that were under way are lost, and nothing else would bring the replicas together.
        members, resumed = fabric.members, {}
        shares = dict.fromkeys(members, 1 / len(members))
        agent.replica.load(await fabric.reduce(START, await agent.replica.snapshot(), shares))
    if strategy.merges():
        node.views.begin(agent.first)
    await strategy.start(node)
    for name, vector in strategy.vectors().items():
        if resumed and name in resumed:
            vector.copy_(resumed[name])
    node.release()
    agent.answers.ready = True
    if strategy.defines("background"):
        agent.spawn(strategy.background(node))


async def _take_over(agent: Agent, rendezvous: Rendezvous) -> None:
    """Become a copy of a living worker; where none has weights yet, begin with the own ones."""
    fabric, node, answers = agent.fabric, agent.node, agent.answers
    if not agent.strategy.merges():
        done = node.rejoined = await answers.copy()
    else:  # come into the view of those who train: they wait, so what is copied is of one moment
        agent.replica.parked = True
        try:
            source = await node.join()
            # No view is left if all loops have ended; their workers still have the weights.
            done = await (answers.copy_once() if source is None else answers.copy(source))
        finally:
            agent.replica.parked = False
    if done:
        return
    if not set(await asyncio.to_thread(rendezvous.living)).intersection(fabric.others):
        raise Orphaned("who could be copied is lost")
    log.warning("worker %d was started again before anybody had weights: it begins anew", agent.me.rank)


async def _begin_alike(agent: Agent) -> None:
    """All begin with the weights of the lowest rank, which may leave in these very moments."""
    fabric, replica, fixed_tag = agent.fabric, agent.replica, (*START, "fixed")
    while (root := fabric.members[0]) != agent.me.rank:
        try:
            weights = await asyncio.wait_for(fabric.receive(START, root), START_S)
            fixed = await tensor_codec.receive(fabric, root, fixed_tag)
            replica.load(weights.of(replica.size))
            agent.inventory.set_fixed(fixed)
            return
        except PeerLost:
            continue
        except TimeoutError:  # it may have begun with a worker that has left since, and sends nothing
            if await agent.answers.copy_once():
                return
    if agent.me.rank != agent.first[0] and await agent.answers.copy_once():
        return  # lower ranks have left, and others have begun before
    mine, my_fixed = await replica.snapshot(), tensor_codec.pack(agent.inventory.fixed())
    for peer in fabric.others:
        fabric.post(peer, START, mine)
        tensor_codec.post(fabric, peer, fixed_tag, my_fixed)
