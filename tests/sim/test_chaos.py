"""Chaos: random faults break no law; and where a law is broken, that is found."""

from __future__ import annotations

import dataclasses
import random

import pytest

from freewheel import strategies, tasks
from freewheel.cli.tools import STRATEGIES
from freewheel.data.ledger import Ledger
from freewheel.fabric.merges import Merge
from freewheel.names import split
from freewheel.node_driver import NodeDriver
from freewheel.records.counters import Counters
from freewheel.sim import chaos

WORKERS = 6


def run(name: str, seed: int) -> chaos.Outcome:
    return chaos.run(strategies.resolve(name), name, tasks.resolve("quadratic"), seed, WORKERS)


@pytest.mark.parametrize("name", split(STRATEGIES))
def test_the_laws_hold(name):
    outcome = run(name, 1)
    assert sum(outcome.faults.values()) > 5
    assert outcome.broken == []


def test_one_seed_one_run_of_faults():
    one, other, third = (chaos.draw(random.Random(seed), WORKERS) for seed in (3, 3, 4))
    assert one == other != third


def test_a_mean_that_is_not_kept_is_found(monkeypatch):
    inner = NodeDriver.met

    def met(node, peer, correction, *apart):
        inner(node, peer, correction * 1.5 if node.rank == 0 else correction, *apart)

    monkeypatch.setattr(NodeDriver, "met", met)
    monkeypatch.setattr(chaos.Chaos, "counted", lambda *_: 0)
    monkeypatch.setattr(chaos, "draw", lambda *_: ([], chaos.Counter()))
    assert {broken.partition(":")[0] for broken in run("adpsgd", 0).broken} == {"mean"}


def _twice(node, peer, correction):
    MET(node, peer, correction.clone())
    MET(node, peer, correction)


async def _without_the_last(merge, vector, part):
    *others, last = merge.members
    return await merge.reduce(vector, {**dict.fromkeys(others, 1 / len(others)), last: 0.0}, part)


MET = NodeDriver.met
MUTANTS = [
    ("adpsgd", NodeDriver, "met", lambda node, *met: (_twice if node.rank == 0 else MET)(node, *met)),
    ("adpsgd", NodeDriver, "met", lambda node, *met: None if node.rank == 0 else MET(node, *met)),
    ("nodelay_free", Merge, "offset", _without_the_last),
]


@pytest.mark.parametrize(
    ("name", "whose", "method", "mutant"), MUTANTS, ids=["twice", "one side", "left out"]
)
def test_a_law_of_the_mean_that_is_broken_on_purpose_is_found(name, whose, method, mutant, monkeypatch):
    """A sample dealt twice: below. A wrong weight in `meet`: in the battery, for it keeps the mean."""
    monkeypatch.setattr(whose, method, mutant)
    monkeypatch.setattr(chaos, "draw", lambda *_: ([], chaos.Counter()))  # a half exchange excuses a run
    assert any(broken.startswith("mean") for broken in run(name, 0).broken)


def test_batches_that_are_lost_are_found(monkeypatch):
    inner = chaos.Chaos._result

    def result(simulation):
        del simulation.used[0, 5]
        return inner(simulation)

    monkeypatch.setattr(chaos.Chaos, "_result", result)
    assert any("batches of pass 0 were never used" in broken for broken in run("adpsgd", 2).broken)


def test_laws_are_looked_at_after_every_step_and_every_fault(monkeypatch):
    looks = []
    inner = chaos.Chaos._look

    def look(simulation):
        looks.append(simulation.completed)
        inner(simulation)

    monkeypatch.setattr(chaos.Chaos, "_look", look)
    assert run("adpsgd", 3).broken == []
    assert len(looks) > looks[-1] == WORKERS * chaos.STEPS


def test_a_bound_that_is_not_kept_is_told_when_it_happens(monkeypatch):
    inner = Counters.stale

    def stale(counters, value):
        inner(counters, value + 100 if counters.steps == 10 else value)

    monkeypatch.setattr(Counters, "stale", stale)
    outcome = run("nodelay:tau=8", 0)
    assert outcome.broken[0].startswith("staleness: ")
    assert " s)" in outcome.broken[0]


def test_members_that_do_not_agree_on_their_view_are_found(monkeypatch):
    inner = NodeDriver.view.fget

    def view(node):
        found = inner(node)
        members = tuple(peer for peer in found.members if peer != 2) if node.rank == 3 else found.members
        return dataclasses.replace(found, members=members)

    monkeypatch.setattr(NodeDriver, "view", property(view))
    assert "views: " in run("allreduce", 0).broken[0]


def test_a_batch_that_two_workers_hold_is_found(monkeypatch):
    monkeypatch.setattr(Ledger, "free", lambda ledger, _: [(0, ledger.length)])  # as if nothing was dealt
    monkeypatch.setattr(chaos, "draw", lambda *_: ([], chaos.Counter()))
    assert any("hold batch" in broken for broken in run("adpsgd", 0).broken)
