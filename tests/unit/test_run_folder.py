"""Reading a run's folder: while it grows, after it was thinned, and when it is none."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest

import made
from freewheel.errors import ConfigError
from freewheel.records import run as run_module
from freewheel.records import track as track_module
from freewheel.records.files import fresh
from freewheel.records.run import LINES, Run, find_runs
from freewheel.records.schema import LEVELS, SUMS
from freewheel.records.track import POINTS, Tail, Track
from freewheel.show.rates import rate, rates


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.read() == [{"a": 1}, {"a": 2}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(": 3}\n")
    assert tail.read() == [{"a": 3}]


def test_a_line_that_is_no_record_is_left_out_and_counted(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    path.write_text('{"a": 1}\n\x00\x00\x00\n[1]\n{"a": 2}\n')
    tail = Tail(path)
    assert tail.read() == [{"a": 1}, {"a": 2}]
    assert tail.broken == 2


def test_of_a_long_file_some_lines_are_read_in_order_the_first_and_all_the_last_ones_among_them(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    path.write_text("".join(json.dumps({"n": n, "fill": "x" * (200 + n % 50)}) + "\n" for n in range(20_000)))
    tail = Tail(path, most=100)
    found = [line["n"] for line in tail.read()]
    assert found == sorted(set(found))
    assert found[0] == 0
    assert found[-16:] == list(range(19_984, 20_000))
    assert 100 < len(found) < 400
    assert max(b - a for a, b in itertools.pairwise(found)) < 20_000 / 100 * 2
    with path.open("a") as file:
        file.write('{"n": 20000}\n')
    assert tail.read() == [{"n": 20_000}]


def test_a_file_that_took_the_place_of_another_is_read_from_its_start(tmp_path):
    path, other = tmp_path / "worker-0.jsonl", tmp_path / "part"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    tail = Tail(path)
    assert len(tail.read()) == 2
    other.write_text('{"n": 2}\n{"n": 3}\n')
    os.replace(other, path)
    assert [line["n"] for line in tail.read()] == [2, 3]
    assert tail.anew


def test_a_sample_that_does_not_say_whose_it_is_is_no_record(tmp_path):
    folder = made.run(tmp_path / "r", workers=2)
    made.append(folder / "worker-1.jsonl", {"time": 2000.0, "steps": 10**6, "life": 1})
    run = Run(folder)
    assert run.broken == 1
    assert rates(run) == rates(Run(made.run(tmp_path / "whole", workers=2)))


def test_a_run_says_what_was_run_who_trains_and_what_happened(tmp_path):
    run = Run(made.run(tmp_path / "r", workers=4, samples=20))
    assert run.about["strategy"] == "adpsgd"
    assert {rank: run.state(rank) for rank in run.workers} == dict.fromkeys(range(4), "finished")
    assert not run.live
    assert run.total("steps") == sum(track.latest["steps"] for track in run.workers.values())
    assert [(event.what, event.rank, event.by) for event in run.events] == [
        ("died", 3, [0, 1, 2]),
        ("joined", 3, [0, 1, 2]),
    ]
    assert len(run.evaluations) == 10
    assert rate(run.workers[0], "steps") == pytest.approx(20, rel=0.1)


def test_two_views_close_together_are_two_events(tmp_path):
    for by in range(3):
        views = [made.event(1000.0 + n, "view", None, by, life=None, text=f"view {n}") for n in (1, 2)]
        made.append(tmp_path / f"events-{by}.jsonl", *views)
    events = Run(tmp_path).events
    assert [(e.text, e.time, e.by) for e in events] == [
        ("view 1", 1001.0, [0, 1, 2]),
        ("view 2", 1002.0, [0, 1, 2]),
    ]


def test_of_many_workers_fewer_points_each_are_read(tmp_path):
    lines = [made.sample(0, number) for number in range(1500)]
    for rank in range(40):
        made.append(tmp_path / f"worker-{rank}.jsonl", *lines)
    run = Run(tmp_path)
    read = sum(len(track.array("time")) for track in run.workers.values())
    assert LINES < read < 2 * LINES
    assert {track.array("time")[-1] for track in run.workers.values()} == {1000.0 + 0.5 * 1499}


def test_only_what_is_new_is_read(tmp_path):
    folder = made.run(tmp_path / "r", workers=2, samples=4, ended=False)
    run = Run(folder)
    assert not run.poll()
    made.append(folder / "worker-1.jsonl", made.sample(1, 4, 2))
    assert run.poll()
    assert len(run.workers[1].array("time")) == 5
    assert not run.poll()


def test_a_restarted_worker_counts_on(tmp_path):
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 10))
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 1, life=2, time=1010.0))
    track = Run(tmp_path).workers[0]
    assert list(track.array("steps")) == [100, 110]
    assert track.value("bytes_out") == 110 * 4_000_000


def test_the_rate_of_a_worker_that_came_back_is_of_the_time_it_lived(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    for number in range(1, 21):
        made.append(path, made.sample(0, number))
    for number in range(1, 4):  # away for 3 s
        made.append(path, made.sample(0, number, life=2, time=1013.0 + 0.5 * number))
    assert rate(Run(tmp_path).workers[0], "steps") == pytest.approx(20.0)


def test_the_sums_of_every_life_are_read_of_a_long_file_too(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=1)))
    at = 0
    for life, samples in enumerate((700, 1, 1, 2400, 30), start=1):
        for number in range(1, samples + 1):
            at += 1
            line = made.sample(0, number, 1, life=life, time=1000.0 + 0.5 * at)
            made.append(tmp_path / "worker-0.jsonl", line)
    run = Run(tmp_path)
    assert run.total("steps") == 10 * (700 + 1 + 1 + 2400 + 30)
    assert [life["steps"] for life in run.workers[0].lives] == [7000, 10, 10, 24000, 300]
    assert run.ended_s - run.began_s == 0.5 * at


def test_a_run_begins_with_training_and_ends_with_the_last_step(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=1, started=1003.0)))
    joining = made.sample(0, 0, 1, state="joining", began=None)
    made.append(tmp_path / "worker-0.jsonl", joining)
    run = Run(tmp_path)
    assert (run.began_s, run.ended_s) == (1000.0, 1000.0)
    leaving = made.sample(0, 20, 1, time=1016.0, began=1003.0, state="finished", last=True)
    made.append(tmp_path / "worker-0.jsonl", leaving)
    run.poll()
    assert (run.began_s, run.ended_s, run.last_s) == (1003.0, 1013.0, 1016.0)


def test_states_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 1010.0)
    for rank, changes in enumerate(
        ({"time": 1009.0}, {"time": 1001.0}, {"time": 1009.0}, {"time": 1001.0, "last": True})
    ):
        made.append(tmp_path / f"worker-{rank}.jsonl", made.sample(rank, 0, **changes))
    made.append(tmp_path / "events-0.jsonl", made.event(1009.5, "died", 2, 0))
    run = Run(tmp_path)
    assert [run.state(rank) for rank in range(4)] == ["training", "silent", "dead", "finished"]
    assert run.live
    made.append(tmp_path / "events-0.jsonl", made.event(1009.6, "restarted", 2, "launcher", life=2))
    run.poll()
    assert run.state(2) == "joining"
    made.append(tmp_path / "events-0.jsonl", made.event(1009.7, "died", 2, "launcher", life=2))
    run.poll()
    assert run.state(2) == "dead"
    made.append(tmp_path / "worker-2.jsonl", made.sample(2, 0, time=1009.8, life=3))
    run.poll()
    assert run.state(2) == "training"


def test_a_worker_that_has_not_written_is_joining_unless_it_died(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 1000.2)
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=4)))
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 0))
    died = made.event(1000.0, "died", 2, "launcher"), made.event(1000.0, "died", 3, "launcher")
    made.append(
        tmp_path / "events-launcher.jsonl", *died, made.event(1000.1, "restarted", 3, "launcher", life=2)
    )
    run = Run(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert [run.state(rank) for rank in run.ranks] == ["training", "joining", "dead", "joining"]
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 1, last=True))
    run.poll()
    assert run.state(1) == "silent"


def test_whom_we_hear_is_not_silent_though_its_clock_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 5000.0)
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 0))
    run = Run(tmp_path)
    assert run.state(0) == "silent"
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 1))
    run.poll()
    assert run.state(0) == "training"
    monkeypatch.setattr(run_module.time, "time", lambda: 5060.0)
    assert run.state(0) == "silent"


def test_a_run_says_for_how_long_nobody_has_written(tmp_path, monkeypatch):
    run = Run(made.run(tmp_path, workers=1, ended=False))
    assert run.quiet_s < 60
    for path in tmp_path.iterdir():
        os.utime(path, (1000, 1000))
    run = Run(tmp_path)
    assert run.quiet_s > 1e6
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 20, 1))
    os.utime(tmp_path / "worker-0.jsonl", (1000, 1000))  # the file server's clock may be wrong, too
    run.poll()
    assert run.quiet_s < 60


def test_points_are_bounded_and_the_last_ones_are_kept(tmp_path):
    run = Run(made.run(tmp_path, workers=1, samples=4, ended=False))
    track = run.workers[0]
    for number in range(4, 5000):
        track.add(made.sample(0, number, 1))
    times = list(track.array("time"))
    assert len(times) <= 2 * POINTS
    assert times[-1] == 1000.0 + 0.5 * 4999
    assert times == sorted(times)
    assert {len(track.array(name)) for name in ("time", *SUMS, *LEVELS)} == {len(times)}


def test_what_is_long_past_stays_drawn_while_a_run_is_looked_at_for_a_day():
    track = Track(0)
    for number in range(0, 2 * 24 * 3600, 4):
        track.add(made.sample(0, number, 1))
    times = list(track.array("time"))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) <= 2 * POINTS
    assert times[0] == 1000.0
    assert max(gaps) <= 2 * 512.0  # parts are powers of two: 24 h in 169 of them
    assert gaps[-track_module.RECENT + 1 :] == [2.0] * (track_module.RECENT - 1)


def test_a_worker_that_only_joins_makes_a_run_no_longer(tmp_path):
    folder = made.run(tmp_path / "r", workers=2, samples=20)
    before = Run(folder)
    late = {"state": "joining", "began": None, "steps": 0, "elapsed_s": 0.0, "compute_s": 0.0}
    made.append(folder / "worker-2.jsonl", *(made.sample(2, number, 3, **late) for number in range(100)))
    run = Run(folder)
    assert run.workers[2].latest["time"] > before.ended_s
    assert (run.began_s, run.ended_s) == (before.began_s, before.ended_s)
    assert rates(run) == rates(before)


def test_a_life_on_a_host_whose_clock_is_behind_counts(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    made.append(path, *(made.sample(0, number, 1) for number in range(1, 21)))
    behind = [made.sample(0, number, 1, life=2, time=970.0 + 0.5 * number) for number in range(1, 11)]
    made.append(path, *behind)
    track = Run(tmp_path).workers[0]
    assert (track.life, track.value("steps")) == (2, 300)
    assert list(track.array("time")) == sorted(track.array("time"))
    assert rate(track, "steps") is not None


def test_a_death_counts_though_one_who_noticed_has_a_clock_that_is_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module.time, "time", lambda: 1010.5)
    for rank in range(3):
        made.append(tmp_path / f"worker-{rank}.jsonl", made.sample(rank, 20, 3))
    made.append(tmp_path / "events-launcher.jsonl", made.event(1010.2, "died", 1, "launcher"))
    made.append(tmp_path / "events-2.jsonl", made.event(1007.0, "died", 1, 2))
    run = Run(tmp_path)
    assert len(run.events) == 1
    assert run.state(1) == "dead"


def test_a_thinned_file_replaces_what_was_known(tmp_path):
    folder = made.run(tmp_path / "r", workers=1, samples=10, ended=False)
    run = Run(folder)
    made.append(tmp_path / "part", *(made.sample(0, number, 1) for number in range(0, 12, 2)))
    os.replace(tmp_path / "part", folder / "worker-0.jsonl")
    assert run.poll()
    assert len(run.workers[0].array("time")) == 6


def test_a_fresh_folder_has_no_records_of_an_earlier_run_and_all_else(tmp_path):
    folder = made.run(tmp_path / "r")
    for name in ("timeline-0.jsonl", "notes.jsonl"):
        (folder / name).write_text("{}\n")
    fresh(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.jsonl"]


@pytest.mark.parametrize("force", [True, False])
def test_another_run_in_the_same_folder_is_read_anew(tmp_path, force):
    folder = made.run(tmp_path / "r", workers=2, samples=20, strategy="adpsgd")
    run = Run(folder)
    if force:  # its records take the place of the old ones
        fresh(folder)
    made.run(folder, workers=2, samples=10, strategy="allreduce", started=2000.0)
    assert run.poll()
    again = Run(folder)
    assert run.about == again.about
    assert run.about["strategy"] == "allreduce"
    assert len(run.events) == len(again.events)
    assert run.evaluations == again.evaluations
    for name in ("time", *SUMS, *LEVELS):
        np.testing.assert_equal(run.workers[0].array(name), again.workers[0].array(name))


def test_a_run_that_is_starting_has_nothing_to_say_yet(tmp_path):
    made.append(tmp_path / "events-launcher.jsonl", made.event(1000.0, "restarted", 0, "launcher"))
    run = Run(find_runs(tmp_path)[0])
    assert run.about == {}
    assert run.workers == {}
    assert run.live


def test_runs_are_found_in_a_folder_and_below_it(tmp_path):
    one, two = made.run(tmp_path / "set" / "0-ddp"), made.run(tmp_path / "set" / "1-adpsgd")
    assert find_runs(one) == [one]
    assert find_runs(tmp_path / "set") == [one, two]
    assert find_runs(tmp_path) == [one, two]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.write_text("x"), "is not a folder"),
        (lambda folder: folder.mkdir(), "is no run"),
    ],
)
def test_a_folder_that_is_no_run_is_named(tmp_path, prepare, says):
    folder = tmp_path / "nothing"
    prepare(folder)
    with pytest.raises(ConfigError, match=says) as caught:
        find_runs(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", '{"format": 1'])
def test_a_run_json_that_is_none_is_named_in_words(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run.json' is not what a run writes.*move this file away"):
        Run(tmp_path)


def test_a_last_line_that_nobody_ends_is_counted(tmp_path):
    folder = made.run(tmp_path / "r")
    path = folder / "worker-0.jsonl"
    whole = len(Run(folder).workers[0].array("time"))
    with path.open("a") as file:
        file.write('{"time": 1')
    os.utime(path)
    run = Run(folder)
    assert run.broken == 0  # it may be written just now
    for one in folder.glob("*.jsonl"):
        os.utime(one, (1000.0, 1000.0))
    run = Run(folder)
    assert (run.broken, len(run.workers[0].array("time"))) == (1, whole)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    folder = made.run(tmp_path / "r")
    os.mkfifo(folder / "worker-9.jsonl")
    assert 9 not in Run(folder).workers
    os.unlink(folder / "run.json")
    os.mkfifo(folder / "run.json")
    with pytest.raises(ConfigError, match="is no file"):
        Run(folder)


def test_a_target_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="target is 'high'"):
        Run(made.run(tmp_path / "r", target="high"))


def test_a_run_of_another_version_is_refused(tmp_path):
    made.run(tmp_path / "r", format=2, freewheel="9.9")
    with pytest.raises(ConfigError, match=r"freewheel 9\.9 .*format 2.*reads format 1"):
        Run(tmp_path / "r")


def test_a_foreign_file_under_a_workers_name_is_refused(tmp_path):
    made.append(tmp_path / "worker-0.jsonl", {"some": "thing"})
    with pytest.raises(ConfigError, match="not what a run writes"):
        Run(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"merges": 3}, {"loss": "low"}, {"bytes_out": [1]}, {"time": None}, {"windows": 3}]
)
def test_a_sample_with_something_else_than_numbers_is_refused(tmp_path, changes):
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 1, **changes))
    with pytest.raises(ConfigError, match="not what a run writes"):
        Run(tmp_path)


def test_a_run_json_with_something_else_than_numbers_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers="four")))
    with pytest.raises(ConfigError, match="not what a run writes"):
        Run(tmp_path)


def test_a_broken_line_costs_itself_and_no_other(tmp_path):
    good = [made.sample(0, number) for number in (1, 2, 3)]
    made.append(tmp_path / "worker-0.jsonl", good[0], good[1] | {"loss": "low"})
    run = Run(tmp_path)
    assert run.broken == 1
    made.append(tmp_path / "worker-0.jsonl", {"time": 5}, good[2])
    made.append(tmp_path / "worker-x.jsonl", good[2])
    assert run.poll()
    assert run.broken == 3
    assert run.workers[0].latest == good[2]
    assert list(run.workers[0].array("time")) == [1000.5, 1001.5]


def cuts(folder, *pairs):
    """Who has lost whom, each a tenth of a second after the other."""
    for number, (by, rank) in enumerate(pairs):
        made.append(folder / f"events-{by}.jsonl", made.event(1000 + number / 10, "cut", rank, by, text=""))
    return [(event.rank, event.peer, sorted(event.by)) for event in Run(folder).events]


def test_a_link_that_was_cut_is_one_event_whichever_end_is_read_first(tmp_path):
    assert cuts(tmp_path / "a", (1, 2), (2, 1)) == [(1, 2, [1, 2])]
    assert cuts(tmp_path / "b", (2, 1), (1, 2)) == [(1, 2, [1, 2])]
    assert Run(tmp_path / "b").events[0].link == "the link between 1 and 2 was cut"


def test_a_worker_that_has_lost_several_is_cut_off(tmp_path):
    assert cuts(tmp_path / "a", (0, 2), (1, 2), (2, 0), (2, 1)) == [(2, None, [0, 1, 2])]
    assert cuts(tmp_path / "b", (2, 0), (2, 1), (3, 2)) == [(2, None, [2, 3])]
    assert cuts(tmp_path / "c", (0, 2)) == [(2, None, [0])]  # the other end may hang
    assert cuts(tmp_path / "d", (0, 1), (1, 0), (2, 3), (3, 2)) == [(0, 1, [0, 1]), (2, 3, [2, 3])]


def test_a_link_that_is_cut_twice_was_cut_twice(tmp_path):
    assert cuts(tmp_path, (1, 2), (2, 1), (1, 2), (2, 1)) == [(1, 2, [1, 2])] * 2


def test_what_was_measured_later_of_one_moment_is_one_evaluation(tmp_path):
    moment = {"time": 1000.0, "worker_steps": 40}
    made.append(tmp_path / "evaluations-0.jsonl", {**moment, "discrepancy": 0.5, "loss": None})
    run = Run(tmp_path)
    assert [(one.get("discrepancy"), one.get("loss")) for one in run.evaluations] == [(0.5, None)]
    made.append(
        tmp_path / "evaluations-0.jsonl", {**moment, "loss": 2.0}, {**moment, "time": 1001.0, "loss": 1.0}
    )
    made.append(tmp_path / "evaluations-1.jsonl", {**moment, "loss": 3.0})  # the same, measured twice
    run.poll()
    known = [(one.get("discrepancy"), one.get("loss")) for one in run.evaluations]
    assert known == [(0.5, 2.0), (None, 3.0), (None, 1.0)]
