"""What the papers say must come out of the simulator: shapes, bounds and identities."""

from __future__ import annotations

import pytest
import torch

import freewheel as fw
import promises
from freewheel import theory
from freewheel.sim.clock import at_once
from freewheel.tasks import Quadratic
from lab import FAST, JITTER, after_every_step, largest_distance, make, replicas, run, timing

COMPUTE_S = 0.01


# -- the straggler curve (AD-PSGD's experiment with one slow worker) --


@pytest.mark.parametrize("s", [1, pytest.param(2, marks=pytest.mark.slow), 10, 100])
@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "dasgd"])
def test_one_slow_worker_slows_only_itself(strategy, s):
    result = timing(strategy, workers=16, steps=100, compute=fw.Compute(slow={0: s}))
    rate = result.steps_per_s * COMPUTE_S
    assert rate == pytest.approx(promises.straggler_rate_async(16, s), rel=0.03)


@pytest.mark.parametrize("s", [1, 2, 10, 100])
@pytest.mark.parametrize("strategy", ["allreduce", "dpsgd", "sasgd", "nodelay"])
def test_one_slow_worker_slows_everybody_in_a_synchronous_strategy(strategy, s):
    result = timing(strategy, workers=16, steps=24, compute=fw.Compute(slow={0: s}), links=FAST)
    rate = result.steps_per_s * COMPUTE_S
    assert rate == pytest.approx(promises.straggler_rate_sync(16, s), rel=0.03)


# -- discrepancy (seed 1, figure 1) --


def discrepancy(strategy: str, workers: int) -> tuple[float, float]:
    """The largest distance between two replicas after any step, and the largest gradient norm."""
    simulation = make(strategy, Quadratic(clip=1.0), workers=workers, steps=48, lr=0.02, links=FAST)
    seen = [0.0]
    after_every_step(simulation, lambda: seen.append(largest_distance(replicas(simulation))))
    result = simulation.run()
    assert max(seen) >= result.discrepancy_max - 1e-9
    return max(seen), max(worker["gradient_norm_max"] for worker in result.by_worker)


def test_with_gradient_delay_discrepancy_grows_with_the_workers():
    few, many = discrepancy("asgd:raw=true", 2)[0], discrepancy("asgd:raw=true", 32)[0]
    assert many >= 8 * few


def test_without_gradient_delay_discrepancy_does_not_grow_with_the_workers():
    few, many = discrepancy("nodelay:tau=8", 4)[0], discrepancy("nodelay:tau=8", 32)[0]
    assert many <= 1.5 * few


def test_without_gradient_delay_discrepancy_grows_with_tau_and_keeps_its_bound():
    measured = []
    for tau in (4, 8, 16):
        distance, steepest = discrepancy(f"nodelay:tau={tau}", 8)
        assert 0 < distance <= promises.nodelay_discrepancy(steepest, tau, 0.02)
        measured.append(distance)
    assert measured == sorted(measured)
    assert measured[2] > 3 * measured[0]


# -- SGD without gradient delay --


@pytest.mark.parametrize("workers", [2, 5])
def test_nodelay_merges_the_mean_of_one_cycle_ago(workers):
    """Lemma 3.1: what arrives at the end of a cycle is the mean of all models at its beginning."""
    simulation = make(fw.NoDelay(tau=8), workers=workers, steps=40, compute=JITTER)
    means, models, step = [], {}, 4
    for worker in simulation.workers.values():

        async def start(node, inner=worker.strategy.start):
            await inner(node)
            models[node.rank, node.steps] = await node.weights()

        async def after_step(node, strategy=worker.strategy, inner=worker.strategy.after_step):
            if node.steps % step == 0:
                before = models[node.rank, node.steps - step]
                means.append((node.steps - step, before + await strategy.merge))
            await inner(node)
            models[node.rank, node.steps] = await node.weights()

        worker.strategy.start, worker.strategy.after_step = start, after_step
    simulation.run()
    assert len(means) == workers * 10
    for cycle_ago, merged in means:
        mean = torch.stack([models[rank, cycle_ago] for rank in range(workers)]).mean(0)
        torch.testing.assert_close(merged, mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tau", [2, 6, 10, 12, 16])
def test_nodelay_is_idle_exactly_until_tau_covers_the_merge(tau):
    workers, megabytes, links = 8, 0.4, fw.Links(mbit=100, latency_ms=0.1)
    t_merge = theory.ring_allreduce_s(workers, megabytes * 1e6, 1e-4, 100e6 / 8) + 2e-4  # have, commit
    assert theory.nodelay_min_tau(t_merge, COMPUTE_S) == 12
    idle = timing(
        fw.NoDelay(tau), workers=workers, steps=10 * tau, model_mb=megabytes, links=links
    ).idle_share
    assert idle == pytest.approx(theory.nodelay_idle_share(tau, t_merge, COMPUTE_S), abs=0.002)
    assert (idle > 0.05) if tau < 12 else (idle < 1e-9)


def test_nodelay_free_keeps_its_bound_where_the_network_cannot_keep_up():
    slow_network = {"workers": 4, "steps": 60, "model_mb": 4.0, "links": fw.Links(mbit=100)}
    assert timing("nodelay_free:tau=8", **slow_network).staleness_max <= 8
    assert timing("nodelay_free", **slow_network).staleness_max > 8


# -- SASGD --


def test_sasgd_with_gamma_over_p_is_local_sgd():
    """Against the textbook loop: T local steps on each worker, then the mean of the models."""
    workers, steps, interval, lr = 4, 24, 6, 0.1
    simulation = run(fw.SASGD(interval), workers=workers, steps=steps, lr=lr, compute=JITTER)
    task = simulation.task
    x = torch.zeros(workers, task.size, dtype=torch.float64)
    for step in range(1, steps + 1):
        x -= lr * torch.einsum("nij,nj->ni", task.a, x - task.optima)
        if step % interval == 0:
            x[:] = x.mean(0)
    torch.testing.assert_close(replicas(simulation), x, rtol=0, atol=1e-12)


def test_sasgd_reduces_after_every_early_step():
    workers, steps, lr = 4, 24, 0.1
    simulation = run(fw.SASGD(6, early=9), workers=workers, steps=steps, lr=lr, compute=JITTER)
    task = simulation.task
    x = torch.zeros(workers, task.size, dtype=torch.float64)
    for step in range(1, steps + 1):
        x -= lr * torch.einsum("nij,nj->ni", task.a, x - task.optima)
        if step <= 9 or step % 6 == 0:
            x[:] = x.mean(0)
    torch.testing.assert_close(replicas(simulation), x, rtol=0, atol=1e-12)


def test_sasgd_with_outer_momentum_goes_on_in_the_way_the_mean_went():
    workers, steps, interval, lr, outer = 4, 24, 6, 0.1, 0.4
    simulation = run(fw.SASGD(interval, outer=outer), workers=workers, steps=steps, lr=lr, compute=JITTER)
    task = simulation.task
    x = torch.zeros(workers, task.size, dtype=torch.float64)
    common, way = x[0].clone(), torch.zeros(task.size, dtype=torch.float64)
    for step in range(1, steps + 1):
        x -= lr * torch.einsum("nij,nj->ni", task.a, x - task.optima)
        if step % interval == 0:
            to = x.mean(0) + outer * way
            common, way = to, to - common
            x[:] = to
    torch.testing.assert_close(replicas(simulation), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["sasgd:interval=4:scale=0.2", "sasgd:interval=4:outer=0.3"])
def test_one_who_was_cut_off_goes_on_with_the_common_model_of_all(spec):
    faults = [fw.Fault("cut", 2, 0.1), fw.Fault("heal", 2, 3.0)]
    simulation = run(spec, workers=5, steps=400, compute=JITTER, faults=faults)
    common = [worker.strategy.x for worker in simulation.workers.values()]
    assert all(torch.equal(common[0], one) for one in common[1:])
    assert largest_distance(replicas(simulation)) == 0.0


def test_one_who_comes_back_has_no_way_and_all_go_on_alike():
    faults = [fw.Fault("crash", 3, 0.1), fw.Fault("restart", 3, 0.2)]
    strategy = fw.SASGD(interval=2, outer=0.5)
    simulation = run(strategy, workers=4, steps=100, compute=JITTER, faults=faults)
    assert simulation.workers[3].node.rejoined
    assert largest_distance(replicas(simulation)) == 0.0
    ways = [worker.strategy.v for worker in simulation.workers.values()]
    assert all(torch.equal(ways[0], one) for one in ways[1:])


def test_sasgd_adds_all_updates_up_with_gamma_p_equal_gamma():
    workers, lr = 4, 0.02
    simulation = run(fw.SASGD(interval=1, scale=1.0), workers=workers, steps=10, lr=lr)
    task = simulation.task
    x = torch.zeros(task.size, dtype=torch.float64)
    for _ in range(10):
        x = x - lr * torch.einsum("nij,nj->ni", task.a, x - task.optima).sum(0)
    torch.testing.assert_close(replicas(simulation)[0], x, rtol=0, atol=1e-12)


def test_sasgd_with_an_interval_of_one_is_allreduce():
    settings = {"workers": 4, "steps": 20, "task": Quadratic(sigma=1.0)}
    rare, every = run("sasgd:interval=1", **settings), run("allreduce", **settings)
    torch.testing.assert_close(replicas(rare), replicas(every), rtol=0, atol=1e-12)


@pytest.mark.parametrize("interval", [1, 4, 16])
def test_sasgd_spreads_the_reduction_over_the_interval(interval):
    result = timing(fw.SASGD(interval), workers=8, steps=32, model_mb=1.0)
    t_allreduce = theory.ring_allreduce_s(8, 1e6, 2e-4, 125e6) + 4e-4  # the ring, "have" and "commit"
    assert result.virtual_s / 32 == pytest.approx(
        theory.sasgd_step_s(COMPUTE_S, t_allreduce, interval), rel=0.01
    )


def test_hierarchical_sasgd_with_one_level_is_sasgd():
    flat = run("sasgd:interval=4", workers=5, steps=16)
    levels = run("hierarchical_sasgd:nodes=2:interval=4:global_every=1", workers=5, steps=16)
    torch.testing.assert_close(replicas(levels), replicas(flat), rtol=0, atol=1e-12)


def test_hierarchical_sasgd_agrees_inside_a_node_before_it_does_between_nodes():
    simulation = make("hierarchical_sasgd:nodes=2:interval=2:global_every=4", workers=4, steps=14)
    simulation.run()  # the last averaging is one inside the nodes
    rows = replicas(simulation)
    assert largest_distance(rows[:2]) < 1e-12
    assert largest_distance(rows[2:]) < 1e-12
    assert largest_distance(rows) > 1e-3


# -- AD-PSGD --


def test_theorem_1_on_two_workers():
    """Measured mean of ‖∇f(mean)‖² against the right-hand side; γ within the theorem's conditions."""
    lipschitz, sigma, steps, n = 1.0, 1.0, 2000, 2
    gamma = 0.9 * promises.adpsgd_step_bound(1, lipschitz, n, 1, promises.rho_bar(0.0, n))
    constants = promises.adpsgd_constants(
        gamma=gamma, M=1, L=lipschitz, n=n, T=1, rho_bar=promises.rho_bar(0.0, n)
    )
    assert constants.hold
    task = Quadratic(sigma=sigma, spread=0.0, alike=True)
    simulation = make("adpsgd", task, workers=n, steps=steps // n, lr=gamma, links=FAST, compute=JITTER)
    gradients = []

    def look():
        away = replicas(simulation).mean(0) - task.optimum
        gradients.append(float((task.a[0] @ away).square().sum()))

    after_every_step(simulation, look)
    f0_gap = task.value(torch.zeros(task.size, dtype=torch.float64)) - task.lowest
    simulation.run()
    bound = promises.adpsgd_theorem1(f0_gap=f0_gap, gamma=gamma, K=steps, M=1, L=lipschitz, n=n, sigma=sigma)
    assert len(gradients) == steps
    assert 0 < sum(gradients) / steps <= bound


def test_a_slow_link_costs_adpsgd_nothing_and_allreduce_everything():
    def rate(strategy, slow):
        links = fw.Links(slow=slow)
        return timing(strategy, workers=8, steps=50, model_mb=1.0, links=links).steps_per_s

    assert rate("adpsgd", {3: 100}) > (1 - 1 / 8) * rate("adpsgd", {})
    assert rate("allreduce", {3: 100}) < 0.05 * rate("allreduce", {})


# -- DASGD --


def test_dasgd_differs_by_no_more_than_what_one_has_and_the_other_has_not():
    """‖x_i - x_j‖ <= γ·Q·S_ij at every event, S_ij from the sets of gradients each one has applied."""
    lr, workers = 0.02, 6
    compute = fw.Compute(kind="exponential", slow={2: 3})
    simulation = make(
        "dasgd:interval=3:form=sum:raw=true",
        Quadratic(clip=1.0),
        workers=workers,
        steps=40,
        lr=lr,
        compute=compute,
    )
    tight = []

    def has(worker):
        applied = list(worker.strategy.applied)
        applied[worker.rank] = worker.node.steps
        return applied

    def look():
        everybody = list(simulation.workers.values())
        for i in everybody:
            for j in everybody[: i.rank]:
                s_ij = sum(abs(a - b) for a, b in zip(has(i), has(j), strict=True))
                distance = float(
                    torch.linalg.vector_norm(at_once(i.replica.snapshot()) - at_once(j.replica.snapshot()))
                )
                assert distance <= promises.dasgd_discrepancy(lr, 1.0, s_ij) + 1e-9
                tight.append(distance / max(lr * s_ij, 1e-12))

    after_every_step(simulation, look)
    simulation.run()
    assert max(tight) > 0.5  # the bound is no empty promise


@pytest.mark.parametrize("form", ["sum", "mean"])
def test_dasgd_replicas_coincide_once_all_is_delivered(form):
    simulation = run(f"dasgd:interval=1:form={form}", workers=5, steps=30, lr=0.01, compute=JITTER)
    assert largest_distance(replicas(simulation)) < 1e-12
    assert float(replicas(simulation).abs().max()) > 0.1


def test_dasgd_works_with_momentum():
    simulation = run(
        "dasgd:interval=1:form=sum:raw=true", workers=4, steps=30, lr=0.002, momentum=0.9, compute=JITTER
    )
    assert largest_distance(replicas(simulation)) < 1e-12


# -- parameter server --


@pytest.mark.parametrize("slow", [{}, {5: 10}])
def test_asgd_mean_delay_is_one_less_than_the_workers_at_any_speeds(slow):
    compute = fw.Compute(kind="exponential", slow=slow)
    result = timing("asgd", workers=16, steps=300, compute=compute, links=FAST)
    assert result.staleness_mean == pytest.approx(theory.asgd_mean_delay(16), rel=0.03)


def test_the_server_becomes_the_bottleneck_of_asgd_but_not_of_adpsgd():
    def rates(strategy):
        return [timing(strategy, workers=n, steps=30, model_mb=1.0).steps_per_s for n in (8, 16, 32)]

    eight, sixteen, thirty_two = rates("asgd")
    assert thirty_two < 1.05 * sixteen < 1.1 * eight  # the server's port is full
    eight, sixteen, thirty_two = rates("adpsgd")
    assert thirty_two > 1.95 * sixteen > 3.8 * eight


def test_downpour_with_an_interval_of_one_is_asgd():
    one, other = run("downpour:interval=1", workers=3, steps=20), run("asgd", workers=3, steps=20)
    assert torch.equal(replicas(one), replicas(other))


def test_easgd_keeps_the_sum_of_workers_and_centre():
    """The elastic force is equal and opposite: with no gradients the sum of all stays."""
    simulation = make("easgd:interval=1", workers=4, steps=30, lr=0.0, compute=JITTER)
    for rank, worker in simulation.workers.items():
        worker.replica.load(torch.full((16,), float(rank), dtype=torch.float64))
    before = replicas(simulation).sum(0) + replicas(simulation)[0]  # the centre starts at worker 0's model
    simulation.run()
    after = replicas(simulation).sum(0) + simulation.workers[0].strategy.centre
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    assert largest_distance(replicas(simulation)) < 1.0  # they began 12 apart


def test_grouping_puts_workers_of_similar_speed_together():
    compute = fw.Compute(slow={1: 4, 3: 4.4, 5: 20})
    simulation = run("grouping", workers=6, steps=30, compute=compute, lr=0.01)
    groups = {worker.strategy.group for worker in simulation.workers.values()}
    assert groups == {(0, 2, 4), (1, 3), (5,)}
    steps = {rank: worker.node.steps for rank, worker in simulation.workers.items()}
    assert steps[0] > 3 * steps[1] > 9 * steps[5]
