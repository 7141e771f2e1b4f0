"""What becomes of an optimizer's memory when workers merge."""

from __future__ import annotations

import asyncio
import zlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import together
from freewheel.errors import ConfigError
from freewheel.moments import NU, Moments, QuasiGlobal
from freewheel.replica import Replica
from freewheel.runtime.worker.checks import joined
from freewheel.runtime.worker.live_replica import live_replica
from freewheel.runtime.worker.settings import Settings
from freewheel.strategies import resolve
from freewheel.strategies.sasgd import mean_moments
from freewheel.task import adam_rate
from freewheel.tasks import resolve as resolve_task
from lab import make


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    for k in range(times):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + k)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        (torch.optim.SGD, {"lr": 0.1}, []),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ["momentum_buffer"]),
        (torch.optim.AdamW, {}, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adam, {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    ],
)
def test_moments_go_to_vectors_and_back(kind, settings, names):
    model = net()
    optimizer = kind(model.parameters(), **settings)
    moments = Moments(optimizer, Replica.of(model))
    assert moments.names() == []  # before the first step
    stepped(model, optimizer)
    assert moments.names() == names
    for name in names:
        vector = moments.get(name)
        flat = torch.cat([optimizer.state[p][name].flatten() for p in model.parameters()])
        assert torch.equal(vector, flat)
        moments.set(name, vector * 2)
        assert torch.equal(moments.get(name), vector * 2)


def test_an_optimizer_whose_memory_cannot_be_averaged_is_named_with_a_cure():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ConfigError, match=r"LBFGS keeps .* Give state=local"):
        Moments(optimizer, Replica.of(model)).names()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_merge_averages_moments_where_it_is_asked_to(optimizer):
    def work(place):
        torch.manual_seed(0)
        model = net()
        made = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(model.parameters()),
        }[optimizer]()
        found = []
        settings = Settings(join_timeout_s=30.0)
        spec = "sasgd:interval=1:state=averaged:state_every=2"
        with fw.Worker(model, made, resolve(spec), settings, place) as attached:
            for _ in range(4):
                made.zero_grad()
                model(torch.full((2, 3), 1.0 + place.rank)).square().mean().backward()
                made.step()
                moments = Moments(made, attached._replica)
                found.append({name: moments.get(name) for name in moments.names()})
        return found

    first, second = together(2, work)
    for step, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        assert mine.keys() == theirs.keys() != set()
        for name, vector in mine.items():
            assert torch.equal(vector, theirs[name]) is (step % 2 == 1), (step, name)


def test_momentum_is_averaged_and_the_common_model_has_some_where_nobody_says_otherwise():
    def same(spec: str, momentum: float) -> bool:
        named, plain = (make(one, workers=3, steps=9, momentum=momentum, lr=0.01) for one in ("sasgd", spec))
        return named.run().trace_sha256 == plain.run().trace_sha256

    assert same("sasgd:state=averaged:outer=0.3", 0.9)
    assert not same("sasgd:state=local:outer=0", 0.9)
    assert same("sasgd:state=local:outer=0", 0.0)


def test_who_has_no_moments_counts_nothing_in_their_mean():
    class Merge:
        async def gather(self, note):
            return {0: note, 1: (0, zlib.crc32(b"")), 2: note}

        async def reduce(self, vector, weights):
            return vector, weights

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer)
    node = SimpleNamespace(rank=0, moments=Moments(optimizer, Replica.of(model)))
    ((vector, weights),) = asyncio.run(mean_moments(node, Merge())).values()
    assert weights == {0: 0.5, 1: 0.0, 2: 0.5}
    assert torch.equal(vector, node.moments.get("momentum_buffer"))


def test_who_comes_without_moments_takes_part():
    faults = [fw.Fault("crash", 1, 0.05), fw.Fault("restart", 1, 0.11)]
    simulation = make("sasgd:interval=2", workers=3, steps=20, momentum=0.9, lr=0.01, faults=faults)
    simulation.run()
    assert {one.node.counters.merges["done"] > 2 for one in simulation.workers.values()} == {True}
    rows = torch.stack([one.study.moments.get("momentum_buffer") for one in simulation.workers.values()])
    assert torch.equal(rows[0], rows[2])


def test_an_optimizer_that_keeps_more_is_left_alone_where_nobody_asks_for_its_mean():
    def work(place):
        torch.manual_seed(0)
        model = net()

        class Odd(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                self.state[model[0].weight]["history"] = torch.zeros(7)

        optimizer = Odd(model.parameters(), lr=0.01, momentum=0.9)
        with fw.Worker(model, optimizer, resolve("sasgd:interval=1"), Settings(join_timeout_s=30.0), place):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 3), 1.0 + place.rank)).square().mean().backward()
                optimizer.step()
        return [one.detach().clone() for one in model.parameters()]

    first, second = together(2, work)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_the_simulator_averages_momentum_too():
    def spread(state: str) -> float:
        simulation = make(f"sasgd:interval=2:state={state}", workers=3, steps=4, momentum=0.9, lr=0.01)
        simulation.run()
        rows = torch.stack([one.study.moments.get("momentum_buffer") for one in simulation.workers.values()])
        return float((rows - rows[0]).abs().max())

    assert spread("averaged") == 0
    assert spread("local") > 0


@pytest.mark.parametrize(
    ("strategy", "rate"),
    [("adpsgd", 0.2), ("nodelay_free", 0.2), ("sasgd", 0.2), ("asgd", 0.2), ("asgd:raw=true", 0.1),
     ("allreduce", 0.1), ("grouping", 0.1), ("none", 0.1)],
)  # fmt: skip
def test_adamw_has_a_higher_rate_where_each_worker_divides_by_its_own_noise(strategy, rate):
    assert adam_rate(0.1, resolve(strategy), 4) == pytest.approx(rate)
    assert adam_rate(0.1, None, 4) == 0.1  # DDP
    simulation = make(strategy, workers=4, steps=2, optimizer="adamw", lr=0.1)
    assert simulation.school.lr == pytest.approx(rate)


def test_quasi_global_momentum_follows_the_way_the_weights_went():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    follower = QuasiGlobal(optimizer)
    m = torch.zeros(2)
    for k in range(3):
        before = weight.detach().clone()
        follower.begin()
        weight.grad = torch.tensor([0.1, -0.2]) * (k + 1)
        optimizer.step()
        assert torch.allclose(before - weight, 0.5 * (0.9 * m + weight.grad))
        with torch.no_grad():
            weight += 0.05  # what mixing did
        follower.end()
        m = (1 - NU) * m + NU * (before - weight.detach()) / 0.5
        assert torch.allclose(follower.m[0], m)


def test_quasi_global_momentum_needs_plain_sgd_with_momentum():
    for optimizer in (torch.optim.SGD(net().parameters(), 0.1), torch.optim.AdamW(net().parameters())):
        with pytest.raises(ConfigError, match=r"needs one torch\.optim\.SGD with momentum"):
            QuasiGlobal(optimizer)
    with pytest.raises(ConfigError, match="with momentum"):
        make("adpsgd:quasi_global=true", workers=2, steps=2)


def test_quasi_global_is_the_same_in_virtual_and_in_real_time():
    """One worker, so nothing is mixed: the attached optimizer, the simulator, and the rule by hand."""
    task = resolve_task("quadratic")
    simulation = make("adpsgd:quasi_global=true", "quadratic", workers=1, steps=6, momentum=0.9, lr=0.01)
    start = [one.detach().clone() for one in simulation.workers[0].study.model.parameters()]
    draws = simulation.workers[0].study.generator.get_state()
    simulation.run()
    task.prepare(1, 0)
    model = task.model()
    with torch.no_grad():
        for one, value in zip(model.parameters(), start, strict=True):
            one.copy_(value)
    generator = torch.Generator()
    generator.set_state(draws)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    with fw.attach(model, optimizer, "adpsgd:quasi_global=true"):
        for _ in range(6):
            optimizer.zero_grad()
            task.loss(model, task.batch(0, generator)).backward()
            optimizer.step()
    simulated = simulation.workers[0].study.model.parameters()
    for one, value in zip(model.parameters(), simulated, strict=True):
        torch.testing.assert_close(one, value)


def test_the_moments_of_several_optimizers_are_found_and_none_is_left_in_another():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    replica = live_replica(model)
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in model)
    several = joined([first, second])
    model(torch.ones(2, 4)).sum().backward()
    first.step()
    second.step()
    found = Moments(several, replica).get("momentum_buffer")
    both = [
        one.state[layer.weight]["momentum_buffer"] for one, layer in zip((first, second), model, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat([one.flatten() for one in both]))
    assert [len(one.state) for one in (first, second)] == [1, 1]


def test_without_gradients_moments_are_sent_all_the_same():
    with_them, without = (
        make("sasgd:interval=4", workers=4, steps=8, momentum=0.9, gradients=gradients).run()
        for gradients in (True, False)
    )
    assert with_them.bytes_per_step == pytest.approx(without.bytes_per_step, rel=0.2)


def test_with_an_interval_of_one_momentum_is_averaged_and_the_model_is_the_mean():
    averaged, named = (
        make(spec, workers=3, steps=9, momentum=0.9) for spec in ("sasgd:interval=1", "allreduce")
    )
    averaged.run(), named.run()
    torch.testing.assert_close(averaged.answer(), named.answer())
