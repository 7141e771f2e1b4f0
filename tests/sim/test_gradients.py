"""Gradients of simulated workers that overlap, computed in one call, are those each would have computed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import freewheel as fw
from freewheel.tasks import Digits
from lab import make, replicas, run

SLOW = fw.Compute(kind="uniform", spread=0.3, slow={1: 3})


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "sasgd:interval=2", "nodelay_free", "asgd"])
@pytest.mark.parametrize("task", ["digits", "digits:net=cnn"])
def test_the_same_comes_of_it(strategy, task):
    settings = {"workers": 4, "steps": 6, "momentum": 0.9, "compute": SLOW, "evaluations": 2}
    alone = run(strategy, task, **settings)
    together = run(strategy, task, batched=True, **settings)
    torch.testing.assert_close(replicas(together), replicas(alone), rtol=1e-4, atol=1e-5)
    assert together.result.virtual_s == alone.result.virtual_s
    assert together.result.loss == pytest.approx(alone.result.loss, rel=1e-3)


def test_one_seed_gives_one_trace_and_few_calls():
    calls: list[int] = []

    def hashed() -> str:
        simulation = make("adpsgd", "digits", workers=6, steps=10, batched=True, evaluations=0)
        inner = simulation.gradients._compute_some

        def counted(studies):
            calls.append(len(studies))
            inner(studies)

        simulation.gradients._compute_some = counted
        return simulation.run().trace_sha256

    assert hashed() == hashed()
    assert len(calls) <= 24  # of 120 gradients
    assert max(calls) == 6


def test_a_crash_in_the_middle_of_a_gradient():
    faults = [fw.Fault.parse("crash:2@0.033"), fw.Fault.parse("restart:2@0.06")]
    simulation = run("adpsgd", "digits", workers=4, steps=10, batched=True, faults=faults)
    assert simulation.completed == 40
    assert len(simulation.gradients._draws) <= 4


@dataclass
class Fussy(Digits):
    """A task whose loss looks at a number on the way, which vmap does not allow."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * 2 if loss.item() > 1e9 else loss


def test_a_model_that_cannot_be_batched_is_told_of_once_and_trained_one_by_one(caplog):
    together = run("adpsgd", Fussy(), workers=3, steps=5, batched=True)
    alone = run("adpsgd", Fussy(), workers=3, steps=5)
    assert torch.equal(replicas(together), replicas(alone))
    assert sum("cannot be batched" in line for line in caplog.text.splitlines()) == 1


def test_weights_that_were_overwritten_meanwhile_get_their_own_gradient():
    simulation = make("none", "digits", workers=2, steps=1, batched=True)
    first, second = (worker.study for worker in simulation.workers.values())
    gradients = simulation.gradients
    for study in (first, second):
        gradients.begin(study)
    gradients.end(first)
    second.replica.load(torch.full_like(second.replica.weights, 3.0))
    batch = gradients._draws[second]
    gradients.end(second)
    found = second.replica.gradient.clone()
    second.gradient(batch)
    assert torch.equal(found, second.replica.gradient)


def test_less_memory_than_hoped_for(monkeypatch, caplog):
    simulation = make("adpsgd", "digits", workers=5, steps=4, batched=True)
    inner = simulation.gradients._compute_some

    def small(studies):
        if len(studies) > 2:
            raise torch.cuda.OutOfMemoryError("out of memory")
        inner(studies)

    monkeypatch.setattr(simulation.gradients, "_compute_some", small)
    simulation.run()
    assert "2 gradients at once fit the GPU" in caplog.text


@dataclass
class ChannelsLast(Digits):
    """Weights whose order in memory is not that of their shape."""

    def model(self):
        return super().model().to(memory_format=torch.channels_last)


def test_weights_in_another_order_than_their_shape_are_not_batched(caplog):
    together = run("adpsgd", ChannelsLast(net="cnn"), workers=2, steps=3, batched=True)
    alone = run("adpsgd", ChannelsLast(net="cnn"), workers=2, steps=3)
    torch.testing.assert_close(replicas(together), replicas(alone))
    assert "cannot be batched" in caplog.text


def test_a_plain_step_is_that_of_torchs_sgd():
    ours = fw.simulate("none", workers=1, steps=20)
    theirs = fw.simulate("none", workers=1, steps=20, weight_decay=1e-40)  # too little to change a number
    assert ours.loss == theirs.loss
