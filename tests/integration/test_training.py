"""`freewheel train`: what a worker of it does when it goes on from a checkpoint."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from freewheel.errors import RunStopped
from freewheel.numbers import share, short
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.runtime.membership.hosts import host_store
from freewheel.show import rows as watched
from freewheel.show.dashboard import Board
from freewheel.show.figures import edges
from freewheel.show.rates import result_of
from freewheel.show.tables import versus
from freewheel.show.terminal import clock_time
from freewheel.training import process
from freewheel.training.budget import Budget
from freewheel.training.job import Job, name, train_all

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


@pytest.fixture
def store(monkeypatch):
    """What a launcher tells its workers, and the store behind it."""
    made, host, port = host_store(None)
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for key, value in {**told, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(key, value)
    return made


def train(folder: Path, number: int, **settings):
    folder.mkdir()
    given = {"task": "digits", "workers": 1, "momentum": 0.9, "schedule": "cosine", "every": 3}
    Job(**given, **settings).save(folder / "job.json")
    process.run(folder, number)
    result = result_of(Run(folder))
    (life,) = result.by_worker
    return result, (result.worker_steps, life["resumed_at"])


@pytest.mark.parametrize("strategy", ["adpsgd", "sasgd"])  # steps are taken as needed; all step together
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path, store, strategy):
    saved = str(tmp_path / "saved")
    whole, steps = train(tmp_path / "whole", 0, strategy=strategy, steps=8, checkpoint=saved)
    assert steps == (8, 0)
    for later in Path(saved).glob("step-*"):
        if int(later.name.split("-")[1]) > 3:
            shutil.rmtree(later)  # as if it had been killed in step 5
    rest, steps = train(tmp_path / "rest", 1, strategy=strategy, steps=8, checkpoint=saved, resume=True)
    assert steps == (5, 3)
    assert rest.loss == whole.loss
    assert [sample.worker_steps for sample in rest.curve][-1] == 8
    with pytest.raises(RunStopped, match=r"has all 3 steps of this run\. Give --steps a larger number"):
        train(tmp_path / "again", 2, strategy=strategy, steps=3, checkpoint=saved, resume=True)


def test_without_a_checkpoint_it_begins_anew(tmp_path, store):
    saved = str(tmp_path / "saved")
    _, steps = train(tmp_path / "whole", 0, strategy="none", steps=4, checkpoint=saved, resume=True)
    assert steps == (4, 0)


SHORT = [
    Job(strategy=one, workers=2, steps=20, compute_ms=5, slow={1: 2.0})
    for one in ("adpsgd", "ddp", "grouping")
]
SERVER = Job(strategy="easgd", workers=2, steps=40, compute_ms=5)
TIMED = [
    Job(
        strategy=one,
        workers=2,
        seconds=1.0,
        compute_ms=5,
        slow={1: 3.0},
        optimizer="adamw",
        schedule="cosine",
    )
    for one in ("ddp", "adpsgd")
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[[Job], tuple[Result, Path]]:
    """What came of a job, and where; all are run in one set of processes."""
    folder, jobs = tmp_path_factory.mktemp("jobs"), [*SHORT, SERVER, *TIMED]
    results = train_all(jobs, folder)
    homes = [folder / name(number, job) for number, job in enumerate(jobs)]

    def of(job: Job) -> tuple[Result, Path]:
        number = jobs.index(job)
        result = results[number]
        assert isinstance(result, Result), result
        return result, homes[number]

    return of


def test_everything_that_shows_a_run_shows_what_was_printed(trained):
    for result, folder in map(trained, SHORT):
        assert result.worker_steps == 40
        assert result.accuracy is not None
        run = Run(folder)
        assert result_of(run).as_json() == result.as_json()
        everyone = watched.rows(run)
        whole = watched.total(run, everyone)
        assert whole.steps_per_s == result.steps_per_s
        (shown,) = Board(folder).answer((), None)["document"]["shown"]
        tiles = shown["tiles"]
        assert tiles["worker-steps/s"] == short(result.steps_per_s)
        assert tiles["of ideal"] == share(result.ideal_share)
        assert tiles["waiting"] == share(whole.blocked_share)
        assert tiles["training loss"] == short(whole.loss)
        assert tiles["wall clock"] == clock_time(run, result.virtual_s)
        for row, life in zip(everyone, result.by_worker, strict=True):
            assert row.steps_per_s == pytest.approx(life["steps_per_s"])
            assert row.blocked_share == pytest.approx(life["blocked_share"])


def test_how_far_workers_of_a_server_are_apart_is_measured_of_the_workers(trained):
    result, folder = trained(SERVER)
    assert result.discrepancy_max > 0
    run = Run(folder)
    assert any(one.get("consensus", 0.0) > 0 for one in run.evaluations)
    told, _ = edges(run)
    assert [(edge.one, edge.other) for edge in told] == [(0, 1)]


def test_workers_that_take_steps_as_they_need_them_make_what_is_left(store):
    job = Job(strategy="adpsgd", workers=2, steps=20, checkpoint="saved", resume=True)
    budgets = [Budget(job, lockstep=False, number=0, step_s=0.001) for _ in range(2)]
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


def test_a_time_for_all_ends_together_and_any_optimizer_is_compared(trained):
    results = [trained(job)[0] for job in TIMED]
    for result in results:
        assert result.settings["scenario"]["optimizer"] == "AdamW"
        assert result.settings["scenario"]["seconds"] == 1.0
        assert result.curve[-1].worker_steps == result.worker_steps > 0
        assert result.accuracy is not None
    ddp, adpsgd = ([life["steps"] for life in result.by_worker] for result in results)
    assert ddp[0] == ddp[1]
    assert adpsgd[0] > adpsgd[1]
    beside = versus(results)
    assert beside[0].steps == results[0].worker_steps
    assert [row.equal_time for row in beside] == [result.accuracy for result in results]
