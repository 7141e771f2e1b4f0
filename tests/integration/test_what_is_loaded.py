"""What a worker's loader takes: batch sizes that differ, samplers, streams, torch's own DataLoader."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections import Counter

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import freewheel as fw
from crew import outcomes, together, worker

pytestmark = pytest.mark.integration


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def used(n: int, make, passes: int = 2, strategy: str = "none") -> list[list[list[int]]]:
    """What each worker's loader gave: a list of batches for each pass."""

    def work(place):
        net = model()
        made, optimizer = worker(place, net, strategy)
        with made as me:
            loader, found = make(me), []
            for _ in range(passes):
                found.append([])
                for batch in loader:
                    found[-1].append(batch.tolist())
                    optimizer.zero_grad()
                    net(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
            assert me.metrics()["samples_again"] == 0
        return found

    return together(n, work)


def flat(found: list[list[list[int]]], number: int) -> list[int]:
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(one[number] for one in found)))


def test_workers_with_different_batch_sizes_share_the_samples_of_a_pass():
    found = used(3, lambda me: me.loader(list(range(360)), batch_size=(4, 8, 5)[me.rank]))
    for number in range(2):
        assert sorted(flat(found, number)) == list(range(360))
        assert all(one[number] for one in found)  # and everybody has some of it
    assert [max(map(len, itertools.chain.from_iterable(one))) for one in found] == [4, 8, 5]


def test_a_short_pass_is_shared_alike():
    ready = threading.Barrier(4)

    def make(me):
        ready.wait(60)
        return me.loader(list(range(256)), batch_size=16)

    found = used(4, make, passes=3)
    assert max(len(one[number]) for one in found for number in range(3)) <= 10  # one took nearly all 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda me: me.loader(list(range(40 + me.rank)), 4), r"1's loader has 41 samples, .*0's has 40"),
        (lambda me: me.loader(list(range(40)), 4, seed=me.rank), r"1's .*with seed 1; worker 0's .*seed 0"),
        (lambda me: me.loader(list(range(40)), 4, shuffle=me.rank == 0), r"1's loader has .* in order"),
        (
            lambda me: me.loader(list(range(40)), 4, sampler=torch.randperm(40, generator=seeded(me.rank))),
            "worker 1's loader gives another order than worker 0's",
        ),
    ],
)
def test_workers_with_other_data_are_refused_by_name(make, message):
    begun, over = threading.Event(), threading.Event()

    def work(place):
        made, _ = worker(place, model(), "none")
        with made as me:
            if place.rank == 1:
                assert begun.wait(60)
            try:
                for _ in make(me):
                    begun.set()  # worker 0's is known: the other one is another
                    assert place.rank == 1 or over.wait(60)
            finally:
                over.set() if place.rank == 1 else begun.set()

    first, second = outcomes(2, work)
    assert first is None
    with pytest.raises(fw.ConfigError, match=message):
        raise second
    assert len(str(second).split()) <= 30


def test_where_all_step_together_batch_sizes_must_be_the_same():
    begun = threading.Event()

    def work(place):
        net = model()
        made, optimizer = worker(place, net, "allreduce")
        with made as me:
            assert place.rank == 0 or begun.wait(60)
            for _ in me.loader(list(range(40)), batch_size=4 + 4 * me.rank):
                begun.set()  # worker 0's is known: the other one is another
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    _, second = outcomes(2, work)
    with pytest.raises(fw.ConfigError, match=r"in 6 batches; worker 0's .* in 10 batches. Give all the same"):
        raise second


def test_other_samples_of_the_same_number_are_named(caplog):
    used(2, lambda me: me.loader([k + me.rank for k in range(40)], 4), passes=1)
    either = "0 has other samples than worker 1", "1 has other samples than worker 0"  # who comes later
    assert any(f"worker {one}, though as many" in caplog.text for one in either)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_a_sampler_draws_is_dealt_once():
    weights = torch.tensor([0.0] * 10 + [1.0] * 90)

    def make(me):
        torch.manual_seed(me.rank)  # what it draws must not depend on it
        return me.loader(list(range(100)), 5, sampler=WeightedRandomSampler(weights, 100))

    found = used(2, make)
    first, second = (Counter(flat(found, number)) for number in range(2))
    assert sum(first.values()) == sum(second.values()) == 100
    assert first != second
    assert min(first) >= 10
    assert max(first.values()) > 1


class Buckets(BatchSampler):
    """Batches of samples that are alike, in an order of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.seed()  # another one on each worker

    def __iter__(self):
        starts = torch.randperm(13, generator=self.generator).tolist()
        return iter([list(range(5 * k, 5 * k + 5)) for k in starts])

    def __len__(self) -> int:
        return 13


def test_batches_of_a_batch_sampler_stay_whole():
    found = used(2, lambda me: me.loader(list(range(65)), batch_sampler=Buckets()))
    for number in range(2):
        assert sorted(flat(found, number)) == list(range(65))
        assert all(batch[0] % 5 == 0 and len(batch) == 5 for one in found for batch in one[number])
    assert found[0][0] != found[0][1]


def test_where_all_step_together_a_batch_sampler_s_batches_are_as_many_for_each(caplog):
    found = used(2, lambda me: me.loader(list(range(65)), batch_sampler=Buckets()), strategy="allreduce")
    assert [[len(number) for number in one] for one in found] == [[6, 6], [6, 6]]
    assert len(set(flat(found, 0))) == 60
    assert "the last 1 of each pass are left out" in caplog.text


class Stream(IterableDataset):
    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


@pytest.mark.parametrize(("strategy", "kept"), [("none", 23), ("allreduce", 22)])
def test_a_stream_is_split_and_says_so(caplog, strategy, kept):
    found = used(2, lambda me: me.loader(Stream(), batch_size=4), strategy=strategy)
    for number in range(2):
        assert sorted(flat(found, number)) == list(range(kept))
    assert "a stream cannot be dealt: each of 2 workers keeps one of as many" in caplog.text
    if strategy == "allreduce":
        assert [len(one[0]) for one in found] == [3, 3]


def test_a_stream_of_each_worker_s_own_is_left_as_it_is():
    found = used(2, lambda me: me.loader(Stream(4 + me.rank), batch_size=2, sharded=True), passes=1)
    assert [len(flat([one], 0)) for one in found] == [4, 5]


class Pairs(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(scope="module")
def alone():
    net = model()
    with fw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "none") as worker:
        yield worker


def halves(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


def test_a_dataloader_of_torch_s_is_taken_with_all_it_says(alone):
    given = DataLoader(Pairs(), batch_size=6, shuffle=True, drop_last=True, collate_fn=halves, num_workers=2)
    loader = alone.loader(given)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [6] * 6
    assert all(one % 2 == 0 for batch in batches for one in batch.tolist())
    assert batches[0].tolist() != sorted(batches[0].tolist())
    assert len(loader.dataset) == len(loader.sampler) == 40
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (6, True, 2)
    assert (loader.collate_fn, loader.pin_memory, len(loader)) == (halves, False, 6)
    with pytest.raises(AttributeError, match="a worker's loader has no attribute 'batchsize'"):
        _ = loader.batchsize


def test_a_process_that_loads_destroys_nothing_of_its_parent_s(alone):
    class Cycle:
        def __init__(self):
            self.me, self.store = self, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    given = DataLoader(Pairs(), batch_size=8, num_workers=1, worker_init_fn=lambda _: gc.collect())
    gc.disable()
    try:
        for _ in range(3):
            Cycle()  # garbage with threads, which a forked process does not have
        assert len(list(alone.loader(given))) == 5
    finally:
        gc.enable()


def test_the_order_of_a_dataloader_is_kept(alone):
    in_order = alone.loader(DataLoader(Pairs(), batch_size=8))
    assert torch.cat(list(in_order)).tolist() == list(range(40))
    subset = alone.loader(DataLoader(Subset(Pairs(), [3, 1, 2]), batch_size=2))
    assert torch.cat(list(subset)).tolist() == [3, 1, 2]
    few = alone.loader(
        DataLoader(Pairs(), 4, sampler=RandomSampler(Pairs(), replacement=True, num_samples=8))
    )
    assert [len(batch) for batch in few] == [4, 4]
    buckets = alone.loader(
        DataLoader(Pairs(), batch_sampler=BatchSampler(SequentialSampler(Pairs()), 7, True))
    )
    assert [len(batch) for batch in buckets] == [7] * 5
    assert buckets.batch_size is None
    stream = alone.loader(DataLoader(Stream(5), batch_size=2))
    assert torch.cat(list(stream)).tolist() == list(range(5))
    assert len(alone.loader(DataLoader(Pairs()), batch_size=5)) == 8  # what is given beside it counts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda me: me.loader(DataLoader(Pairs(), batch_size=None)), "not batches.*Give it a batch_size"),
        (
            lambda me: me.loader(Pairs(), 4, sampler=DistributedSampler(Pairs(), 2, 0)),
            "is a DistributedSampler, which deals by rank",
        ),
        (lambda me: me.loader(Pairs(), 4, sampler=iter([1, 2])), "has no length.*Give it __len__"),
        (
            lambda me: me.loader(
                Pairs(), 4, sampler=RandomSampler(Pairs(), replacement=True, num_samples=10**10)
            ),
            "draws 10,000,000,000 times a pass.*at most 30,000,000. Give it fewer draws",
        ),
        (lambda me: me.loader(Stream(), 4, sampler=[1]), "a stream comes in its own order.*no sampler"),
        (
            lambda me: list(me.loader(Pairs(), 4, sampler=Liar())),
            "pass 0 of Liar has 3 draws, and its len is 9",
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused(alone, make, message):
    with pytest.raises(fw.ConfigError, match=message) as error:
        make(alone)
    assert len(str(error.value).split()) <= 30


class Liar:
    def __len__(self) -> int:
        return 9

    def __iter__(self):
        return iter([1, 2, 3])


def test_a_pass_by_a_sampler_goes_on_after_a_resume_unless_its_order_is_another(caplog):
    def run(state=None, weights=None, stop=None):
        def work(place):
            made, _ = worker(place, model(), "none")
            with made as me:
                sampler = WeightedRandomSampler(weights or [1.0] * 20, 20)
                loader, found = me.loader(list(range(20)), 4, sampler=sampler), []
                if state:
                    loader.load_state_dict(state)
                for batch in loader:
                    found.append(batch.tolist())
                    if len(found) == stop:
                        return found, loader.state_dict()
                return found, None

        return together(1, work)[0]

    whole, _ = run()
    first, state = run(stop=2)
    assert first + run(state)[0] == whole
    with caplog.at_level(logging.WARNING):
        assert len(run(state, weights=[*range(20)])[0]) == 5
    assert "pass 0 begins anew: the checkpoint was taken with another order of its sampler" in caplog.text


def test_a_stream_goes_on_after_a_resume(alone):
    loader = alone.loader(Stream(10), batch_size=2)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(2)]
    waits, again = (alone.loader(Stream(10), batch_size=2) for _ in range(2))
    waits.load_state_dict(loader.state_dict())
    again.load_state_dict(waits.state_dict())  # of a checkpoint before it was read on
    assert first == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in again] == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(TypeError):
        len(again)


def test_a_pass_goes_on_with_another_batch_size():
    def run(batch_size, state=None, stop=None):
        def work(place):
            made, _ = worker(place, model(), "none")
            with made as me:
                loader, found = me.loader(list(range(40)), batch_size), []
                if state:
                    loader.load_state_dict(state)
                for batch in loader:
                    found += batch.tolist()
                    if len(found) == stop:
                        return found, loader.state_dict()
                return found, None

        return together(1, work)[0]

    first, state = run(8, stop=16)
    rest, _ = run(5, state)
    assert sorted(first + rest) == list(range(40))


def test_what_a_tensor_dataset_holds_is_known_without_reading_it():
    from freewheel.data.order import fingerprint

    def data(seed: int) -> TensorDataset:
        return TensorDataset(torch.randn(500, 3, generator=seeded(seed)), torch.arange(500))

    assert fingerprint(data(1)) == fingerprint(data(1)) != fingerprint(data(2))
    assert fingerprint(Pairs()) == 0
