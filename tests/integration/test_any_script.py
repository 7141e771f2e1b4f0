"""Scripts as people write them: what they do to a model and its optimizers is right, or refused by name."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import outcomes, together
from freewheel.runtime.membership.hosts import BoundedStore
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import checks
from loops import make

pytestmark = pytest.mark.integration

ALONE = Place(0, 1, 1, "127.0.0.1", 1)


def net(seed: int = 0, *more: nn.Module) -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), *more), seed)


def filled(model: Any, seed: int) -> Any:
    """With weights of this seed, whatever other threads draw meanwhile."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) / 2)
    return model


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.to(next(model.parameters()).dtype)
    return (model(inputs) - inputs[:, :2]).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, seed).backward()
    optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


# -- layers that are frozen and unfrozen --


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "sasgd", "nodelay_free"])
def test_a_layer_frozen_in_the_block_keeps_its_place(strategy):
    """Momentum and weight decay must not move it either: alone the loop is the plain one."""

    def loop(model, optimizer, rank=0):
        for k in range(4):
            step(model, optimizer, 10 * rank + k)
        model[0].requires_grad_(False)
        for k in range(4):
            step(model, optimizer, 10 * rank + k)

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    model, plain = net(), net()
    with make(ALONE, model, optimizer_of(model), strategy) as worker:
        loop(model, worker.optimizer)
        inside = worker.consensus()
    loop(plain, optimizer_of(plain))
    assert all(same(one, plain) for one in (model, inside, worker.consensus()))

    def work(place):
        mine = net(place.rank)
        with make(place, mine, optimizer_of(mine), strategy) as attached:
            loop(mine, attached.optimizer, place.rank)
        return mine, attached.consensus()

    (first, answer), (second, other) = together(2, work)
    assert same(answer, other)
    for name, one in answer.state_dict().items():
        torch.testing.assert_close(one, (first.state_dict()[name] + second.state_dict()[name]) / 2)


@pytest.mark.parametrize("how", ["unfreeze", "unfreeze what no optimizer has", "add_param_group", "grow"])
def test_what_begins_to_train_in_the_block_is_refused_by_name(how):
    model = net()
    model[0].requires_grad_(False)
    trained = model.parameters() if how == "unfreeze" else model[2].parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def train():
        with make(ALONE, model, optimizer):
            step(model, optimizer)
            if how == "grow":
                model.append(nn.Linear(2, 2))
                optimizer.add_param_group({"params": list(model[3].parameters())})
            else:
                model[0].requires_grad_(True)
            if how == "add_param_group":
                optimizer.add_param_group({"params": list(model[0].parameters())})
            step(model, optimizer)
            raise AssertionError("it is noticed at the first step")

    with pytest.raises(fw.RunStopped, match=r"0\.weight was frozen|of shape \(2, 2\)"):
        train()


@pytest.mark.parametrize("which", [0, 20, 39])
def test_of_many_frozen_layers_each_is_looked_at_in_its_turn(which):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)), nn.Linear(4, 2))
    model[:40].requires_grad_(False)
    optimizer = torch.optim.SGD(model[40].parameters(), lr=0.1)

    def train():
        with make(ALONE, model, optimizer):
            step(model, optimizer)
            model[which].requires_grad_(True)
            for _ in range(3):  # 80 parameters, 32 in a step
                step(model, optimizer)

    with pytest.raises(fw.RunStopped, match=rf"{which}\.weight was frozen"):
        train()


@pytest.mark.parametrize("which", [0, 39])
def test_a_frozen_layer_that_the_optimizer_holds_is_seen_at_once(which):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)), nn.Linear(4, 2))
    model[:40].requires_grad_(False)
    guest = torch.zeros(1)  # frozen: it trains nothing
    optimizer = torch.optim.SGD([*model.parameters(), guest], lr=0.1)

    def train():
        with make(ALONE, model, optimizer):
            step(model, optimizer)
            model[which].requires_grad_(True)
            step(model, optimizer)
            raise AssertionError("it is noticed at the first step")

    with pytest.raises(fw.RunStopped, match=rf"{which}\.weight was frozen"):
        train()


@pytest.mark.parametrize("early", [False, True])
def test_a_parameter_put_in_the_place_of_another_is_refused_by_name(early):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with make(ALONE, model, optimizer):
            step(model, optimizer)
            model[2] = nn.Linear(8, 2)
            for _ in range(4 * early):
                step(model, optimizer)

    with pytest.raises(fw.RunStopped, match=r"2\.weight is not the one"):
        train()


def test_gradual_unfreezing_of_what_was_trainable_at_attach():
    def work(place):
        model = net(place.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with make(place, model, optimizer, "allreduce") as worker:
            model[0].requires_grad_(False)
            step(model, optimizer)
            frozen = model[0].weight.detach().clone()
            model[0].requires_grad_(True)
            step(model, optimizer, place.rank)
            assert not torch.equal(frozen, model[0].weight)
        return model, worker.consensus()

    (one, answer), (other, _) = together(2, work)
    assert same(one, other)
    assert same(one, answer)


# -- buffers and frozen parameters --


class Furnished(nn.Module):
    """A model with buffers of all kinds, and a frozen base of another type than what trains."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.base.weight.copy_(torch.randn(4, 4, generator=generator))
        self.adapter = nn.Linear(4, 4).bfloat16()
        self.norm = nn.BatchNorm1d(4)
        self.norm.requires_grad_(False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))
        self.register_buffer("unknown", torch.full((2,), math.nan))
        self.register_buffer("flag", torch.rand(3, generator=generator) > 0.5)
        self.register_buffer(
            "table", torch.rand(5, generator=generator, dtype=torch.float64), persistent=False
        )
        self.register_buffer("rotary", torch.view_as_complex(torch.rand(3, 2, generator=generator)))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.quantized = nn.Parameter(
            torch.randint(0, 255, (6,), generator=generator, dtype=torch.uint8), requires_grad=False
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.norm(self.base(inputs))
        return (hidden + self.adapter(hidden.bfloat16()).float()) @ self.mask.exp()

    def everything(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_buffers_and_frozen_weights_travel_to_the_bit(strategy, caplog):
    """Masks with -inf, tables in fp64, an fp32 base beside bf16 adapters."""
    began: dict[int, dict[str, torch.Tensor]] = {}

    def work(place):
        model = Furnished(place.rank)
        optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.01)
        with make(place, model, optimizer, strategy) as worker:
            began[place.rank] = {name: one.detach().clone() for name, one in model.everything().items()}
            for k in range(6 + (strategy == "adpsgd") * place.rank):
                generator = torch.Generator().manual_seed(100 * place.rank + k)
                optimizer.zero_grad()
                model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
        return model, worker.consensus()

    (one, answer), (other, theirs) = together(2, work)
    assert "not finite" not in caplog.text
    first = Furnished(0).everything()
    for rank in (0, 1):
        for name, value in began[rank].items():
            if not name.startswith("adapter"):  # made without a seed
                assert torch.equal(bits(value), bits(first[name])), name
    mine = dict(answer.named_buffers())
    for name, value in theirs.named_buffers():
        assert torch.equal(bits(mine[name]), bits(value)), name
    for name in ("mask", "unknown", "flag", "table", "rotary"):
        assert torch.equal(bits(mine[name]), bits(first[name])), name
    assert int(mine["seen"]) == int(one.seen)  # a counter is copied
    assert not torch.equal(one.norm.running_mean, other.norm.running_mean)
    torch.testing.assert_close(
        mine["norm.running_mean"], (one.norm.running_mean + other.norm.running_mean) / 2
    )
    assert torch.equal(bits(answer.base.weight), bits(first["base.weight"]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def test_other_buffers_than_those_of_the_first_worker_are_named():
    def work(place):
        model = net(0)
        model.register_buffer("scale", torch.ones(2 + place.rank))
        with make(place, model, torch.optim.SGD(model.parameters(), lr=0.1), join_timeout_s=10):
            pass

    with pytest.raises(
        fw.ConfigError, match=r"scale is float32 of shape \(3,\) here and float32 of shape \(2,\)"
    ):
        together(2, work)


def test_the_step_count_of_adam_reaches_one_that_joins_though_weights_are_bf16():
    from freewheel.runtime.worker import tensor_codec

    model = nn.Linear(2, 1).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["step"].fill_(1001.0)  # bf16 has no 1001
    found = tensor_codec.unpack(tensor_codec.pack(optimizer.state_dict()))
    assert found["state"][0]["step"] == 1001


# -- closures --


def closing(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, seen: list[float] | None = None):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        if seen is not None:
            seen.append(loss.item())
        return loss

    return closure


def test_lbfgs_forgets_its_curvature_where_its_weights_were_corrected():
    def work(place):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def iterations() -> int:
            optimizer.step(closing(model, optimizer, 0))
            (state,) = optimizer.state.values()
            return state["n_iter"]

        with make(place, model, optimizer, "none") as worker:
            first, second = iterations(), iterations()
            worker._replica.correct(torch.zeros(worker._replica.size))
            assert first < second < iterations()  # what is pending is added behind the step
            assert iterations() <= 3

    together(2, work)


@pytest.mark.parametrize(("strategy", "told"), [("allreduce", 0), ("adpsgd", 2)])
def test_who_averages_what_lbfgs_has_moved_is_told_of_allreduce(strategy, told, caplog):
    def work(place):
        with make(place, model := net(), torch.optim.LBFGS(model.parameters()), strategy):
            pass

    together(2, work)
    assert caplog.text.count("LBFGS goes far in one step") == told


@pytest.mark.parametrize("strategy", ["allreduce", "grouping:ratio=1e9"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_gradients_of_a_closure_are_averaged(strategy, search):
    """LBFGS takes the same way on all workers: its loss is averaged too."""

    def optimizer_of(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)

    def work(place):
        model, calls = net(0).double(), list[float]()
        with make(place, model, optimizer_of(model), strategy) as worker:
            for k in range(4):
                worker.optimizer.step(closing(model, worker.optimizer, 10 * k + place.rank, calls))
        return model, len(calls), worker.metrics()["steps"]

    (one, calls, steps), (other, their_calls, _) = together(2, work)
    assert same(one, other)
    assert (calls, steps) == (their_calls, 4)
    plain = net(0).double()
    optimizer = optimizer_of(plain)

    def both(k):
        def closure():
            optimizer.zero_grad()
            loss = (loss_of(plain, 10 * k) + loss_of(plain, 10 * k + 1)) / 2
            loss.backward()
            return loss

        return closure

    for k in range(4):
        optimizer.step(both(k))
    for mine, theirs in zip(one.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_step_given_a_closure_is_the_same_step(keyword):
    """As Lightning calls every optimizer."""

    def work(place, closes=True):
        model = net(0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with make(place, model, optimizer, "allreduce"):
            for k in range(5):
                seed = 10 * k + place.rank
                if not closes:
                    step(model, optimizer, seed)
                elif keyword:
                    optimizer.step(closure=closing(model, optimizer, seed))
                else:
                    optimizer.step(closing(model, optimizer, seed))
        return model

    one, other = together(2, work)
    plain, _ = together(2, lambda place: work(place, closes=False))
    assert same(one, other)
    assert same(one, plain)


def test_weights_stand_still_while_a_closure_computes_and_move_when_they_move():
    """Until they have moved: at LBFGS's trial points, and at SAM's, they count as moving."""

    class Climbing(torch.optim.SGD):
        """As SAM: moves, computes there, moves back."""

        def step(self, closure):
            for one in self.param_groups[0]["params"]:
                with torch.no_grad():
                    one.add_(0.1)
            with torch.enable_grad():
                closure()
            return super().step()

    for kind, expected in (
        (torch.optim.SGD, [0]),
        (Climbing, [1]),
        (torch.optim.LBFGS, [0, 1, 1]),
    ):
        model, seen = net(), list[int]()
        settings = {"max_iter": 3} if kind is torch.optim.LBFGS else {}
        optimizer = kind(model.parameters(), lr=0.1, **settings)
        with make(ALONE, model, optimizer) as worker:

            def closure(model=model, optimizer=optimizer, worker=worker, seen=seen):
                seen.append(worker._replica.version % 2)
                return closing(model, optimizer, 0)()

            optimizer.step(closure)
            assert seen == expected, kind
            assert worker._replica.version % 2 == 0


def test_exchanges_go_on_while_a_closure_computes():
    def work(place):
        model = net(place.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        over = time.monotonic() + 60

        def done() -> int:
            return worker.metrics()["exchanges"]["done"]

        def closure():
            loss = closing(model, optimizer, 0)()
            before = done()
            while place.rank == 0 and done() == before and time.monotonic() < over:
                time.sleep(1e-3)
            return loss

        with make(place, model, optimizer) as worker:
            for _ in range(5):
                optimizer.step(closure)
            if place.rank == 0:
                enough.set()
            while not enough.is_set() and time.monotonic() < over:
                step(model, optimizer)
                time.sleep(1e-3)
            assert time.monotonic() < over

    enough = threading.Event()
    together(2, work)


# -- several optimizers --


class Pair(nn.Module):
    """A GAN's two halves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.makes, self.judges = nn.Linear(3, 4), nn.Linear(4, 1)
        filled(self, seed)


def play(model: Pair, a: torch.optim.Optimizer, b: torch.optim.Optimizer, seed: int, rounds: int = 1) -> None:
    """Some steps of the one that judges, then one of the one that makes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        b.zero_grad()
        fake = model.makes(torch.randn(6, 3, generator=generator)).detach()
        real = torch.randn(6, 4, generator=generator)
        (
            model.judges(fake).mean() - model.judges(real).mean() + model.judges.weight.square().sum()
        ).backward()
        b.step()
    a.zero_grad()
    (-model.judges(model.makes(torch.randn(6, 3, generator=generator))).mean()).backward()
    a.step()


def two(model: Pair) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model.makes.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(model.judges.parameters(), lr=0.01),
    ]


@pytest.mark.parametrize("strategy", ["allreduce", "adpsgd", "sasgd:state=averaged", "nodelay_free"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_two_optimizers_of_one_model(strategy, rounds):
    alone, plain = Pair(), Pair()
    mine, theirs = two(alone), two(plain)
    with make(ALONE, alone, mine, strategy) as worker:
        for k in range(4):
            play(alone, *mine, k, rounds)
    for k in range(4):
        play(plain, *theirs, k, rounds)
    assert same(alone, plain)
    assert worker.metrics()["steps"] == 4

    def work(place):
        model = Pair(place.rank)
        optimizers = two(model)
        with make(place, model, optimizers, strategy) as attached:
            for k in range(4):
                play(model, *optimizers, k if strategy == "allreduce" else 10 * k + place.rank, rounds)
        return model, attached.consensus(), attached.metrics()

    (one, answer, metrics), (other, same_answer, _) = together(2, work)
    assert same(answer, same_answer)
    assert metrics["steps"] == 4
    if strategy == "allreduce":
        assert same(one, other)
        for a, b in zip(one.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_several_optimizers_are_resumed_and_scheduled(tmp_path):
    states = []
    for steps in (3, 0):
        model = Pair()
        optimizers = two(model)
        with make(ALONE, model, optimizers, resume=tmp_path / "kept") as worker:
            scheduler = worker.scheduler(steps=10, warmup=0)
            for k in range(steps):
                play(model, *optimizers, k)
                scheduler.step()
            worker.checkpoint(tmp_path / "kept", every=None)
            assert worker.metrics()["steps"] == 3
        states.append((model, [one.state_dict()["state"] for one in optimizers]))
    (model, mine), (again, theirs) = states
    assert same(model, again)
    assert torch.equal(mine[0][0]["momentum_buffer"], theirs[0][0]["momentum_buffer"])
    assert torch.equal(mine[1][0]["exp_avg"], theirs[1][0]["exp_avg"])


def test_an_optimizer_that_attach_was_not_given_is_refused_when_it_steps(caplog):
    model = Pair()
    a, b = two(model)
    with (
        pytest.raises(
            fw.ConfigError,
            match=r"an optimizer \(Adam\) that attach was not given steps .*judges",
        ),
        make(ALONE, model, a),
    ):
        play(model, a, b, 0)
    assert "no optimizer that attach was given trains judges.weight, judges.bias yet" in caplog.text
    again, other = net(), net()
    optimizer, foreign = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (again, other))
    with make(ALONE, again, optimizer):
        step(again, optimizer)
        step(other, foreign)  # another model's
        step(again, optimizer)
    with pytest.raises(fw.ConfigError, match="was not given steps"), make(ALONE, again, optimizer):
        step(again, torch.optim.SGD(again.parameters(), lr=0.1))  # made anew


def test_an_optimizer_inside_another_s_step_is_no_stranger():
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    model = net()
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    with make(ALONE, model, optimizer) as worker:
        step(model, optimizer)
    assert worker.metrics()["steps"] == 1


def test_what_the_optimizer_trains_beside_the_model_is_refused():
    model, scale = net(), nn.Parameter(torch.ones(3))
    with pytest.raises(fw.ConfigError, match=r"of shape \(3,\) that is not the model's.*ModuleList"):
        make(ALONE, model, torch.optim.SGD([*model.parameters(), scale], lr=0.1))
    with pytest.raises(fw.ConfigError, match="the same optimizer twice"):
        make(ALONE, model, [torch.optim.SGD(model.parameters())] * 2)


# -- never a run without a word --


def test_an_optimizer_that_never_steps_is_named(caplog):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with make(ALONE, model, optimizer):
        for one in model.parameters():
            one.data.mul_(0.9)  # a loop with a rule of its own
    assert "Adam made no step in the with-block" in caplog.text
    caplog.clear()
    pair = Pair()
    a, b = two(pair)
    with make(ALONE, pair, [a, b]):
        for k in range(100):
            b.zero_grad()
            pair.judges(torch.ones(1, 4)).sum().backward()
            b.step()
            assert ("SGD made no step in the with-block" in caplog.text) == (k == 99)
    assert "SGD made no step in the with-block" in caplog.text


def test_steps_outside_of_the_block_are_named_once(caplog):
    caplog.set_level(logging.WARNING)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = make(ALONE, model, optimizer)
    for k in range(3):
        step(model, optimizer, k)
    assert caplog.text.count("steps outside of its with-block") == 1
    caplog.clear()
    with worker:
        step(model, optimizer)
    step(model, optimizer)
    assert "outside" not in caplog.text


def test_the_loader_of_a_block_that_has_ended():
    model = net()
    with make(ALONE, model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
        loader = worker.loader(list(range(4)), 2)
        step(model, worker.optimizer)
    for late in (loader, worker.loader(list(range(4)), 2)):
        with pytest.raises(fw.RunStopped, match="with-block has ended"):
            list(late)


# -- what other libraries wrap --


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's: an optimizer in name only, with the real one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_wrapped_optimizers_are_unwrapped_and_wrapped_models_refused():
    model = net()
    optimizer = Wrapped(Wrapped(torch.optim.SGD(model.parameters(), lr=0.1)))
    with make(ALONE, model, optimizer) as worker:
        step(model, optimizer)
    assert worker.metrics()["steps"] == 1

    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    with pytest.raises(fw.ConfigError, match=r"not DistributedDataParallel around it: give its \.module"):
        make(ALONE, DistributedDataParallel(net()), torch.optim.SGD(model.parameters()))

    class Unseen(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

    with pytest.raises(fw.ConfigError, match="no step hooks"):
        make(ALONE, model, Unseen(model.parameters()))


def test_gradients_that_are_still_scaled_are_not_averaged():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def train():
        with make(ALONE, model, optimizer, "allreduce"):
            scaler.scale(loss_of(model, 0)).backward()
            scaler.step(optimizer)

    with pytest.raises(fw.ConfigError, match="still scaled"):
        train()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients_are_averaged(kind):
    def loop(model, optimizer, rank):
        for k in range(4):
            optimizer.zero_grad()
            at = torch.randint(0, 6, (3,), generator=torch.Generator().manual_seed(10 * k + rank))
            (model(at) - 1).square().mean().backward()
            optimizer.step()

    def work(place):
        model = filled(nn.Embedding(6, 3, sparse=True), 0)
        optimizer = kind(model.parameters(), lr=0.1)
        with make(place, model, optimizer, "allreduce") as worker:
            loop(model, optimizer, place.rank)
        return model, worker.consensus()

    (one, answer), (other, _) = together(2, work)
    assert same(one, other)
    assert same(one, answer)
    alone, _ = work(ALONE)
    plain = filled(nn.Embedding(6, 3, sparse=True), 0)
    loop(plain, kind(plain.parameters(), lr=0.1), 0)
    torch.testing.assert_close(alone.weight, plain.weight)


@pytest.mark.parametrize("when", ["inside", "at the end", "never"])
def test_weights_that_are_changed_between_steps_are_noticed(when, caplog):
    """As by one who clamps them, or swaps an average in to evaluate it; alone it is nobody's business."""

    def work(place):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with make(place, model, optimizer):
            for number in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if (number, when) in ((1, "inside"), (3, "at the end")):
                    with torch.no_grad():
                        model[0].weight.clamp_(-0.1, 0.1)

    work(ALONE)
    assert "changed outside" not in caplog.text
    together(2, work)
    assert caplog.text.count("changed outside the optimizer's step") == 2 * (when != "never")


@pytest.mark.parametrize(("strategy", "told"), [("allreduce", 0), ("adpsgd", 1)])
def test_who_saves_its_own_weights_in_the_block_is_told_so_once(strategy, told, caplog, monkeypatch):
    """With allreduce they are the weights of all."""
    barrier = threading.Barrier(2, timeout=60)

    def work(place):
        model = net()
        with make(place, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy) as worker:
            step(model, worker.optimizer, place.rank)
            copy.deepcopy(model).state_dict()
            worker.consensus().state_dict()
            assert "own weights" not in caplog.text
            barrier.wait()
            model[2].state_dict()
            model.state_dict()
        assert b"freewheel" not in pickle.dumps(model)

    monkeypatch.setattr(checks, "warned_own", False)
    together(2, work)
    assert caplog.text.count("state_dict in the with-block is of this worker's own weights") == told


@pytest.mark.parametrize("part", [False, True])
def test_weights_loaded_in_the_block_are_refused_before_anything_changes(part):
    """Alone it is the plain run; a copy, and the model after the block, can be loaded."""

    def work(place):
        model = net()
        other = net(7).state_dict()
        with make(place, model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
            step(model, worker.optimizer, place.rank)
            copy.deepcopy(model).load_state_dict(other)
            pickle.loads(pickle.dumps(model)).load_state_dict(other)
            worker.consensus().load_state_dict(other)
            assert b"freewheel" not in pickle.dumps(worker.consensus())
            if place.rank == 1 or place.world_size == 1:
                if part:
                    model[2].load_state_dict(net(7)[2].state_dict())
                else:
                    model.load_state_dict(other)
        model.load_state_dict(other)
        return model

    assert same(work(ALONE), net(7))
    first, second = outcomes(2, work)
    assert same(first, net(7))
    assert isinstance(second, fw.ConfigError)
    assert "Load them before attach, or into a copy" in str(second)
    assert len(str(second).split()) <= 30


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_workers_that_train_on_the_same_samples_are_told_so_once(alike, closure, caplog):
    """As scripts do whose DataLoader is torch's: all of the data, in the same order, on every worker."""

    def work(place):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with make(place, model, optimizer, "allreduce"):
            for k in range(4):

                def compute(seed=k + 100 * (0 if alike else place.rank)):
                    optimizer.zero_grad()
                    loss = loss_of(model, seed)
                    loss.backward()
                    return loss

                if not closure:
                    compute()
                optimizer.step(compute if closure else None)

    together(3, work)
    assert caplog.text.count("they train on the same samples") == alike


def test_the_store_shows_nobody_what_first_gradients_sum_up_to(monkeypatch):
    """Whoever reaches it can read it, and could try out which batch gives such a sum."""
    said, ask = list[str](), BoundedStore.ask

    def heard(store, call, *words):
        said.extend(map(str, words))
        return ask(store, call, *words)

    monkeypatch.setattr(BoundedStore, "ask", heard)
    monkeypatch.setattr("freewheel.runtime.worker.steps.summed", lambda parameters: 123456789)

    def work(place):
        model = net()
        with make(place, model, torch.optim.SGD(model.parameters(), lr=0.1)) as worker:
            step(model, worker.optimizer, place.rank)

    together(2, work)
    assert any("/gradients/" in word for word in said)
    assert not any("123456789" in word for word in said)


def test_what_is_added_to_the_optimizer_in_the_block_is_merged(caplog):
    """Where it required gradients at attach: the way to unfreeze layer by layer."""

    def work(place):
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        with make(place, model, optimizer, "allreduce") as worker:
            step(model, optimizer, place.rank)
            optimizer.add_param_group({"params": list(model[0].parameters())})
            for k in range(3):
                step(model, optimizer, 10 * k + place.rank)
        return model, worker.consensus()

    (one, answer), (other, _) = together(2, work)
    assert same(one, other)
    assert same(one, answer)
    assert not torch.equal(one[0].weight, net()[0].weight)
    assert "no optimizer that attach was given trains 0.weight, 0.bias yet" in caplog.text
    assert "add_param_group is merged, too" in caplog.text
