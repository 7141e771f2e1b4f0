"""The loader: every sample once, the same number of batches for all, the same order from the same seed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import freewheel as fw
from freewheel.runtime.loader import Loader, Shares

sizes = {"length": st.integers(1, 200), "batch_size": st.integers(1, 20), "workers": st.integers(1, 9)}


def deal(length: int, batch_size: int, workers: int, epoch: int = 0, **options) -> list[list[list[int]]]:
    """The batches of every worker in one pass."""
    dealt = []
    for rank in range(workers):
        shares = Shares(length, batch_size, rank, workers, **options)
        shares.epoch = epoch
        dealt.append(list(shares))
        assert len(shares) == len(dealt[-1])
    return dealt


def flat(dealt: list[list[list[int]]]) -> list[int]:
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(dealt)))


@given(**sizes, seed=st.integers(0, 5), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_each_sample_comes_once_and_all_have_as_many_batches(
    length, batch_size, workers, seed, epoch, shuffle
):
    assume(length >= workers and (batch_size > 1 or length % workers == 0))
    dealt = deal(length, batch_size, workers, epoch, seed=seed, shuffle=shuffle)
    assert sorted(flat(dealt)) == list(range(length))
    assert len({len(batches) for batches in dealt}) == 1
    assert all(1 <= len(batch) <= batch_size for batches in dealt for batch in batches)
    largest = math.ceil(length / workers)
    assert len(dealt[0]) == math.ceil(largest / batch_size)  # no more than needed


@given(**sizes)
def test_batches_are_full_unless_some_shares_would_lack_one(length, batch_size, workers):
    assume(length >= workers and (batch_size > 1 or length % workers == 0))
    some_lack_one = length % workers and length // workers % batch_size == 0
    for batches in deal(length, batch_size, workers):
        counts = [len(batch) for batch in batches]
        if some_lack_one:
            assert max(counts) - min(counts) <= 1
        else:
            assert set(counts[:-1]) <= {batch_size}


@given(**sizes, epoch=st.integers(0, 5))
def test_drop_last_leaves_full_batches_only(length, batch_size, workers, epoch):
    assume(length // workers >= batch_size)
    dealt = deal(length, batch_size, workers, epoch, drop_last=True)
    seen = flat(dealt)
    assert len(set(seen)) == len(seen)
    assert {len(batch) for batches in dealt for batch in batches} == {batch_size}
    assert {len(batches) for batches in dealt} == {length // workers // batch_size}


@given(seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
def test_the_order_is_that_of_the_seed_and_the_pass(seed, epoch):
    dealt = deal(100, 10, 3, epoch, seed=seed)
    assert dealt == deal(100, 10, 3, epoch, seed=seed)
    assert dealt != deal(100, 10, 3, epoch + 1, seed=seed)
    assert dealt != deal(100, 10, 3, epoch, seed=seed + 1)
    assert flat(dealt) == flat(deal(100, 10, 1, epoch, seed=seed))  # one order, however many share it


def test_unshuffled_shares_lie_one_after_another():
    assert deal(10, 3, 2, shuffle=False) == [[[0, 1, 2], [3, 4]], [[5, 6, 7], [8, 9]]]
    assert deal(9, 4, 2, shuffle=False) == [[[0, 1], [2, 3]], [[4, 5], [6, 7, 8]]]  # 4 and 5: no batch of 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shares(3, 2, 0, 4), r"3 samples cannot be dealt to 4 workers.*more data or .*fewer workers"),
        (lambda: Shares(0, 2), r"0 samples cannot be dealt to 1 workers"),
        (lambda: Shares(5, 1, 0, 2), r"batches of 1 .*batch_size of 2 or more, or drop_last=True"),
        (lambda: Shares(9, 5, 0, 2, drop_last=True), r"share is 4 of 9 .*batch_size of 4 or less"),
        (lambda: Shares(9, 0), r"batch_size must be at least 1, not 0"),
        (lambda: Shares(9, None), r"batch_size must be a whole number, not None"),
        (lambda: Shares(9, 3, 2, 2), r"no worker 2 among 2, only 0 to 1"),
        (lambda: Loader([1, 2], 1, sampler=[0]), r"takes no sampler.*Leave it out"),
        (lambda: Loader([1, 2], 1, batch_sampler=[[0]]), r"takes no batch_sampler"),
        (lambda: Loader([1, 2], 1).set_epoch(-1), r"epoch must be at least 0, not -1"),
        (lambda: Loader(iter([1, 2]), 1), r"iterator has no length.*__len__ and __getitem__"),
        (lambda: Loader(torch.tensor(1), 1), r"Tensor has no length"),
        (lambda: Loader({1, 2}, 1), r"set has no length and no samples by index"),
    ],
)
def test_what_cannot_be_dealt_is_refused(make, message):
    with pytest.raises(fw.ConfigError, match=message):
        make()


def test_a_dataset_without_an_order_is_refused_even_if_it_has_a_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

        def __len__(self):
            return 4

    with pytest.raises(fw.ConfigError, match=r"a Stream has no .*every world_size-th sample"):
        Loader(Stream(), 2)


def test_unknown_options_are_not_swallowed():
    with pytest.raises(TypeError, match="numworkers"):
        Loader([1, 2], 1, numworkers=2)


def test_every_pass_is_the_next_epoch():
    loader = Loader(torch.arange(50), 8, rank=1, world_size=2, seed=3)
    passes = []
    for epoch in range(3):
        passes.append([batch.tolist() for batch in loader])
        assert loader.epoch == epoch
        shares = Shares(50, 8, 1, 2, seed=3)
        shares.epoch = epoch
        assert passes[-1] == list(shares)
    loader.set_epoch(1)
    assert loader.epoch == 1
    assert [batch.tolist() for batch in loader] == passes[1]
    assert [batch.tolist() for batch in loader] == passes[2]
    assert len(loader) == len(passes[0]) == 4


def test_a_pass_that_was_broken_off_counts():
    loader = Loader(torch.arange(50), 8)
    first = next(iter(loader))
    assert not torch.equal(next(iter(loader)), first)
    assert loader.epoch == 1


@pytest.mark.parametrize("processes", [0, 2])
def test_stop_ends_the_pass_after_the_batch_in_hand(processes):
    told = []
    loader = Loader(list(range(40)), 4, stopped=lambda: bool(told), num_workers=processes)
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == 3:
            told.append(True)
    assert len(seen) == 3
    assert list(loader) == []  # and no other pass begins
    assert loader.epoch == 0
    told.clear()
    assert len(list(loader)) == 10


def test_what_may_be_given_as_a_dataset():
    inputs, targets = torch.arange(12.0).view(6, 2), torch.arange(6)
    pairs = list(Loader(TensorDataset(inputs, targets), 4, shuffle=False))
    assert [len(batch) for batch in pairs[0]] == [4, 4]
    assert torch.equal(pairs[1][0], inputs[4:])
    assert torch.equal(torch.cat(list(Loader(inputs, 4, shuffle=False))), inputs)
    assert torch.cat(list(Loader([3, 1, 4, 1, 5], 2, shuffle=False))).tolist() == [3, 1, 4, 1, 5]
    assert list(Loader("freewheel", 4, shuffle=False, collate_fn="".join)) == ["free", "whee", "l"]


class Dice:
    """A dataset that draws at random while it is read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(torch.randint(1 << 40, ()))


def test_processes_load_the_same_batches_and_draw_what_the_seed_and_the_rank_say():
    def thrown(rank: int) -> list[list[int]]:
        torch.manual_seed(0)  # as scripts do, the same in every worker
        loader = Loader(Dice(), 4, rank=rank, world_size=2, num_workers=2)
        by_hand = Shares(16, 4, rank, 2)
        dice = []
        for by_hand.epoch in (0, 1):
            got = list(loader)
            assert [batch[0].tolist() for batch in got] == list(by_hand)
            dice.append([draw for batch in got for draw in batch[1].tolist()])
        return dice

    zero = thrown(0)
    assert zero == thrown(0)
    assert zero[0] != zero[1]
    assert not set(zero[0]) & set(thrown(1)[0])


def test_processes_may_persist():
    loader = Loader(torch.arange(40), 4, num_workers=2, persistent_workers=True)
    once = Loader(torch.arange(40), 4)
    for _ in range(3):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in once]


def test_a_generator_of_the_user_s_own_is_left_alone():
    generator = torch.Generator().manual_seed(7)
    loader = Loader(list(range(8)), 4, generator=generator)
    list(loader)
    drawn = torch.Generator().manual_seed(7)
    torch.empty((), dtype=torch.int64).random_(generator=drawn)  # DataLoader's own draw
    assert torch.equal(generator.get_state(), drawn.get_state())


def test_pinned_memory_is_passed_on():
    loader = Loader(torch.arange(8), 4, pin_memory=True)
    if torch.cuda.is_available():
        assert all(batch.is_pinned() for batch in loader)
    else:
        with pytest.warns(UserWarning, match="pin_memory"):
            assert len(list(loader)) == 2
