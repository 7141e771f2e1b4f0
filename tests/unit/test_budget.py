"""The steps that the workers of a job share."""

from __future__ import annotations

from torch.distributed import TCPStore

from freewheel.runtime.entries import Entries
from freewheel.training.job import Job
from freewheel.training.process import Budget


def test_a_slow_worker_takes_few_steps_at_a_time_and_all_are_taken_once(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    job = Job(strategy="adpsgd", workers=2, steps=200)
    slow, fast = (Budget(job, False, 1, step_s).steps() for step_s in (0.25, 0.001))
    taken = [next(slow)]
    count = Entries(store, b"")
    assert count.number("training/1/steps") == 1
    taken.append(next(fast))
    assert count.number("training/1/steps") == 11
    taken += [*fast, *slow]
    assert sorted(taken) == [step / 400 for step in range(400)]


def test_workers_of_a_group_end_after_the_same_step(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    job = Job(strategy="grouping", workers=3, steps=40, slow={0: 5.0})
    made = [0, 0, 0]

    def group(rank):
        """All together for two steps, then the slow one by itself."""
        together = made[rank] < 2
        return ((0, 1, 2) if together else ((0,), (1, 2), (1, 2))[rank]), not together

    def turns(rank):
        budget = Budget(job, False, 1, (0.05, 0.01, 0.01)[rank])
        return budget.steps_of_groups(lambda: group(rank))

    taken = [turns(rank) for rank in range(3)]
    living = {0, 1, 2}
    for turn in range(400):
        for rank in [rank for rank in (2, 0, 1) if rank in living]:
            if rank == 0 and turn > 2 and turn % 5:
                continue  # it is slow
            if next(taken[rank], None) is None:
                living.discard(rank)
            else:
                made[rank] += 1
    assert not living
    assert made[1] == made[2] > made[0] > 2
    assert 120 <= sum(made) <= 122
