"""Runs beside each other: equally many samples, equal time, speed-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

import freewheel as fw
from freewheel.records.result import Sample
from freewheel.show.shown import ranked
from freewheel.show.tables import brief_table, versus, wide_tables


@pytest.fixture(scope="module")
def result():
    return fw.simulate("none", "quadratic", workers=1, steps=1)


def run(result, strategy, points, target=None):
    """A run that was measured at (seconds, steps, accuracy)."""
    curve = tuple(Sample(at, steps, 1.0, accuracy, 0.0, 0.0) for at, steps, accuracy in points)
    reached = (at for at, _, accuracy in points if target and accuracy >= target)
    return replace(result, strategy=strategy, curve=curve, target=target, target_s=next(reached, None))


DDP = [(0.0, 0, 0.1), (5.0, 50, 0.5), (10.0, 100, 0.7), (20.4, 200, 0.8)]
OURS = [(0.0, 0, 0.1), (5.0, 200, 0.7), (10.0, 400, 0.9), (20.0, 800, 0.95)]


def test_in_equal_time_equal_samples_lie_on_the_way(result):
    beside = versus([run(result, "ddp", DDP), run(result, "adpsgd", OURS)])
    ddp, ours = beside
    assert (ours.of, ours.over, ours.steps, ours.s) == ("accuracy", "ddp", 200, 20.0)
    # DDP's last step was begun in time: what it ended with counts.
    assert (ddp.equal_samples, ddp.equal_time) == (0.8, 0.8)
    assert (ours.equal_samples, ours.equal_time) == (pytest.approx(0.7), 0.95)
    assert ours.target == pytest.approx(0.795)
    assert (ddp.target_s, ours.target_s) == (20.4, 10.0)
    assert ours.speedup == pytest.approx(2.04)


def test_with_equally_many_samples_equal_time_lies_on_the_way(result):
    beside = versus(
        [run(result, "adpsgd", OURS), run(result, "allreduce", [(at * 4, *of) for at, *of in OURS])]
    )
    assert [row.equal_samples for row in beside] == [0.95, 0.95]
    assert [row.equal_time for row in beside] == pytest.approx([0.95, 0.7])
    assert (beside[0].over, beside[0].speedup) == ("allreduce", 4.0)


def test_a_target_that_the_baseline_never_reaches_gives_a_bound(result):
    runs = [run(result, "ddp", DDP, target=0.9), run(result, "adpsgd", OURS, target=0.9)]
    ddp, ours = versus(runs)
    assert (ddp.target_s, ddp.speedup) == (None, None)
    assert (ours.speedup, ours.at_least) == (pytest.approx(2.04), True)
    console = Console(width=100, record=True)
    console.print(brief_table(ranked(runs)))
    assert "adpsgd        100  0.0 %           10             > 2.04" in console.export_text()
    console.print(*wide_tables(ranked(runs)))
    lines = console.export_text().splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert any(
        line.split() == ["adpsgd", "nobody", "70.0", "%", "95.0", "%", "10", ">", "2.04"] for line in lines
    )
    assert any(line.split() == ["ddp", "nobody", "80.0", "%", "80.0", "%", "never", "–"] for line in lines)


def test_what_was_not_measured_is_not_compared(result):
    assert versus([run(result, "ddp", DDP)]) == []
    assert versus([run(result, "ddp", DDP), run(result, "adpsgd", OURS[:1])]) == []
    losses = versus([run(result, "adpsgd", [(at, steps, None) for at, steps, _ in OURS])] * 2)
    assert (losses[0].of, losses[0].target, losses[0].speedup) == ("loss", None, None)
