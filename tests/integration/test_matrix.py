"""What people do in training loops × strategies × {alone, two workers}, against the loop without Freewheel.

Alone the loop is the plain one, to the bit. Two workers that average gradients of the same data are as one.
Where nobody waits, both end with the same model: it is finite, and its weights and buffers are what theirs
come to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import freewheel as fw
from crew import together
from freewheel import strategies
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker.settings import Settings

pytestmark = pytest.mark.integration

STRATEGIES = ["allreduce", "adpsgd", "sasgd", "nodelay_free"]
STEPS = 6
COMPILER = threading.Lock()
"""It knows no threads; workers of a real run are processes."""
ALONE = Place(0, 1, 1, "127.0.0.1", 1)


@dataclass
class Run:
    """One worker's loop: its model, its optimizers, its data; what else it makes is compared too."""

    model: nn.Module
    rank: int
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    made: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(100 + self.rank)

    def batch(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers).to(next(self.model.parameters()).dtype)

    def loss(self) -> Tensor:
        inputs = self.batch(8, 4)
        return (self.model(inputs) - inputs[:, :2]).float().square().mean()

    def step(self) -> None:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        self.loss().backward()
        optimizer.step()


def net(*more: nn.Module, hidden: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), *more, nn.Tanh(), nn.Linear(hidden, 2))


def momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def steps(run: Run) -> None:
    for _ in range(STEPS):
        run.step()


# -- models --


class Tied(nn.Module):
    """One matrix in two places, as language models have it; and a head that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.out.weight = self.into.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(inputs)))[:, :2]


class TiedByMemory(Tied):
    """Two parameters over the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(self.into.weight.data)


class Words(nn.Module):
    """A sparse embedding beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.words((inputs.abs() * 4).long().clamp(max=8))).mean(1)


class Masked(nn.Module):
    """Attention's mask, a table in fp64 and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("table", torch.linspace(0, 1, 5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.net(inputs) @ self.mask.exp()


def adapters() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


# -- loops --


def freezing(run: Run) -> None:
    for k in range(STEPS):
        run.model[0].requires_grad_(k not in (2, 3, 4))
        run.step()


def accumulating(run: Run) -> None:
    for _ in range(STEPS):
        for _ in range(3):
            (run.loss() / 3).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.optimizers[0].step()
        run.optimizers[0].zero_grad(set_to_none=False)


def averaging(run: Run) -> None:
    kept = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(STEPS):
        run.step()
        kept.update_parameters(run.model)
    run.made |= {f"ema.{name}": one for name, one in kept.state_dict().items()}


def scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizers[0], 3)
    for _ in range(3):
        for _ in range(STEPS // 3):
            run.step()
        scheduler.step()
    run.made["lr"] = torch.tensor(run.optimizers[0].param_groups[0]["lr"])


def scaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(STEPS):
        run.optimizers[0].zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss() * (float("inf") if k == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(run.optimizers[0])
        scaler.update()
    run.made["scale"] = torch.tensor(scaler.get_scale())


def closing(run: Run) -> None:
    optimizer = run.optimizers[0]
    for _ in range(STEPS // 2 if isinstance(optimizer, torch.optim.LBFGS) else STEPS):
        inputs = run.batch(8, 4)

        def closure(inputs: Tensor = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = (run.model(inputs) - inputs[:, :2]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def adversaries(run: Run) -> None:
    makes, judges = run.model
    first, second = run.optimizers
    for _ in range(STEPS):
        for _ in range(2):
            second.zero_grad()
            loss = judges(makes(run.batch(6, 4)).detach()).mean() - judges(run.batch(6, 2)).mean()
            (loss + judges[0].weight.square().sum()).backward()
            second.step()
        first.zero_grad()
        (-judges(makes(run.batch(6, 4))).mean()).backward()
        first.step()


def interleaved(run: Run) -> None:
    """Two optimizers after one backward pass, as Muon is used."""
    for _ in range(STEPS):
        loss = run.loss()
        for one in run.optimizers:
            one.zero_grad()
        loss.backward()
        for one in run.optimizers:
            one.step()


def compiled(run: Run) -> None:
    run.model.compile(backend="eager")  # whatever the backend, calls go through the compiled form
    for _ in range(STEPS):
        run.optimizers[0].zero_grad()
        with COMPILER:
            run.loss().backward()
        run.optimizers[0].step()


@dataclass
class Feature:
    model: Callable[[], nn.Module] = net
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = momentum
    loop: Callable[[Run], None] = steps
    close: float = 1e-5
    """How far two workers on the same data may be from one."""


def pair() -> nn.Module:
    return nn.ModuleList([net(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))])


FEATURES = {
    "plain": Feature(),
    "batchnorm": Feature(lambda: net(nn.BatchNorm1d(6))),
    "tied, one unused": Feature(Tied),
    "tied by memory": Feature(TiedByMemory),
    "frozen base": Feature(adapters),
    "bf16 adapters on an fp32 base": Feature(
        lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), Half())
    ),
    "frozen and thawed": Feature(loop=freezing),
    "buffers of all kinds": Feature(Masked),
    "sparse": Feature(
        Words,
        lambda model: [
            torch.optim.SparseAdam(model.words.parameters(), lr=0.01),
            torch.optim.SGD(model.out.parameters(), lr=0.1),
        ],
        interleaved,
    ),
    "fp16": Feature(lambda: net().half(), close=1e-2),
    "bf16": Feature(lambda: net().bfloat16(), adam, close=1e-2),
    "two types": Feature(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Half()), close=1e-2),
    "channels last": Feature(lambda: Pictures().to(memory_format=torch.channels_last)),
    "compiled": Feature(loop=compiled),
    "accumulated and clipped": Feature(loop=accumulating),
    "ema": Feature(loop=averaging),
    "a schedule by epochs": Feature(loop=scheduled),
    "a scaler that skips": Feature(optimizers=adam, loop=scaled, close=1e-3),
    "a closure": Feature(optimizers=adam, loop=closing),
    "lbfgs": Feature(
        lambda: net().double(),
        lambda model: [
            torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        ],
        closing,
    ),
    "two optimizers": Feature(net, lambda model: [*momentum(model[0]), *adam(model[-1])], interleaved),
    "a gan": Feature(pair, lambda model: [*momentum(model[0]), *adam(model[1])], adversaries),
}


class Half(nn.Module):
    """A layer in bf16 among others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.bfloat16()).float()


class Pictures(nn.Module):
    """A convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.out = nn.Conv2d(2, 3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.filters(inputs.view(-1, 1, 2, 2).expand(-1, 2, 2, 2)).flatten(1))


def begin(feature: Feature, rank: int, data: int) -> Run:
    """A model with weights of its rank's own."""
    model, numbers = feature.model(), torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=numbers) / 2)
    return Run(model, data, feature.optimizers(model))


def train(
    feature: Feature, place: Place, strategy: str, data: int
) -> tuple[Run, dict[str, Tensor], fw.Worker]:
    run = begin(feature, place.rank, data)
    settings = Settings(join_timeout_s=30.0)
    with fw.Worker(run.model, run.optimizers, strategies.resolve(strategy), settings, place) as worker:
        feature.loop(run)
    return run, everything(worker.consensus()), worker


def everything(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, those that no state_dict has too."""
    return {name: one.detach() for name, one in [*model.named_parameters(), *model.named_buffers()]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        assert torch.equal(value.reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)), (
            name
        )


@pytest.fixture(scope="module")
def plain() -> dict[str, Run]:
    """The loops without Freewheel, made once."""
    return {}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_is_the_loop_it_was(name, strategy, plain):
    feature = FEATURES[name]
    if name not in plain:
        plain[name] = begin(feature, 0, 0)
        feature.loop(plain[name])
    wanted = everything(plain[name].model)

    alone, answer, worker = train(feature, ALONE, strategy, 0)
    same(everything(alone.model), wanted)
    same(answer, wanted)
    same(alone.made, plain[name].made)
    done = worker.metrics()["steps"]

    together_on = 0 if strategy == "allreduce" else 1  # the same data, or each its own
    results = together(2, lambda place: train(feature, place, strategy, together_on * place.rank))
    (one, answer, worker), (other, theirs, second) = results
    same(answer, theirs)
    assert worker.metrics()["steps"] == second.metrics()["steps"] == done
    mine, yours = everything(one.model), everything(other.model)
    if strategy == "allreduce":
        same(mine, yours)
        same(answer, mine)
        for key, value in wanted.items():
            torch.testing.assert_close(answer[key], value, rtol=feature.close, atol=feature.close)
        for key, value in plain[name].made.items():
            torch.testing.assert_close(one.made[key], value, rtol=feature.close, atol=feature.close)
        (one, answer, _), (other, _, _) = together(
            2, lambda place: train(feature, place, strategy, place.rank)
        )
        weights = {key: value.detach() for key, value in one.model.named_parameters()}
        same(weights, {key: value.detach() for key, value in other.model.named_parameters()})
        same(weights, {key: answer[key] for key in weights})  # each on data of its own, and still as one
        return
    coarse = any(value.dtype in (torch.float16, torch.bfloat16) for value in mine.values())
    for key, value in answer.items():
        if not value.is_floating_point() or not wanted[key].isfinite().all():
            assert torch.equal(value, mine[key]), key  # the lowest rank's
            continue
        assert value.isfinite().all(), key
        close = 3e-2 if coarse else 1e-4
        mean = (mine[key].double() + yours[key].double()) / 2
        torch.testing.assert_close(value.double(), mean, rtol=close, atol=close)
        if torch.equal(mine[key], yours[key]):
            assert torch.equal(value, mine[key]) or key in dict(one.model.named_parameters()), key
