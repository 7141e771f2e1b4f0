"""Exchanges under any interleaving: the mean is kept, nobody hangs, nobody takes part in two."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import freewheel as fw
from freewheel.errors import PeerLost
from freewheel.fabric.base import Fabric
from freewheel.fabric.exchange import Exchanges
from freewheel.node_driver import NodeDriver
from freewheel.tasks import Quadratic
from freewheel.topology import resolve
from lab import make, record_updates, replicas, run

TOPOLOGIES = [
    "ring",
    "complete",
    "star",
    "torus",
    "exponential",
    "one_peer_exponential",
    "hierarchical",
]

scenarios = st.fixed_dictionaries(
    {
        "workers": st.integers(2, 9),
        "seed": st.integers(0, 2**32),
        "compute": st.builds(
            fw.Compute,
            ms=st.just(10.0),
            kind=st.sampled_from(["constant", "uniform", "exponential", "lognormal"]),
            slow=st.dictionaries(st.integers(0, 1), st.floats(0.2, 20.0), max_size=2),
        ),
        "links": st.builds(
            fw.Links,
            mbit=st.sampled_from([0.05, 1.0, 1000.0]),  # a model takes 20 ms to 1 µs
            latency_ms=st.sampled_from([0.0, 0.1, 7.0, 60.0]),
            slow=st.dictionaries(st.integers(0, 1), st.floats(1.0, 100.0), max_size=2),
            backbone_mbit=st.sampled_from([None, 0.1]),
            workers_per_node=st.sampled_from([1, 2]),
        ),
    }
)


@settings(max_examples=60)
@given(scenario=scenarios, topology=st.sampled_from(TOPOLOGIES), tries=st.integers(1, 4))
def test_the_mean_moves_only_by_updates_whatever_interleaves(scenario, topology, tries):
    simulation = make(fw.ADPSGD(topology, tries), Quadratic(size=4, sigma=1.0), steps=12, **scenario)
    updates = record_updates(simulation)
    result = simulation.run()
    assert result.idle_share < 1e-9  # nobody ever waited
    torch.testing.assert_close(replicas(simulation).sum(0), updates[0], rtol=0, atol=1e-9)
    counts = [worker.node.counters.exchanges for worker in simulation.workers.values()]
    assert sum(c["done"] for c in counts) % 2 == 0  # an exchange counts on both sides
    assert all(c["half"] == c["failed"] == 0 for c in counts)


def test_a_replica_takes_part_in_one_exchange_at_a_time(monkeypatch):
    """Between a worker's snapshot and its correction no other exchange may touch it."""
    busy: dict[int, int] = {}
    inner, inner_met = fw.Node.snapshot_soon, NodeDriver.met

    async def snapshot(node):
        assert node._exchanges.partner is not None
        busy[node.rank] = busy.get(node.rank, 0) + 1
        assert busy[node.rank] == 1
        return await inner(node)

    def met(node, peer, correction):
        busy[node.rank] -= 1
        inner_met(node, peer, correction)

    simulation = make("adpsgd", workers=6, steps=20, links=fw.Links(mbit=0.1), evaluations=0)
    monkeypatch.setattr(simulation._answer, "weights", lambda _: torch.zeros(16, dtype=torch.float64))
    monkeypatch.setattr(fw.Node, "snapshot_soon", snapshot)
    monkeypatch.setattr(NodeDriver, "met", met)
    simulation.run()
    assert set(busy) == set(range(6))


def test_two_who_call_each_other_at_once_still_meet():
    simulation = run("adpsgd", workers=2, steps=20)  # equal constant speeds: they always call at once
    assert simulation.workers[0].node.counters.exchanges["done"] >= 19


@pytest.mark.parametrize("topology", ["star", "hierarchical", "hierarchical:nodes=4", "ring", "complete"])
def test_every_edge_is_used_by_workers_in_step(topology):
    """Equal constant speeds: ties must not always be won by the same worker."""
    simulation = make("adpsgd", workers=8, steps=300, gradients=False)
    for worker in simulation.workers.values():
        worker.strategy.topology = topology
    pairs = set()
    for worker in simulation.workers.values():

        def met(peer, correction, *apart, node=worker.node, inner=worker.node.met):
            pairs.add((min(node.rank, peer), max(node.rank, peer)))
            inner(peer, correction)

        worker.node.met = met
    simulation.run()
    assert pairs == set(resolve(topology, 8).edges)


def test_workers_in_step_find_partners():
    """All call at the same moment: about every worker should still get an exchange in every step."""
    simulation = run("adpsgd", workers=16, steps=40)
    done = sum(worker.node.counters.exchanges["done"] for worker in simulation.workers.values())
    assert done > 0.8 * 16 * 40


class Waiting(fw.ADPSGD):
    """Trains only after its exchange, so that a circle of waits would stop everything."""

    async def background(self, node):
        return

    async def after_step(self, node):
        await node.exchange((node.rank + 1) % node.world_size)


def test_waiting_for_an_answer_cannot_form_a_circle(monkeypatch):
    """Break rule 3 (let everybody wait for everybody) and the simulator finds the deadlock and names it."""

    async def serve(self):
        while True:
            request = await self.fabric.receive(("call",))
            tag = ("exchange", request.sender, int(request.note[0]))
            if self.partner is None:
                self._accept(request.sender, tag)
            else:
                self.waiting.append((request.sender, tag))

    monkeypatch.setattr(Exchanges, "serve", serve)
    monkeypatch.setattr(Exchanges, "_send_away", lambda self: None)
    with pytest.raises(fw.Deadlock) as caught:
        run(Waiting(), workers=3, steps=10)
    text = str(caught.value)
    for rank in range(3):
        assert f"worker {rank} waits for worker {(rank + 1) % 3} (exchange" in text


def test_the_same_strategy_does_not_deadlock_with_rule_3():
    assert run(Waiting(), workers=3, steps=10).result.worker_steps == 30


def test_a_cut_in_the_middle_of_an_exchange_counts_on_neither_side_or_is_counted_as_half():
    """Cut the link of a pair at every phase; what one corrected and the other did not is counted as half."""
    outcomes = set()
    for k in range(60):
        cut_s = 0.01 + k * 0.0005  # an exchange takes about 25 ms
        simulation = make(
            "adpsgd",
            workers=2,
            steps=4,
            lr=0.0,
            model_mb=0.0125,
            links=fw.Links(mbit=10, latency_ms=2.0),
            faults=[fw.Fault("cut", 0, cut_s)],
        )
        for rank, worker in simulation.workers.items():
            worker.replica.load(torch.full((16,), float(rank), dtype=torch.float64))
        simulation.wire.silence_s = 0.001
        simulation.run()
        rows = replicas(simulation)
        half = sum(worker.node.counters.exchanges["half"] for worker in simulation.workers.values())
        kept = abs(float(rows.sum(0)[0]) - 1.0) < 1e-12
        assert kept or half == 1, (cut_s, rows[:, 0])
        outcomes.add((kept, half > 0))
    assert (True, False) in outcomes
    assert (False, True) in outcomes


def test_who_waits_in_vain_keeps_no_vector():
    gc.collect()
    gc.disable()
    try:
        fabric, vectors = Fabric(0), []
        fabric.gain(1)

        async def swap():
            vector = torch.zeros(8)
            vectors.append(weakref.ref(vector))
            await fabric.receive(("x",), 1)

        async def meet():
            with contextlib.suppress(PeerLost):
                await swap()

        async def go():
            meeting = asyncio.create_task(meet())
            await asyncio.sleep(0)
            fabric.lose(1, "it was lost")
            await meeting

        asyncio.run(go())
        assert vectors[0]() is None
    finally:
        gc.enable()
