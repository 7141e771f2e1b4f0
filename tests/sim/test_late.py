"""AD-PSGD calls late in a step, so that what it gets is fresh at the boundary."""

from __future__ import annotations

import asyncio
from statistics import median

import pytest

import freewheel as fw
from freewheel.node import Node

STEP_S = 0.02


@pytest.fixture
def phases(monkeypatch):
    """At which share of a step each exchange was begun; all steps end at multiples of STEP_S."""
    found, exchange = [], Node.exchange

    async def noted(node, peer):
        found.append(asyncio.get_running_loop().time() % STEP_S / STEP_S)
        return await exchange(node, peer)

    monkeypatch.setattr(Node, "exchange", noted)
    return found


def exchanges_per_step(strategy, **links):
    result = fw.simulate(
        strategy, workers=4, steps=50, compute=fw.Compute(ms=1e3 * STEP_S), links=fw.Links(**links)
    )
    return sum(one["exchanges"]["done"] for one in result.by_worker) / result.worker_steps


def test_a_call_comes_late_in_the_step(phases):
    assert 0.7 < exchanges_per_step("adpsgd", mbit=1e5) < 1.3
    assert 0.7 < median(phases) < 0.9


def test_where_an_exchange_takes_a_step_the_call_comes_at_once(phases):
    exchanges_per_step("adpsgd", latency_ms=3.0)
    assert median(phases) < 0.5


def test_two_exchanges_in_a_step(phases):
    assert exchanges_per_step("adpsgd:per_step=2", mbit=1e5) > 1.5
    assert min(phases) < 0.5 < max(phases)


def test_per_step_counts_from_one():
    with pytest.raises(fw.ConfigError, match="per_step"):
        fw.simulate("adpsgd:per_step=0", workers=2, steps=2)
