"""The loader: every sample once, the same order from the same seed, and what it refuses."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import crew
import freewheel as fw
from freewheel.data.batches import Key
from freewheel.data.order import Seeded, order
from freewheel.runtime.loading.sampler import LeaseSampler, Side

sizes = {"length": st.integers(1, 200), "batch_size": st.integers(1, 20), "workers": st.integers(1, 9)}

DEADLINE_S = 60.0


def cut(length: int, batch_size: int, workers: int, parts: bool = False, **options) -> LeaseSampler:
    """How the order is cut into batches; nobody is asked for any."""
    side = Side(lambda: None, world_size=workers, parts=parts)
    return LeaseSampler(side, Seeded(length, True, 0), batch_size, **options)


def counts(leases: LeaseSampler) -> list[int]:
    """How many samples the batches have, in order; each begins where the one before it ends."""
    key = Key(leases.dealt, 0, grid=leases.count if leases.side.parts else 0)
    places = key.cut(0, key.length, leases.batch_size)
    assert [start for start, _ in places] == [0, *(stop for _, stop in places)][: len(places)]
    found = [stop - start for start, stop in places]
    return [one for one in found if one == leases.batch_size] if leases.drop_last else found


@given(**sizes, parts=st.booleans())
def test_batches_hold_each_sample_once(length, batch_size, workers, parts):
    assume(length >= workers and (batch_size > 1 or length % workers == 0))
    assume(parts or math.ceil(length / batch_size) >= workers)
    found = counts(cut(length, batch_size, workers, parts=parts))
    assert sum(found) == length
    assert all(1 <= count <= batch_size for count in found)


@given(**sizes)
def test_in_parts_all_workers_have_as_many_batches_and_batches_are_alike(length, batch_size, workers):
    assume(length >= workers and (batch_size > 1 or length % workers == 0))
    leases = cut(length, batch_size, workers, parts=True)
    found = counts(leases)
    assert len(found) % workers == 0
    assert max(found) - min(found) <= 1
    assert len(leases) == len(found) // workers == math.ceil(length / workers / batch_size)


@given(**sizes, parts=st.booleans())
def test_drop_last_leaves_full_batches_only(length, batch_size, workers, parts):
    assume(length // workers >= batch_size)
    leases = cut(length, batch_size, workers, parts=parts, drop_last=True)
    assert set(counts(leases)) == {batch_size}
    together = batch_size * workers if parts else batch_size
    assert length - sum(counts(leases)) < together


@pytest.fixture(scope="module")
def alone():
    """A worker that trains by itself."""
    model = torch.nn.Linear(1, 1)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none") as worker:
        yield worker


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda _: cut(3, 2, 4, parts=True),
            r"3 samples in batches of 2 are less.*fewer workers",
        ),
        (lambda _: cut(0, 2, 1), r"0 samples in batches of 2 are less than a batch for each of 1"),
        (lambda _: cut(5, 1, 2, parts=True), r"batches of 1 .*batch_size of 2 or more, or drop_last=True"),
        (lambda _: cut(9, 5, 2, parts=True, drop_last=True), r"take a smaller batch_size or fewer workers"),
        (lambda _: cut(9, 0, 1), r"batch_size must be at least 1, not 0"),
        (lambda _: cut(9, None, 1), r"batch_size must be a whole number, not None"),
        (lambda worker: worker.loader([1, 2], 1).set_epoch(-1), r"epoch must be at least 0, not -1"),
        (lambda worker: worker.loader(iter([1, 2]), 1), r"iterator has no length.*__len__ and __getitem__"),
        (lambda worker: worker.loader(torch.tensor(1), 1), r"Tensor has no length"),
        (lambda worker: worker.loader({1, 2}, 1), r"set has no length and no samples by index"),
    ],
)
def test_what_cannot_be_dealt_is_refused(alone, make, message):
    with pytest.raises(fw.ConfigError, match=message):
        make(alone)


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
def test_the_order_is_that_of_the_seed_and_the_pass(seed, epoch):
    found = order(100, True, seed, epoch)
    assert sorted(found.tolist()) == list(range(100))
    assert torch.equal(found, order(100, True, seed, epoch))
    assert not torch.equal(found, order(100, True, seed, epoch + 1))
    assert not torch.equal(found, order(100, True, seed + 1, epoch))


def test_unknown_options_are_not_swallowed(alone):
    with pytest.raises(TypeError, match="numworkers"):
        alone.loader([1, 2], 1, numworkers=2)


def test_every_pass_is_the_next_epoch(alone):
    loader = alone.loader(torch.arange(50), 8, seed=3)
    passes = []
    for epoch in range(3):
        passes.append([batch.tolist() for batch in loader])
        assert loader.epoch == epoch
        assert [k for batch in passes[-1] for k in batch] == order(50, True, 3, epoch).tolist()
    assert len(loader) == len(passes[0]) == 7


def test_a_pass_may_be_chosen(alone):
    loader = alone.loader(torch.arange(50), 8, seed=4)
    loader.set_epoch(1)
    assert loader.epoch == 1
    assert torch.equal(torch.cat(list(loader)), order(50, True, 4, 1))


def test_a_pass_that_was_broken_off_counts(alone):
    loader = alone.loader(torch.arange(50), 8)
    first = next(iter(loader))
    assert not torch.equal(next(iter(loader)), first)
    assert loader.epoch == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_stop_ends_the_pass_after_the_batch_in_hand(processes):
    model = torch.nn.Linear(1, 1)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none") as worker:
        loader = worker.loader(list(range(40)), 4, num_workers=processes)
        seen = []
        for batch in loader:
            seen.append(batch)
            if len(seen) == 3:
                worker.stop()
        assert len(seen) == 3
        assert list(loader) == []  # and no other pass begins
        assert loader.epoch == 0


def test_what_may_be_given_as_a_dataset(alone):
    inputs, targets = torch.arange(12.0).view(6, 2), torch.arange(6)
    pairs = list(alone.loader(TensorDataset(inputs, targets), 4, shuffle=False))
    assert [len(batch) for batch in pairs[0]] == [4, 4]
    assert torch.equal(pairs[1][0], inputs[4:])
    assert torch.equal(torch.cat(list(alone.loader(inputs, 4, shuffle=False))), inputs)
    assert torch.cat(list(alone.loader([3, 1, 4, 1, 5], 2, shuffle=False))).tolist() == [3, 1, 4, 1, 5]
    assert list(alone.loader("freewheel", 4, shuffle=False, collate_fn="".join)) == ["free", "whee", "l"]


class Dice:
    """A dataset that draws at random while it is read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(1 << 40, ()))


def test_processes_load_the_same_batches_and_draw_what_the_seed_and_the_rank_say():
    seeded = {n: threading.Barrier(n) for n in (1, 2)}

    def thrown(place):
        model = torch.nn.Linear(1, 1)
        made, _ = crew.worker(place, model, "none")
        with made as me:
            torch.manual_seed(0)  # as scripts do, the same in every worker
            # Workers are threads here: a process forked while another one seeds would wait for torch's lock.
            seeded[place.world_size].wait(DEADLINE_S)
            loader = me.loader(Dice(), 4, num_workers=2)
            return [[draw for batch in loader for draw in batch[1].tolist()] for _ in range(2)]

    (zero,), (again,) = (crew.together(1, thrown) for _ in range(2))
    assert zero == again
    assert zero[0] != zero[1]
    first, second = crew.together(2, thrown)
    assert not set(first[0]) & set(second[0])


def test_processes_may_persist(alone):
    loader = alone.loader(torch.arange(40), 4, num_workers=2, persistent_workers=True)
    once = alone.loader(torch.arange(40), 4)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in once]


def test_a_generator_of_the_user_s_own_is_left_alone(alone):
    generator = torch.Generator().manual_seed(7)
    loader = alone.loader(list(range(8)), 4, generator=generator)
    list(loader)
    drawn = torch.Generator().manual_seed(7)
    torch.empty((), dtype=torch.int64).random_(generator=drawn)  # DataLoader's own draw
    assert torch.equal(generator.get_state(), drawn.get_state())


def test_pinned_memory_is_passed_on(alone):
    loader = alone.loader(torch.arange(8), 4, pin_memory=True)
    if torch.cuda.is_available():
        assert all(batch.is_pinned() for batch in loader)
    else:
        with pytest.warns(UserWarning, match="pin_memory"):
            assert len(list(loader)) == 2


def test_loaders_made_anew_for_each_pass_count_on_and_their_order_is_warned_of(caplog):
    model = torch.nn.Linear(1, 1)
    with fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "none") as worker:
        for k in range(3):
            loader = worker.loader(list(range(10)), batch_size=2)
            assert worker.progress == k
            assert len(list(loader)) == 5
            assert worker.progress == k + 1
        list(worker.loader(list(range(7)), batch_size=2))  # other data
        assert worker.progress == 3
    found = [one for one in caplog.messages if "made no step" not in one]  # it only looks at the batches
    assert [one.count("same order as the first") for one in found] == [1]
