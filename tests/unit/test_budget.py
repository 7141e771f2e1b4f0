"""The steps that the workers of a job share."""

from __future__ import annotations

from torch.distributed import TCPStore

from freewheel.training.job import Job
from freewheel.training.process import Budget


def test_a_slow_worker_takes_few_steps_at_a_time_and_all_are_taken_once(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    job = Job(strategy="adpsgd", workers=2, steps=200)
    slow, fast = (Budget(job, False, 1, step_s).steps() for step_s in (0.25, 0.001))
    taken = [next(slow)]
    assert store.add("training/1/steps", 0) == 1
    taken.append(next(fast))
    assert store.add("training/1/steps", 0) == 11
    taken += [*fast, *slow]
    assert sorted(taken) == [step / 400 for step in range(400)]
