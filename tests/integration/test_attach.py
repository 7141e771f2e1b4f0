"""`fw.attach` around ordinary training loops: workers are threads with real sockets between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import next_life, outcomes, together
from freewheel import strategies
from freewheel.fabric import windows
from freewheel.fabric.transfers import HOST_PIECE, PIECE
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import steps as steps_of
from freewheel.runtime.worker.leaving import Left

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


def make(place: Place, model: nn.Module, optimizer: Any = None, strategy: str = "adpsgd", **settings: Any):
    """A worker; by default with plain SGD."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"version": "test", "join_timeout_s": 30.0, **settings}
    return fw.Worker(model, optimizer, strategies.resolve(strategy), place=place, **settings)


def net(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> torch.Tensor:
    """One ordinary step on random data."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 4, generator=generator)
    loss = (model(inputs) - inputs[:, :2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def run(place: Place, strategy: str = "adpsgd", steps: int = 10, **settings: Any) -> fw.Worker:
    model = net(place.rank)
    worker = make(place, model, None, strategy, **settings)
    with worker:
        for k in range(steps):
            worker.report(step(model, worker._optimizer, seed=100 * place.rank + k))
    return worker


# -- alone --


@pytest.fixture
def no_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", strategies.ALL)
def test_alone_without_any_environment(name, no_environment):
    model, plain = net(), net()
    settings = {"lr": 0.1, "momentum": 0.9} if name == "eamsgd" else {"lr": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    with fw.attach(model, optimizer, name) as worker:
        for k in range(5):
            worker.report(step(model, optimizer, k))
    assert (worker.rank, worker.world_size) == (0, 1)
    metrics = worker.metrics()
    assert metrics["steps"] == 5
    assert metrics["bytes_out"] == 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for k in range(5):
        step(plain, optimizer, k)
    if name not in ("downpour", "easgd", "eamsgd"):  # their answer, the centre, hears of steps later
        torch.testing.assert_close(flat(worker.consensus()), flat(plain))


def test_alone_a_strategy_object_and_a_setting_by_name(no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, fw.SASGD(interval=2)) as worker:
        step(model, optimizer)
    with fw.attach(model, optimizer, "sasgd:interval=2") as again:
        step(model, optimizer)
    assert worker.metrics()["steps"] == again.metrics()["steps"] == 1


def test_wrong_arguments_are_refused(no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fw.ConfigError, match="wire must be one of fp32, bf16"):
        fw.attach(model, optimizer, wire="int8")
    with pytest.raises(fw.ConfigError, match="the optimizer trains none"):
        fw.attach(net(), optimizer)
    with pytest.raises(fw.UnknownName, match="adpsgd"):
        fw.attach(model, optimizer, "adpgsd")


# -- the start --


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "asgd", "nodelay_free"])
def test_all_begin_with_the_weights_of_worker_0(strategy):
    def work(place: Place) -> torch.Tensor:
        model = net(seed=place.rank)
        with make(place, model, None, strategy):
            return flat(model)

    began = together(4, work)
    for weights in began:
        assert torch.equal(weights, flat(net(seed=0)))


def other_shape(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 3)


def other_type(model: nn.Sequential) -> None:
    model[2].double()


def one_more(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


DIFFERENT = [
    (other_shape, r"2\.weight of shape \(3, 8\) in float32 here, 2\.weight of shape \(2, 8\)"),
    (other_type, r"2\.weight of shape \(2, 8\) in float64 here, 2\.weight of shape \(2, 8\) in float32"),
    (one_more, r"3\.weight of shape \(2, 2\) in float32 here, no further parameter at worker 0"),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENT, ids=["shape", "type", "one more"])
def test_another_model_is_refused_and_those_who_wait_for_nobody_go_on(change, words, caplog):
    def work(place: Place) -> dict[str, Any]:
        model = net()
        if place.rank == 2:
            change(model)
        worker = make(place, model)
        with worker:
            for k in range(30):
                step(model, worker._optimizer, k)
            return worker.metrics()

    *others, odd = outcomes(3, work)
    assert isinstance(odd, fw.ConfigError)
    assert odd.args[0].startswith("worker 2 was refused")
    with pytest.raises(fw.ConfigError, match=words):
        raise odd
    for rank, metrics in enumerate(others):
        assert metrics["steps"] == 30
        assert metrics["members"] == [0, 1]
        for said in ("the run goes on without worker 2", "the mean of worker 0, 1; it lacks worker 2"):
            (line,) = (one for one in caplog.messages if one.startswith(f"worker {rank}: ") and said in one)
            assert "it was refused: its model differs from worker 0's. The first difference: " in line


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd", "nodelay", "dpsgd", "grouping"])
def test_another_model_is_a_clear_error_where_all_are_needed(strategy):
    def work(place: Place) -> None:
        model = net()
        if place.rank == 1:
            other_shape(model)
        with make(place, model, None, strategy):
            pytest.fail("it began without worker 1")

    first, odd, last = outcomes(3, work)
    assert isinstance(odd, fw.ConfigError)
    for error in (first, last):
        assert isinstance(error, fw.WorkerLost)
        assert "needs worker 1, which is not coming: it was refused: its model differs" in str(error)
        assert "2.weight" in str(error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("adpsgd", "sasgd"), "it has strategy=sasgd, worker 0 has strategy=adpsgd"),
        (("sasgd:interval=4", "sasgd:interval=8"), "it has interval=8, worker 0 has interval=4"),
    ],
)
def test_another_strategy_or_setting_is_refused_by_name(given, words):
    def work(place: Place) -> None:
        with make(place, net(), None, given[place.rank]):
            pass

    first, odd = outcomes(2, work)
    assert isinstance(odd, fw.ConfigError)
    assert words in str(odd)
    assert len(str(odd).split()) <= 30
    assert first is None or f"it was refused: {words}" in str(first)


@pytest.mark.parametrize("what", ["seed", "optimizer"])
def test_another_seed_or_optimizer_is_refused_by_name(what, caplog):
    kinds = (torch.optim.SGD, torch.optim.AdamW)

    def work(place: Place) -> None:
        model = net()
        kind, seed = (kinds[place.rank], 0) if what == "optimizer" else (kinds[0], place.rank)
        with make(place, model, kind(model.parameters(), lr=0.1 + place.rank), seed=seed):
            pass

    first, odd = outcomes(2, work)
    assert first is None
    words = {
        "seed": "it has seed=1, worker 0 has seed=0",
        "optimizer": "it has optimizer=AdamW, worker 0 has optimizer=SGD",
    }
    assert f"{words[what]}. Give all" in str(odd)
    assert f"it lacks worker 1: it was refused: {words[what]}" in caplog.text


def test_a_worker_that_is_refused_later_is_named_while_the_others_train(caplog):
    """It comes when they have begun, and they look at the store; to be told once is enough."""
    said = "worker 0: the run goes on without worker 1: it was refused: it has optimizer=AdamW"

    def work(place: Place) -> None:
        model = net()
        if place.rank == 0:
            end_s = time.monotonic() + 30
            with make(place, model) as worker:
                while said not in caplog.text and time.monotonic() < end_s:
                    step(model, worker._optimizer, 0)
                    time.sleep(0.01)
                return
        with contextlib.suppress(ArithmeticError), make(place, model):
            raise ArithmeticError
        other = torch.optim.AdamW(model.parameters(), lr=0.1)
        with (
            pytest.raises(fw.ConfigError, match="worker 1 was refused"),
            make(next_life(place), model, other),
        ):
            pass

    together(2, work)
    assert caplog.text.count(said) == 1
    assert "it lacks worker 1: it was refused" in caplog.text


def test_a_worker_that_never_comes_is_a_clear_error():
    def work(place: Place) -> None:
        if place.rank < 2:
            with make(place, net(), join_timeout_s=2.0):
                pass

    first, second, _ = outcomes(3, work)
    for error in (first, second):
        assert isinstance(error, fw.WorkerLost)
        assert "2 to join. Start all workers" in str(error)


# -- any loop --

OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"foreach": False}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {}),
]


def test_any_optimizer_steps_as_it_does_alone():
    """All-reduce of equal gradients is the plain loop, whatever the optimizer."""

    def work(place: Place) -> list[tuple[torch.Tensor, int]]:
        results = []
        for kind, settings in OPTIMIZERS:
            model = net()
            optimizer = kind(model.parameters(), lr=0.01, **settings)
            with make(place, model, optimizer, "allreduce") as worker:
                for k in range(4):
                    step(model, optimizer, k)
            results.append((flat(worker.consensus()), worker.metrics()["steps"]))
        return results

    for results in together(2, work):
        for (kind, settings), (weights, steps) in zip(OPTIMIZERS, results, strict=True):
            model = net()
            optimizer = kind(model.parameters(), lr=0.01, **settings)
            for k in range(4):
                step(model, optimizer, k)
            torch.testing.assert_close(weights, flat(model), msg=f"{kind.__name__} {settings}")
            assert steps == 4


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free"])
def test_an_optimizer_with_a_closure(strategy):
    """LBFGS computes inside its step. (How well it does while others move its weights is its own affair.)"""

    def work(place: Place) -> None:
        model = net(place.rank)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(place.rank))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :2]).square().mean()
            loss.backward()
            return loss

        with make(place, model, optimizer, strategy) as worker:
            steps, end_s = 0, time.monotonic() + DEADLINE_S
            while steps < 20 or not merged(worker):
                optimizer.step(closure)
                steps += 1
                assert time.monotonic() < end_s, "they never meet"
            assert worker.metrics()["steps"] == steps
        assert math.isfinite(closure().item())

    together(2, work)


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_mixed_precision_accumulation_clipping_and_schedules(strategy):
    def work(place: Place) -> tuple[int, float, float]:
        model = net(place.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        with make(place, model, optimizer, strategy) as worker:
            for k in range(12):
                for part in range(2):
                    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * k + part))
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = (model(inputs) - inputs[:, :2]).float().square().mean() / 2
                    scaler.scale(loss).backward()
                    worker.report(loss)
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                assert norm.isfinite()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
        return worker.metrics()["steps"], scheduler.get_last_lr()[0], worker.metrics()["loss"]

    for steps, lr, loss in together(2, work):
        assert steps == 12  # not 24: a step is the optimizer's
        assert lr == pytest.approx(0.1 / 8)
        assert loss < 1.5  # from 2.2


def test_a_step_the_scaler_skips_is_no_step():
    def work(place: Place) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        with make(place, model, optimizer) as worker:
            for k in range(10):
                loss = model(torch.ones(2, 4)).sum() * (float("inf") if k == place.rank else 1.0)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert flat(worker.consensus()).isfinite().all()
        return worker.metrics()["steps"]

    assert together(2, work) == [9, 9]


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free:tau=4"])
def test_a_step_that_raises_and_is_tried_again(strategy):
    """Some loops catch a failed step (out of memory) and go on with the next batch."""

    def work(place: Place) -> None:
        model = net(place.rank)
        worker = make(place, model, None, strategy)

        def failing() -> torch.Tensor:
            raise MemoryError("too large a batch")

        with worker:
            for k in range(30):
                if k % 3 == place.rank:
                    with pytest.raises(MemoryError):
                        worker._optimizer.step(failing)
                step(model, worker._optimizer, k)
            assert worker.metrics()["steps"] == 30
            assert worker._replica.version % 2 == 0
            train_until(worker, merges=3)

    together(2, work)


def test_compiled_models():
    lock = threading.Lock()

    def work(place: Place) -> nn.Module:
        model = net(place.rank)
        names = list(model.state_dict())
        with lock:
            compiled = torch.compile(model, backend="eager")
            compiled(torch.zeros(8, 4))
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        with make(place, compiled, optimizer):
            for k in range(10):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))
                with lock:
                    loss = (compiled(inputs) - inputs[:, :2]).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                optimizer.step()
        assert list(model.state_dict()) == names
        return model

    together(2, work)


def test_the_answer_of_a_compiled_model_is_a_plain_one(no_environment):
    model = net()
    names = list(model.state_dict())
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with fw.attach(compiled, optimizer) as worker:
        step(compiled, optimizer)
        before = compiled(torch.ones(1, 4))
    answer = worker.consensus()
    assert list(answer.state_dict()) == names
    torch.testing.assert_close(answer(torch.ones(1, 4)), before)


def test_checkpoints_load_into_a_plain_model(tmp_path):
    names = list(net().state_dict())

    def work(place: Place) -> None:
        model = net(place.rank)
        worker = make(place, model)
        with worker:
            for k in range(5):
                step(model, worker._optimizer, k)
                if k == 2:
                    torch.save(model.state_dict(), tmp_path / f"{place.rank}.pt")
                    torch.save(worker._optimizer.state_dict(), tmp_path / f"optimizer-{place.rank}.pt")
                    inside = flat(model)
        torch.save(worker.consensus().state_dict(), tmp_path / f"end-{place.rank}.pt")
        plain = net(9)
        plain.load_state_dict(torch.load(tmp_path / f"{place.rank}.pt"))
        assert torch.equal(flat(plain), inside)

    together(2, work)
    ends = [torch.load(tmp_path / f"end-{rank}.pt") for rank in range(2)]
    for end in ends:
        assert list(end) == names
        net(9).load_state_dict(end)
    for name in names:
        torch.testing.assert_close(ends[0][name], ends[1][name])


def test_frozen_and_tied_parameters():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.frozen = nn.Linear(4, 4)
            self.frozen.requires_grad_(False)
            self.last = nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.frozen(self.first(x))))

    def work(place: Place) -> tuple[nn.Module, nn.Module]:
        model = Tied()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        with make(place, model, optimizer) as worker:
            for k in range(20):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(k + 50 * place.rank))
                loss = (model(inputs) - inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert worker._replica.size == 16
        assert model.last.weight is model.first.weight
        return model, worker.consensus()

    results = together(3, work)
    for model, answer in results:
        assert torch.equal(model.frozen.weight, results[0][0].frozen.weight)  # worker 0's
        assert torch.equal(answer.frozen.weight, model.frozen.weight)
        assert answer.last.weight is answer.first.weight
        assert not answer.frozen.weight.requires_grad
        assert list(answer.state_dict()) == list(Tied().state_dict())


def test_buffers_are_averaged_in_the_answer():
    def work(place: Place) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(place.rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with make(place, model, optimizer) as worker:
            for _ in range(10):
                loss = model(torch.randn(8, 4) + place.rank).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if place.rank == 1:
                worker.consensus()  # nobody waits for it
        return model, worker.consensus()

    results = together(3, work)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([model[1].get_buffer(name) for model, _ in results]).mean(0)
        for model, answer in results:
            torch.testing.assert_close(answer[1].get_buffer(name), mean)
            assert not torch.equal(model[1].get_buffer(name), mean)
    assert all(int(answer[1].num_batches_tracked) == 10 for _, answer in results)


def test_one_worker_may_ask_for_the_answer_in_the_middle_of_training():
    asked, ready = threading.Event(), threading.Barrier(4)

    def work(place: Place) -> torch.Tensor | None:
        model = net()
        worker = make(place, model, torch.optim.SGD(model.parameters(), lr=0.0), "none")
        with worker:
            move_to(worker, float(place.rank))
            ready.wait(DEADLINE_S)
            if place.rank == 1:
                answer = flat(worker.consensus())
                asked.set()
                step(model, worker._optimizer)
                return answer
            while not asked.is_set():  # the others train on
                step(model, worker._optimizer)
        return None

    answer = together(4, work)[1]
    torch.testing.assert_close(answer, torch.full_like(answer, 1.5))


# -- the mean is kept --


def merged(worker: fw.Worker) -> int:
    """How many exchanges and merges a worker has taken part in."""
    metrics = worker.metrics()
    return metrics["exchanges"]["done"] + metrics["merges"]["done"]


def train_until(worker: fw.Worker, merges: int) -> None:
    """Step until so many have come about."""
    end_s = time.monotonic() + DEADLINE_S
    while merged(worker) < merges:
        assert time.monotonic() < end_s, f"{merged(worker)} of {merges} merges"
        time.sleep(1e-3)  # this is the computing
        worker._optimizer.step()


def move_to(worker: fw.Worker, value: torch.Tensor | float) -> None:
    """Set a worker's weights between two steps."""
    replica = worker._replica
    replica.begin_moving()
    for block in replica.blocks:
        block.weights.copy_(torch.as_tensor(value, dtype=block.weights.dtype))
    replica.end_moving()


SHORT, MANY_PIECES = 3000, 2 * PIECE + HOST_PIECE + 5
EXCHANGES = [
    ("adpsgd", "fp32", SHORT, True),
    ("adpsgd:topology=ring", "fp32", SHORT, True),
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
            train_until(worker, merges=50)
        return began, asyncio.run(worker._replica.snapshot()), flat(worker.consensus()), merged(worker)

    results = together(n, work)
    total = torch.stack([began for began, *_ in results]).double().sum(0)
    ended = torch.stack([ended for _, ended, *_ in results]).double().sum(0)
    # Each correction rounds the weights it is added to once, by 2⁻²⁴ of a number below 8.
    merges = sum(count for *_, count in results)
    assert float((ended - total).abs().max()) < merges * 8 * 2.0**-24
    for *_, answer, _ in results:
        torch.testing.assert_close(answer, total / n, rtol=0, atol=merges * 8 * 2.0**-24)
    spread = torch.stack([ended for _, ended, *_ in results])
    assert float((spread.max(0).values - spread.min(0).values).max()) < 0.1  # they have met


# -- encrypted --


def test_with_keys_of_the_run(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    keys.make(tmp_path)
    workers = together(3, lambda place: run(place, steps=20, tls=tmp_path))
    answers = [flat(worker.consensus()) for worker in workers]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert sum(worker.metrics()["exchanges"]["done"] for worker in workers) > 0


def test_keys_of_another_run_do_not_fit(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    for rank in range(2):
        keys.make(tmp_path / str(rank))

    def work(place: Place) -> None:
        run(place, "allreduce", tls=tmp_path / str(place.rank))

    called, calling = outcomes(2, work)
    assert isinstance(calling, fw.ConfigError)
    assert "worker 1 cannot join" in str(calling)
    assert "its keys are not of this worker's set (self-signed certificate" in str(calling)
    assert isinstance(called, fw.WorkerLost)
    assert "its keys are not" in str(called), "why the other is not coming"


def test_who_joins_with_keys_of_another_run_is_told(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    for name in ("ours", "theirs"):
        keys.make(tmp_path / name)
    there = threading.Barrier(2)

    def work(place: Place) -> None:
        with make(place, net(), tls=tmp_path / "ours"):
            there.wait(DEADLINE_S)
            if place.rank == 1:
                late = make(next_life(place), net(), tls=tmp_path / "theirs")
                with pytest.raises(fw.ConfigError, match="its keys are not of this worker's set"), late:
                    pass
            there.wait(DEADLINE_S)

    together(2, work)


# -- data and the end --


def test_the_loader_deals_every_sample_once():
    def work(place: Place) -> list[list[int]]:
        model = net()
        worker = make(place, model)
        passes = []
        with worker:
            loader = worker.loader(list(range(103)), batch_size=5)
            for _ in range(2):
                seen = []
                for batch in loader:
                    seen += batch.tolist()
                    step(model, worker._optimizer)
                passes.append(seen)
        return passes

    results = together(3, work)
    for k in range(2):
        dealt = [sample for passes in results for sample in passes[k]]
        assert sorted(dealt) == list(range(103))
    assert results[0][0] != results[0][1]


@pytest.mark.parametrize("strategy", ["adpsgd", "none"])
def test_stop_ends_the_loaders_of_all(strategy):
    def work(place: Place) -> tuple[bool, int]:
        model = net()
        worker = make(place, model, None, strategy)
        batches = 0
        with worker:
            loader = worker.loader(torch.zeros(40, 4), batch_size=2)
            while not worker.stopped:
                for _ in loader:
                    step(model, worker._optimizer)
                    batches += 1
                    if place.rank == 1 and batches == 12:
                        worker.stop()
            assert list(loader) == []  # no other pass begins
            return worker.stopped, batches

    results = together(3, work)
    assert all(stopped for stopped, _ in results)
    assert results[1][1] == 12


class OfTheUser(Exception):
    """Raised by a training loop."""


def test_an_exception_of_one_loop_is_its_own_and_leaves_the_others_running():
    failed = threading.Event()

    def work(place: Place) -> dict[str, Any]:
        model = net()
        worker = make(place, model)
        with worker:
            step(model, worker._optimizer)
            if place.rank == 1:
                failed.set()
                raise OfTheUser("of worker 1")
            assert failed.wait(DEADLINE_S)
            for k in range(50):
                step(model, worker._optimizer, k)
        return {**worker.metrics(), "answer": flat(worker.consensus())}

    first, error, last = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    assert error.__cause__ is None
    for metrics in (first, last):
        assert metrics["steps"] == 51
    assert torch.equal(first["answer"], last["answer"])


@pytest.mark.parametrize("strategy", ["asgd", "easgd:interval=1"])
def test_an_exception_of_one_loop_stops_those_who_need_it_with_a_clear_error(strategy):
    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(1000):
                if place.rank == 0 and k == 5:
                    raise OfTheUser("of worker 0")
                step(model, worker._optimizer, k)

    error, *others = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    for other in others:
        assert isinstance(other, fw.WorkerLost)
        # Who had not joined yet does not wait for it either.
        name = strategy.split(":")[0]
        assert f"{name} stopped: it lost worker" in str(other) or "needs worker 0" in str(other)
    assert any("it left with OfTheUser" in str(other) for other in others)


@pytest.mark.parametrize(
    ("raised", "as_what", "told"),
    [
        (SystemExit(), Left, "it was told to leave"),
        (SystemExit(3), SystemExit, "it left with SystemExit"),
        (fw.RunStopped("no more of it"), fw.RunStopped, "it left with RunStopped: no more of it"),
    ],
)
def test_the_others_are_told_how_a_worker_left(raised, as_what, told):
    """A script that exits with code 0 has left well: what it held of the data is another's."""
    used, begun = list[int](), threading.Barrier(2)

    def work(place: Place) -> str:
        model = net()
        worker = make(place, model, None, "adpsgd")
        with worker:
            for k, which in enumerate(worker.loader(list(range(12)), 2)):
                if not k:
                    begun.wait(DEADLINE_S)
                if place.rank == 1:
                    raise raised
                step(model, worker._optimizer, k)
                used.extend(which.tolist())
            while 1 in worker._agent.fabric.members:
                time.sleep(0.01)
            return worker._agent.fabric.why_lost(1)

    said, error = outcomes(2, work)
    assert said == told
    assert type(error) is as_what
    assert sorted(used) == list(range(12))


@pytest.mark.parametrize("strategy", ["asgd", "easgd"])
def test_without_the_server_there_is_no_answer(strategy):
    """Worker 0 leaves with an exception after the others have ended: what it held is gone."""
    others_done = threading.Barrier(3)

    def work(place: Place) -> torch.Tensor:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(3):
                step(model, worker._optimizer, k)
            others_done.wait(DEADLINE_S)
            if place.rank == 0:
                while len(worker._agent.ending._ended) < 2:
                    pass
                raise OfTheUser("of worker 0")
        return flat(worker.consensus())

    error, *others = outcomes(3, work)
    assert isinstance(error, OfTheUser)
    for other in others:
        assert isinstance(other, fw.WorkerLost), other


@pytest.mark.parametrize(
    "strategy", ["allreduce", "sasgd", "dpsgd", "nodelay", "leader", "grouping:ratio=1e9"]
)
def test_a_loop_that_ends_early_is_a_clear_error_where_all_step_together(strategy, monkeypatch):
    monkeypatch.setattr(steps_of, "GRACE_S", 1.0)

    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(8 if place.rank == 1 else 40):
                worker.report(step(model, worker._optimizer, k))

    results = outcomes(3, work, deadline_s=40)
    stopped = [error for error in results if isinstance(error, fw.RunStopped)]
    assert any(
        "the loop of worker 1 has ended. Give all workers the same number of steps" in str(error)
        for error in stopped
    )
    assert isinstance(results[0], fw.RunStopped)
    assert isinstance(results[2], fw.RunStopped)


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "dasgd", "asgd", "downpour", "easgd", "none"])
def test_loops_of_different_length_where_nobody_waits(strategy):
    def work(place: Place) -> torch.Tensor:
        model = net(place.rank)
        worker = make(place, model, None, strategy)
        with worker:
            for k in range(5 + 20 * place.rank):
                worker.report(step(model, worker._optimizer, k))
        assert worker.metrics()["steps"] == 5 + 20 * place.rank
        return flat(worker.consensus())

    answers = together(3, work)
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_nobody_leaves_before_all_have_the_answer():
    """What a worker has sent last could be lost if it closed its connections at once."""

    def work(place: Place) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        model, seen = net(), []
        worker = make(place, model, torch.optim.SGD(model.parameters(), lr=0.0), "none")
        with worker:
            move_to(worker, float(place.rank))
            agent = worker._agent
            mean = agent.ending._mean

            async def slowly(*given: Any) -> Any:
                answer = await mean(*given)
                with contextlib.suppress(TimeoutError):  # the others have it by now
                    await asyncio.wait_for(agent.fabric.changed(), 0.5)
                seen.append(agent.fabric.members)
                return answer

            if place.rank == 1:
                agent.ending._mean = slowly
        return flat(worker.consensus()), seen

    results = together(4, work)
    assert results[1][1] == [(0, 1, 2, 3)]
    for answer, _ in results:
        torch.testing.assert_close(answer, torch.full_like(answer, 1.5))


# -- the record --

KEYS = {
    "rank", "steps", "elapsed_s", "steps_per_s", "blocked_share", "exchanges", "merges", "staleness_mean",
    "staleness_max", "discrepancy_max", "bytes_out", "bytes_in", "messages_dropped", "members", "loss",
}  # fmt: skip


def test_metrics_and_records(tmp_path):
    def work(place: Place) -> dict[str, Any]:
        model = net(place.rank)
        worker = make(place, model, folder=tmp_path / "run")
        with worker:
            for k in range(30):
                worker.report(step(model, worker._optimizer, k + 100 * place.rank))
            inside = worker.metrics()
        assert worker.metrics()["members"] == [0, 1], "after the block, those who were there when it ended"
        return inside

    for rank, metrics in enumerate(together(2, work)):
        assert set(metrics) >= KEYS
        assert set(metrics["exchanges"]) == {"done", "busy", "half", "failed"}
        assert metrics["rank"] == rank
        assert metrics["steps"] == 30
        assert metrics["bytes_out"] > 0
        assert metrics["bytes_in"] > 0
        assert metrics["members"] == [0, 1]
        assert 0 <= metrics["blocked_share"] < 1
        assert metrics["loss"] < 100
        text = (tmp_path / "run" / f"worker-{rank}.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        assert [record["last"] for record in records] == [False] * (len(records) - 1) + [True]
        assert set(records[-1]) >= KEYS | {"time"}
        assert records[-1]["steps"] == 30


def test_records_of_a_loss_that_is_no_number_are_json(tmp_path, no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, folder=tmp_path) as worker:
        step(model, optimizer)
        worker.report(float("inf"))
    (record,) = (tmp_path / "worker-0.jsonl").read_text().splitlines()[-1:]
    assert json.loads(record, parse_constant=pytest.fail)["loss"] is None


def test_a_folder_that_cannot_be_written_costs_only_the_records(tmp_path, no_environment, caplog):
    (tmp_path / "file").write_text("")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, folder=tmp_path / "file") as worker:
        step(model, optimizer)
    assert worker.metrics()["steps"] == 1
    assert [record.levelname for record in caplog.records if record.name == "freewheel"] == ["WARNING"]


def test_leader_asks_for_losses():
    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, "leader")
        with worker:
            for k in range(5):
                step(model, worker._optimizer, k)

    for error in outcomes(2, work):
        assert isinstance(error, fw.FreewheelError)
    errors = outcomes(2, work)
    assert any(isinstance(e, fw.ConfigError) and "call worker.report(loss)" in str(e) for e in errors)


# -- nothing is left behind --


@pytest.mark.slow
def test_two_hundred_runs_leave_no_thread_and_no_socket():
    """A script may attach again and again."""
    cycles, counts = 200, []
    both = threading.Barrier(2, action=lambda: counts.append((threading.active_count(), handles())))

    def work(place: Place) -> None:
        model = net(place.rank)
        for k in range(cycles):
            worker = make(place, model)
            with worker:
                for _ in range(3):
                    step(model, worker._optimizer, k)
            both.wait(DEADLINE_S)

    together(2, work, deadline_s=110.0)
    assert len(counts) == cycles
    assert counts[-1] == counts[0]


def handles() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


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
