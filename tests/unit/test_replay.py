"""A replay holds what workers did: every gradient, who waited, who met whom, who died."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import freewheel as fw
import made
from freewheel.errors import ConfigError
from freewheel.records import journal
from freewheel.records.journal import Journal
from freewheel.records.run import Run
from freewheel.records.timeline import Timeline
from freewheel.show.replay import html

WORKERS, STEPS = 4, 12


def played(*folders, title="both"):
    page = html([Run(one) for one in folders], title)
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page).group(1)), page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that waits for its slow worker, and one in which a worker dies and comes back."""
    folder = tmp_path_factory.mktemp("runs")
    usual = {"workers": WORKERS, "steps": STEPS, "compute": fw.Compute(ms=50, slow={0: 5})}
    fw.simulate("allreduce", "digits", folder=folder / "allreduce", **usual)
    faults = [fw.Fault("crash", 2, 0.12), fw.Fault("restart", 2, 0.3)]
    fw.simulate("adpsgd", "digits", folder=folder / "adpsgd", faults=faults, **usual)
    return folder


def waiting(run):
    busy = sum(end - begin for lane in run["spans"] for begin, end in zip(lane[::2], lane[1::2], strict=True))
    return 1 - busy / sum(end - begin for lives in run["lives"] for begin, end in lives)


def test_every_gradient_is_there_and_who_waits_is_seen(runs):
    data, _ = played(runs / "allreduce", runs / "adpsgd")
    waits, free = data["runs"]
    assert [len(lane) for lane in waits["spans"]] == [2 * STEPS] * WORKERS
    for lane in (lane for run in data["runs"] for lane in run["spans"]):
        assert lane == sorted(lane)
    assert waiting(waits) > 0.55
    assert waiting(free) < 0.1  # what was being computed in a death, and at the end
    assert [members for _, _, members in waits["merges"]] == [list(range(WORKERS))] * STEPS
    assert not waits["exchanges"]
    pairs = list(zip(free["exchanges"][2::4], free["exchanges"][3::4], strict=True))
    assert len(pairs) > STEPS
    assert all(0 <= a < b < WORKERS for a, b in pairs)
    assert free["exchanges"][::4] == sorted(free["exchanges"][::4])
    assert len(free["accuracy"]) > 2
    assert waits["colour"] != free["colour"]


def test_a_death_and_a_return_are_marked_and_make_two_lives(runs):
    data, _ = played(runs / "adpsgd")
    (run,) = data["runs"]
    assert [(rank, what) for _, rank, what in run["marks"]][:2] == [(2, "died"), (2, "joined")]
    assert len(run["lives"][2]) == 2


def test_a_hostile_name_stays_text(runs):
    _, page = played(runs / "adpsgd", title="</script><img src=x onerror=alert(1)>")
    assert "<img" not in page.replace("&lt;img", "")


def test_a_run_without_a_timeline_is_refused(tmp_path):
    made.run(tmp_path / "old", workers=2, samples=5)
    with pytest.raises(ConfigError, match="has no timeline"):
        html([Run(tmp_path / "old")], "old")


def test_a_line_that_is_not_whole_is_left_out(runs, tmp_path):
    shutil.copytree(runs / "adpsgd", tmp_path / "copy")
    with (tmp_path / "copy" / "timeline-1.jsonl").open("a") as file:
        file.write('{"life": 1, "fro')
    assert played(tmp_path / "copy")[0]["runs"][0]["spans"] == played(runs / "adpsgd")[0]["runs"][0]["spans"]


def test_a_timeline_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "TIMELINE_BYTES", 1000)
    pen, clock = Journal(tmp_path, 0), iter(range(10**6))
    timeline = Timeline(lambda: next(clock) / 10, 1)
    for _ in range(50):
        for _ in range(10):
            timeline.gradient(0.05)
        pen.timeline(0, timeline.take())
    assert timeline.take() is None
    assert (tmp_path / "timeline-0.jsonl").stat().st_size < 1500
    told = [
        line for line in (tmp_path / "events-0.jsonl").read_text().splitlines() if "rest of the run" in line
    ]
    assert len(told) == 1
