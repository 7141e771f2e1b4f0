import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import promises
from freewheel import theory, topology
from freewheel.errors import ConfigError

law = settings(deadline=None)  # a busy machine is no counterexample


def complete_bipartite(n):
    """Every even rank with every odd rank."""
    return topology.from_edges(n, [(i, j) for i in range(0, n, 2) for j in range(1, n, 2)])


# How fast averaging mixes -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_rho_of_a_complete_graph(n):
    assert promises.rho(topology.complete(n)) == pytest.approx(1 - 1 / (n - 1))


@pytest.mark.parametrize("n", [4, 8, 16])
def test_rho_of_a_ring(n):
    assert promises.rho(topology.ring(n)) == pytest.approx(1 - (1 - math.cos(2 * math.pi / n)) / n)


@pytest.mark.parametrize(("n", "expected"), [(4, 0.75), (8, 0.875), (16, 0.9375)])
def test_rho_of_a_complete_bipartite_graph(n, expected):
    assert promises.rho(complete_bipartite(n)) == pytest.approx(expected)


def test_rho_of_a_lone_worker():
    assert promises.rho(topology.complete(1)) == 0.0


@pytest.mark.parametrize(
    "t", [topology.star(5), topology.torus(12), topology.hierarchical(8, 2), topology.one_peer_exponential(6)]
)
def test_rho_is_the_second_eigenvalue_of_its_definition(t):
    mean = np.zeros((t.size, t.size))
    for i, j in t.edges:
        w = np.eye(t.size)
        w[np.ix_([i, j], [i, j])] = 0.5
        mean += w.T @ w / len(t.edges)
    assert promises.rho(t) == pytest.approx(np.sort(np.abs(np.linalg.eigvalsh(mean)))[-2])


def test_rho_mixing_squares_the_second_modulus():
    assert theory.rho_mixing(topology.complete(8)) == pytest.approx(0)
    assert theory.rho_mixing(topology.ring(4)) == pytest.approx(1 / 9)  # eigenvalues 1, 1/3, 1/3, -1/3
    assert theory.rho_mixing(topology.ring(8)) == pytest.approx((1 / 3 + 2 / 3 * math.cos(math.pi / 4)) ** 2)


def left_after_mixing(t, steps, samples, seed=0):
    """‖1/n - W_1 … W_K e_0‖² in each of many independent runs of random edge averaging."""
    rng = np.random.default_rng(seed)
    edges, runs = np.array(t.edges), np.arange(samples)
    x = np.zeros((samples, t.size))
    x[:, 0] = 1
    for _ in range(steps):
        i, j = edges[rng.integers(len(edges), size=samples)].T
        x[runs, i] = x[runs, j] = (x[runs, i] + x[runs, j]) / 2
    return ((x - 1 / t.size) ** 2).sum(axis=1)


def test_lemma_3_is_an_equality_on_the_complete_graph():
    left = left_after_mixing(topology.complete(8), steps=20, samples=40_000)
    bound = promises.adpsgd_mixing_bound(n=8, rho=promises.rho(topology.complete(8)), K=20)
    error = left.std() / math.sqrt(len(left))
    assert error < bound / 50  # sharp enough to mean something
    assert abs(left.mean() - bound) < 4 * error


@pytest.mark.parametrize("t", [topology.ring(8), topology.star(6), topology.hierarchical(8, 2)])
@pytest.mark.parametrize("steps", [1, 10, 40])
def test_lemma_3_bounds_every_graph(t, steps):
    left = left_after_mixing(t, steps, samples=10_000)
    bound = promises.adpsgd_mixing_bound(t.size, promises.rho(t), steps)
    assert left.mean() <= bound + 4 * left.std() / math.sqrt(len(left))


# AD-PSGD ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "stale", "rho_bar", "gamma", "steps"),
    [
        (topology.complete(2), 0, 0.5, 3.1e-2, 4.1e3),
        (topology.complete(2), 1, 0.5, 3.0e-2, 4.3e3),
        (topology.complete(4), 1, 38.6, 2.0e-4, 3.9e8),
        (topology.ring(8), 1, 5055, 7.7e-7, 1.1e14),
        (topology.ring(16), 1, 3.3e5, 5.9e-9, 7.3e18),
    ],
)
def test_published_constants(t, stale, rho_bar, gamma, steps):
    bar = promises.rho_bar(promises.rho(t), t.size)
    assert bar == pytest.approx(rho_bar, rel=0.01)
    assert promises.adpsgd_step_bound(1, 1, t.size, stale, bar) == pytest.approx(gamma, rel=0.02)
    needed = promises.adpsgd_corollary2_min_steps(M=1, L=1, n=t.size, T=stale, rho_bar=bar, sigma=1)
    assert needed == pytest.approx(steps, rel=0.03)


def test_rho_bar_by_hand():
    assert promises.rho_bar(0.25, 2) == pytest.approx((4 / 3 + 4) / 2)
    for wrong in (1.0, 1.1, -0.1, math.nan):
        with pytest.raises(ConfigError, match="rho must be"):
            promises.rho_bar(wrong, 4)


def test_constants_by_hand():
    # Every term with its own value: n=3, T=2 and rho_bar=1 make T(n-1)/n + rho_bar = 7/3.
    c1, c2, c3 = promises.adpsgd_constants(gamma=0.01, M=1, L=1, n=3, T=2, rho_bar=1)
    assert c1 == pytest.approx(0.9944)
    first = 1 / 600 - 1 / 90_000 - 8 / 27_000_000
    second = (6 / 90_000 + 1 / 300 + 48 / 27_000_000) * (28 / 30_000) / 0.9944
    assert c2 == pytest.approx(first - second, rel=1e-9)
    assert c3 == pytest.approx(0.5 + 2 * (0.0006 + 0.03 + 0.000016) / 0.9944 + 0.04 / 3, rel=1e-9)
    assert promises.ADPSGDConstants(c1, c2, c3).hold


def test_constants_refuse_what_is_too_fast():
    # A negative C1 would turn the signs of the two that divide by it, and C3 would look small.
    assert promises.adpsgd_constants(gamma=1, M=1, L=1, n=2, T=1, rho_bar=0.5) == (-23, -math.inf, math.inf)
    assert not promises.ADPSGDConstants(-23, 0.1, 0.5).hold
    assert not promises.ADPSGDConstants(0.5, -0.1, 0.5).hold
    assert not promises.ADPSGDConstants(0.5, 0.1, 1.1).hold


letters = {
    "M": st.integers(1, 64),
    "L": st.floats(0.1, 10),
    "n": st.integers(2, 32),
    "T": st.integers(0, 8),
    "rho": st.floats(0, 0.99),
}


@law
@given(**letters, share=st.floats(0.01, 1))
def test_the_step_bound_is_sufficient_and_not_idle(M, L, n, T, rho, share):  # noqa: N803
    bar = promises.rho_bar(rho, n)
    bound = promises.adpsgd_step_bound(M, L, n, T, bar)
    assert promises.adpsgd_constants(gamma=share * bound, M=M, L=L, n=n, T=T, rho_bar=bar).hold
    assert not promises.adpsgd_constants(gamma=1000 * bound, M=M, L=L, n=n, T=T, rho_bar=bar).hold


@law
@given(**letters, share=st.floats(0.01, 1))
def test_constants_have_the_right_units(M, L, n, T, rho, share):  # noqa: N803
    # Only gamma·M·L is free of units; C2 is in units of gamma·M, that is of 1/L.
    bar = promises.rho_bar(rho, n)
    gamma = share * promises.adpsgd_step_bound(M, L, n, T, bar)
    c1, c2, c3 = promises.adpsgd_constants(gamma=gamma, M=M, L=L, n=n, T=T, rho_bar=bar)
    pure = promises.adpsgd_constants(gamma=gamma * M * L, M=1, L=1, n=n, T=T, rho_bar=bar)
    assert (c1, c2 * L, c3) == pytest.approx(tuple(pure), rel=1e-6, abs=1e-9 * gamma * M * L)


@law
@given(
    **letters,
    sigma=st.floats(0.1, 10),
    varsigma=st.floats(0, 10),
    f0_gap=st.floats(0, 100),
    more=st.floats(1, 9),
)
def test_corollary_2_follows_from_theorem_1(M, L, n, T, rho, sigma, varsigma, f0_gap, more):  # noqa: N803
    bar = promises.rho_bar(rho, n)
    noise = {"sigma": sigma, "varsigma": varsigma}
    steps = more * promises.adpsgd_corollary2_min_steps(M=M, L=L, n=n, T=T, rho_bar=bar, **noise)
    gamma = promises.adpsgd_corollary2_gamma(K=steps, M=M, L=L, n=n, **noise)
    assert gamma <= promises.adpsgd_step_bound(M, L, n, T, bar) * (1 + 1e-9)
    theorem = promises.adpsgd_theorem1(f0_gap=f0_gap, gamma=gamma, K=steps, M=M, L=L, n=n, **noise)
    corollary = promises.adpsgd_corollary2_bound(f0_gap=f0_gap, K=steps, M=M, L=L, **noise)
    assert theorem <= corollary * (1 + 1e-9)


def test_corollary_2_by_hand():
    by = {"K": 900, "M": 4, "L": 2, "sigma": 5, "varsigma": 1}  # sigma² + 6 M varsigma² = 49
    assert promises.adpsgd_corollary2_gamma(n=3, **by) == pytest.approx(3 / (80 + 7 * 60))
    assert promises.adpsgd_corollary2_bound(f0_gap=10, **by) == pytest.approx(400 / 900 + 2 * 12 * 7 / 60)
    assert promises.adpsgd_theorem1(f0_gap=10, gamma=0.1, n=3, **by) == pytest.approx(60 / 360 + 0.4 / 3 * 49)
    needed = promises.adpsgd_corollary2_min_steps(M=4, L=2, n=2, T=0, rho_bar=0.5, sigma=5, varsigma=1)
    assert needed == pytest.approx(4 * 4 * 4 / 49 * 1024)
    stale = promises.adpsgd_corollary2_min_steps(M=1, L=1, n=2, T=100, rho_bar=0.5, sigma=1)
    assert stale == pytest.approx(4 * 64 * 100**4 / 4)
    assert promises.adpsgd_step_bound(1, 1, 2, 100, 0.5) == pytest.approx(2 / 80_000)


def test_without_noise_corollary_2_never_speaks():
    assert promises.adpsgd_corollary2_min_steps(M=1, L=1, n=2, T=1, rho_bar=0.5, sigma=0) == math.inf


def test_one_worker_has_no_bounds():
    with pytest.raises(ConfigError, match="two or more workers, not 1"):
        promises.adpsgd_step_bound(1, 1, 1, 1, 0.5)
    with pytest.raises(ConfigError, match="two or more workers, not 1"):
        promises.adpsgd_corollary2_min_steps(M=1, L=1, n=1, T=1, rho_bar=0.5, sigma=1)


def run_adpsgd(t, *, gamma, batch, centres, sigma, start, steps, runs, seed=0):
    """AD-PSGD's Algorithm 1 on f_i(x) = ‖x - c_i‖²/2, each gradient taken at the models of one step before.

    Returns means over steps and runs: ‖∇f(mean)‖², the consensus distance, ‖mean_i ∇f_i(x_i)‖² as read.
    """
    rng = np.random.default_rng(seed)
    n, d = centres.shape
    edges, every = np.array(t.edges), np.arange(runs)
    x = np.broadcast_to(start, (runs, n, d)).copy()
    read = x.copy()
    totals = np.zeros(3)
    for _ in range(steps):
        mean = x.mean(axis=1)
        totals += [
            (mean**2).sum(axis=1).mean(),  # the centres sum to zero, so ∇f(x) = x
            ((read - read.mean(axis=1, keepdims=True)) ** 2).sum(axis=2).mean(),
            (read.mean(axis=1) ** 2).sum(axis=1).mean(),
        ]
        who = rng.integers(n, size=runs)
        noise = rng.normal(size=(runs, d)) * sigma * math.sqrt(batch / d)
        g = batch * (read[every, who] - centres[who]) + noise  # the sum over the batch
        read = x.copy()
        i, j = edges[rng.integers(len(edges), size=runs)].T
        x[every, i] = x[every, j] = (x[every, i] + x[every, j]) / 2
        x[every, who] -= gamma * g
    return totals / steps


def test_theorem_1_holds_in_a_run_of_two_workers():
    centres = np.array([[0.5, 0, 0], [-0.5, 0, 0]])  # ‖c_i‖ = 1/2 = varsigma
    bar = promises.rho_bar(promises.rho(topology.complete(2)), 2)
    gamma = promises.adpsgd_step_bound(M=2, L=1, n=2, T=1, rho_bar=bar)
    assert promises.adpsgd_constants(gamma=gamma, M=2, L=1, n=2, T=1, rho_bar=bar).hold
    start = np.array([1.0, -1.0, 1.0])  # f(x0) - f* = 3/2
    measured, _, _ = run_adpsgd(
        topology.complete(2),
        gamma=gamma,
        batch=2,
        centres=centres,
        sigma=2,
        start=start,
        steps=3000,
        runs=100,
    )
    promised = promises.adpsgd_theorem1(f0_gap=1.5, gamma=gamma, K=2000, M=2, L=1, n=2, sigma=2, varsigma=0.5)
    assert promised / 8 < measured <= promised


@pytest.mark.parametrize("t", [topology.complete(4), topology.ring(8)])
def test_lemma_7_holds_in_a_run(t):
    n = t.size
    centres = np.array([[1.0, 0], [-1.0, 0]] * (n // 2))  # varsigma = 1
    bar = promises.rho_bar(promises.rho(t), n)
    gamma = 0.1 / math.sqrt(24 * (n + bar))  # C1 = 0.99 is all that the lemma asks for
    _, measured, grad_sq = run_adpsgd(
        t, gamma=gamma, batch=1, centres=centres, sigma=1, start=np.ones(2), steps=1000, runs=50
    )
    by = {"gamma": gamma, "M": 1, "L": 1, "n": n, "T": 1, "rho_bar": bar, "mean_grad_sq": grad_sq}
    assert 0 < measured <= promises.adpsgd_consensus_bound(sigma=1, varsigma=1, **by)


def test_lemma_7_by_hand():
    by = {"M": 2, "L": 1, "n": 2, "T": 1, "rho_bar": 0.5, "sigma": 3, "varsigma": 1, "mean_grad_sq": 5}
    # C1 = 1 - 24·4·1e-4·1; the noise term is 2e-4·(2·9 + 24)·0.5, the other 4e-4·4·1·5.
    assert promises.adpsgd_consensus_bound(gamma=0.01, **by) == pytest.approx((0.0042 + 0.008) / 0.9904)
    assert promises.adpsgd_consensus_bound(gamma=1, **by) == math.inf


# SGD without gradient delay -----------------------------------------------------------------------


def run_nodelay(gradient, *, n, tau, eta, cycles):
    """Talyansky et al.'s Algorithm 2; yields the workers' models (n × d) after every gradient."""
    x = np.zeros((n, 2))
    merged, begun = x[0].copy(), x.copy()
    for _ in range(cycles):
        update = x - begun
        x = begun = merged + update
        merged = merged + update.mean(axis=0)
        for _ in range(tau // 2):
            x = x - eta * gradient(x)
            yield x


def discrepancy(x):
    return max(np.linalg.norm(a - b) for a, b in itertools.combinations(x, 2))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("tau", [2, 8])
def test_nodelay_discrepancy_is_reached_by_opposite_pulls(n, tau):
    pull = np.array([[3.0, 0], [-3.0, 0]] * (n // 2))
    seen = max(discrepancy(x) for x in run_nodelay(lambda _: pull, n=n, tau=tau, eta=0.1, cycles=6))
    assert seen == pytest.approx(promises.nodelay_discrepancy(L=3, tau=tau, eta=0.1))


def test_nodelay_discrepancy_bounds_random_pulls():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 2)) * 3

    def clipped(x):
        g = x - centres + rng.normal(size=x.shape)
        return g / np.maximum(1, np.linalg.norm(g, axis=1, keepdims=True))

    seen = max(discrepancy(x) for x in run_nodelay(clipped, n=6, tau=8, eta=0.05, cycles=40))
    assert 0.2 < seen <= promises.nodelay_discrepancy(L=1, tau=8, eta=0.05)


def test_nodelay_expected_discrepancy_bounds_noise():
    rng = np.random.default_rng(0)
    eta, tau, s = 0.02, 8, 1.5
    assert promises.nodelay_expected_holds(eta, tau, H=1)

    def noisy(x):
        return x + rng.normal(size=x.shape) * s / math.sqrt(2)

    models = list(run_nodelay(noisy, n=2, tau=tau, eta=eta, cycles=500))
    seen = np.mean([discrepancy(x) for x in models])
    bound = promises.nodelay_discrepancy_expected(eta, tau, s)
    assert bound == pytest.approx(0.48)
    assert bound / 10 < seen <= bound


def test_nodelay_expected_needs_small_steps():
    assert promises.nodelay_expected_holds(eta=0.0125, tau=16, H=1)  # exactly 0.1
    assert not promises.nodelay_expected_holds(eta=0.013, tau=16, H=1)


@law
@given(st.integers(0, 1000), st.integers(1, 50))
def test_nodelay_min_tau_is_the_smallest_without_idle_time(merge_ms, grad_ms):
    merge_s, grad_s = merge_ms / 1000, grad_ms / 1000
    tau = theory.nodelay_min_tau(merge_s, grad_s)
    assert tau == max(2, 2 * -(-merge_ms // grad_ms))
    assert theory.nodelay_idle_share(tau, merge_s, grad_s) == pytest.approx(0, abs=1e-9)
    if tau > 2:
        assert theory.nodelay_idle_share(tau - 2, merge_s, grad_s) > 1e-4


def test_nodelay_idle_share_of_a_slow_merge():
    assert theory.nodelay_idle_share(8, t_merge_s=16, t_grad_s=1) == pytest.approx(12 / 16)
    for tau in (0, 1, 7):
        with pytest.raises(ConfigError, match=f"even number of steps, .*not {tau}"):
            theory.nodelay_idle_share(tau, 1, 1)
    with pytest.raises(ConfigError, match="gradients of 0 s"):
        theory.nodelay_min_tau(1, 0)


# SASGD, DASGD, the parameter server ---------------------------------------------------------------


def test_sasgd_drift_is_reached_by_opposite_pulls():
    x = np.zeros((2, 3))
    pull = np.array([[1, 2, 2], [-1, -2, -2]])  # of norm 3
    for _ in range(10):
        x = x - 0.1 * pull
    assert np.linalg.norm(x[0] - x[1]) == pytest.approx(promises.sasgd_drift(gamma=0.1, T=10, G=3))


def test_sasgd_shares_one_allreduce_among_t_steps():
    assert theory.sasgd_step_s(t_grad_s=0.1, t_allreduce_s=0.8, T=8) == pytest.approx(0.2)


@law
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_dasgd_discrepancy_counts_what_only_one_has_applied(mine, theirs):
    gradients = np.random.default_rng(0).normal(size=(31, 4))
    most = np.linalg.norm(gradients, axis=1).max()
    apart = np.linalg.norm(sum(gradients[k] for k in mine) - sum(gradients[k] for k in theirs)) * 0.1
    assert apart <= promises.dasgd_discrepancy(gamma=0.1, Q=most, S=len(mine ^ theirs)) + 1e-12
    assert promises.dasgd_discrepancy(gamma=0.1, Q=2, S=3) == pytest.approx(0.6)


def test_dasgd_step_size_has_three_regimes():
    quiet = {"delta": 1, "L": 4}
    assert promises.dasgd_step_size(sigma=0, Q=1, S_avg=0, K=10**9, **quiet) == 1 / 8
    assert promises.dasgd_step_size(sigma=0, Q=0, S_avg=9, K=10**9, **quiet) == 1 / 8
    noisy = promises.dasgd_step_size(sigma=5, Q=0, S_avg=0, K=10**4, **quiet)
    assert noisy == pytest.approx(1 / (2 * 5 * 100))
    stale = promises.dasgd_step_size(sigma=0, Q=2, S_avg=3, K=10**6, **quiet)
    assert stale == pytest.approx((16 * 4 * 9) ** (-1 / 3) / 100)
    assert promises.dasgd_step_size(sigma=5, Q=2, S_avg=3, K=10**6, **quiet) == pytest.approx(1 / 10_000)


@pytest.mark.parametrize("slowest", [1, 100])
def test_mean_delay_at_a_parameter_server(slowest):
    n, updates, rng = 16, 20_000, np.random.default_rng(0)
    pace = np.ones(n)
    pace[0] = slowest
    queue = [(rng.exponential(pace[i]), i, 0) for i in range(n)]
    heapq.heapify(queue)
    delays = []
    for version in range(updates):
        now, who, read = heapq.heappop(queue)
        delays.append(version - read)
        heapq.heappush(queue, (now + rng.exponential(pace[who]), who, version + 1))
    assert np.mean(delays) == pytest.approx(theory.asgd_mean_delay(n), rel=0.03)


def easgd_round(p, eta, alpha):
    """The matrix of one round-robin round of EASGD on x²/2; the last coordinate is the centre."""
    total = np.eye(p + 1)
    for i in range(p):
        turn = np.eye(p + 1)
        turn[i, i], turn[i, p] = 1 - eta - alpha, alpha
        turn[p, i], turn[p, p] = alpha, 1 - alpha
        total = turn @ total
    return total


def radius(matrix):
    return np.abs(np.linalg.eigvals(matrix)).max()


def test_easgd_is_stable_inside_its_region():
    rng = np.random.default_rng(0)
    for _ in range(500):
        p, eta = int(rng.integers(1, 9)), rng.uniform(0, 2)
        alpha = rng.uniform(0, theory.easgd_alpha_limit(eta))
        assert radius(easgd_round(p, eta, alpha)) <= 1 + 1e-6, (p, eta, alpha)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 1.9])
def test_one_easgd_worker_is_unstable_outside_it(eta):
    limit = theory.easgd_alpha_limit(eta)
    assert radius(easgd_round(1, eta, limit)) == pytest.approx(1)
    assert radius(easgd_round(1, eta, limit + 0.01)) > 1 + 1e-3


@pytest.mark.parametrize("eta", [-0.1, 2.1])
def test_no_alpha_saves_a_wild_step(eta):
    with pytest.raises(ConfigError, match="between 0 and 2"):
        theory.easgd_alpha_limit(eta)


# Time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "sync", "free"), [(1, 16, 16), (2, 8, 15.5), (10, 1.6, 15.1), (100, 0.16, 15.01)]
)
def test_one_straggler_of_sixteen(s, sync, free):
    assert promises.straggler_rate_sync(16, s) == pytest.approx(sync)
    assert promises.straggler_rate_async(16, s) == pytest.approx(free)


def test_ring_allreduce():
    assert theory.ring_allreduce_s(1, 1e6, 0.1, 1e6) == 0
    assert theory.ring_allreduce_s(4, 8e6, 0.01, 1e6) == pytest.approx(6 * 0.01 + 12)
    free_latency = [theory.ring_allreduce_s(n, 1e6, 0, 1e6) for n in (2, 1000)]
    assert free_latency == pytest.approx([1, 2], rel=0.01)  # the bytes sent hardly grow with n


def test_sync_step_by_hand():
    # Backward ends at 3, 5, 6 (last layer first); sending runs 3-4, 5-9 and, the link being busy, 9-10.
    layers = {"t_f_s": 1, "t_b_s": [1, 2, 3], "t_c_s": [1, 4, 1], "t_u_s": 0.5}
    assert theory.sync_step_s(**layers) == pytest.approx(11.5)
    assert theory.sync_step_s(**layers, overlap=False) == pytest.approx(13.5)
    assert theory.sync_step_s(**layers, t_io_s=2, t_h2d_s=1) == pytest.approx(11.5)  # read meanwhile
    assert theory.sync_step_s(**layers, t_io_s=20, t_h2d_s=1) == pytest.approx(21)
    assert theory.sync_step_s(**layers, t_io_s=2, t_h2d_s=1, overlap=False) == pytest.approx(16.5)


times = st.floats(0, 10)


@law
@given(t_f=times, layers=st.lists(st.tuples(times, times), max_size=8), t_io=times, t_h2d=times, t_u=times)
def test_overlap_hides_but_never_removes(t_f, layers, t_io, t_h2d, t_u):
    t_b, t_c = [b for b, _ in layers], [c for _, c in layers]
    rest = {"t_io_s": t_io, "t_h2d_s": t_h2d, "t_u_s": t_u}
    hidden = theory.sync_step_s(t_f, t_b, t_c, **rest)
    assert hidden <= theory.sync_step_s(t_f, t_b, t_c, **rest, overlap=False) + 1e-9
    assert hidden >= max(t_f + sum(t_b) + t_u, sum(t_c), t_io + t_h2d) - 1e-9


@law
@given(t_f=times, t_b=times, t_c=times, t_u=times)
def test_a_single_layer_overlaps_nothing(t_f, t_b, t_c, t_u):
    ways = [theory.sync_step_s(t_f, [t_b], [t_c], t_u_s=t_u, overlap=overlap) for overlap in (True, False)]
    assert ways[0] == pytest.approx(ways[1])


def test_sync_step_needs_both_times_of_every_layer():
    with pytest.raises(ConfigError, match="2 backward times but 1 communication"):
        theory.sync_step_s(1, [1, 1], [1])


def test_sync_speedup():
    alone = theory.sync_step_s(1, [2], [0])
    together = theory.sync_step_s(1, [2], [3])
    assert promises.sync_speedup(4, alone, together) == pytest.approx(2)
