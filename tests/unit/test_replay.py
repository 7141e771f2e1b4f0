"""A replay holds what workers did: every gradient, who waited, who met whom, who died."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest

import freewheel as fw
import made
from freewheel.cli.show import replay
from freewheel.errors import ConfigError
from freewheel.records import journal
from freewheel.records.counters import Timeline
from freewheel.records.journal import Journal
from freewheel.records.run import Run
from freewheel.show.replay import as_perfetto, html
from freewheel.show.tables import race

WORKERS, STEPS = 4, 12


def played(*folders, title="both"):
    page = html([Run(one) for one in folders], title)
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page).group(1)), page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that waits for its slow worker, and one in which a worker dies and comes back."""
    folder = tmp_path_factory.mktemp("runs")
    usual = {"workers": WORKERS, "steps": STEPS, "compute": fw.Compute(ms=50, slow={0: 5}), "target": 0.2}
    fw.simulate("allreduce", "digits", folder=folder / "allreduce", **usual)
    faults = [fw.Fault("crash", 2, 0.12), fw.Fault("restart", 2, 0.3)]
    fw.simulate("adpsgd", "digits", folder=folder / "adpsgd", faults=faults, **usual)
    return folder


def waiting(run):
    busy = sum(end - begin for lane in run["spans"] for begin, end in zip(lane[::2], lane[1::2], strict=True))
    busy += sum(end - begin for _, begin, end in run["cut"])
    return 1 - busy / sum(end - begin for lives in run["lives"] for begin, end in lives)


def test_every_gradient_is_there_and_who_waits_is_seen(runs):
    data, _ = played(runs / "allreduce", runs / "adpsgd")
    waits, free = data["runs"]
    assert [len(lane) for lane in waits["spans"]] == [2 * STEPS] * WORKERS
    for lane in (lane for run in data["runs"] for lane in run["spans"]):
        assert lane == sorted(lane)
    assert waiting(waits) > 0.55
    assert waiting(free) < 0.01  # what was being computed in a death and at the end is no waiting
    assert [members for _, _, members in waits["meetings"]] == [list(range(WORKERS))] * STEPS
    pairs = [members for _, _, members in free["meetings"]]
    assert len(pairs) > STEPS
    assert all(0 <= a < b < WORKERS for a, b in pairs)
    begins = [begin for begin, _, _ in free["meetings"]]
    assert begins == sorted(begins)
    assert len(free["accuracy"]) > 2
    assert waits["colour"] != free["colour"]


def test_a_death_and_a_return_are_marked_and_make_two_lives(runs):
    data, _ = played(runs / "adpsgd")
    (run,) = data["runs"]
    assert [tuple(mark[1:3]) for mark in run["marks"]] == [(2, "died"), (2, "joined")]
    assert [words for *_, words in run["marks"]] == [
        "worker 2 died at 0.12 s",
        "worker 2 came back at 0.30 s",
    ]
    assert len(run["lives"][2]) == 2
    assert [begin for rank, begin, end in run["cut"] if rank == 2 and end == 0.12] == [0.1]


def test_the_story_is_told_from_the_runs(runs):
    data, _ = played(runs / "allreduce", runs / "adpsgd")
    assert re.fullmatch(
        r"AD-PSGD reaches 20 % accuracy first, after [\d.]+ s, "
        r"[\d.]+ times sooner than AllReduce \([\d.]+ s\)\.",
        data["story"],
    )
    assert re.match(r"Time spent waiting: AllReduce 6\d %, AD-PSGD [01] %\.", data["about"])
    assert data["measure"] == "accuracy"
    assert [run["label"] for run in data["runs"]] == ["AllReduce", "AD-PSGD"]
    (first, second) = (run["colour"] for run in data["runs"])
    alone, _ = played(runs / "adpsgd")
    assert first != second == alone["runs"][0]["colour"]  # a strategy keeps its colour
    assert re.fullmatch(r"AD-PSGD reaches 20 % accuracy after [\d.]+ s\.", alone["story"])


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ({"DDP": 4.4, "AD-PSGD": 1.1}, "AD-PSGD {} first, after 1.10 s, 4 times sooner than DDP (4.40 s)."),
        ({"DDP": None, "AD-PSGD": 1.1}, "AD-PSGD {} first, after 1.10 s; never: DDP."),
        ({"DDP": 1.0, "AD-PSGD": 2.0}, "DDP {} first, after 1 s."),
        ({"DDP": None, "AD-PSGD": None}, "No run {}."),
        ({"AD-PSGD": 0.0, "DDP": 0.0}, "AD-PSGD {} first, after 0 s."),
        ({"AD-PSGD": 120.0}, "AD-PSGD {} after 120 s."),
    ],
)  # fmt: skip
def test_who_was_there_first(curves, said):
    one = fw.simulate("none", "quadratic", workers=1, steps=1)
    some = [
        dataclasses.replace(one, strategy=name.lower(), target=0.9, target_s=at_s)
        for name, at_s in curves.items()
    ]
    assert race(list(curves), some) == said.format("reaches 90 % accuracy")
    assert race(["a"], [dataclasses.replace(one, target=None)]) == ""


def test_without_accuracy_the_loss_is_raced(tmp_path):
    fw.simulate("adpsgd", "quadratic", workers=3, steps=10, folder=tmp_path / "run")
    data, _ = played(tmp_path / "run")
    assert data["measure"] == "loss"
    assert len(data["runs"][0]["loss"]) > 2


def test_perfetto_gets_the_trace_event_format(runs):
    found = json.loads(as_perfetto([Run(runs / one) for one in ("allreduce", "adpsgd")]))
    events = found["traceEvents"]
    assert found["displayTimeUnit"] in ("ms", "ns")
    for event in events:
        assert {"ph", "name", "ts", "pid", "tid"} <= event.keys()
        assert event["ph"] in {"X", "M", "i", "C"}
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid"))
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["allreduce", "adpsgd"]
    work = [event for event in events if event["name"] == "gradient" and event["pid"] == 0]
    assert len(work) == WORKERS * STEPS
    slow = [event["dur"] for event in work if event["tid"] == 0]
    assert slow == pytest.approx([250_000] * STEPS, abs=200)
    assert {event["name"] for event in events if event["ph"] == "i"} == {"died", "joined"}
    assert {"exchange", "merge", "accuracy"} <= {event["name"] for event in events}


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
        line for line in (tmp_path / "events-0.jsonl").read_text().splitlines() if "takes too much" in line
    ]
    assert len(told) == 1


def test_a_run_that_never_trained_is_named_and_left_out(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    made.append(
        tmp_path / "runs" / "dead" / "events-launcher.jsonl", made.event(1.0, "restarted", 0, "launcher")
    )
    replay([tmp_path / "runs"], tmp_path / "page.html", None)
    assert "left out" in capsys.readouterr().err
    assert (tmp_path / "page.html").exists()
