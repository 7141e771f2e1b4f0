"""A run's folder gives the figures that its workers measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import made
from freewheel.errors import ConfigError
from freewheel.records.run import Run
from freewheel.show import rows as watched
from freewheel.show.bounds import Bound, bounds
from freewheel.show.dashboard import Board
from freewheel.show.rates import result_of


def folder_of(folder: Path, lives: list[dict[str, Any]], **about: Any) -> Run:
    """A run of which only the last sample of each life is there."""
    for life in lives:
        made.append(folder / f"worker-{life['rank']}.jsonl", life)
    (folder / "run.json").write_text(json.dumps(made.about(**{"workers": 2, **about})))
    return Run(folder)


def life(rank: int, steps: int, elapsed_s: float, compute_s: float, **changes: Any) -> dict[str, Any]:
    given = {"time": 1000.0 + elapsed_s, "elapsed_s": elapsed_s, "compute_s": compute_s, "steps": steps}
    return made.sample(rank, 20, 2, **{**given, "staleness_counts": {}, **changes})


def test_figures_add_up_over_workers_and_lives(tmp_path: Path) -> None:
    lives = [
        life(0, 100, 10.0, 8.0, bytes_out=1000, staleness_mean=1.0, staleness_max=2.0, discrepancy_max=0.3),
        life(1, 40, 4.0, 4.0, bytes_out=400, staleness_mean=2.0, staleness_max=9.0, discrepancy_max=0.9),
        life(
            1, 10, 2.0, 1.0, life=2, time=1012.5, bytes_out=100, staleness_mean=4.0, staleness_max=5.0,
            discrepancy_max=0.1,
        ),
    ]  # fmt: skip
    result = result_of(folder_of(tmp_path, lives))
    assert (result.strategy, result.workers, result.seed) == ("adpsgd", 2, 0)
    assert result.virtual_s == 12.5
    assert result.worker_steps == 150
    assert result.steps_per_s == 12.0
    assert result.ideal_share == pytest.approx(12.0 / (100 / 8 + 50 / 5))
    assert result.idle_share == pytest.approx(1 - 13 / 16)
    assert result.staleness_mean == pytest.approx((100 * 1 + 40 * 2 + 10 * 4) / 150)
    assert result.staleness_max == 9.0
    assert result.discrepancy_max == 0.9
    assert result.bytes_per_step == 10.0
    assert len(result.by_worker) == 3


def test_the_mean_staleness_weighs_what_was_counted(tmp_path: Path) -> None:
    lives = [
        life(0, 100, 10.0, 8.0, staleness_mean=1.0, staleness_counts={"1": 30}),
        life(1, 100, 10.0, 8.0, staleness_mean=5.0, staleness_counts={"4": 10}),
    ]
    run = folder_of(tmp_path, lives)
    assert result_of(run).staleness_mean == pytest.approx(2.0)
    # The same in the terminal and on the dashboard.
    assert watched.total(run, watched.rows(run)).staleness == pytest.approx(2.0)
    (shown,) = Board(tmp_path).answer((), None)["document"]["shown"]
    assert shown["tiles"]["mean staleness"] == "2"


def test_who_has_noted_no_staleness_yet_does_not_weigh(tmp_path: Path) -> None:
    lives = [life(0, 100, 10.0, 8.0, staleness_mean=3.0, staleness_counts={"2": 5}), life(1, 900, 10.0, 8.0)]
    lives[1]["staleness_mean"] = 0.0
    assert result_of(folder_of(tmp_path, lives)).staleness_mean == pytest.approx(3.0)


def test_the_answer_is_the_last_evaluation_and_the_target_is_timed(tmp_path: Path) -> None:
    for at, accuracy in ((2.0, 0.5), (4.0, 0.8), (6.0, 0.7)):
        line = {"time": 1000.0 + at, "worker_steps": int(10 * at), "loss": 1 / at, "accuracy": accuracy}
        made.append(tmp_path / "evaluations.jsonl", line)
    result = result_of(folder_of(tmp_path, [life(0, 100, 10.0, 8.0)], target=0.75))
    assert (result.loss, result.accuracy, result.target_s) == (pytest.approx(1 / 6), 0.7, 4.0)
    assert [sample.virtual_s for sample in result.curve] == [2.0, 4.0, 6.0]


def test_without_evaluations_the_loss_is_the_mean_of_what_workers_reported(tmp_path: Path) -> None:
    result = result_of(folder_of(tmp_path, [life(0, 9, 1.0, 1.0, loss=1.0), life(1, 9, 1.0, 1.0, loss=2.0)]))
    assert (result.loss, result.accuracy, result.curve) == (1.5, None, ())


def test_what_a_dead_worker_said_last_is_not_in_the_loss(tmp_path: Path) -> None:
    made.append(tmp_path / "events-0.jsonl", made.event(1001.0, "died", 1, 0))
    lives = [life(0, 90, 10.0, 9.0, loss=1.0, last=True, state="finished"), life(1, 9, 1.0, 1.0, loss=5.0)]
    assert result_of(folder_of(tmp_path, lives)).loss == 1.0


# -- bounds of real runs -------------------------------------------------------------------------


def rows(run: Run) -> dict[str, Bound]:
    return {bound.name: bound for bound in bounds(result_of(run))}


def test_a_real_run_that_waits_for_nobody_is_held_against_its_own_steps(tmp_path: Path) -> None:
    # 12.5 and 5 steps a second while computing; 150 steps in 10 s.
    run = folder_of(tmp_path, [life(0, 100, 10.0, 8.0), life(1, 50, 10.0, 10.0)])
    bound = rows(run)["worker-steps per second"]
    assert (bound.measured, bound.bound, bound.kind) == (15.0, pytest.approx(17.5), "at most")
    assert bound.holds


def test_a_real_run_that_waits_for_all_is_held_against_its_slowest(tmp_path: Path) -> None:
    settings = {**made.about()["settings"], "waits_for": "all"}
    quick, slow = (
        life(0, 50, 10.0, 2.0, staleness_max=0.0),
        life(1, 50, 10.0, 8.0, staleness_max=0.0),
    )
    run = folder_of(tmp_path, [quick, slow], strategy="allreduce", settings=settings)
    found = rows(run)
    assert found["worker-steps per second"].bound == pytest.approx(2 / (8 / 50))
    assert found["largest staleness"].bound == 0
    assert all(bound.holds for bound in found.values())
    assert set(found) == {"worker-steps per second", "largest staleness"}  # the rest is about virtual time


def test_where_workers_fell_behind_nothing_is_said_about_the_slowest(tmp_path: Path) -> None:
    settings = {**made.about()["settings"], "waits_for": "all"}
    lives = [life(0, 50, 10.0, 2.0), life(1, 20, 4.0, 4.0)]
    run = folder_of(tmp_path, lives, strategy="allreduce", settings=settings)
    assert "worker-steps per second" not in rows(run)


def test_a_broken_bound_of_a_real_run_is_found(tmp_path: Path) -> None:
    settings = {**made.about()["settings"], "strategy": {"tau": 4}, "waits_for": "all"}
    late = [life(rank, 50, 10.0, 8.0, staleness_max=5.0) for rank in range(2)]
    bound = rows(folder_of(tmp_path, late, strategy="nodelay", settings=settings))["largest staleness"]
    assert (bound.measured, bound.bound, bound.holds) == (5.0, 4, False)


# -- what has nothing to tell ---------------------------------------------------------------------


def test_a_run_that_is_starting_has_no_figures(tmp_path: Path) -> None:
    made.append(tmp_path / "events-launcher.jsonl", made.event(1000.0, "restarted", 0, "launcher"))
    with pytest.raises(ConfigError, match="still starting: no worker has made a step"):
        result_of(Run(tmp_path))
    now = os.stat(tmp_path).st_mtime
    with pytest.raises(ConfigError, match="still starting"):
        result_of(folder_of(tmp_path, [life(0, 0, 0.5, 0.0, time=now)], started=now))


def test_a_run_that_ended_before_it_began_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended before any worker made a step"):
        result_of(folder_of(tmp_path, [life(0, 0, 0.5, 0.0, last=True)]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workers": "many"}, r"run\.json' is not what a run writes: workers is 'many'"),
        ({"workers": 0}, r"workers in .*run\.json' must be at least 1, not 0"),
        ({"started": None}, "started is None"),
        ({"settings": []}, r"settings is \[\]"),
    ],
)
def test_what_no_run_writes_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        result_of(folder_of(tmp_path, [life(0, 9, 1.0, 1.0)], **changes))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("evaluations.jsonl", {"time": 1001.0, "worker_steps": 9, "loss": "low"}),
        ("events-0.jsonl", {"time": "now", "what": "died", "by": 1}),
    ],
)
def test_values_of_another_kind_are_left_out_and_counted(
    tmp_path: Path, name: str, line: dict[str, Any]
) -> None:
    made.append(tmp_path / name, line)
    run = folder_of(tmp_path, [life(0, 9, 1.0, 1.0)])
    assert run.broken == 1
    assert (run.events, run.evaluations) == ([], [])
    assert result_of(run).worker_steps == 9


def test_a_run_json_that_is_missing_or_no_object_is_named(tmp_path: Path) -> None:
    run = folder_of(tmp_path, [life(0, 9, 1.0, 1.0)])
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json' is not what a run writes: it has no format"):
        Run(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"has records but no run\.json"):
        result_of(Run(tmp_path))
    assert result_of(run).worker_steps == 9
