"""Who may talk to whom: graphs as values.

A topology is a name, a size and a cycle of mixing matrices W, one per step (a static graph has one). W_ij is
the share that worker i takes of worker j's snapshot; each W is doubly stochastic, so mixing keeps the mean.
Describing a graph needs no network: every worker builds the same value from the same text, such as
`torus:rows=4` or `edges:list=0-1/1-2`: one of NAMES, with settings.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from freewheel import names
from freewheel.errors import ConfigError, at_least

Matrix = npt.NDArray[np.float64]
Edges = Iterable[tuple[int, int]]
Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """A graph over workers 0 … size-1 and its mixing weights. Made by the functions of this module.

    The weights are Metropolis-Hastings: W_ij = 1/(1 + the larger number of neighbours of the two).
    """

    name: str
    size: int
    # Neighbours, not matrices: a sparse graph of a thousand workers stays small.
    cycle: tuple[Rows, ...] = field(repr=False)
    """For each step the sorted neighbours of every worker."""
    passive: frozenset[int] = field(repr=False, default=frozenset())

    @property
    def period(self) -> int:
        """The number of steps after which the cycle of graphs starts again; 1 for a static graph."""
        return len(self.cycle)

    @cached_property
    def fewest(self) -> int:
        """The smallest number of neighbours of a worker."""
        return min(len(row) for rows in self.cycle for row in rows)

    def neighbours(self, rank: int, step: int = 0) -> tuple[int, ...]:
        """The peers whose snapshots ``rank`` mixes in at ``step``, sorted."""
        self._check(rank)
        return self.cycle[step % self.period][rank]

    def listeners(self, rank: int, step: int = 0) -> tuple[int, ...]:
        """The peers that mix in ``rank``'s snapshot at ``step``, sorted."""
        self._check(rank)
        return tuple(self._listeners.get((step % self.period, rank), ()))

    @cached_property
    def _listeners(self) -> dict[tuple[int, int], list[int]]:
        heard: dict[tuple[int, int], list[int]] = {}
        for step, rows in enumerate(self.cycle):
            for rank, peers in enumerate(rows):
                for peer in peers:
                    heard.setdefault((step, peer), []).append(rank)
        return heard

    def weight(self, rank: int, peer: int, step: int = 0) -> float:
        """W_ij: the share ``rank`` takes of ``peer``'s snapshot at ``step``; 0 where they do not talk."""
        self._check(peer)
        peers = self.neighbours(rank, step)
        if peer == rank:
            return 1 - math.fsum(self.weight(rank, one, step) for one in peers)
        return 1 / (1 + max(len(peers), len(self.neighbours(peer, step)))) if peer in peers else 0.0

    def mixing_matrix(self, step: int = 0) -> Matrix:
        """W at ``step``: a new size × size array, doubly stochastic."""
        w = np.zeros((self.size, self.size))
        rows = self.cycle[step % self.period]
        for rank, peers in enumerate(rows):
            w[rank, list(peers)] = [1 / (1 + max(len(peers), len(rows[peer]))) for peer in peers]
            w[rank, rank] = 1 - math.fsum(w[rank])
        return w

    @cached_property
    def spectral_gap(self) -> float:
        """How fast mixing averages, per step: 0 never, 1 exactly.

        1 - max(|λ2|, |λn|) of W; over a cycle, 1 - ‖P - 11ᵀ/n‖^(1/period) with P the product of its W.
        """
        p = np.eye(self.size)
        for step in range(self.period):
            p = self.mixing_matrix(step) @ p
        # W is symmetric when static, and then this norm is max(|λ2|, |λn|).
        residual = float(np.linalg.norm(p - 1 / self.size, 2))
        # Rounding is no residual: where the mean is exact the gap is 1, to the last digit.
        return 1.0 - residual ** (1 / self.period) if residual > 1e-12 else 1.0

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All pairs (i, j), i < j, that talk at any step of the cycle, in either direction."""
        talks = ((i, j) for rows in self.cycle for i, peers in enumerate(rows) for j in peers)
        return tuple(sorted({(min(pair), max(pair)) for pair in talks}))

    def initiates(self, rank: int) -> bool:
        """Whether ``rank`` may start an exchange; False for AD-PSGD's passive workers, which only answer."""
        self._check(rank)
        return rank not in self.passive

    def _check(self, rank: int) -> None:
        # A negative rank would index from the end.
        if not 0 <= rank < self.size:
            raise ConfigError(
                f"there is no worker {rank} in a topology of {self.size}, only 0 to {self.size - 1}."
            )


def ring(n: int) -> Topology:
    return _undirected("ring", n, _hopping(n, [1]))


def torus(n: int, rows: int | None = None) -> Topology:
    """A grid of ``rows`` × n/rows whose sides are joined; the most square one unless ``rows`` says otherwise.

    One row is a ring; it is all that a prime ``n`` allows.
    """
    if rows is None:
        rows = max(d for d in range(1, n + 1) if n % d == 0 and d * d <= n)
    if rows < 1 or n % rows:
        raise ConfigError(f"a torus of {n} workers cannot have {rows} rows: they must divide {n}.")
    columns = n // rows
    right = [(i, i - i % columns + (i + 1) % columns) for i in range(n)]
    return _undirected("torus", n, right + _hopping(n, [columns]))


def complete(n: int) -> Topology:
    """Everybody with everybody: one mixing step is the exact mean."""
    everybody = tuple(range(n))
    return Topology("complete", n, (tuple(everybody[:i] + everybody[i + 1 :] for i in everybody),))


def bipartite_ring(n: int) -> Topology:
    """A ring on which even ranks start exchanges and odd ranks answer (AD-PSGD's active and passive sets).

    No two workers of one set are joined, so nobody can wait in a circle.
    """
    if n % 2 and n > 1:
        raise ConfigError(
            f"a bipartite_ring needs an even number of workers, not {n}: "
            f"take {n - 1} or {n + 1} workers, or the topology 'ring'."
        )
    return _undirected("bipartite_ring", n, _hopping(n, [1]), passive=frozenset(range(1, n, 2)))


def exponential(n: int) -> Topology:
    """Each worker and those 1, 2, 4, 8 … hops away on either side."""
    return _undirected("exponential", n, _hopping(n, _hops(n)))


def one_peer_exponential(n: int) -> Topology:
    """Step k: each worker i keeps half of itself and takes half of i + 2^(k mod period); directed.

    After one period of floor(log2(n-1)) + 1 steps the mean is exact if ``n`` is a power of two, else close.
    """
    cycle = tuple(tuple(((i + hop) % n,) for i in range(n)) for hop in _hops(n))
    return Topology("one_peer_exponential", n, cycle or (((),),))  # a lone worker has no hops


def deal(n: int, nodes: int) -> Rows:
    """Workers 0 to n-1 dealt to nodes in order of rank, as evenly as can be. A lone worker is a node."""
    if not 1 <= nodes <= max(n, 2):
        raise ConfigError(f"{n} workers cannot be shared out over {nodes} nodes. Allowed: 1 to {n} nodes.")
    nodes = min(nodes, n)
    starts = [n * k // nodes for k in range(nodes + 1)]
    return tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(starts))


def mates(rank: int, n: int, nodes: int) -> tuple[int, ...]:
    """The workers of one worker's node, itself included, as they are dealt."""
    return next(group for group in deal(n, nodes) if rank in group)


def hierarchical(n: int, nodes: int = 2) -> Topology:
    """``n`` workers in ``nodes`` nodes: complete inside each, and between the nodes' first workers."""
    groups = deal(n, nodes)
    complete_in = [*groups, [group[0] for group in groups]]
    edges = [edge for group in complete_in for edge in itertools.combinations(group, 2)]
    return _undirected("hierarchical", n, edges)


def star(n: int) -> Topology:
    return _undirected("star", n, [(0, i) for i in range(1, n)])


def random_regular(n: int, degree: int = 4, seed: int = 0) -> Topology:
    """A random connected graph where each of ``n`` workers has ``degree`` neighbours; ``seed`` fixes it."""
    if n == 1:
        return _undirected("random_regular", 1, [])
    # An edge has two ends, so workers × degree is even; and one neighbour each makes nothing but pairs.
    if n * degree % 2 or not (2 <= degree < n or degree == n - 1):
        raise ConfigError(
            f"no connected graph gives each of {n} workers {degree} neighbours: the degree must be from 2 "
            f"to {n - 1}, and even where the number of workers is odd."
        )
    import networkx

    rng = random.Random(seed)
    while True:  # most are connected
        graph = networkx.random_regular_graph(degree, n, seed=rng)
        if networkx.is_connected(graph):
            return _undirected("random_regular", n, graph.edges)


def from_edges(n: int, edges: Edges) -> Topology:
    """The undirected graph of these pairs of workers; it must be connected."""
    pairs = list(edges)
    for i, j in pairs:
        if not (0 <= i < n and 0 <= j < n and i != j):
            raise ConfigError(f"the edge {i}-{j} must join two different workers of ranks 0 to {n - 1}.")
    import networkx

    graph = networkx.Graph(pairs)
    graph.add_nodes_from(range(n))
    parts = [str(part) for part in networkx.connected_components(graph)]
    if len(parts) > 1:
        raise ConfigError(
            f"the topology is not connected: its parts are {', '.join(parts)}. Add an edge between them."
        )
    return _undirected("edges", n, pairs)


def _listed_edges(n: int, list: str = "") -> Topology:  # noqa: A002 - that is what the setting is called
    try:
        pairs = [(int(i), int(j)) for i, j in (text.split("-") for text in list.split("/"))]
    except ValueError:
        raise ConfigError(
            f"cannot read the edges {list!r}. Write two ranks with a dash between them, and a slash between "
            "edges: edges:list=0-1/1-2."
        ) from None
    return from_edges(n, pairs)


_BUILDERS: dict[str, Callable[..., Topology]] = {
    "ring": ring,
    "torus": torus,
    "complete": complete,
    "bipartite_ring": bipartite_ring,
    "exponential": exponential,
    "one_peer_exponential": one_peer_exponential,
    "hierarchical": hierarchical,
    "star": star,
    "random_regular": random_regular,
    "edges": _listed_edges,
}

NAMES = tuple(_BUILDERS)  # that `resolve` knows; all but ``edges`` stand alone, without settings


def resolve(spec: str | Topology, size: int) -> Topology:
    """The topology that ``spec`` names, for ``size`` workers; one already built must have that size."""
    if isinstance(spec, str):
        return _from_text(spec, size)
    if spec.size != size:
        raise ConfigError(
            f"the topology {spec.name!r} was built for {spec.size} workers, but there are {size}. "
            "Give its name, and the run builds it."
        )
    return spec


# Every worker of a simulated run asks for the same graph, which may have a million entries.
@lru_cache(maxsize=32)
def _from_text(spec: str, size: int) -> Topology:
    at_least("workers of a topology", size, 1)
    return names.build("topology", spec, _BUILDERS, size)


def _undirected(name: str, n: int, edges: Edges, passive: frozenset[int] = frozenset()) -> Topology:
    """A static graph; edges may be doubled, and loops are dropped: a small ring folds onto itself."""
    peers: list[set[int]] = [set() for _ in range(n)]
    for i, j in edges:
        peers[i].add(j)
        peers[j].add(i)
    return Topology(name, n, (tuple(tuple(sorted(mine - {i})) for i, mine in enumerate(peers)),), passive)


def _hopping(n: int, hops: Iterable[int]) -> list[tuple[int, int]]:
    """Each worker and those so many places further, on a ring."""
    return [(i, (i + hop) % n) for hop in hops for i in range(n)]


def _hops(n: int) -> list[int]:
    """The powers of two below ``n``."""
    return [1 << k for k in range((n - 1).bit_length())]
