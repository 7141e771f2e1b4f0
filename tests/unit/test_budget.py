"""The steps that the workers of a job share."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from freewheel.errors import ConfigError
from freewheel.runtime.membership.entries import Entries
from freewheel.training import budget
from freewheel.training.budget import Budget
from freewheel.training.job import Job


@pytest.fixture
def store(monkeypatch):
    made = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    return made


def test_a_slow_worker_takes_few_steps_at_a_time_and_all_are_taken_once(store):
    job = Job(strategy="adpsgd", workers=2, steps=200)
    slow, fast = (Budget(job, False, 1, step_s).steps() for step_s in (0.25, 0.001))
    taken = [next(slow)]
    count = Entries(store, b"")
    assert count.number("training/1/steps") == 1
    taken.append(next(fast))
    assert count.number("training/1/steps") == 11
    taken += [*fast, *slow]
    assert sorted(taken) == [step / 400 for step in range(400)]


GROUPS = ((0, 1, 2), (0,), (1, 2))


def in_turns(turns, hour=None):
    """How many steps three workers make: together at first, then the slow one, worker 0, by itself."""
    made, living = [0, 0, 0], {0, 1, 2}

    def group(rank):
        together = made[rank] < 2
        return GROUPS[0 if together else 1 if rank == 0 else 2], not together

    taken = [turns(rank, lambda rank=rank: group(rank)) for rank in range(3)]
    for turn in range(400):
        for rank in [rank for rank in (2, 0, 1) if rank in living]:
            if rank == 0 and turn > 2 and turn % 5:
                continue  # it is slow
            if next(taken[rank], None) is None:
                living.discard(rank)
            else:
                made[rank] += 1
        if hour is not None:
            hour.now_s += 0.01
    assert not living
    return made


def test_workers_of_a_group_end_after_the_same_step(store):
    job = Job(strategy="grouping", workers=3, steps=40, slow={0: 5.0})

    def turns(rank, group):
        return Budget(job, False, 1, (0.05, 0.01, 0.01)[rank]).steps(group)

    made = in_turns(turns)
    assert made[1] == made[2] > made[0] > 2
    assert 120 <= sum(made) <= 122


def test_workers_of_a_group_end_after_the_same_step_when_the_time_is_over(store, hour):
    job = Job(strategy="grouping", workers=3, seconds=1.0, slow={0: 5.0})

    def turns(rank, group):
        return Budget(job, False, 1, (0.05, 0.01, 0.01)[rank]).steps(group)

    made = in_turns(turns, hour)
    assert made[1] == made[2] > made[0] > 2


class Hour:
    """A clock that somebody moves."""

    def __init__(self) -> None:
        self.now_s = 50.0


@pytest.fixture
def hour(monkeypatch):
    made = Hour()
    monkeypatch.setattr(budget.time, "monotonic", lambda: made.now_s)
    return made


def test_those_who_step_together_end_with_the_same_step_and_have_the_same_rates(store, hour):
    job = Job(strategy="ddp", workers=2, seconds=1.0, schedule="cosine")
    quick, slow = (Budget(job, True, 2, step_s) for step_s in (0.01, 0.4))
    shares = []
    for share in quick.steps():
        shares.append(share)
        hour.now_s += 0.04
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert 0.8 < shares[-1] <= 1.0
    assert 25 <= len(shares) <= 27  # a part begun in time is finished: at most a tenth of a second
    assert list(slow.steps()) == shares  # although its own clock says that the time is over
    assert quick.made() == 2 * len(shares)


def test_those_who_wait_for_nobody_go_on_until_the_time_is_over(store, hour):
    job = Job(strategy="adpsgd", workers=2, seconds=2.0)
    quick, slow = (Budget(job, False, 3, step_s) for step_s in (0.25, 1.5))
    steps = quick.steps()
    shares = [next(steps)]
    assert list(zip(slow.steps(), [None], strict=False)) == [(0.0, None)]  # it has begun at the same time
    for share in steps:
        shares.append(share)
        hour.now_s += 0.25
    assert shares[1:] == [step / 8 for step in range(8)]
    assert quick.made() == 9


def test_a_schedule_ends_with_the_time():
    rates = Job(seconds=20.0, schedule="cosine", warmup=2.0).rates
    assert 0 < rates.factor(0.0) < 0.02
    assert rates.factor(2.0) == 1.0
    assert rates.factor(20.0) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seconds": 0.0}, "--seconds must be above 0, not 0"),
        ({"seconds": float("nan")}, "--seconds must be above 0, not nan"),
        ({"seconds": 5.0, "warmup": 6.0}, "does not fit a budget of 5"),
        ({"seconds": 5.0, "checkpoint": "saved", "resume": True}, "give --steps instead of --seconds"),
        ({"optimizer": "lion"}, "the optimizer must be sgd or adamw, not 'lion'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum is sgd's"),
        ({"optimizer": "adamw", "strategy": "eamsgd"}, "take sgd"),
        ({"optimizer": "adamw", "strategy": "adpsgd:quasi_global=true"}, "take sgd"),
    ],
)
def test_a_job_that_cannot_be_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        Job(**given)
