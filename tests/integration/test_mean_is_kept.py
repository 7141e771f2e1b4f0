"""Exchanges move the replicas towards each other and leave their mean where it is."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import together
from freewheel.fabric import windows
from freewheel.fabric.transfers import HOST_PIECE, PIECE
from freewheel.runtime.membership.place import Place
from loops import DEADLINE_S, flat, make, merged, move_to, train_until

pytestmark = pytest.mark.integration

SHORT, MANY_PIECES = 3000, 2 * PIECE + HOST_PIECE + 5
EXCHANGES = [
    ("adpsgd", "fp32", SHORT, True),
    ("adpsgd:topology=ring", "fp32", SHORT, True),
    ("adpsgd:patience=1", "fp32", SHORT, True),
    ("nodelay_free", "fp32", SHORT, True),
    ("nodelay_free:tau=3", "fp32", SHORT, True),
    ("adpsgd", "bf16", SHORT, True),
    ("adpsgd:topology=ring", "bf16", SHORT, True),
    ("adpsgd", "fp32", MANY_PIECES, True),
    ("adpsgd", "fp32", MANY_PIECES, False),
    ("adpsgd", "bf16", MANY_PIECES, True),
]


@pytest.mark.parametrize(("strategy", "wire", "size", "near"), EXCHANGES)
def test_the_sum_of_all_replicas_stays_while_many_exchange(strategy, wire, size, near, monkeypatch):
    """The optimizer is frozen; only corrections move. With bf16 both sides use the rounded numbers."""
    if not near:
        monkeypatch.setattr(windows, "place", lambda: "")
    n = 4
    ready = threading.Barrier(n)

    def work(place: Place) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        model = nn.Linear(size, 1, bias=False)
        worker = make(place, model, torch.optim.SGD(model.parameters(), lr=0.0), strategy, wire=wire)
        generator = torch.Generator().manual_seed(place.rank)
        with worker:
            began = torch.randn(size, generator=generator) + place.rank
            move_to(worker, began)
            ready.wait(DEADLINE_S)
            model.weight.grad = torch.ones_like(model.weight)
            train_until(worker, merges=50 if size == SHORT else 20)
        return began, asyncio.run(worker._replica.snapshot()), flat(worker.consensus()), merged(worker)

    results = together(n, work)
    total = torch.stack([began for began, *_ in results]).double().sum(0)
    ended = torch.stack([ended for _, ended, *_ in results]).double().sum(0)
    # Each correction rounds the weights it is added to once, by 2⁻²⁴ of a number below 8.
    merges = sum(count for *_, count in results)
    assert float((ended - total).abs().max()) < merges * 8 * 2.0**-24
    for *_, answer, _ in results:
        torch.testing.assert_close(answer, total / n, rtol=0, atol=merges * 8 * 2.0**-24)
    first, last = (
        torch.stack(vectors).std(0).mean() for vectors in zip(*(row[:2] for row in results), strict=True)
    )
    assert last < first  # they have met; on a busy machine, the same two again and again


def test_rounding_is_refused_where_it_would_add_up():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(fw.ConfigError, match="swap snapshots, such as adpsgd"):
        fw.attach(model, optimizer, "nodelay_free", wire="bf16")


@pytest.mark.parametrize(("size", "near"), [(SHORT, True), (MANY_PIECES, True), (MANY_PIECES, False)])
def test_how_far_apart_two_are_is_measured_over_the_whole_vector(size, near, monkeypatch):
    """Each side combines one half for both, and then has all of its correction."""
    if not near:
        monkeypatch.setattr(windows, "place", lambda: "")
    apart = threading.Barrier(2)

    def work(place: Place) -> float:
        model = nn.Linear(size, 1, bias=False)
        worker = make(place, model, torch.optim.SGD(model.parameters(), lr=0.0), "adpsgd")
        with worker:
            worker._agent.counters.measure_always = worker._agent.counters.measure = True
            offset = torch.arange(size) / size * place.rank  # the second half is farther away
            move_to(worker, offset)
            apart.wait(DEADLINE_S)
            model.weight.grad = torch.ones_like(model.weight)
            train_until(worker, merges=1)
        return float(worker.metrics()["discrepancy_max"])

    expected = float(torch.linalg.vector_norm(torch.arange(size) / size))
    assert together(2, work) == pytest.approx([expected] * 2, rel=1e-4)
