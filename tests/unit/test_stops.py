"""Training stops for a strategy at the boundaries it names, and at no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import freewheel as fw
from crew import together
from freewheel.runtime.worker.settings import Settings
from freewheel.strategies import resolve
from lab import timing


@pytest.mark.parametrize(
    "spec",
    [
        "sasgd:interval=4",
        "hierarchical_sasgd:interval=4",
        "easgd:interval=4",
        "eamsgd:interval=4",
        "downpour:interval=4",
        "nodelay:tau=8",
    ],
)
def test_who_merges_every_few_steps_stops_there_only(spec):
    strategy = resolve(spec)
    assert [step for step in range(1, 13) if strategy.stops(SimpleNamespace(steps=step))] == [4, 8, 12]


@pytest.mark.parametrize(("tau", "steps"), [(None, []), (3, [3, 4])])
def test_nodelay_free_stops_at_its_bound(tau, steps):
    strategy = fw.FreeNoDelay(tau=tau)
    nodes = [
        SimpleNamespace(unmerged_steps=step, steps=step, members=range(8), rate_left=1.0) for step in range(5)
    ]
    assert [node.steps for node in nodes if strategy.stops(node)] == steps


def test_a_strategy_sees_the_rate_of_each_step():
    seen = []

    class Looks(fw.ADPSGD):
        def stops(self, node):
            seen.append(node.rate_left)
            return False

    def work(place):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with fw.Worker(model, optimizer, Looks(), Settings(join_timeout_s=30.0), place):
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                schedule.step()
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
            optimizer.step()

    together(1, work)
    assert seen == [1.0, 0.5, 0.25, 0.25]  # a tensor may lie on a device, which nobody waits for


@pytest.mark.parametrize("kind", [fw.ADPSGD, fw.SASGD, fw.AllReduce])
def test_a_subclass_with_a_part_of_its_own_in_every_step_is_always_called(kind):
    class Own(kind):
        async def after_step(self, node):
            """Something in every step."""

    class Rare(Own):
        def stops(self, node):
            return False

    class Mixed:
        async def after_step(self, node):
            """The same for several strategies."""

    assert Own.always_stops
    assert not Rare.always_stops
    assert type("Both", (Mixed, kind), {}).always_stops


def test_a_timeout_of_the_strategys_own_ends_the_step():
    class Own(fw.AllReduce):
        async def after_step(self, node):
            raise TimeoutError("nobody has answered")

    def work(place):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with fw.Worker(model, optimizer, Own(), Settings(join_timeout_s=30.0), place):
            optimizer.step()

    with pytest.raises(TimeoutError, match="nobody has answered"):
        together(1, work)


@pytest.mark.parametrize("kind", [fw.SASGD, fw.Downpour, fw.EASGD, fw.HierarchicalSASGD])
def test_a_subclass_that_calls_its_base_in_every_step_merges_as_often(kind):
    class Own(kind):
        async def after_step(self, node):
            await super().after_step(node)

    of_base, of_own = (timing(one(interval=4), workers=4, steps=32) for one in (kind, Own))
    assert of_own.bytes_per_step == of_base.bytes_per_step > 0
