"""Leases for real: threads, sockets and torch's DataLoader, with unequal speeds and workers that go."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter

import pytest
import torch

import freewheel as fw
from crew import outcomes, together, worker

pytestmark = pytest.mark.integration


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def flat(batches) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def test_every_sample_comes_once_a_pass_and_fast_workers_take_more():
    counts, moved = [0, 0, 0], threading.Condition()

    def work(place):
        net = model()
        made, optimizer = worker(place, net)
        passes = []
        with made as me:
            loader = me.loader(list(range(1003)), batch_size=5)
            for _ in range(2):
                seen = []
                for batch in loader:
                    seen.append(batch.tolist())
                    step(net, optimizer)
                    with moved:
                        counts[place.rank] += 1
                        moved.notify_all()
                        if place.rank == 1:  # whatever the machine does, both others do more
                            moved.wait_for(lambda: min(counts[0], counts[2]) > 3 * counts[1], 0.5)
                passes.append(seen)
            metrics = me.metrics()
        return passes, metrics, me.progress

    ended = together(3, work)
    for k in (0, 1):
        assert sorted(flat(flat(passes[k] for passes, _, _ in ended))) == list(range(1003))
        sizes = Counter(len(batch) for passes, _, _ in ended for batch in passes[k])
        assert sizes == {5: 200, 3: 1}
    taken = [sum(map(len, passes)) for passes, _, _ in ended]
    assert 0 < taken[1] < min(taken[0], taken[2])
    assert sum(metrics["samples"] for _, metrics, _ in ended) == 2006
    assert sum(metrics["samples_again"] for _, metrics, _ in ended) == 0
    assert max(progress for _, _, progress in ended) == 2.0


@pytest.mark.parametrize(("strategy", "leaver"), [("adpsgd", 0), ("adpsgd", 2), ("allreduce", 0)])
def test_what_a_worker_that_leaves_held_is_dealt_again(strategy, leaver):
    gone = threading.Event()

    def work(place):
        net = model()
        made, optimizer = worker(place, net, strategy)
        seen: list[int] = []
        try:
            with made as me:
                for batch in me.loader(list(range(600)), batch_size=4, epochs=1):
                    seen += batch.tolist()
                    step(net, optimizer)
                    if place.rank == leaver and len(seen) >= 40:
                        raise RuntimeError("enough")
                    if place.rank != leaver:
                        gone.wait(0.002)
                again = me.metrics()["samples_again"]
        except RuntimeError:
            gone.set()
            return seen, 0
        return seen, again

    ended = outcomes(3, work)
    used = Counter(flat(seen for seen, _ in ended))
    assert set(used) == set(range(600))
    assert len(ended[leaver][0]) == 40
    assert 0 < sum(used.values()) - 600 <= sum(again for _, again in ended)


def test_processes_that_load_ahead_and_a_collate_function_of_one_s_own():
    def work(place):
        net = model()
        made, optimizer = worker(place, net)
        seen = []
        with made as me:
            options = {"num_workers": 2, "collate_fn": tuple}
            for batch in me.loader(list(range(120)), batch_size=4, epochs=1, **options):
                assert isinstance(batch, tuple)
                seen += batch
                step(net, optimizer)
            again = me.metrics()["samples_again"]
        return seen, again

    ended = together(2, work)
    assert sorted(flat(seen for seen, _ in ended)) == list(range(120))
    assert sum(again for _, again in ended) == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_one_worker_gets_the_same_batches_again_and_goes_on_where_it_was(processes):
    def run(stop_after=None, state=None):
        def work(place):
            made, _ = worker(place, model())
            with made as me:
                loader = me.loader(list(range(50)), batch_size=4, seed=3, num_workers=processes)
                if state:
                    loader.load_state_dict(state)
                got = []
                for _ in range(2):
                    for batch in loader:
                        got.append((loader.epoch, batch.tolist()))
                        if len(got) == stop_after:
                            return got, loader.state_dict()
                    if state and loader.epoch == 1:
                        break
                return got, loader.state_dict()

        return together(1, work)[0]

    whole, _ = run()
    assert len(whole) == 26
    assert sorted(flat(batch for epoch, batch in whole if epoch == 0)) == list(range(50))
    assert run()[0] == whole
    for cut in (1, 5, 13, 14, 20):
        first, state = run(stop_after=cut)
        assert first == whole[:cut]
        rest, _ = run(state=state)
        assert rest == whole[cut:]


def test_a_state_holds_what_this_worker_has_finished_and_not_what_others_did_after_their_own():
    went_on = threading.Event()
    kept: dict[int, tuple[list[int], dict]] = {}

    def first(place):
        net = model()
        made, optimizer = worker(place, net)
        with made as me:
            loader, seen = me.loader(list(range(240)), batch_size=4), []
            for number, batch in enumerate(loader, 1):
                step(net, optimizer)
                seen += batch.tolist()
                if me.rank == 1 and number == 3:
                    kept[1] = list(seen), loader.own_state()
                if me.rank == 1 and number == 15:  # the dealer has heard of more than 3 by now
                    went_on.set()
                if me.rank == 0 and number == 4:
                    assert went_on.wait(60)
                if me.rank == 0 and number == 6:
                    kept[0] = list(seen), loader.own_state()
                if number == 20:
                    return

    def then(place):
        net = model()
        made, optimizer = worker(place, net)
        with made as me:
            loader, seen = me.loader(list(range(240)), batch_size=4, epochs=1), []
            loader.load_state_dict({**kept[me.rank][1], "others": [kept[1 - me.rank][1]["ledger"]]})
            for batch in loader:
                step(net, optimizer)
                seen += batch.tolist()
            return seen

    together(2, first)
    rest = together(2, then)
    assert sorted(flat([*rest, kept[0][0], kept[1][0]])) == list(range(240))


@pytest.mark.parametrize("asks", [0, 2])  # who deals; one of the others
def test_the_position_of_all_loads_at_any_number_of_workers(asks):
    there, asked = threading.Barrier(3), threading.Barrier(3)
    finished: list[list[int]] = [[], [], []]
    position = ""

    def first(place):
        nonlocal position
        net = model()
        made, optimizer = worker(place, net)
        with made as me:
            loader = me.loader(list(range(240)), batch_size=4)
            for number, batch in enumerate(loader, 1):
                step(net, optimizer)
                if number < 4 + me.rank or me.rank == asks:  # what the others have in hand is dealt again
                    finished[me.rank] += batch.tolist()
                if number == 4 + me.rank:
                    there.wait(60)
                    if me.rank == asks:
                        position = json.dumps(loader.state_dict())
                    asked.wait(60)
                    return

    def then(place):
        net = model()
        made, optimizer = worker(place, net)
        with made as me:
            loader = me.loader(list(range(240)), batch_size=5, epochs=1)
            loader.load_state_dict(json.loads(position))
            assert round(240 * loader.progress) >= len(flat(finished))  # the others may train already
            return [one for batch in loader for one in batch.tolist() if step(net, optimizer) is None]

    together(3, first)
    for workers in (1, 2, 4):
        rest = together(workers, then)
        assert sorted(flat([*rest, *finished])) == list(range(240))


def test_a_pass_that_is_broken_off_is_not_taken_up_again():
    def work(place):
        made, _ = worker(place, model())
        with made as me:
            loader = me.loader(list(range(40)), batch_size=4)
            for _ in loader:
                break
            return [(loader.epoch, *batch.tolist()) for batch in loader]

    (rest,) = together(1, work)
    assert len(rest) == 10
    assert {batch[0] for batch in rest} == {1}


def test_strategies_that_step_together_have_as_many_batches_each():
    def work(place):
        net = model()
        made, optimizer = worker(place, net, "allreduce")
        with made as me:
            count = 0
            for _ in me.loader(list(range(41)), batch_size=4):
                step(net, optimizer)
                count += 1
            return count, me.metrics()["samples"]

    assert together(2, work) == [(6, 20), (6, 21)]


def test_too_little_data_is_named():
    def work(place):
        made, _ = worker(place, model())
        with made as me:
            with pytest.raises(fw.ConfigError, match=r"10 samples in batches of 8 .*a smaller batch_size"):
                me.loader(list(range(10)), batch_size=8)
            with pytest.raises(fw.ConfigError, match=r"2 samples in batches of 2.*fewer workers"):
                me.loader(list(range(2)), batch_size=2)
            with pytest.raises(fw.ConfigError, match="take a smaller batch_size"):
                me.loader(list(range(10)), batch_size=4, drop_last=True)
            with pytest.raises(fw.ConfigError, match="takes no in_order=False"):
                me.loader(list(range(100)), batch_size=4, in_order=False)

    together(3, work)


@pytest.mark.parametrize("over", [False, True])
def test_only_a_pass_under_way_begins_anew_in_other_batches(over, caplog):
    def work(place):
        net = model()
        made, optimizer = worker(place, net, "allreduce")
        with made as me:
            loader = me.loader(list(range(8)), batch_size=4)
            for _ in loader:
                step(net, optimizer)
                if not over:
                    state = loader.state_dict()
            state = loader.state_dict() if over else state
            after = me.loader(list(range(8)), batch_size=2)
            after.load_state_dict(state)
            return after.epoch

    (epoch,) = together(1, work)
    assert epoch == over
    assert ("begins anew" in caplog.text) != over


def test_another_dataset_s_state_is_refused():
    def work(place):
        made, _ = worker(place, model())
        with made as me:
            state = me.loader(list(range(40)), batch_size=4).state_dict()
            with pytest.raises(fw.ConfigError, match="has 41 samples, the one of the checkpoint had 40"):
                me.loader(list(range(41)), batch_size=4).load_state_dict(state)

    together(1, work)
