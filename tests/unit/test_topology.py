import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel import topology
from freewheel.errors import ConfigError, UnknownName
from freewheel.topology import NAMES, Topology, resolve

SIZES = (1, 2, 3, 4, 6, 8, 16)
REFUSED = {
    ("bipartite_ring", 3),  # an odd ring has no two colours
    ("random_regular", 2),  # four neighbours need five workers
    ("random_regular", 3),
    ("random_regular", 4),
}
STANDING_ALONE = [name for name in NAMES if name != "edges"]
BUILT = [(name, n) for name in STANDING_ALONE for n in SIZES if (name, n) not in REFUSED]

every_topology = pytest.mark.parametrize(("name", "n"), BUILT)


def gap_of_circulant(row):
    """1 - the second largest modulus among the eigenvalues of the circulant matrix with this first row."""
    return 1 - np.sort(np.abs(np.fft.fft(row)))[-2]


@every_topology
def test_mixing_is_doubly_stochastic(name, n):
    t = resolve(name, n)
    assert (t.name, t.size) == (name, n)
    for step in range(t.period):
        w = t.mixing_matrix(step)
        assert w.shape == (n, n)
        assert (w >= 0).all()
        np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
        if name != "one_peer_exponential":
            np.testing.assert_array_equal(w, w.T)


@every_topology
def test_lookups_agree_with_the_matrix(name, n):
    t = resolve(name, n)
    pairs = set()
    for step in range(t.period + 1):  # one more: the cycle starts again
        w = t.mixing_matrix(step)
        for rank in range(n):
            row = np.array([t.weight(rank, peer, step) for peer in range(n)])
            np.testing.assert_array_equal(row, w[rank])
            others = set(range(n)) - {rank}
            assert t.neighbours(rank, step) == tuple(sorted(j for j in others if w[rank, j] > 0))
            assert t.listeners(rank, step) == tuple(sorted(j for j in others if w[j, rank] > 0))
            pairs |= {tuple(sorted((rank, peer))) for peer in t.neighbours(rank, step)}
    assert t.edges == tuple(sorted(pairs))


@every_topology
def test_gap_is_that_of_the_cycle(name, n):
    t = resolve(name, n)
    product = np.linalg.multi_dot([np.eye(n), np.eye(n), *(t.mixing_matrix(k) for k in range(t.period))])
    away = np.linalg.norm(product - np.full((n, n), 1 / n), 2)
    assert (1 - t.spectral_gap) ** t.period == pytest.approx(away, abs=1e-12)
    assert 0 < t.spectral_gap <= 1


def test_everybody_initiates_but_the_passive_half():
    for name, n in BUILT:
        t = resolve(name, n)
        expected = [rank % 2 == 0 if name == "bipartite_ring" else True for rank in range(n)]
        assert [t.initiates(rank) for rank in range(n)] == expected, (name, n)


@pytest.mark.parametrize("n", SIZES)
def test_nodes_share_out_all_workers(n):
    for nodes in range(1, n + 1):
        dealt = topology.deal(n, nodes)
        assert [rank for group in dealt for rank in group] == list(range(n))
        assert len(dealt) == nodes
        assert all(topology.mates(rank, n, nodes) == group for group in dealt for rank in group)


@pytest.mark.parametrize("name", STANDING_ALONE)
def test_a_lone_worker_keeps_itself(name):
    t = resolve(name, 1)
    assert t.neighbours(0) == t.listeners(0) == t.edges == ()
    assert t.mixing_matrix().tolist() == [[1.0]]
    assert t.spectral_gap == 1.0
    assert t.period == 1
    assert t.initiates(0)


@pytest.mark.parametrize(("name", "n"), sorted(REFUSED))
def test_impossible_sizes_are_refused(name, n):
    with pytest.raises(ConfigError, match=str(n)):
        resolve(name, n)


def test_weights_are_metropolis_hastings():
    path = topology.from_edges(4, [(0, 1), (1, 2), (1, 3)])  # degrees 1, 3, 1, 1
    fan = topology.from_edges(4, [(0, 1), (1, 2), (0, 2), (2, 3)])  # degrees 2, 2, 3, 1
    assert path.weight(0, 1) == path.weight(1, 0) == 1 / 4
    assert path.weight(0, 0) == 3 / 4
    assert path.weight(0, 2) == 0
    assert fan.weight(0, 1) == 1 / 3
    assert fan.weight(0, 2) == 1 / 4
    assert fan.weight(3, 3) == 3 / 4


@pytest.mark.parametrize("n", [4, 5, 8, 16])
def test_gap_of_a_ring(n):
    eigenvalues = [1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / n) for k in range(1, n)]
    assert topology.ring(n).spectral_gap == pytest.approx(1 - max(map(abs, eigenvalues)))
    assert topology.ring(n).neighbours(0) == (1, n - 1)


@pytest.mark.parametrize("n", [2, 3, 6, 7, 16])
def test_gap_of_complete_and_star(n):
    assert topology.complete(n).spectral_gap == 1.0
    assert topology.star(n).spectral_gap == pytest.approx(1 / n if n > 2 else 1)
    assert topology.star(n).neighbours(0) == tuple(range(1, n))
    assert topology.star(n).neighbours(n - 1) == (0,)


def test_gap_of_a_torus():
    wave = [math.cos(2 * math.pi * k / 4) for k in range(4)]
    eigenvalues = sorted(abs(1 + 2 * a + 2 * b) / 5 for a in wave for b in wave)
    t = topology.torus(16)
    assert t.spectral_gap == pytest.approx(1 - eigenvalues[-2])
    assert t.neighbours(5) == (1, 4, 6, 9)
    assert t.neighbours(0) == (1, 3, 4, 12)


@pytest.mark.parametrize("n", [6, 8, 16])
def test_gap_of_exponential(n):
    hops = {hop % n for k in range(5) if 2**k < n for hop in (2**k, -(2**k))}
    row = [1 / (1 + len(hops)) if j in hops or j == 0 else 0 for j in range(n)]
    t = topology.exponential(n)
    assert set(t.neighbours(0)) == hops
    assert t.spectral_gap == pytest.approx(gap_of_circulant(row))


def test_torus_is_as_square_as_can_be():
    assert topology.torus(12) == topology.torus(12, rows=3)
    assert topology.torus(12) != topology.torus(12, rows=4)
    assert topology.torus(12, rows=4).neighbours(0) == (1, 2, 3, 9)
    assert topology.torus(8, rows=2).neighbours(0) == (1, 3, 4)  # up and down are the same worker
    for one_line in (topology.torus(7), topology.torus(7, rows=1), topology.torus(7, rows=7)):
        assert one_line.cycle == topology.ring(7).cycle
    with pytest.raises(ConfigError, match=r"5 rows.*must divide 12"):
        topology.torus(12, rows=5)
    with pytest.raises(ConfigError):
        topology.torus(12, rows=0)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_one_peer_exponential_is_exact_for_powers_of_two(n):
    t = topology.one_peer_exponential(n)
    x = np.random.default_rng(n).normal(size=n)
    mixed = x
    for step in range(t.period):
        assert abs(mixed - x.mean()).max() > 1e-6  # and not before
        mixed = t.mixing_matrix(step) @ mixed
    assert t.period == math.log2(n)
    np.testing.assert_allclose(mixed, x.mean(), atol=1e-12)
    assert t.spectral_gap == 1.0


def test_one_peer_exponential_leaves_a_residual_for_six():
    t = topology.one_peer_exponential(6)
    product = t.mixing_matrix(2) @ t.mixing_matrix(1) @ t.mixing_matrix(0)
    assert t.period == 3
    assert abs(product - 1 / 6).max() == pytest.approx(1 / 12)
    # The slowest wave keeps |cos 30° · cos 60° · cos 120°| of itself in a cycle of three.
    assert t.spectral_gap == pytest.approx(1 - (math.sqrt(3) / 8) ** (1 / 3))


def test_one_peer_exponential_is_directed():
    t = topology.one_peer_exponential(8)
    assert [t.neighbours(1, k) for k in range(4)] == [(2,), (3,), (5,), (2,)]
    assert [t.listeners(1, k) for k in range(4)] == [(0,), (7,), (5,), (0,)]
    assert t.weight(1, 2) == t.weight(1, 1) == 0.5
    assert t.weight(2, 1) == 0


def test_hierarchical_joins_leads():
    t = topology.hierarchical(12, nodes=3)
    assert topology.deal(12, 3) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert t.neighbours(4) == (0, 5, 6, 7, 8)
    assert t.neighbours(6) == (4, 5, 7)
    assert topology.hierarchical(6, nodes=6).edges == topology.complete(6).edges
    assert topology.deal(5, 2) == ((0, 1), (2, 3, 4))
    with pytest.raises(ConfigError, match=r"12 workers.*13 nodes.*1 to 12"):
        topology.hierarchical(12, nodes=13)


def test_bipartite_ring_never_joins_two_of_a_kind():
    t = topology.bipartite_ring(8)
    assert all(t.initiates(i) != t.initiates(j) for i, j in t.edges)
    with pytest.raises(ConfigError, match=r"even number of workers, not 7.*6 or 8"):
        topology.bipartite_ring(7)


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (8, 2), (9, 4), (30, 2), (30, 3)])
def test_random_regular_is_regular_connected_and_replayed(n, degree):
    graphs = [topology.random_regular(n, degree, seed) for seed in range(5)]
    for seed, t in enumerate(graphs):
        assert {len(t.neighbours(rank)) for rank in range(n)} == {degree}
        assert topology.from_edges(n, t.edges).edges == t.edges  # which refuses a graph in parts
        assert topology.random_regular(n, degree, seed) == t
    if n > 8:
        assert len({t.edges for t in graphs}) == len(graphs)


@pytest.mark.parametrize(("n", "degree"), [(5, 3), (4, 4), (6, 1), (6, 0)])
def test_random_regular_refuses_what_cannot_be(n, degree):
    with pytest.raises(ConfigError, match=f"each of {n} workers {degree} neighbours"):
        topology.random_regular(n, degree)


def test_edge_list():
    t = topology.from_edges(4, [(2, 1), (0, 1), (1, 2), (2, 3)])  # one of them twice
    assert t.name == "edges"
    assert t.edges == ((0, 1), (1, 2), (2, 3))
    assert resolve("edges:list=0-1/1-2/2-3", 4) == t
    assert topology.from_edges(1, []).mixing_matrix().tolist() == [[1.0]]


def test_a_graph_in_parts_is_refused_by_its_parts():
    with pytest.raises(ConfigError, match=r"not connected: its parts are \{0, 1\}, \{2, 3\}\. Add an edge"):
        topology.from_edges(4, [(0, 1), (2, 3)])
    with pytest.raises(ConfigError, match=r"\{0, 2\}, \{1\}, \{3\}"):
        resolve("edges:list=0-2", 4)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("edges:list=0-1/1-4", r"edge 1-4 .*ranks 0 to 3"),
        ("edges:list=0-1/2-2", r"edge 2-2 .*two different"),
        ("edges:list=0-1/1", r"cannot read the edges '0-1/1'.*0-1"),
        ("edges:list=0-x", r"cannot read the edges '0-x'"),
        ("edges:list=-1-2", r"cannot read the edges '-1-2'"),
        ("edges", r"edges:list=0-1/1-2"),
        ("torus:rows=two", r"rows must be a whole number, not 'two'"),
        ("hierarchical:nodes=1.5", r"nodes must be a whole number, not '1.5'"),
        ("ring:", r"cannot read"),
    ],
)
def test_unreadable_settings_say_what_to_write(spec, says):
    with pytest.raises(ConfigError, match=says):
        resolve(spec, 4)


def test_edges_outside_are_refused_from_python_too():
    with pytest.raises(ConfigError, match="edge -1-2"):
        topology.from_edges(4, [(-1, 2)])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rnig", r"unknown topology 'rnig'\. Did you mean 'ring'\?.*complete"),
        ("hierarchicl:nodes=2", r"Did you mean 'hierarchical'\?"),
        ("hierarchical:node=2", r"unknown setting of topology 'hierarchical'.*Did you mean 'nodes'\?"),
        ("ring:rows=2", r"unknown setting of topology 'ring'.*none"),
        ("torus:n=4", r"unknown setting of topology 'torus'.*rows"),
        ("edges:lst=0-1", r"Did you mean 'list'\?"),
    ],
)
def test_unknown_names_suggest_the_nearest(spec, says):
    with pytest.raises(UnknownName, match=says):
        resolve(spec, 4)


def test_text_means_what_the_functions_mean():
    assert resolve("ring", 8) == topology.ring(8)
    assert resolve(" torus:rows=2 ", 8) == topology.torus(8, rows=2)
    assert resolve("torus:rows=none", 8) == topology.torus(8)
    assert resolve("hierarchical:nodes=4", 8) == topology.hierarchical(8, nodes=4)
    assert resolve("random_regular:degree=6:seed=1", 16) == topology.random_regular(16, 6, 1)
    assert resolve("ring", 8) is resolve("ring", 8)  # built once for all workers


def test_a_built_topology_must_fit():
    t = topology.ring(4)
    assert resolve(t, 4) is t
    with pytest.raises(ConfigError, match="'ring' was built for 4 workers, but there are 8"):
        resolve(t, 8)


def test_topologies_are_values():
    t = topology.ring(8)
    assert t == topology.ring(8)
    assert hash(t) == hash(topology.ring(8))
    assert len({t, topology.ring(8), topology.ring(6), topology.star(8)}) == 3
    assert topology.hierarchical(8, 2) != topology.hierarchical(8, 4)
    assert topology.bipartite_ring(8) != t
    assert repr(t) == "Topology(name='ring', size=8)"
    assert t.spectral_gap == pickle.loads(pickle.dumps(t)).spectral_gap
    with pytest.raises(AttributeError):
        t.size = 9  # type: ignore[misc]
    t.mixing_matrix()[:] = 0  # a copy: the value stays as it was
    assert t.weight(0, 1) == t.mixing_matrix()[0, 1] == 1 / 3


@pytest.mark.parametrize("rank", [-1, 4])
@pytest.mark.parametrize(
    "ask", [Topology.neighbours, Topology.listeners, Topology.initiates, lambda t, r: t.weight(0, r)]
)
def test_ranks_outside_are_refused(ask, rank):
    with pytest.raises(ConfigError, match=f"no worker {rank} .*0 to 3"):
        ask(topology.ring(4), rank)


@pytest.mark.parametrize("name", STANDING_ALONE)
def test_nobody_is_no_topology(name):
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        resolve(name, 0)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_connected_graph_keeps_the_mean_and_comes_closer(data):
    n = data.draw(st.integers(1, 12))
    tree = [(data.draw(st.integers(0, child - 1)), child) for child in range(1, n)]
    rank = st.integers(0, n - 1)
    more = (
        data.draw(st.lists(st.tuples(rank, rank).filter(lambda e: e[0] != e[1]), max_size=10))
        if n > 1
        else []
    )
    t = topology.from_edges(n, tree + more)
    x = np.random.default_rng(0).normal(size=n)
    mixed = t.mixing_matrix() @ x
    assert mixed.mean() == pytest.approx(x.mean())
    away, still = np.linalg.norm(x - x.mean()), np.linalg.norm(mixed - x.mean())
    assert still <= (1 - t.spectral_gap) * away + 1e-12
    assert t.spectral_gap > 0
