"""What Freewheel does around the train function of Ray Train, without Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("pandas", reason="the extra `ray-train` is not installed")
from freewheel.errors import WorkerLost
from freewheel.ray import train
from freewheel.ray.run import Driver
from freewheel.runtime.worker.leaving import Left


def test_who_leaves_well_is_done_and_the_reports_of_the_others_do_not_wait_for_it(monkeypatch):
    reports, twice = [], threading.Event()

    def report(metrics):
        reports.append(metrics)
        if len(reports) == 2:
            twice.set()
            raise RuntimeError("the run is over")

    monkeypatch.setattr(train.ray.train, "report", report)
    with train.FreewheelConfig().train_func_context():
        raise Left
    assert twice.wait(30)
    assert reports == [{}, {}]
    with pytest.raises(ValueError, match="own"), train.FreewheelConfig().train_func_context():
        raise ValueError("the script's own")


def test_a_report_that_ray_drops_is_made_again():
    """Ray does so where a worker is lost meanwhile, and its next life reports, too."""
    made, counted = [], 0

    def report(metrics):
        nonlocal counted
        made.append(metrics)
        counted += len(made) == 3

    functions = SimpleNamespace(report=report)
    train.watch_reports(functions, lambda: counted)
    functions.report({"a": 1})
    assert made == [{"a": 1}] * 3


def test_scripts_raise_alike_only_where_all_raise_the_same():
    driver = object.__new__(Driver)
    driver.restarts, driver.actors = 1, {0: None, 1: None}
    driver.entries = SimpleNamespace(check=lambda key: False)  # nobody trains

    def again(*raised):
        driver.raised = []
        return [driver._again(rank, why, ValueError(why)) for rank, why in raised]

    assert again((0, "x"), (0, "x")) == [True, False]
    assert again((0, "x"), (1, "y"), (0, "x")) == [True, True, False]
    with pytest.raises(WorkerLost, match="alike before they began: x"):
        again((0, "x"), (0, "x"), (1, "x"))
