"""Who starts a worker may hand it its place as an object, with a meeting place of its own."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import freewheel as fw
from crew import together, worker
from freewheel.fabric import secret
from freewheel.runtime.membership import place as places
from freewheel.runtime.membership.entries import Entries
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.rendezvous import OPTIONS


class Book:
    """A meeting place that survives a worker, as an actor of an engine would."""

    def __init__(self) -> None:
        self.store = HashStore()

    def connect(self, timeout_s):
        return self

    def __getattr__(self, call):
        return getattr(self.store, call)


@pytest.fixture
def book():
    return Book()


def everywhere(book, n, most=0, **more):
    """The places of a run that an engine starts."""
    shared = secret.make()
    options = {"run": "r" * 32, "workers": n, "most": most or n}
    Entries(book, shared).set(OPTIONS, json.dumps(options))
    told = {"hosted": True, "launched": True, "secret": shared, "meeting": book, "bind": "127.0.0.1", **more}
    return [Place(rank, most or n, 1, **told) for rank in range(most or n)]


def train(place, steps=20, before_end=lambda: None):
    """One worker's weights at the end."""
    torch.manual_seed(place.rank)
    model = nn.Linear(3, 2)
    attached, optimizer = worker(place, model)
    with attached:
        for _ in range(steps):
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before_end()
    return torch.cat([one.flatten() for one in attached.consensus().parameters()]), attached.metrics()


def test_workers_meet_in_a_book(book, tmp_path):
    places = everywhere(book, 3, folder=str(tmp_path))
    found = together(places, train)
    assert all(torch.equal(answer, found[0][0]) for answer, _ in found)
    assert found[0][1]["members"] == [0, 1, 2]
    assert any(tmp_path.iterdir())


def test_a_book_that_was_lost_and_comes_back_empty_is_filled_again(book):
    places = everywhere(book, 2, most=3)
    both, filled = threading.Barrier(2), threading.Event()

    def lose_it():
        if both.wait(30) == 0:
            book.store = HashStore()
        for _ in range(300):
            if book.check([OPTIONS, "freewheel/0/0/address/0"]):
                filled.set()
            if filled.wait(0.1):
                break
        both.wait(30)

    found = together(places[:2], lambda place: train(place, before_end=lose_it))
    assert filled.is_set()
    assert torch.equal(found[0][0], found[1][0])


def test_a_run_that_begins_with_one_worker_can_be_joined(book):
    first, second = everywhere(book, 1, most=2)
    first = dataclasses.replace(first, world_size=1)
    joined = threading.Event()

    def work(place):
        return train(place, before_end=joined.set if place.rank else lambda: joined.wait(30))

    found = together([first, second], work)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1]["members"] == [0, 1]


def test_a_place_that_was_given_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = Place(1, 2)
    places.give(given)
    try:
        assert Place.read() is given
    finally:
        places.give(None)
    with pytest.raises(fw.ConfigError, match="MASTER_ADDR"):
        Place.read()


SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "FREEWHEEL_STORE": "10.0.0.1:29500"}
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "FREEWHEEL_STORE": "10.0.0.1:29500"}


@pytest.mark.parametrize("environment", [SLURM, INDEXED_JOB])
def test_the_words_of_schedulers_are_understood(environment):
    place = Place.read(environment)
    assert (place.rank, place.world_size, place.where, place.hosted) == (2, 4, "10.0.0.1:29500", True)


@pytest.mark.parametrize("given", ["JOB_COMPLETION_INDEX", "FREEWHEEL_STORE"])
def test_an_index_or_a_store_without_the_number_of_workers_is_not_alone(given):
    with pytest.raises(fw.ConfigError, match=r"has no (RANK, )?WORLD_SIZE"):
        Place.read({given: INDEXED_JOB[given]})


def test_a_single_task_of_slurm_trains_alone():
    assert Place.read({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Place()


def test_ranks_that_were_set_go_before_slurms():
    given = {**SLURM, "RANK": "0", "WORLD_SIZE": "8"}
    assert (Place.read(given).rank, Place.read(given).world_size) == (0, 8)


def test_a_store_that_is_no_address_is_refused():
    with pytest.raises(fw.ConfigError, match=r"cannot read FREEWHEEL_STORE 'here'"):
        Place.read({**SLURM, "FREEWHEEL_STORE": "here"})


def test_a_strategy_that_needs_worker_0_is_refused_where_others_wait_for_room(book):
    place = everywhere(book, 1, most=2)[0]
    attached, _ = worker(place, nn.Linear(3, 2), strategy=fw.ASGD())
    with pytest.raises(fw.ConfigError, match="asgd needs worker 0, whose room may go to"):
        attached.start()
