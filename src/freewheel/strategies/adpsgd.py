"""AD-PSGD: asynchronous pairwise averaging without a server."""

from dataclasses import dataclass

from freewheel import topology
from freewheel.errors import ConfigError, at_least
from freewheel.fabric.base import Pull
from freewheel.node import Node
from freewheel.patience import Patience
from freewheel.strategy import Machines, Strategy
from freewheel.topology import Topology

AT_BOUNDARY = 8  # how many neighbours a worker asks while it waits at its boundary
FEW, MANY = 2, 5  # more than FEW workers wait there; MANY and more meet two neighbours, and wait to the end


@dataclass
class ADPSGD(Strategy):
    """Average with one random neighbour at a time, in the background.

        s_i, s_j <- snapshots of a pair, while both compute on
        x_i <- x_i + (s_j - s_i)/2        at i's next boundary
        x_j <- x_j + (s_i - s_j)/2        at j's next boundary

    The two corrections sum to zero: only the optimizers' updates move the mean of all replicas.

    A worker takes part in about one exchange a step: it calls a neighbour late in a step in which nobody has
    called it, so that what it gets is fresh at its boundary. With momentum that is too late: it then calls
    one or two at its boundary and waits for them, among few workers only while the learning rate is high.

    Settings: topology (who may meet whom), tries (neighbours asked before a step passes without an exchange),
    every (steps for each exchange), per_step (exchanges in a step, for fast links), quasi_global (momentum
    follows the way the weights went), patience (the longest wait for exchanges begun at a boundary, in steps;
    0: none; None: 2 for more than 2 workers with momentum, else 0; with fewer than 5 workers over when the
    learning rate is below half of its highest), meetings (neighbours met there, one after the other;
    with k of them each difference counts 1/(k+1); None: 2 with 5 workers or more, else 1).
    Late, lost and doubled messages: a late peer delays the pair's own exchange, and a step while there is
    patience. If a peer is lost before both have both snapshots, neither corrects (fabric/exchange.py).

    Example:
        >>> import freewheel as fw
        >>> fw.simulate(fw.ADPSGD(topology="ring"), workers=4, steps=40).idle_share < 0.01
        True

    Reference: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel SGD", ICML 2018.
    Differences: any graph, not a bipartite one, since busy peers are skipped (topology="bipartite_ring" gives
    the paper's active and passive roles); corrections are differences of snapshots, so workers may step
    while a pair averages; momentum stays local.
    """

    name = "adpsgd"
    reference = "Lian, Zhang, Zhang, Liu, ICML 2018"
    convergence = "the rate of SGD once training is long (Lian et al. 2018, Corollary 2)"
    keeps_vectors = 2
    keeps_mean = True

    topology: str | Topology = "complete"
    tries: int = 3
    every: int = 1
    per_step: int = 1
    quasi_global: bool = False
    patience: float | None = None
    meetings: int | None = None

    moment, most = Patience(0), 1  # how long it waits at its boundary, how many it meets there; see `start`

    @classmethod
    def round_s(cls, machines: Machines) -> float:
        return 2 * machines.model_s  # one there and one back

    def check(self, world_size: int) -> None:
        for setting, least in {"tries": 1, "every": 1, "per_step": 1, "patience": 0, "meetings": 1}.items():
            at_least(f"adpsgd: {setting}", getattr(self, setting), least)
        if self.meetings is not None and self.meetings > AT_BOUNDARY:
            raise ConfigError(f"adpsgd: meetings must be at most {AT_BOUNDARY}, not {self.meetings}.")
        topology.resolve(self.topology, world_size)  # it must exist and be connected

    async def start(self, node: Node) -> None:
        many = node.world_size >= MANY
        self.moment = Patience(self.patience, node.momentum, FEW, 0.0 if many else 0.5)
        meetings = 1 + many if self.meetings is None else self.meetings
        self.most = max(1, min(meetings, self._graph(node).fewest)) if self.moment.most else 1

    def _graph(self, node: Node) -> Topology:
        return topology.resolve(self.topology, node.world_size)

    @property
    def meet(self) -> Pull:
        """Both sides move by 1/(1 + most) of the difference."""
        return Pull(1 / (1 + self.most))

    def stops(self, node: Node) -> bool:
        due = node.steps % self.every == 0 and self.moment.waits(len(node.members))
        due = due and self.moment.tries(node.steps, node.rate_left)
        return due and self._graph(node).initiates(node.rank)

    async def after_step(self, node: Node) -> None:
        await node.linger(self.moment, self._fresh(node))

    async def _fresh(self, node: Node) -> None:
        left = self.most
        for peer, _ in zip(node.peers(self._graph(node)), range(AT_BOUNDARY), strict=False):
            await node.exchange_over()  # the one under way does not hold the last step
            left -= await node.exchange(peer)
            if not left:
                break

    async def background(self, node: Node) -> None:
        if not self._graph(node).initiates(node.rank):
            return
        while True:
            before = node.exchanges
            await node.next_step(self.every)
            for number in range(1, self.per_step + 1):
                await node.late(number / self.per_step)
                if node.exchanges < before + number:  # else another worker called, or it was at the boundary
                    for peer, _ in zip(node.peers(self._graph(node)), range(self.tries), strict=False):
                        if await node.exchange(peer):
                            break
