"""Whatever a loop does (closures, mixed precision, compiled and tied weights) it does as a worker, too."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import together
from freewheel.runtime.membership.place import Place
from loops import DEADLINE_S, flat, make, merged, move_to, net, step, train_until

pytestmark = pytest.mark.integration

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
            for k in range(24):
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
        assert steps == 24  # not 48: a step is the optimizer's
        assert lr == pytest.approx(0.1 / 64)
        assert loss < 1.5  # from 2.2; after 12 steps it may still be above


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
                        worker.optimizer.step(failing)
                step(model, worker.optimizer, k)
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
                step(model, worker.optimizer, k)
                if k == 2:
                    torch.save(model.state_dict(), tmp_path / f"{place.rank}.pt")
                    torch.save(worker.optimizer.state_dict(), tmp_path / f"optimizer-{place.rank}.pt")
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
                step(model, worker.optimizer)
                return answer
            while not asked.is_set():  # the others train on
                step(model, worker.optimizer)
        return None

    answer = together(4, work)[1]
    torch.testing.assert_close(answer, torch.full_like(answer, 1.5))
