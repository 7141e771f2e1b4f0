"""The run folder from the writing side: its size, and disks and folders that fail."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from freewheel.records import journal
from freewheel.records.counters import Counters
from freewheel.records.journal import Journal
from freewheel.records.run import Run

HOUR = 7200  # samples


def sample(k: int, peers: int = 2, life: int = 1, last: bool = False) -> dict[str, Any]:
    """What a worker that has met so many peers writes as its k-th sample."""
    counters = Counters(steps=100 * k, bytes_out=10**9 + 77_777 * k, bytes_in=10**9 + 66_666 * k)
    for peer in range(1, peers + 1):
        counters.peers[peer] = (17 * k + peer, 1.0 / 3.0 + k / 7.0)
    for value in range(40):
        counters.stale(value)
    counters.discrepancy = k / 3.0
    return {
        "time": 1.8e9 + 0.5 * k,
        "rank": 0,
        "life": life,
        "state": "training",
        "steps": counters.steps,
        "elapsed_s": 0.5 * k + 0.123456789,
        "steps_per_s": 199.987654321,
        "compute_s": k / 2.1,
        "blocked_s": counters.blocked(0.0),
        "blocked_share": 0.012345678901,
        **counters.figures(),
        "checkpoints": {"done": k, "skipped": 0, "failed": 0},
        "progress": k / 1000,
        "members": list(range(peers + 1)),
        "view": 0,
        "loss": 1.0 / (k + 1),
        "last": last,
    }


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "freewheel"]


def test_an_hour_among_64_peers_is_small(tmp_path):
    pen = Journal(tmp_path, 0)
    for k in range(HOUR):
        pen.sample(sample(k, peers=64, last=k == HOUR - 1))
        pen.event(1.8e9 + 0.5 * k, "checkpoint", 0, 1, f"of step {100 * k}")
        pen.evaluation(1.8e9 + 0.5 * k, loss=0.1234567890123, accuracy=0.9, worker_steps=k, samples=k)
    assert size(tmp_path) < 50e6
    assert lines(tmp_path / "worker-0.jsonl")[-1]["last"]


def test_what_grows_too_large_is_thinned_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal, "THIN_BYTES", 200_000)
    pen, reader, most = Journal(tmp_path, 0), Run(tmp_path), 0
    for k in range(600):  # about 600 kB
        pen.sample(sample(k, life=1 if k < 301 else 2))
        most = max(most, (tmp_path / "worker-0.jsonl").stat().st_size)
        if k % 50 == 0:
            reader.poll()
    pen.sample(sample(600, life=2, last=True))
    assert most < 200_000 + 4_000  # twice what was kept, the last of a life among it
    kept = lines(tmp_path / "worker-0.jsonl")
    assert kept[-1] == json.loads(json.dumps(sample(600, life=2, last=True)))
    assert [one["time"] for one in kept] == sorted(one["time"] for one in kept)
    assert 30000 in [one["steps"] for one in kept if one["life"] == 1]  # the last of a life that ended
    thinned = lines(tmp_path / "events-0.jsonl")
    assert thinned
    assert {event["what"] for event in thinned} == {"thinned"}
    assert list(tmp_path.glob(".*")) == []
    reader.poll()
    assert reader.total("steps") == Run(tmp_path).total("steps") == 30000 + 60000
    assert warnings(caplog) == []


def test_the_old_file_stays_whole_if_the_thinner_one_cannot_take_its_place(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal, "THIN_BYTES", 20_000)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    pen = Journal(tmp_path, 0)
    for k in range(50):
        pen.sample(sample(k))
    assert [one["steps"] for one in lines(tmp_path / "worker-0.jsonl")] == [100 * k for k in range(50)]
    assert list(tmp_path.glob(".*")) == []
    assert len(warnings(caplog)) == 1


def test_events_without_end_do_not_fill_the_disk(tmp_path):
    pen = Journal(tmp_path, 3)
    for k in range(5_000):
        pen.event(1000.0 + k / 5_000, "cut", 1, 1, "it has been silent for 2 s " * 10)
    pen.event(100_000.0, "died", 1, 1, "connection reset by peer")
    events = lines(tmp_path / "events-3.jsonl")
    assert (tmp_path / "events-3.jsonl").stat().st_size < 1.1e6
    assert [event["what"] for event in events].count("thinned") == 1
    assert events[-1]["what"] == "died"  # there is room again


def test_a_full_disk_costs_records_and_one_warning(tmp_path, caplog):
    for name in ("worker-0.jsonl", "events-0.jsonl", "evaluations-0.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    pen = Journal(tmp_path, 0)
    for k in range(3):
        pen.sample(sample(k))
        pen.event(0.0, "died", 1, 1, "")
        pen.evaluation(0.0, loss=1.0)
    (warning,) = warnings(caplog)
    assert "No space left on device" in warning
    assert "Training goes on" in warning


def test_a_line_that_does_not_fit_is_taken_back_and_others_follow_when_there_is_room(tmp_path, caplog):
    """The kernel's limit on the size of a file stands for the last bytes of a disk."""
    pen, path = Journal(tmp_path, 0), tmp_path / "worker-0.jsonl"
    pen.sample({"rank": 0, "text": "x" * 4_000_000})
    whole = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 100, before[1]))
    try:
        for _ in range(3):
            pen.sample({"rank": 0, "text": "y" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == whole
    pen.sample({"rank": 0, "text": "z"})
    assert lines(path)[1:] == [{"rank": 0, "text": "z"}]
    (warning,) = warnings(caplog)
    assert "No space left" in warning


def test_a_folder_that_was_deleted_is_not_made_again(tmp_path, caplog):
    pen = Journal(tmp_path / "run", 0)
    pen.sample(sample(0))
    shutil.rmtree(tmp_path / "run")
    for k in range(3):
        pen.sample(sample(k))
        pen.event(0.0, "died", 1, 1, "")
    assert not (tmp_path / "run").exists()
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("text", "life"), [('{"life": 3, "x": 1}\n{"life"', 3), ("no json\n", 0), ("", 0)])
def test_the_last_life_in_a_folder_is_found(tmp_path, text, life):
    (tmp_path / "worker-0.jsonl").write_text(text)
    assert Journal(tmp_path, 0).last_life(0) == life
    assert Journal(tmp_path, 0).last_life(1) == 0


def test_numbers_that_are_none_are_written_as_null(tmp_path):
    Journal(tmp_path, 0).sample({"rank": 0, "peers": {1: [2, float("inf")]}, "loss": float("nan")})
    text = (tmp_path / "worker-0.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "rank": 0,
        "peers": {"1": [2, None]},
        "loss": None,
    }


def test_a_wait_that_goes_on_is_counted_and_staleness_has_classes():
    counters = Counters()
    counters.wait("peers", 10.0)
    assert counters.blocked(12.0) == {"peers": 2.0, "data": 0.0, "checkpoint": 0.0}
    counters.go_on(13.0)
    counters.wait("data", 20.0)
    counters.go_on(21.0)
    assert counters.blocked(30.0) == {"peers": 3.0, "data": 1.0, "checkpoint": 0.0}
    for value in (0, 1, 2, 3, 4, 7, 8, 1000):
        counters.stale(value)
    assert counters.figures()["staleness_counts"] == {0: 1, 1: 1, 2: 2, 4: 2, 8: 1, 512: 1}


def test_merges_with_ever_other_peers_are_counted_for_each():
    counters = Counters()
    for k in range(200):
        counters.met_all((1, 2 + k))
    counters.met(1, 0.5)
    peers = counters.figures()["peers"]
    assert peers[1] == (201, 0.5)
    assert all(peers[2 + k] == (1, None) for k in range(200))
    assert len(counters.merged) <= 64


def test_what_one_worker_takes_back_of_its_evaluations_is_its_own(tmp_path):
    for by in (0, 1):
        Journal(tmp_path, by).evaluation(1000.0 + by, loss=1.0 + by)
    assert [len(lines(tmp_path / f"evaluations-{by}.jsonl")) for by in (0, 1)] == [1, 1]
    assert [one["loss"] for one in Run(tmp_path).evaluations] == [1.0, 2.0]
