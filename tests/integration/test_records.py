"""What real workers and the launcher write down, and that writing never stops training."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import outcomes, together, worker
from freewheel.records.counters import Noticed
from freewheel.records.run import Run
from freewheel.records.schema import MEASURED
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership import rendezvous
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import records

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


@pytest.fixture
def quick(monkeypatch):
    """Samples so often that a test need not wait for one."""
    monkeypatch.setattr(records, "SAMPLE_S", 0.01)


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "freewheel"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.ones(2, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train_until(model: nn.Module, optimizer: torch.optim.Optimizer, done: Any) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not done():
        step(model, optimizer)
        assert time.monotonic() < end_s


# -- what is written --


@pytest.mark.parametrize("strategy", ["adpsgd", "sasgd:interval=2"])
def test_a_run_of_two_can_be_read(strategy, tmp_path, quick):
    def work(place: Place) -> None:
        model = net()
        one, optimizer = worker(place, model, strategy, folder=tmp_path)
        if place.rank == 1:
            one.about(name="never seen: worker 0 speaks for all")
        else:
            one.about(name="squares", target=torch.tensor(0.5), batch_size=2)
        with one:
            for _ in range(40):
                one.report(step(model, optimizer))
            if place.rank == 0:
                one.record(loss=torch.tensor(0.25, requires_grad=True), accuracy=0.75)
        if place.rank == 0:
            one.record(accuracy=float("nan"), discrepancy=1)
            one.record(perplexity=torch.tensor(12.5), temperature=-3)

    together(2, work)
    run = Run(tmp_path)
    about = run.about
    assert (about["clock"], about["name"], about["workers"], about["target"]) == ("wall", "squares", 2, 0.5)
    assert about["strategy"] == strategy.partition(":")[0]
    assert about["settings"]["scenario"]["batch_size"] == 2
    assert about["settings"]["lr"] == 0.1
    assert about["settings"]["model_bytes"] == 16
    assert {rank: run.state(rank) for rank in run.workers} == {0: "finished", 1: "finished"}
    assert run.total("steps") == 80
    assert [tuple(map(e.get, ("loss", "accuracy", "discrepancy"))) for e in run.evaluations] == [
        (0.25, 0.75, None),
        (None, None, 1.0),
        (None, None, None),
    ]
    own = {name: value for name, value in run.evaluations[-1].items() if name not in MEASURED}
    assert own == {"perplexity": 12.5, "temperature": -3.0}
    assert run.events == []  # all began and ended together
    last = run.workers[0].latest
    if strategy == "adpsgd":
        met, apart = last["peers"]["1"]
        assert met == last["exchanges"]["done"]
        assert apart == last["discrepancy"]
    else:
        assert last["peers"] == {"1": [last["merges"]["done"], None]}
        assert last["blocked_s"]["peers"] > 0
    assert last["compute_s"] + sum(last["blocked_s"].values()) <= last["elapsed_s"] + 1e-6
    states = [one["state"] for one in lines(tmp_path / "worker-0.jsonl")]
    assert states[0] in ("joining", "training")
    assert states[-1] == "finished"


def test_a_worker_that_fails_is_told_by_itself_and_by_the_others(tmp_path):
    def work(place: Place) -> None:
        model = net()
        one, optimizer = worker(place, model, folder=tmp_path)
        with one:
            step(model, optimizer)
            if place.rank == 1:
                raise ZeroDivisionError("by zero")
            train_until(model, optimizer, lambda: one.metrics()["members"] == [0])

    outcomes(2, work)
    run = Run(tmp_path)
    told = {(event.what, event.rank): event for event in run.events}
    assert told["failed", 1].by == [1]
    assert told["failed", 1].text == "ZeroDivisionError: by zero"
    assert told["left", 1].by == [0]
    assert run.state(1) == "dead"
    assert run.state(0) == "finished"


def test_the_first_worker_writes_run_json_whoever_it_is(tmp_path, alone):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with fw.attach(model, optimizer, folder=tmp_path):
        step(model, optimizer)
    first = json.loads((tmp_path / "run.json").read_text())
    assert first["workers"] == 1
    assert first["command"]
    assert first["settings"]["scenario"]["optimizer"] == "Adam"
    with fw.attach(model, optimizer, "none", folder=tmp_path):  # another run in the same folder
        step(model, optimizer)
    assert json.loads((tmp_path / "run.json").read_text())["strategy"] == "none"
    assert [one["life"] for one in lines(tmp_path / "worker-0.jsonl") if one["last"]] == [1, 2]
    assert Run(tmp_path).total("steps") == 2


def test_checkpoints_and_what_is_resumed_are_events_and_waiting_has_a_cause(tmp_path, alone):
    def train(resume: Path | None) -> dict[str, float]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with fw.attach(model, optimizer, folder=tmp_path / "run", resume=resume) as one:
            one.checkpoint(tmp_path / "saved", every=2)
            for _ in one.loader(list(range(8)), batch_size=2):
                step(model, optimizer)
            return one.metrics()["blocked_s"]

    blocked = train(None)
    assert blocked["checkpoint"] > 0
    assert blocked["data"] > 0
    assert blocked["peers"] == 0
    train(tmp_path / "saved")
    texts = [(event["what"], event["text"]) for event in lines(tmp_path / "run" / "events-0.jsonl")]
    assert ("checkpoint", "of step 2") in texts
    assert any(what == "resumed" and text.startswith("goes on at step") for what, text in texts)


def test_a_store_that_goes_and_comes_back_is_an_event(monkeypatch):
    monkeypatch.setattr(rendezvous, "REGISTER_S", 0.001)
    there, events = iter([True, False, False, True]), Noticed()

    class Store:
        place = Place(1, 2, host="10.0.0.1", port=29500)
        there = True

        def hurry(self) -> None:
            pass

        def register(self, *_: Any) -> dict[int, tuple[str, int]]:
            found = next(there, None)
            events.muted = found is None  # that is enough
            self.there = found is not False
            return {}

        def refused(self, *_: Any) -> dict[int, str]:
            return {}

    class Fabric:
        lives: ClassVar[dict[int, int]] = {}
        members = (1,)

    asyncio.run(
        asyncio.wait_for(
            rendezvous.stay_registered(Store(), Fabric(), events, lambda absent: None), DEADLINE_S
        )
    )
    assert [what for _, what, *_ in events.noted] == ["store lost", "store back"]


def test_the_launcher_writes_who_ended_and_was_started_again(tmp_path):
    output = Captured()
    command = [sys.executable, "-c", "import os, sys; sys.exit(3 * int(os.environ['RANK']))"]
    options = Options(folder=tmp_path / "run", typed="as typed", console=True)
    assert launch(command, 2, output=output, restarts=1, options=options) == 3
    events = lines(tmp_path / "run" / "events-launcher.jsonl")
    assert [(e["what"], e["rank"], e["life"], e["by"]) for e in events] == [
        ("died", 1, 1, "launcher"),
        ("restarted", 1, 2, "launcher"),
        ("died", 1, 2, "launcher"),
    ]
    assert "exit code 3" in events[0]["text"]
    assert any(line == f"Watch: freewheel watch {tmp_path / 'run'}" for line in output.lines[None])


# -- nobody who looks on stops a run --


class Raises:
    def add_scalar(self, *_: Any) -> None:
        raise RuntimeError("this board is broken")

    close = add_scalar


@pytest.mark.parametrize("broken", ["metrics", "tensorboard", "full disk", "deleted folder"])
def test_training_goes_on_with_one_warning(broken, tmp_path, quick, alone, monkeypatch, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if broken == "tensorboard":
        monkeypatch.setattr(records, "open_board", lambda *_: Raises())
    if broken == "full disk":
        for name in ("worker-0.jsonl", "events-0.jsonl", "evaluations-0.jsonl"):
            (folder / name).symlink_to("/dev/full")
    given = {"folder": folder, "tensorboard": tmp_path if broken == "tensorboard" else None}
    with fw.attach(model, optimizer, **given) as one:
        if broken == "metrics":
            monkeypatch.setattr(one._account, "said", lambda: 1 / 0)
        if broken == "deleted folder":
            train_until(model, optimizer, (folder / "worker-0.jsonl").exists)
            shutil.rmtree(folder)
        train_until(model, optimizer, lambda: warnings(caplog))
        one.record(loss=1.0)
        for _ in range(100):
            step(model, optimizer)
    one.record(loss=1.0)
    assert one.consensus() is not None
    assert len(warnings(caplog)) == 1
    assert "raining goes on" in warnings(caplog)[0]
    if broken == "tensorboard":  # the others go on
        assert lines(folder / "worker-0.jsonl")[-1]["last"]
    if broken == "deleted folder":
        assert not folder.exists()


# -- what is refused --


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "at least one number under a name"),
        ({"top 5": 0.5}, "'top 5' is no name"),
        ({"time": 0.5}, "'time' is no name"),
        ({"perplexity": "low"}, "perplexity must be one number"),
        ({"accuracy": 91.5}, "between 0 and 1, not 91.5"),
        ({"loss": "low"}, "loss must be one number, not 'low'"),
        ({"loss": torch.ones(2)}, "loss must be one number"),
        ({"loss": None}, "loss must be one number, not None"),
    ],
)
def test_record_refuses_what_is_no_measurement(given, message, alone):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer) as one, pytest.raises(fw.ConfigError, match=message):
        one.record(**given)


def test_record_and_about_have_their_time(alone):
    model = net()
    one = fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(fw.ConfigError, match="inside the with-block, or after it"):
        one.record(loss=1.0)
    with pytest.raises(fw.ConfigError, match=r"target is an accuracy between 0 and 1, not 90"):
        one.about(target=90)
    with one, pytest.raises(fw.ConfigError, match="before the with-block"):
        one.about(name="late")
    one.record(loss=1.0)  # without a folder it goes nowhere
