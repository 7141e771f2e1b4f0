"""The replica on a CUDA device: what streams and pinned memory must not break."""

from __future__ import annotations

import threading

import pytest
import torch

import freewheel as fw
from crew import together, worker
from freewheel.runtime.live import LiveReplica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def net(size: int = 1024) -> torch.nn.Module:
    return torch.nn.Linear(size, size, device="cuda")


def test_a_snapshot_is_of_one_moment_while_weights_move():
    model = net(2048)
    replica = LiveReplica(model)
    replica.load(torch.zeros(replica.size))
    steps, done = 3000, threading.Event()
    for _ in range(2):  # pinned memory takes its time the first time
        replica.correct(replica.snapshot(), own=True)
        replica.boundary()

    def train():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(steps):
                replica.begin_moving()
                with torch.no_grad():
                    for parameter in model.parameters():
                        for _ in range(4):
                            parameter.add_(0.25)
                replica.boundary()
                replica.end_moving()
        torch.cuda.synchronize()
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    seen = set()
    while not done.is_set():
        snapshot = replica.snapshot()
        assert snapshot.is_pinned()
        low, high = float(snapshot.min()), float(snapshot.max())
        assert low == high == round(low), "a snapshot torn by a step"
        seen.add(low)
        replica.correct(snapshot.zero_(), own=True)
    thread.join()
    assert len(seen) > 1
    assert float(replica.snapshot().max()) == steps


def test_every_correction_is_added_once():
    model = net(256)
    replica = LiveReplica(model)
    replica.load(torch.zeros(replica.size))
    for k in range(50):
        replica.correct(torch.full((replica.size,), 1.0), own=True)
        if k % 3 == 0:
            replica.begin_moving()
            replica.boundary()
            replica.end_moving()
    snapshot = replica.snapshot()
    assert float(snapshot.min()) == float(snapshot.max()) == 50.0


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "allreduce", "nodelay", "dasgd"])
def test_workers_on_one_device_learn_together(strategy):
    def work(place):
        torch.manual_seed(place.rank)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()
        attached, optimizer = worker(place, model, strategy, lr=0.05)
        with attached:
            for _ in range(200):
                x = torch.randn(64, 32, device="cuda")
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                attached.report(loss)
                optimizer.step()
        consensus = attached.consensus()
        assert next(consensus.parameters()).is_cuda
        x = torch.randn(4096, 32, device="cuda")
        loss = (consensus(x) - x.sum(1, keepdim=True)).square().mean()
        return float(loss.detach()), [float(p.detach().sum()) for p in consensus.parameters()]

    results = together(3, work)
    assert all(loss < 16 for loss, _ in results)  # from 32
    for _, sums in results[1:]:
        assert sums == pytest.approx(results[0][1], abs=1e-3)


def test_the_mean_is_kept_while_all_exchange():
    start = [torch.full((1024 * 1024 + 1024,), float(rank)) for rank in range(3)]

    def work(place):
        model = net()
        attached, optimizer = worker(place, model, "adpsgd", lr=0.0)
        with attached:
            replica = attached._replica
            replica.begin_moving()
            with torch.no_grad():
                for block in replica.blocks:
                    block.weights.copy_(start[place.rank][block.start : block.stop])
            replica.end_moving()
            for _ in range(300):
                optimizer.zero_grad()
                model(torch.ones(1, 1024, device="cuda")).sum().backward()
                optimizer.step()
        return attached.consensus().bias.detach().cpu(), attached.metrics()["exchanges"]["done"]

    results = together(3, work)
    assert sum(done for _, done in results) > 30
    for bias, _ in results:
        torch.testing.assert_close(bias, torch.ones(1024), rtol=0, atol=1e-4)


def test_a_checkpoint_brings_back_weights_moments_and_random_numbers(tmp_path):
    def train(steps: int, resume: bool) -> list[torch.Tensor]:
        torch.manual_seed(1 + resume)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        with fw.attach(model, optimizer, resume=tmp_path) as attached:
            attached.checkpoint(tmp_path, every=5)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(8, 64, device="cuda")).square().mean().backward()
                optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return [*model.parameters(), *moments, torch.rand(4, device="cuda")]

    began = train(5, resume=False)
    for one, other in zip(train(0, resume=True), began, strict=True):
        assert other.is_cuda
        assert torch.equal(one, other)
