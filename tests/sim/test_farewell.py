"""Workers that are told to leave, in virtual time: the mean stays, and every batch is used once."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

import freewheel as fw
import lab
from freewheel.fabric.farewell import Farewells
from freewheel.sim.driver import Simulation
from freewheel.sim.worker import SimulatedWorker
from freewheel.strategies import ALL, resolve

BATCHES = 60


def crew(
    strategy: str, seed: int, leavers: int, workers: int = 5, among=None, more=(), **settings
) -> tuple[Simulation, float]:
    """A run whose weights differ from the first moment on and move by exchanges alone; their mean."""
    draw = random.Random(f"leaving/{strategy}/{seed}")
    who = draw.sample(among or range(workers), leavers)
    if resolve(strategy).needs(0):
        who = [rank for rank in who if rank != 0]
    together = draw.random() < 0.5
    at_s = draw.uniform(0.05, 0.4)
    faults = [fw.Fault("leave", rank, at_s if together else draw.uniform(0.05, 0.4)) for rank in who]
    simulation = lab.make(
        strategy,
        workers=workers,
        steps=30,
        gradients=False,
        batches=BATCHES,
        compute=fw.Compute(20.0, "uniform", 0.3),
        links=fw.Links(latency_ms=0.3, mbit=1000.0),
        model_mb=settings.pop("model_mb", 0.5),
        faults=[*faults, *more],
        seed=seed,
        **settings,
    )
    generator = torch.Generator().manual_seed(seed)
    for worker in simulation.workers.values():
        worker.replica.load(torch.randn(worker.replica.size, generator=generator))
    mean = lab.replicas(simulation).mean(0)
    simulation.result = simulation.run()
    assert set(simulation.workers) == set(range(workers)) - {fault.rank for fault in [*faults, *more]}
    return simulation, float((lab.replicas(simulation).mean(0) - mean).abs().max())


def used_once(simulation: Simulation) -> None:
    """Of the passes that are over every batch was used, and none twice."""
    used = simulation.used
    over = min(worker.hand.number for worker in simulation.workers.values())
    if simulation.strategy.merges():
        over -= 1  # in parts, what is left of somebody's is dealt in the next pass
    assert max(used.values()) == 1
    assert all(used[number, place] == 1 for number in range(over) for place in range(BATCHES))
    assert sum(one.samples_again for one in simulation.counters()) == 0


@pytest.mark.parametrize("seed", range(40))
def test_the_mean_of_those_who_stay_is_the_mean_of_all(seed):
    simulation, off = crew("adpsgd", seed, leavers=1 + seed % 3)
    assert off < 1e-5
    used_once(simulation)


@pytest.fixture
def linger(monkeypatch):
    """Let who has said goodbye stay for a while, as processes do that write records and close."""
    depart = SimulatedWorker.depart

    async def slowly(worker):
        await depart(worker)
        await asyncio.sleep(random.Random(f"linger/{worker.rank}").uniform(0.0, 0.3))

    monkeypatch.setattr(SimulatedWorker, "depart", slowly)


@pytest.mark.parametrize("every", [1, 10**6])
@pytest.mark.parametrize("seed", range(10))
def test_who_has_handed_over_does_not_count_again_while_it_lingers(linger, seed, every):
    simulation, off = crew(f"adpsgd:every={every}", seed, leavers=2 + seed % 2)
    assert off < 1e-5
    used_once(simulation)


def test_nobody_waits_for_one_that_joins(monkeypatch):
    """It copies 200 MB: who leaves meanwhile does without it."""
    took_part, share = set(), Farewells._share

    def noted(self, merge):
        took_part.add(self.fabric.rank)
        return share(self, merge)

    monkeypatch.setattr(Farewells, "_share", noted)
    faults = [fw.Fault("crash", 3, 0.1), fw.Fault("restart", 3, 1.0), fw.Fault("leave", 2, 1.05)]
    settings = {"workers": 4, "steps": 200, "model_mb": 200.0, "compute": fw.Compute(20.0)}
    links = fw.Links(mbit=1000.0)
    simulation = lab.run("adpsgd:every=1000000", gradients=False, faults=faults, links=links, **settings)
    assert sorted(simulation.workers) == [0, 1, 3]
    assert took_part == {0, 1, 2}


@pytest.mark.parametrize("strategy", ["nodelay_free", "sasgd:interval=2", "nodelay:tau=4"])
@pytest.mark.parametrize("seed", range(5))
def test_strategies_that_merge_all_lose_nothing_either(strategy, seed):
    simulation, off = crew(strategy, seed, leavers=2)
    assert off < 1e-5
    used_once(simulation)


@pytest.mark.parametrize("seed", range(10))
def test_who_hands_over_while_another_dies_leaves_everybody_with_it_or_nobody(seed):
    """What those who stay have in the end moved their sum by is the same for all of them, or nothing."""
    draw = random.Random(f"dies/{seed}")
    crash = fw.Fault("crash", 4, draw.uniform(0.02, 0.2))
    simulation, _ = crew("adpsgd", seed, 1, among=range(4), more=[crash], model_mb=10.0)
    assert len(simulation.workers) == 3
    assert not any(worker.node.farewells.calls.busy for worker in simulation.workers.values())
    used = simulation.used
    twice = sum(count - 1 for count in used.values() if count > 1)
    assert twice <= sum(one.samples_again for one in simulation.counters())


def test_where_all_leave_nobody_hands_over_and_the_last_one_goes():
    faults = [fw.Fault("leave", rank, 0.1) for rank in range(4)]
    with pytest.raises(fw.RunStopped):  # the simulator has no run without a worker
        lab.run("adpsgd", workers=4, steps=500, gradients=False, faults=faults)


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("seed", range(5))
def test_every_strategy_goes_on_without_those_who_leave(name, seed):
    simulation, _ = crew(name, seed, leavers=2)
    used_once(simulation)
