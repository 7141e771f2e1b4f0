"""`freewheel train`: what a worker of it does when it goes on from a checkpoint."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from freewheel.errors import RunStopped
from freewheel.runtime.hosts import host_store
from freewheel.training import process
from freewheel.training.job import Job

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


@pytest.fixture
def store(monkeypatch):
    """What a launcher tells its workers, and the store behind it."""
    made, host, port = host_store(None, 1)
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for name, value in {**told, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    return made


def train(folder: Path, number: int, **settings):
    folder.mkdir()
    given = {"task": "digits", "workers": 1, "momentum": 0.9, "schedule": "cosine", "every": 3}
    Job(**given, **settings).save(folder / "job.json")
    return process.run(folder, number)


@pytest.mark.parametrize("strategy", ["adpsgd", "sasgd"])  # steps are taken as needed; all step together
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path, store, strategy):
    saved = str(tmp_path / "saved")
    whole = train(tmp_path / "whole", 0, strategy=strategy, steps=8, checkpoint=saved)
    assert (whole["steps"], whole["resumed_at"]) == (8, 0)
    for last in Path(saved).glob("step-00000006-*"):  # skipped if the one before was still being written
        shutil.rmtree(last)  # as if it had been killed in step 5
    rest = train(tmp_path / "rest", 1, strategy=strategy, steps=8, checkpoint=saved, resume=True)
    assert (rest["steps"], rest["resumed_at"]) == (5, 3)
    assert rest["loss"] == whole["loss"]
    with pytest.raises(RunStopped, match=r"has all 3 steps of this run\. Give --steps a larger number"):
        train(tmp_path / "again", 2, strategy=strategy, steps=3, checkpoint=saved, resume=True)


def test_without_a_checkpoint_it_begins_anew(tmp_path, store):
    saved = str(tmp_path / "saved")
    whole = train(tmp_path / "whole", 0, strategy="none", steps=4, checkpoint=saved, resume=True)
    assert (whole["steps"], whole["resumed_at"]) == (4, 0)


def test_workers_that_take_steps_as_they_need_them_make_what_is_left(store):
    job = Job(strategy="adpsgd", workers=2, steps=20, checkpoint="saved", resume=True)
    budgets = [process.Budget(job, lockstep=False, number=0, step_s=0.001) for _ in range(2)]
    made: list[float] = []

    def work(rank: int) -> None:
        budgets[rank].go_on(rank, (11, 4)[rank])
        made.extend(budgets[rank].steps())

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(made) == [step / 40 for step in range(15, 40)]
