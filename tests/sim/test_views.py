"""Views: whoever waits for others goes on without those who are lost, and with those who come."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

import freewheel as fw
from freewheel.fabric import calls
from freewheel.fabric.base import Fabric, Message
from freewheel.fabric.calls import BUSY, Calls
from freewheel.fabric.views import Record, Views, main_line
from freewheel.sim.clock import Trace, VirtualLoop
from freewheel.sim.driver import Simulation
from freewheel.sim.fabric import VirtualFabric, Wire
from freewheel.sim.links import Network
from freewheel.sim.scenario import Links
from lab import JITTER, largest_distance, make, replicas, seeds

SPECS = [
    "allreduce",
    "sasgd:interval=2",
    "hierarchical_sasgd:nodes=2:interval=2:global_every=2",
    "nodelay:tau=4",
    "dpsgd",
    "dpsgd:topology=one_peer_exponential",
    "leader",
    "leader:groups=2:interval=2:global_interval=3",
    "grouping:warmup=1:ratio=1.05",
]


def faulty(spec: str, *faults: str, silent_s: float = 0.05, **settings: Any) -> Simulation:
    settings = {"workers": 4, "steps": 40, "compute": JITTER, "evaluations": 0, **settings}
    simulation = make(spec, faults=[fw.Fault.parse(text) for text in faults], **settings)
    simulation.wire.silence_s = silent_s
    simulation.result = simulation.run()
    return simulation


def check(simulation: Simulation, spec: str, members: tuple[int, ...]) -> None:
    """All who live are in one view, at the same step where all step together, equal in allreduce."""
    assert {worker.node.view.members for worker in simulation.workers.values()} == {members}
    assert len({worker.node.view for worker in simulation.workers.values()}) == 1
    if simulation.strategy.lockstep():
        assert {worker.node.steps for worker in simulation.workers.values()} == {simulation.scenario.steps}
    if spec == "allreduce":
        assert largest_distance(replicas(simulation)) == 0.0
    if spec.startswith("sasgd"):  # the last step is one at which all merge
        assert largest_distance(replicas(simulation)) < 1e-6


def without(*ranks: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(4) if rank not in ranks)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", seeds(2, quick=1))
def test_survivors_go_on(spec, seed):
    rng = random.Random(f"{spec}/{seed}")
    one, other = rng.sample(range(4), 2)
    at_s, later_s = rng.uniform(0.0, 0.2), rng.choice([0.0, 0.0002, 0.0005, 0.01])
    for victim in {0, one}:
        check(faulty(spec, f"crash:{victim}@{at_s}", seed=seed), spec, without(victim))
    two = [f"crash:{one}@{at_s}", f"crash:{other}@{at_s + later_s}"]
    check(faulty(spec, *two, seed=seed), spec, without(one, other))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", seeds(2, quick=1))
def test_who_comes_back_is_taken_in(spec, seed):
    rng = random.Random(f"{spec}/{seed}")
    for victim in (0, rng.randrange(1, 4)):
        at_s, for_s = rng.uniform(0.0, 0.15), rng.choice([0.0001, 0.0006, 0.002, 0.05])
        faults = [f"crash:{victim}@{at_s}", f"restart:{victim}@{at_s + for_s}"]
        simulation = faulty(spec, *faults, seed=seed)
        check(simulation, spec, without())
        assert simulation.workers[victim].node.counters.steps > 10


@pytest.mark.parametrize("spec", SPECS)
def test_a_last_worker_goes_on_alone(spec):
    check(faulty(spec, "crash:0@0.05", "crash:1@0.1", "crash:3@0.1"), spec, (2,))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", seeds(2, quick=1))
def test_two_sides_of_a_cut_each_go_on_and_become_one_again(spec, seed):
    rng = random.Random(f"{spec}/{seed}")
    side = rng.choice([(0,), (2,), (0, 1), (1, 2)])
    at_s = rng.uniform(0.0, 0.1)
    pairs = [(a, b) for a in side for b in range(4) if b not in side]
    faults = [f"cut:{a}-{b}@{at_s}" for a, b in pairs] + [f"heal:{a}-{b}@{at_s + 0.2}" for a, b in pairs]
    simulation = faulty(spec, *faults, seed=seed, steps=70)
    check(simulation, spec, without())


def test_the_larger_side_keeps_its_weights():
    simulation = make(
        "allreduce", steps=60, workers=4, faults=[fw.Fault("cut", 0, 0.05), fw.Fault("heal", 0, 0.3)]
    )
    simulation.wire.silence_s = 0.05
    seen: dict[str, torch.Tensor] = {}
    simulation.loop.call_at(0.29, lambda: seen.update(apart=replicas(simulation)))
    simulation.loop.call_at(0.34, lambda: seen.update(again=replicas(simulation)))
    simulation.run()
    alone, others = seen["apart"][0], seen["apart"][1]
    assert float((alone - others).norm()) > 1
    for again in seen["again"]:
        assert float((again - others).norm()) < 0.7 * float((again - alone).norm())


@pytest.mark.parametrize("spec", ["allreduce", "sasgd:interval=2", "dpsgd"])
def test_whose_loop_goes_on_longer_ends_it_alone(spec):
    """The others had left before it began its next merge: the next view, of itself, began at once."""
    simulation = make(spec, workers=3, steps=20, gradients=False)
    for rank in (0, 1):
        simulation.workers[rank].limit = 6
    simulation.run()
    assert {rank: worker.node.steps for rank, worker in simulation.workers.items()} == {0: 6, 1: 6, 2: 20}


@pytest.mark.parametrize("spec", SPECS)
def test_of_two_that_cannot_reach_each_other_one_goes_on_by_itself_until_they_can(spec):
    simulation = faulty(spec, "cut:1-2@0.05", "heal:1-2@1.2", steps=150)
    check(simulation, spec, without())
    assert simulation.workers[0].node.view.number >= 2


def test_silence_holds_up_survivors_no_longer_than_it_takes_to_notice():
    simulation = make("allreduce", workers=4, steps=40, faults=[fw.Fault("cut", 1, 0.1)])
    moments: list[float] = []
    inner = simulation._stepped

    def stepped(worker):
        if worker.rank == 0:
            moments.append(simulation.loop.time())
        inner(worker)

    simulation._stepped = stepped
    simulation.run()
    assert 2.0 < max(b - a for a, b in itertools.pairwise(moments)) < 2.1


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("number", [1, 6])
def test_the_first_member_is_lost_while_it_says_commit(spec, number, monkeypatch):
    """One member hears it, two do not: all three let the merge count."""
    simulation = make(spec, workers=4, steps=30, evaluations=0)
    inner, said = VirtualFabric.post, []

    def post(self, peer, tag, vector=None, note=()):
        if tag[:2] == ("merge", 0) and tag[3:] == (number, "commit") and self.rank == 0:
            if said:
                return
            said.append(peer)
            latency_s = self.wire.network.latency_s
            self.wire.loop.call_later(1.5 * latency_s, simulation._strike, fw.Fault("crash", 0, 0))
        inner(self, peer, tag, vector, note)

    monkeypatch.setattr(VirtualFabric, "post", post)
    simulation.run()
    assert said
    check(simulation, spec, without(0))


@pytest.mark.parametrize("spec", ["sasgd:interval=2", "nodelay:tau=4", "dpsgd"])
@pytest.mark.parametrize("victim", [0, 2])
def test_the_corrections_of_a_merge_sum_to_zero_in_every_view(spec, victim):
    """Each merge counts for all members of its view or for none: the mean is kept."""
    faults = [fw.Fault("crash", victim, 0.104), fw.Fault("restart", victim, 0.15)]
    simulation = make(spec, workers=4, steps=60, compute=JITTER, faults=faults, evaluations=0)
    sums: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def watch(worker):
        inner = worker.node.correct

        def correct(vector, own=False):
            record = worker.node.views.record
            sums[record.line, record.counted[0]].append(vector.clone())
            inner(vector, own)

        worker.node.correct = correct

    make_worker = simulation._worker

    def made(rank):
        worker = make_worker(rank)
        watch(worker)
        return worker

    simulation._worker = made
    for worker in simulation.workers.values():
        watch(worker)
    simulation.run()
    later = {key: vectors for key, vectors in sums.items() if key[0] > 0}
    assert len(later) > 5
    for vectors in later.values():
        if len(vectors) >= 3:  # the last merge of a view may be taken in after the next has begun
            torch.testing.assert_close(
                torch.stack(vectors).sum(0), torch.zeros_like(vectors[0]), rtol=0, atol=1e-9
            )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", seeds(2, quick=1))
def test_after_any_faults_all_are_together_again(spec, seed):
    rng = random.Random(f"{spec}/{seed}")
    faults: list[fw.Fault] = []
    for _ in range(4):
        one, other = rng.sample(range(4), 2)
        at_s = rng.uniform(0.0, 0.5)
        peer = rng.choice([None, other])
        for_s = rng.choice([0.01, 0.06, 0.2])
        faults += [fw.Fault("cut", one, at_s, peer), fw.Fault("heal", one, at_s + for_s, peer)]
    victim, at_s = rng.randrange(4), rng.uniform(0.0, 0.5)
    faults += [fw.Fault("crash", victim, at_s), fw.Fault("restart", victim, at_s + 0.003)]
    faults += [fw.Fault("heal", rank, 0.7) for rank in range(4)]
    settings = {"workers": 4, "steps": 180, "compute": JITTER, "evaluations": 0, "seed": seed}

    def once() -> Simulation:
        simulation = make(spec, faults=faults, **settings)
        simulation.wire.silence_s = 0.05
        simulation.result = simulation.run()
        return simulation

    simulation = once()
    check(simulation, spec, without())
    if seed == 0:
        assert once().result.trace_sha256 == simulation.result.trace_sha256


def record(line: int, parents: tuple[int, ...] = (), heirs: tuple[int, ...] = ()) -> Record:
    return Record(line, parents, heirs, {})


def test_the_main_line():
    assert main_line({0: record(-1), 1: record(5), 2: record(5)}) == (1, 2)
    assert main_line({0: record(7), 1: record(5), 2: record(5)}) == (1, 2)
    assert main_line({0: record(7), 1: record(5)}) == (0,)
    assert main_line({1: record(-1), 2: record(-1)}) == (1,)
    # 2 has not heard of view 9, which it had promised; 3 was not in it.
    child = record(9, (5,), (1, 2))
    assert main_line({1: child, 2: record(5), 3: record(5)}) == (1, 2)
    assert main_line({1: child, 3: record(5)}) == (1,)


def test_a_merge_that_is_broken_off_is_not_under_way_any_more():
    """Else a member whose loop has ended would be missed in it, and the view be formed anew without need."""
    seen = []

    class Impatient(fw.NoCommunication):
        async def background(self, node):
            if node.rank == 0:  # nobody else merges
                merging = asyncio.ensure_future(node.merge(lambda merge: merge.gather(())))
                await node.next_step()
                seen.append(node.views.under_way is not None)
                merging.cancel()
                await asyncio.wait([merging])
                seen.append(node.views.under_way is not None)

    make(Impatient(), workers=2, steps=4, gradients=False).run()
    assert seen == [True, False]


def test_who_comes_back_halts_nobody_before_it_has_begun():
    """A next life connects first, and may take seconds until it has weights to copy."""
    loop = VirtualLoop()
    wire = Wire(loop, Network(Links(), 3), Trace(None), 3, 4.0)

    def views(fabric: VirtualFabric) -> Views:
        return Views(fabric, asyncio.ensure_future, lambda joiner, among: among[0])

    async def work() -> None:
        made = [views(wire.attach(rank)) for rank in range(3)]
        for one in made:
            one.begin(range(3))
        await asyncio.sleep(1)
        wire.crash(2)
        await asyncio.sleep(1)
        late = wire.attach(2)
        await asyncio.sleep(2)
        assert [one.view.members for one in made[:2]] == [(0, 1)] * 2
        assert all(one.open.is_set() for one in made[:2])
        back = views(late)
        back.begin((2,), newborn=True)
        await asyncio.sleep(1)
        assert {one.view.members for one in (*made[:2], back)} == {(0, 1, 2)}

    task = loop.create_task(work())
    loop.run_until_idle()
    task.result()


def test_of_two_calls_of_one_moment_each_is_answered():
    """The second one ends the first, whose task has not begun."""
    loop = VirtualLoop()
    wire = Wire(loop, Network(Links(), 3), Trace(None), 3, 4.0)

    async def work() -> None:
        ends = [wire.attach(rank) for rank in range(3)]
        Calls(ends[2], asyncio.ensure_future, ("call",), lambda merge: asyncio.sleep(1), print).serve()
        await asyncio.sleep(1)
        for caller in (1, 0):
            ends[2].deliver(Message(caller, ("call",), None, (7, caller, 2)))
        answer = await ends[1].receive(("call", "have", 1, 7), 2)
        assert answer.note == (BUSY,)

    task = loop.create_task(work())
    loop.run_until_idle()
    task.result()


def test_on_the_real_clock_too_two_that_are_apart_are_looked_at_again(monkeypatch):
    monkeypatch.setattr(calls, "GRACE_S", 0.01)

    async def work() -> None:
        who, looked = (0, 1, 2), asyncio.Event()
        knows = calls.Reach(Fabric(0), ("see",))
        knows.sees[1] = (0, 1)
        assert knows.choose(who, who, looked.set) == who
        await asyncio.wait_for(looked.wait(), 5)
        assert knows.choose(who, who, looked.set) == (0, 1)

    asyncio.run(work())
