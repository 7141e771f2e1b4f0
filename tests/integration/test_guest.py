"""A trainer's loop as a worker, without a trainer: where a checkpoint says that all workers are."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from crew import next_life, places, together, worker
from freewheel.data.batches import size
from freewheel.data.ledger import Ledger
from freewheel.fabric.notes import whole
from freewheel.runtime.loading.sampler import LeaseSampler
from freewheel.runtime.worker.guest import Guest

pytestmark = pytest.mark.integration

LENGTH, BATCH, EPOCHS = 512, 8, 3


class Lost(Exception):
    """A worker's loop breaks."""


class ByEpoch(RandomSampler):
    """Draws by its own seed and the number of the pass, as Accelerate's does."""

    def __init__(self, data) -> None:
        super().__init__(data, generator=torch.Generator())
        self.epoch = 0

    def set_epoch(self, epoch) -> None:
        self.epoch = epoch

    def __iter__(self):
        self.generator.manual_seed(42 + self.epoch)
        yield from super().__iter__()
        self.epoch += 1


def data() -> DataLoader:
    samples = torch.arange(float(LENGTH)).unsqueeze(1)
    return DataLoader(samples, BATCH, sampler=ByEpoch(samples))


def train(place, position=None, after=lambda guest: None, bounded=False):
    """The loop of a trainer that draws a batch ahead; `after` each step.

    One that is `bounded` makes no more steps in an epoch than the data have batches.
    """
    made, optimizer = worker(place, model := nn.Linear(1, 1), lr=0.0)
    guest = Guest(made)
    try:
        _loop(guest, model, optimizer, position, after, bounded)
    except Lost as error:
        guest.fail(error)
        raise
    guest.leave(model)
    return made


def _loop(guest, model, optimizer, position, after, bounded):
    passes = guest.deal(
        data(), epochs=EPOCHS, seed=0, ahead=1, per_step=1, bounded=bounded, position=position
    )
    guest.seek()
    while not (passes.over or guest.worker.stopped):
        batches = iter(passes)
        ahead = next(batches, None)
        left = LENGTH // BATCH if bounded else LENGTH
        while ahead is not None and left:
            left -= 1
            batch, ahead = ahead, next(batches, None)
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            after(guest)


def finished(position) -> int:
    """How many samples a checkpoint says are finished."""
    (numbers,) = position["loader"]["ledger"]
    ledger = Ledger.decode(LENGTH, whole(numbers))
    return ledger.past + sum(size(one.finished) for one in ledger.passes.values())


@pytest.mark.parametrize(("breaks", "bounded"), [(None, False), (3, True), (20, False), (20, True)])
def test_from_each_checkpoint_of_two_workers_one_does_exactly_the_rest(breaks, bounded):
    """Also where one of them is lost and comes back, and where a pass has more batches than an epoch."""
    taken, lost, back = [], threading.Event(), threading.Event()

    def work(place):
        def after(guest):
            steps = guest.worker.metrics()["steps"]
            if place.rank == 0:
                taken.append(copy.deepcopy(guest.position()))
                if breaks and len(taken) == 2 * breaks:
                    assert back.wait(60)
            elif lost.is_set():
                back.set()
            elif steps == breaks:
                lost.set()
                raise Lost
            time.sleep(1e-3 * (1 + 4 * place.rank))

        try:
            return train(place, after=after, bounded=bounded)
        except Lost:
            return train(next_life(place), after=after, bounded=bounded)

    made = together(2, work)
    samples = sum(one.metrics()["samples"] for one in made)
    again = sum(one.metrics()["samples_again"] for one in made)
    assert EPOCHS * LENGTH - BATCH * (breaks or 0) <= samples <= EPOCHS * LENGTH + again
    assert [one.progress for one in made] == [EPOCHS, EPOCHS]
    assert len(taken) > EPOCHS
    for position in taken:
        assert finished(position) == BATCH * position["steps"]
    ends = [one for one in taken if not one["loader"]["under_way"]]  # the other may hold some of that pass
    for position in [*ends, *taken[:: max(1, len(taken) // 5)]]:
        alone = train(places(1)[0], position, bounded=bounded)
        assert alone.metrics()["samples"] == EPOCHS * LENGTH - finished(position)
        assert alone.progress == EPOCHS


def test_what_others_say_while_a_checkpoint_is_taken_is_in_all_of_it_or_in_nothing(monkeypatch):
    """The steps of a position and its samples are of one moment."""
    known, heard = LeaseSampler.finished, []

    def then_news(leases, *given):
        encoded = known(leases, *given)
        leases.agent.loop.call_soon(_news, leases)
        return encoded

    def _news(leases):
        heard.append(True)
        ledger = leases.queue.data.ledger
        ledger.finish((1, 1), 1, 0, 10 * BATCH)
        leases.queue.data.collect()

    def after(guest):
        if guest.worker.metrics()["steps"] == 5:
            monkeypatch.setattr(LeaseSampler, "finished", then_news)
            taken.append(guest.position())
            monkeypatch.undo()
            guest.worker.stop()

    taken: list = []
    train(places(1)[0], after=after)
    assert heard
    assert finished(taken[0]) == BATCH * taken[0]["steps"]
