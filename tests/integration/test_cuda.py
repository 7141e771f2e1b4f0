"""The replica on a CUDA device: what streams and pinned memory must not break."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
import torch

import freewheel as fw
from crew import together, worker
from freewheel.errors import ConfigError, Diverged
from freewheel.fabric import kernels, transfers
from freewheel.fabric.windows import Cuda, Windows
from freewheel.runtime.worker import live_replica as live
from freewheel.runtime.worker.live_replica import LiveReplica, live_replica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def net(size: int = 1024) -> torch.nn.Module:
    return torch.nn.Linear(size, size, device="cuda")


class Trainer:
    """A training thread that steps as fast as it can, on a stream of its own: every weight + 1 in a step."""

    def __init__(self, model: torch.nn.Module, replica: LiveReplica) -> None:
        self.model, self.replica = model, replica
        self.elsewhere = torch.zeros(1 << 16, device="cuda")
        self.begun = self.done = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not self.over.is_set():
                self.begun += 1
                self.replica.begin_moving()
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        for _ in range(2):
                            parameter.add_(0.5)
                self.replica.boundary()
                self.replica.end_moving()
                self.done += 1
                self.elsewhere.add_(1.0).mul_(0.5)  # computes, while the weights stand still
                if self.done % 8 == 0:
                    torch.cuda.current_stream().synchronize()

    def __enter__(self) -> Trainer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(60.0)
        torch.cuda.synchronize()


@pytest.mark.timeout(300)
def test_snapshots_and_corrections_are_exact_against_a_thread_that_steps_all_the_time(monkeypatch):
    """10,000 exchanges: each correction counts once, in one moment; the other side gets the opposite."""
    monkeypatch.setattr(live, "PATIENCE_S", 1e-3)
    huge = float(2**22)  # above the number of steps, which float64 tells apart from it
    model = torch.nn.Linear(64, 64, device="cuda", dtype=torch.float64)
    replica = live_replica(model)
    replica.load(torch.zeros(replica.size))
    other = torch.zeros(replica.size, device="cuda", dtype=torch.float64)

    async def work(trainer: Trainer) -> None:
        given = 0
        for k in range(10_000):
            sign, least = 1 if k % 2 == 0 else -1, trainer.done
            snapshot = await replica.snapshot()
            low, high = torch.stack([snapshot.min(), snapshot.max()]).tolist()
            assert low == high, "torn by a step"
            assert least - 1 <= low - given * huge <= trainer.begun, "a correction is missing or counts twice"
            other.sub_(sign * huge)
            replica.correct(snapshot.fill_(sign * huge), own=True)
            given += sign

    before = sys.getswitchinterval()
    with Trainer(model, replica) as trainer:
        while trainer.done < 3:
            pass
        sys.setswitchinterval(1e-5)  # the two threads take turns
        with torch.cuda.stream(replica.side):
            asyncio.run(work(trainer))
        sys.setswitchinterval(before)
    total = replica.weights + sum(correction.vector for correction in replica._slot) + other
    assert float(total.min()) == float(total.max()) == trainer.done


def test_a_step_near_its_end_holds_the_host_and_the_hook_goes():
    model = net(256)
    replica = live_replica(model)
    replica.keep_close()
    model(torch.ones(4, 256, device="cuda")).sum().backward()
    assert replica._near is not None
    replica.begin_moving()
    assert replica._near is None
    replica.end_moving()
    replica.let_go()
    model(torch.ones(4, 256, device="cuda")).sum().backward()
    assert replica._near is None


@pytest.mark.parametrize("size", [1, 5, 1003, 5000])
def test_kernels_do_what_torch_does(size):
    fused = kernels.for_device(torch.device("cuda", 0))
    assert fused is not None
    make = lambda: torch.randn(size, device="cuda")  # noqa: E731
    mine, theirs = make(), make()
    pair = [mine.clone(), theirs.clone()]
    fused.pull(*pair, 0.5)
    torch.testing.assert_close(pair[0], (theirs - mine) / 2)
    assert torch.equal(pair[0], -pair[1])
    vectors = [make() for _ in range(8)]
    for part in (0.0, 0.7, 1.0):
        own, native = [v.clone() for v in vectors], [v.clone() for v in vectors]
        weights = [k / 36 for k in range(1, 9)]
        fused.all(own, weights, part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "_kernels", lambda *_: None)
            transfers.combine_all(native, weights, part)
        for one, other in zip(own, native, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    bad, into = torch.zeros(1, dtype=torch.int32, pin_memory=True), make()
    fused.copy(mine, theirs, into, bad)
    torch.cuda.synchronize()
    assert torch.equal(into, mine + theirs)
    assert not bad
    for value in (float("nan"), float("inf")):
        mine[-1] = value
        fused.copy(mine, None, into, bad.zero_())
        torch.cuda.synchronize()
        assert bad


def test_every_correction_is_added_once():
    model = net(256)
    replica = live_replica(model)
    replica.load(torch.zeros(replica.size))
    for k in range(50):
        replica.correct(torch.full((replica.size,), 1.0, device="cuda"), own=True)
        if k % 3 == 0:
            replica.begin_moving()
            replica.boundary()
            replica.end_moving()
    snapshot = asyncio.run(replica.snapshot())
    assert float(snapshot.min()) == float(snapshot.max()) == 50.0


def test_weights_that_are_not_finite_are_seen_at_their_own_snapshot():
    model = net(256)
    replica = live_replica(model)
    asyncio.run(replica.snapshot())
    with torch.no_grad():
        model.bias[3] = float("nan")
    with pytest.raises(Diverged, match="weights of bias are not finite"):
        asyncio.run(replica.snapshot())


def test_a_gpu_without_memory_for_a_window_says_how_much_is_needed(monkeypatch):
    def no_memory(self, size):
        raise OSError("cudaMalloc: out of memory")

    ours = Windows(torch.device("cuda", 0))
    monkeypatch.setattr(Cuda, "malloc", no_memory)
    with pytest.raises(ConfigError, match=r"needs 400 MB on cuda:0, which has [\d,]+ MB left"):
        ours.make(100_000_000, torch.float32)
    torch.zeros(8, device="cuda").sum().item()  # the error is not left behind


def test_the_driver_says_how_large_device_memory_is():
    """A peer's word for it is not needed."""
    cuda = Cuda()
    address = cuda.malloc(1 << 20)
    size = cuda.size(address)
    cuda.free(address)
    assert size is not None
    assert 1 << 20 <= size < 1 << 22


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
