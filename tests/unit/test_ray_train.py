"""What Freewheel does around the train function of Ray Train, without Ray."""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("pandas", reason="the extra `ray-train` is not installed")
from freewheel.errors import WorkerLost
from freewheel.ray import train
from freewheel.runtime.worker.leaving import Left

run = importlib.import_module("freewheel.ray.run")


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


@pytest.mark.parametrize(("second", "begun", "message"), [
    ("ValueError: x", False, "alike before they began: ValueError: x"),
    ("ValueError: y", False, "it waited on"),
    ("ValueError: x", True, "it waited on"),
])  # fmt: skip
def test_where_all_scripts_raise_the_same_before_they_train_none_is_started_again(
    second, begun, message, monkeypatch
):
    def wait(refs, timeout):
        if told:
            raise WorkerLost("it waited on")
        return [], refs

    def ask(_):
        told.append(1)
        return {0: 1, 1: 1}, {}, [(0, "Traceback\nValueError: x"), (1, f"Traceback\n{second}")], []

    told: list[int] = []
    monkeypatch.setattr(run.ray, "wait", wait)
    driver = run.Driver.__new__(run.Driver)
    driver.actors, driver.left, driver.lives, driver.later = {0: 0, 1: 0}, {"a": 0, "b": 1}, {}, []
    driver.told, driver.errors, driver.journal, driver.collector = set(), {}, None, None
    driver.line, driver.begun = SimpleNamespace(ask=ask), lambda: begun
    with pytest.raises(WorkerLost, match=message):
        driver.wait()
