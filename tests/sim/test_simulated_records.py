"""A simulated run, written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import freewheel as fw
from freewheel.records.run import Run
from freewheel.show.rates import result_of
from freewheel.show.report import happened


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


SETTINGS: dict[str, Any] = {
    "workers": 4,
    "steps": 60,
    "compute": fw.Compute(slow={0: 4}),
    "faults": [fw.Fault.parse(text) for text in ("crash:3@0.2", "restart:3@0.35", "slow:1x2@0.3")],
}


@pytest.mark.parametrize("strategy", ["adpsgd", "sasgd:interval=4"])
def test_the_folder_tells_the_run_and_does_not_change_it(strategy, tmp_path):
    plain = fw.simulate(strategy, "quadratic", **SETTINGS)
    result = fw.simulate(strategy, "quadratic", folder=tmp_path / "run", **SETTINGS)
    assert result.trace_sha256 == plain.trace_sha256
    assert result.as_json() == plain.as_json()
    run = Run(tmp_path / "run")
    assert run.clock == "virtual"
    assert run.about["strategy"] == result.strategy
    assert run.about["name"] == "quadratic"
    assert run.about["settings"]["waits_for"] == result.settings["waits_for"]
    assert run.total("steps") == result.worker_steps
    assert run.total("bytes_out") == sum(worker["bytes_out"] for worker in result.by_worker)
    assert run.total("bytes_in") > 0
    assert {rank: run.state(rank) for rank in run.workers} == dict.fromkeys(range(4), "finished")
    assert run.workers[3].life == 2
    measured = [tuple(map(e.get, ("time", "worker_steps", "loss", "discrepancy"))) for e in run.evaluations]
    assert measured == [(s.virtual_s, s.worker_steps, s.loss, s.discrepancy) for s in result.curve]
    happened = {(event.what, event.rank): event for event in run.events}
    assert set(happened["died", 3].by) == {"simulator", 0, 1, 2}
    assert happened["slowed", 1].time == 0.3
    assert ("restarted", 3) in happened
    assert ("joined", 3) in happened
    assert (("view", None) in happened) == (strategy != "adpsgd")


@pytest.mark.parametrize("strategy", fw.strategies.ALL)
def test_the_figures_in_the_folder_are_those_of_the_result(strategy, tmp_path):
    result = fw.simulate(strategy, "quadratic", folder=tmp_path, **SETTINGS)
    found = result_of(Run(tmp_path))
    told, known = found.as_json(), result.as_json()
    for name in known.keys() - {"strategy", "trace_sha256"}:
        assert told[name] == pytest.approx(known[name]), name
    assert (found.target_s, found.curve) == (result.target_s, result.curve)


def test_every_sample_holds_what_is_promised(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "RECORDS.md").read_text()
    table = page.partition("## Samples")[2].partition("## Events")[0]
    names = [row.split("|")[1].split("`")[1::2] for row in table.splitlines() if row.startswith("| `")]
    promised = {name for row in names for name in row}
    fw.simulate("sasgd:interval=4", "quadratic", folder=tmp_path, **SETTINGS)
    samples = [one for path in tmp_path.glob("worker-*.jsonl") for one in lines(path)]
    assert all(set(one) == promised for one in samples)
    for one in samples:
        parts = one["compute_s"] + sum(one["blocked_s"].values())
        assert parts <= one["elapsed_s"] + 1e-9
    waits = [one for one in samples if one["rank"] == 1][-1]
    assert waits["blocked_share"] > 0.3  # for the slow worker
    assert waits["discrepancy"] > 0
    assert waits["peers"]["0"][0] == waits["merges"]["done"]


def test_a_long_run_is_sampled_rarely(tmp_path):
    links = fw.Links(mbit=0.01)  # everything takes far longer than computing does
    fw.simulate("allreduce", "quadratic", workers=2, steps=600, links=links, folder=tmp_path)
    assert 100 < len(lines(tmp_path / "worker-0.jsonl")) < 1000


def test_timing_only(tmp_path):
    fw.simulate("adpsgd", workers=4, steps=20, gradients=False, folder=tmp_path)
    last = lines(tmp_path / "worker-0.jsonl")[-1]
    assert last["last"]
    assert last["loss"] is None
    assert last["discrepancy"] is None
    assert last["exchanges"]["done"] > 0
    assert all(one["loss"] is None for one in lines(tmp_path / "evaluations-simulator.jsonl"))


def test_a_run_that_stops_says_why(tmp_path):
    faults = [fw.Fault.parse("crash:0@0.05")]
    with pytest.raises(fw.RunStopped):
        fw.simulate("asgd", "quadratic", workers=4, steps=50, faults=faults, folder=tmp_path)
    run = Run(tmp_path)
    (failed,) = [event for event in run.events if event.what == "failed"]
    assert "held the parameter server" in failed.text
    assert not any(track.latest["last"] for track in run.workers.values())


def test_a_disk_that_fills_up_costs_the_records(tmp_path, caplog):
    def fill(_done: int, _all: int) -> None:
        for rank in range(4):
            (tmp_path / f"worker-{rank}.jsonl").unlink(missing_ok=True)
            (tmp_path / f"worker-{rank}.jsonl").symlink_to("/dev/full")

    result = fw.simulate("adpsgd", "quadratic", workers=4, steps=40, folder=tmp_path, progress=fill)
    assert result.worker_steps == 160
    assert len([one for one in caplog.records if one.name == "freewheel"]) == 1


def test_a_folder_begins_empty_and_must_be_one(tmp_path):
    (tmp_path / "events-5.jsonl").write_text("of an earlier run\n")
    (tmp_path / "mine.txt").write_text("not of a run")
    for _ in range(2):
        fw.simulate("adpsgd", "quadratic", workers=2, steps=10, folder=tmp_path)
    assert not (tmp_path / "events-5.jsonl").exists()
    assert (tmp_path / "mine.txt").exists()
    assert len([one for one in lines(tmp_path / "worker-0.jsonl") if one["last"]]) == 1
    with pytest.raises(fw.ConfigError, match="Give a folder that can be written to"):
        fw.simulate("adpsgd", "quadratic", workers=2, steps=10, folder=tmp_path / "mine.txt")


def test_a_link_that_is_cut_is_said_once(tmp_path):
    faults = [fw.Fault.parse(text) for text in ("cut:1-2@0.1", "heal:1-2@0.3", "cut:0@0.4")]
    fw.simulate("adpsgd", "quadratic", workers=4, steps=100, faults=faults, folder=tmp_path)
    run = Run(tmp_path)
    told = [(event.rank, event.peer) for event in run.events if event.what == "cut"]
    assert told == [(1, 2), (0, None)]
    assert [event.link for event in run.events if event.peer is not None] == [
        "the link between 1 and 2 was cut",
        "the link between 1 and 2 is whole again",
    ]
    assert "The link between 1 and 2 was cut at 0.1 s." in happened(run)
    assert "Worker 0 was cut off at 0.4 s." in happened(run)
