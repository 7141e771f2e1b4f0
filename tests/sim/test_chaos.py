"""Chaos: random faults break no law; and where a law is broken, that is found."""

from __future__ import annotations

import random

import pytest

from freewheel import strategies, tasks
from freewheel.cli.chaos import STRATEGIES
from freewheel.names import split
from freewheel.node import Node
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
    inner = Node.met

    def met(node, correction, *apart):
        inner(node, correction * 1.5 if node.rank == 0 else correction, *apart)

    monkeypatch.setattr(Node, "met", met)
    monkeypatch.setattr(chaos.Chaos, "counted", lambda *_: 0)
    monkeypatch.setattr(chaos, "draw", lambda *_: ([], chaos.Counter()))
    assert [broken.partition(":")[0] for broken in run("adpsgd", 0).broken] == ["mean"]


def test_batches_that_are_lost_are_found(monkeypatch):
    inner = chaos.Chaos.all_used

    def all_used(simulation):
        used = inner(simulation)
        del used[0, 5]
        return used

    monkeypatch.setattr(chaos.Chaos, "all_used", all_used)
    assert any("batches of pass 0 were never used" in broken for broken in run("adpsgd", 2).broken)
