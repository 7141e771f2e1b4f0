"""A replica that two threads use: no snapshot is torn, no correction lost or doubled, memory is reused.

The weights move as the optimizer's hooks move them, in pieces; all elements are equal at every boundary.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading

import pytest
import torch
from torch import nn

from freewheel.errors import Diverged
from freewheel.runtime.worker import live_replica as live
from freewheel.runtime.worker.live_replica import LiveReplica, live_replica

DEADLINE_S = 60.0
CORRECTION = float(2**14)
"""Above the number of steps, so that their sum tells both apart; float32 still holds it exactly."""


class Tower(nn.Module):
    """Parameters of a few shapes and types."""

    def __init__(self, *dtypes: torch.dtype, size: int = 60_000) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for dtype in dtypes)


ONE_BLOCK = (torch.float64, torch.float64)
TWO_BLOCKS = (torch.float64, torch.float32)


class Mover:
    """A training thread: adds 1 to every weight in every step, parameter by parameter, then the boundary."""

    def __init__(self, model: nn.Module, replica: LiveReplica, rests: bool = True) -> None:
        self.model, self.replica, self.rests = model, replica, rests
        self.elsewhere = torch.zeros(3 * replica.size)
        self.begun = self.done = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def step(self) -> None:
        self.begun += 1
        self.replica.begin_moving()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        self.replica.boundary()
        self.replica.end_moving()
        self.done += 1
        if self.rests:  # computes, while the weights stand still
            self.elsewhere.add_(1.0).mul_(0.5)

    def run(self) -> None:
        while not self.ended.is_set():
            self.step()

    def __enter__(self) -> Mover:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


def check(snapshot: torch.Tensor, least: int, most: int, corrections: int) -> None:
    """All elements equal; so many corrections, each once; a number of steps that was true meanwhile."""
    first = snapshot[0].item()
    assert bool((snapshot == first).all()), "torn"
    steps = first - CORRECTION * corrections
    assert least <= steps <= most, f"{steps} steps, not {least} to {most}: a correction is missing or doubled"


@pytest.mark.parametrize("rests", [True, False], ids=["with rests", "moving nearly all the time"])
@pytest.mark.parametrize("dtypes", [ONE_BLOCK, TWO_BLOCKS], ids=["one block", "two blocks"])
def test_no_snapshot_is_torn(dtypes, rests, monkeypatch):
    if not rests:
        monkeypatch.setattr(live, "PATIENCE_S", 1e-3)
    model = Tower(*dtypes)
    replica = live_replica(model)
    with Mover(model, replica, rests) as mover:
        while mover.done < 3:  # the thread must have begun to move
            pass
        for _ in range(200):
            least = mover.done
            snapshot = asyncio.run(replica.snapshot())
            check(snapshot, least, mover.begun, 0)
            replica._spare.append(snapshot)
    assert mover.done > 200


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtypes", [ONE_BLOCK, (torch.float64, torch.float64, torch.float32)])
def test_a_snapshot_holds_what_is_pending_exactly_once(dtypes, own):
    model = Tower(*dtypes, size=30_000)
    replica = live_replica(model)
    given = 0
    with Mover(model, replica) as mover:
        for k in range(300):
            for _ in range(k % 3):  # several before a boundary are joined
                replica.correct(torch.full((replica.size,), CORRECTION, dtype=replica.dtype), own=own)
                given += 1
            least = mover.done
            check(asyncio.run(replica.snapshot()), least, mover.begun, given)
    assert given == 300
    mover.step()  # the last one that is pending
    check(replica.weights, mover.done, mover.done, given)
    check(asyncio.run(replica.snapshot()), mover.done, mover.done, given)


def test_all_corrections_arrive_while_the_training_thread_parks_now_and_then():
    """While it is parked the communication thread may add them itself; none gets lost at the seams."""
    model = Tower(*ONE_BLOCK, size=20_000)
    replica = live_replica(model)
    wanted, parked, go = threading.Event(), threading.Event(), threading.Event()
    ended, gone, steps = threading.Event(), threading.Event(), 0

    def train() -> None:
        nonlocal steps
        while not ended.is_set():
            replica.begin_moving()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            if wanted.is_set():
                replica.end_moving()
                parked.set()
                go.wait(DEADLINE_S)
                gone.set()
                replica.begin_moving()
            replica.boundary()
            replica.end_moving()
            steps += 1

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    given = 0
    for _ in range(50):
        wanted.set()
        assert parked.wait(DEADLINE_S)
        replica.parked = True
        for _ in range(2):
            replica.correct(torch.full((replica.size,), CORRECTION, dtype=replica.dtype), own=True)
            given += 1
            assert replica.weights[0].item() >= CORRECTION * given  # added at once
            check(asyncio.run(replica.snapshot()), steps, steps + 1, given)
        wanted.clear()
        parked.clear()
        replica.parked = False
        go.set()
        replica.correct(torch.full((replica.size,), CORRECTION, dtype=replica.dtype), own=True)
        given += 1
        assert gone.wait(DEADLINE_S)
        gone.clear()
        go.clear()
    ended.set()
    go.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    replica.begin_moving()
    replica.boundary()
    replica.end_moving()
    check(replica.weights, steps, steps, given)


def test_a_snapshot_ends_though_the_training_thread_does_not_step_again():
    """The training thread may be waiting for the communication thread."""
    model = Tower(*ONE_BLOCK, size=8)
    replica = live_replica(model)
    Mover(model, replica).step()
    copy, torn = replica._copy, iter(range(live.TRIES))

    def torn_at_first(into: torch.Tensor) -> None:
        if next(torn, None) is not None:
            replica.version += 2  # a whole step fell into the copy
        copy(into)

    replica._copy = torn_at_first  # type: ignore[method-assign]
    taken: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: taken.append(asyncio.run(replica.snapshot())), daemon=True)
    thread.start()
    thread.join(5.0)
    assert taken, "it waits for a step that does not come"
    check(taken[0], 1, 1, 0)


def test_a_step_that_computes_while_weights_move_holds_up_nothing_but_the_snapshot():
    """A step with a closure takes long. Signs of life must still go out meanwhile."""
    model = Tower(*ONE_BLOCK, size=8)
    replica = live_replica(model)
    mover = Mover(model, replica)
    mover.step()

    async def communicate() -> torch.Tensor:
        replica.begin_moving()
        copying = asyncio.create_task(replica.snapshot())
        for _ in range(3):
            await asyncio.sleep(0)
            assert not copying.done()
        replica.boundary()
        replica.end_moving()
        return await asyncio.wait_for(copying, 5.0)

    check(asyncio.run(communicate()), 1, 1, 0)


def test_weights_that_move_nearly_all_the_time_are_copied_for_the_next_who_asks(monkeypatch):
    """Steps with long closures, one after the other: an exchange is put off, and not for ever."""
    model = Tower(*ONE_BLOCK, size=8)
    replica = live_replica(model)
    mover = Mover(model, replica)
    monkeypatch.setattr(live, "SOON_S", 0.001)

    async def communicate() -> list[torch.Tensor | None]:
        got = []
        mover.step()
        for turn in range(4):
            replica.begin_moving()  # the next closure begins at once
            got.append(await replica.snapshot_soon())
            replica.boundary()
            replica.end_moving()
            if turn == 2:  # what was copied before it is of no use any more
                replica.correct(torch.zeros(replica.size, dtype=torch.float64))
        return got

    first, second, third, fourth = asyncio.run(communicate())
    assert first is third is fourth is None
    assert second is not None
    check(second, 1, 1, 0)


def test_a_snapshot_that_is_given_up_leaves_no_order():
    model = Tower(*ONE_BLOCK, size=8)
    replica = live_replica(model)
    replica._spare.append(asyncio.run(replica.snapshot()))

    async def communicate() -> None:
        replica.begin_moving()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "PATIENCE_S", 0.0)
            copying = asyncio.create_task(replica.snapshot())
            while not replica._orders:
                await asyncio.sleep(0)
            copying.cancel()
            await asyncio.wait([copying])

    asyncio.run(communicate())
    assert not replica._orders


def test_traffic_of_exchanges_needs_two_vectors():
    model = Tower(*ONE_BLOCK, size=5_000)
    replica = live_replica(model)
    seen: dict[int, torch.Tensor] = {}  # holds them, so that the allocator cannot hand one out twice
    with Mover(model, replica) as mover:
        for k in range(200):
            snapshot = asyncio.run(replica.snapshot())
            seen[snapshot.data_ptr()] = snapshot
            before = mover.done
            replica.correct(snapshot.zero_(), own=True)
            if k % 2:  # half of the time the next exchange begins before the boundary
                while mover.done < before + 2:
                    pass
    assert len(seen) <= 2


def test_a_vector_somebody_else_holds_is_neither_changed_nor_used_again():
    model = Tower(*ONE_BLOCK, size=1_000)
    replica = live_replica(model)
    mover = Mover(model, replica)
    held = [torch.full((replica.size,), CORRECTION, dtype=replica.dtype) for _ in range(4)]
    for one, another in itertools.pairwise(held):
        replica.correct(one)
        replica.correct(another, own=False)
        mover.step()
    taken = [asyncio.run(replica.snapshot()) for _ in range(4)]
    assert all(bool((vector == CORRECTION).all()) for vector in held)
    assert not {v.data_ptr() for v in held} & {v.data_ptr() for v in taken}
    check(replica.weights, 3, 3, 6)


def test_gradients_go_in_and_out_as_one_vector():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    replica = live_replica(model)
    model(torch.ones(1, 3)).sum().backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.equal(replica.gradient, torch.cat([flat, torch.ones(3), torch.zeros(1)]))
    model[1].weight.grad = None  # one that took no part has zeros
    gradient = replica.gradient
    assert gradient[8:].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    gradient[:10] += 1
    replica.set_gradient(gradient)
    assert model[1].weight.grad is None  # nobody has one: momentum and weight decay must not move it
    assert torch.equal(model[0].weight.grad.flatten(), flat[:6] + 1)
    gradient[12] = 0.5  # another worker has one
    replica.set_gradient(gradient)
    assert torch.equal(model[1].weight.grad, torch.ones(1, 2))


def test_loading_drops_what_is_pending():
    model = Tower(*ONE_BLOCK, size=10)
    replica = live_replica(model)
    replica.correct(torch.full((replica.size,), CORRECTION, dtype=replica.dtype))
    replica.load(torch.full((replica.size,), 5.0, dtype=replica.dtype))
    Mover(model, replica).step()
    assert bool((replica.weights == 6).all())


def test_the_mean_is_exact_over_ten_thousand_exchanges_with_a_thread_that_steps_all_the_time():
    """Each correction counts once in every snapshot after it, and in no torn one; both sides' sum to zero."""
    models = [Tower(torch.float64, size=256) for _ in range(2)]
    replicas = [live_replica(model) for model in models]
    huge = float(2**30)

    async def exchange(movers: list[Mover]) -> None:
        given = 0
        for k in range(10_000):
            sign = 1 if k % 2 == 0 else -1
            snapshots = []
            for one, mover, replica in zip((1, -1), movers, replicas, strict=True):
                least = mover.done
                snapshot = await replica.snapshot()
                first = snapshot[0].item()
                assert bool((snapshot == first).all()), "torn"
                assert least <= first - one * given * huge <= mover.begun
                snapshots.append(snapshot)
            for one, replica, snapshot in zip((1, -1), replicas, snapshots, strict=True):
                replica.correct(snapshot.fill_(one * sign * huge), own=True)
            given += sign

    both = [Mover(model, replica) for model, replica in zip(models, replicas, strict=True)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # three threads take turns
    try:
        with both[0], both[1]:
            while min(mover.done for mover in both) < 3:
                pass
            asyncio.run(exchange(both))
    finally:
        sys.setswitchinterval(before)
    for mover in both:
        mover.step()  # what is still pending
    total = replicas[0].weights + replicas[1].weights
    assert bool((total == sum(mover.done for mover in both)).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_seen_at_their_own_snapshot(value):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    replica = live_replica(model)
    asyncio.run(replica.snapshot())
    with torch.no_grad():
        model[1].bias[0] = value
    with pytest.raises(Diverged, match=r"weights of 1\.bias are not finite"):
        asyncio.run(replica.snapshot())


def test_weights_whose_sum_overflows_are_finite():
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(3e38)
    asyncio.run(live_replica(model).snapshot())


def test_gradients_that_are_not_finite_are_not_merged():
    model = nn.Linear(2, 1)
    replica = live_replica(model)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad.fill_(float("nan"))
    with pytest.raises(Diverged, match="gradients of bias are not finite"):
        _ = replica.gradient


def test_gradients_are_used_where_they_were_merged_and_their_memory_again():
    model = nn.Linear(4, 3)
    replica = live_replica(model)
    seen = set()
    for k in range(6):
        model.zero_grad(set_to_none=k % 2 == 0)
        model(torch.ones(2, 4)).sum().backward()
        merged = replica.gradient.mul_(2.0)
        seen.add(merged.data_ptr())
        replica.set_gradient(merged)
        assert model.bias.grad.tolist() == [4.0] * 3
        assert merged.data_ptr() <= model.weight.grad.data_ptr() < merged.data_ptr() + merged.nbytes
    assert len(seen) == 2
