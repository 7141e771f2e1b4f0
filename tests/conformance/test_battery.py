"""One battery for all strategies: a new strategy is one row of ROWS."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
import torch

import freewheel as fw
from freewheel.strategies import ALL, resolve
from freewheel.strategies.nodelay_free import PART
from freewheel.tasks import Quadratic
from lab import JITTER, largest_distance, make, record_updates, replicas, run

ROWS = [
    *ALL,
    "sasgd:interval=3",
    "sasgd:interval=2:outer=0.3",
    "hierarchical_sasgd:nodes=3:interval=2:global_every=2",
    "nodelay:tau=2",
    "nodelay_free:every=3:tau=6",
    "nodelay_free:patience=0.5",
    "adpsgd:topology=ring",
    "adpsgd:topology=bipartite_ring",
    "adpsgd:topology=star:every=2",
    "adpsgd:topology=one_peer_exponential",
    "adpsgd:patience=0.5",
    "dpsgd:topology=complete",
    "dpsgd:topology=one_peer_exponential",
    "dpsgd:topology=torus",
    "dasgd:interval=1",
    "dasgd:interval=2:form=mean",
    "downpour:interval=2",
    "easgd:interval=1:alpha=0.2",
    "leader:groups=2:global_interval=2",
    "grouping:warmup=1:ratio=3",
]

every_strategy = pytest.mark.parametrize("spec", ROWS)


def test_every_strategy_is_in_the_table():
    assert set(ALL) == {resolve(spec).name for spec in ROWS}


# -- converges --


@functools.cache
def alone(steps: int) -> float:
    """Where workers end up that never talk: the mean of their optima is not the optimum of the mean."""
    simulation = run("none", workers=6, steps=steps, compute=JITTER)
    worst = max(simulation.task.value(x) - simulation.task.lowest for x in replicas(simulation))
    assert worst > 1.0
    assert simulation.result.loss > 0.04
    return simulation.result.loss


@pytest.mark.parametrize("spec", [spec for spec in ROWS if spec != "none"])
def test_converges_although_every_worker_wants_something_else(spec):
    steps = 300 if resolve(spec).name in ("easgd", "eamsgd") else 200  # a spring takes its time
    simulation = run(spec, workers=6, steps=steps, compute=JITTER)
    assert simulation.result.loss < alone(steps) / 3
    assert simulation.result.worker_steps == 6 * steps


@every_strategy
def test_works_with_noise_and_momentum(spec):
    task = Quadratic(sigma=0.5)
    result = run(spec, task, workers=4, steps=100, momentum=0.9, compute=JITTER).result
    start = task.value(torch.zeros(task.size, dtype=torch.float64)) - task.lowest
    assert result.loss < 0.02 * start


@every_strategy
def test_works_alone(spec):
    spec = spec.replace("nodes=3", "nodes=1")
    result = run(spec, workers=1, steps=150).result
    assert result.worker_steps == 150
    assert result.bytes_per_step == 0
    assert result.loss < 2.0  # from 40


# -- one seed, one run --


def trace(spec: str, seed: int) -> str:
    faults = [fw.Fault.parse("slow:1x3@0.1"), fw.Fault.parse("throttle:2x5@0.15")]
    compute = fw.Compute(kind="lognormal", slow={0: 2})
    return run(spec, workers=4, steps=20, compute=compute, seed=seed, faults=faults).result.trace_sha256


@every_strategy
def test_one_seed_gives_one_run(spec):
    assert trace(spec, 1) == trace(spec, 1)
    assert trace(spec, 1) != trace(spec, 2)


def test_another_process_gives_the_same_run():
    """Whatever order another process's hash seed gives to sets and dictionaries."""
    code = "from test_battery import ALL, json, sys, trace; json.dump([trace(s, 3) for s in ALL], sys.stdout)"
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.dirname(here), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env["PYTHONHASHSEED"] = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert json.loads(there.stdout) == [trace(spec, 3) for spec in ALL]


def test_a_crash_and_a_restart_replay_too():
    def once() -> str:
        faults = [fw.Fault.parse(f) for f in ("crash:2@0.1", "cut:1-3@0.12", "restart:2@0.2", "heal:1-3@2.5")]
        return run("adpsgd", workers=5, steps=60, compute=JITTER, faults=faults).result.trace_sha256

    assert once() == once()


def test_the_trace_holds_every_event(tmp_path):
    with (tmp_path / "trace").open("w") as file:
        result = fw.simulate("adpsgd", "quadratic", workers=3, steps=10, trace_file=file)
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    told = [tuple(tuple(one) if isinstance(one, list) else one for one in line.values()) for line in lines]
    text = "".join(f"{event!r}\n" for event in told)  # what was hashed comes back from what was written
    assert hashlib.sha256(text.encode()).hexdigest() == result.trace_sha256
    kinds = [line["event"] for line in lines]
    assert kinds.count("step") == 30
    assert kinds.count("send") >= kinds.count("land") > 0


# -- the mean is kept --


@pytest.mark.parametrize("spec", [spec for spec in ROWS if resolve(spec).keeps_mean])
def test_the_mean_moves_only_by_the_optimizers_updates(spec):
    simulation = make(spec, Quadratic(sigma=1.0), workers=6, steps=30, compute=JITTER)
    updates = record_updates(simulation)
    simulation.run()
    torch.testing.assert_close(replicas(simulation).sum(0), updates[0], rtol=0, atol=1e-9)
    assert float(updates[0].norm()) > 1


def test_the_mean_is_not_kept_where_it_is_not_promised():
    simulation = make("dasgd:form=sum", workers=6, steps=30, compute=JITTER)
    updates = record_updates(simulation)
    simulation.run()
    assert float((replicas(simulation).sum(0) - updates[0]).norm()) > 1


# -- communication brings replicas together --

MERGING = [
    spec for spec in ROWS if resolve(spec).keeps_mean and resolve(spec).name not in ("none", "allreduce")
]


@pytest.mark.parametrize("spec", [spec for spec in MERGING if "nodes=3" not in spec])
def test_two_workers_that_do_not_train_are_one_after_they_first_communicate(spec):
    """The mean is kept by any weight that both sides use; only half of the way brings both to one point.

    A merge that is waited for goes a part of the way.
    """
    left = 1 - PART if spec == "nodelay_free:patience=0.5" else 0.0
    for steps in range(1, 100):
        simulation = make(spec, workers=2, steps=steps, lr=0.0)
        replica = simulation.workers[1].replica
        replica.load(replica.weights + 1)
        before = replicas(simulation)
        simulation.run()
        after = replicas(simulation)
        if not torch.equal(before, after):
            mean = before.mean(0)
            torch.testing.assert_close(after - mean, left * (before - mean), rtol=0, atol=1e-12)
            return
    pytest.fail("they never communicated")


# -- crashes --

SURVIVORS = [spec for spec in ROWS if resolve(spec).waits_for in ("nobody", "server")]


@pytest.mark.parametrize("spec", SURVIVORS)
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_does_not_stop_an_asynchronous_strategy(spec, seed):
    rng = random.Random(f"{spec}{seed}")
    victim, at_s = rng.randrange(1, 6), rng.uniform(0.0, 0.4)
    faults = [fw.Fault("crash", victim, at_s)]
    simulation = run(spec, workers=6, steps=80, compute=JITTER, faults=faults, seed=seed)
    assert sorted(simulation.workers) == [rank for rank in range(6) if rank != victim]
    assert simulation.result.worker_steps == 480
    steps = [worker.node.steps for worker in simulation.workers.values()]
    assert min(steps) > 0.8 * max(steps)  # nobody was left waiting
    if spec != "none":
        assert largest_distance(replicas(simulation)) < 5.0


@pytest.mark.parametrize("spec", [spec for spec in ROWS if spec not in SURVIVORS])
def test_after_a_crash_a_synchronous_strategy_goes_on_in_a_new_view(spec):
    rng = random.Random(spec)
    victim, at_s = rng.randrange(6), rng.uniform(0.05, 0.4)
    faults = [fw.Fault("crash", victim, at_s)]
    simulation = run(spec, workers=6, steps=80, compute=JITTER, faults=faults)
    left = tuple(rank for rank in range(6) if rank != victim)
    (view,) = {worker.node.view for worker in simulation.workers.values()}
    assert view.number // 6 == 1  # the first after the one all began with
    assert view.members == left
    if resolve(spec).lockstep():
        assert [simulation.workers[rank].node.steps for rank in left] == [80] * 5
    assert simulation.result.loss < 1.0


@pytest.mark.parametrize("spec", [spec for spec in SURVIVORS if resolve(spec).waits_for == "server"])
def test_the_crash_of_the_server_is_a_clear_error(spec):
    with pytest.raises(fw.WorkerLost, match=r"lost worker 0 \(crashed\).*parameter server"):
        run(spec, workers=4, steps=80, faults=[fw.Fault("crash", 0, 0.2)])


@pytest.mark.parametrize("spec", SURVIVORS)
def test_a_worker_that_comes_back_takes_part_again(spec):
    faults = [fw.Fault("crash", 3, 0.1), fw.Fault("restart", 3, 0.2)]
    simulation = run(spec, workers=6, steps=100, compute=JITTER, faults=faults)
    back = simulation.workers[3]
    assert back.node.rejoined
    assert back.node.steps > 50
    if spec != "none":
        assert back.node.counters.bytes_out > 0
        assert simulation.result.loss < 1.0


@pytest.mark.parametrize("spec", [spec for spec in SURVIVORS if resolve(spec).waits_for == "nobody"])
def test_a_cut_link_stops_nobody(spec):
    faults = [fw.Fault("cut", 2, 0.1), fw.Fault("heal", 2, 3.0)]
    simulation = run(spec, workers=6, steps=400, compute=JITTER, faults=faults)
    steps = [worker.node.steps for worker in simulation.workers.values()]
    assert min(steps) > 0.95 * max(steps)
    if resolve(spec).keeps_mean and spec != "none":
        assert largest_distance(replicas(simulation)) < 1.0
