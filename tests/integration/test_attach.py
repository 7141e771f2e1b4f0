"""`fw.attach` around ordinary training loops: workers are threads with real sockets between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import next_life, outcomes, together
from freewheel import strategies
from freewheel.fabric.tcp import TcpFabric
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import agent
from loops import DEADLINE_S, flat, make, net, step

pytestmark = pytest.mark.integration

# -- alone --


@pytest.mark.parametrize("name", strategies.ALL)
def test_alone_without_any_environment(name, no_environment):
    model, plain = net(), net()
    settings = {"lr": 0.1, "momentum": 0.9} if name == "eamsgd" else {"lr": 0.1}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    with fw.attach(model, optimizer, name) as worker:
        for k in range(5):
            worker.report(step(model, optimizer, k))
    assert (worker.rank, worker.world_size) == (0, 1)
    metrics = worker.metrics()
    assert metrics["steps"] == 5
    assert metrics["bytes_out"] == 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for k in range(5):
        step(plain, optimizer, k)
    if name not in ("downpour", "easgd", "eamsgd"):  # their answer, the centre, hears of steps later
        torch.testing.assert_close(flat(worker.consensus()), flat(plain))


def test_alone_a_strategy_object_and_a_setting_by_name(no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, fw.SASGD(interval=2)) as worker:
        step(model, optimizer)
    with fw.attach(model, optimizer, "sasgd:interval=2") as again:
        step(model, optimizer)
    assert worker.metrics()["steps"] == again.metrics()["steps"] == 1


def test_wrong_arguments_are_refused(no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fw.ConfigError, match="wire must be one of fp32, bf16"):
        fw.attach(model, optimizer, wire="int8")
    with pytest.raises(fw.ConfigError, match="the optimizer trains none"):
        fw.attach(net(), optimizer)
    with pytest.raises(fw.UnknownName, match="adpsgd"):
        fw.attach(model, optimizer, "adpgsd")


# -- the start --


def test_a_worker_may_come_before_the_one_that_holds_the_store():
    others = threading.Barrier(3)

    def work(place: Place) -> list[int]:
        if place.rank == 0:
            others.wait(DEADLINE_S)
            model = net()
        else:
            model = net()
            others.wait(DEADLINE_S)
        with make(place, model) as worker:
            return worker.metrics()["members"]

    assert together(3, work) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce", "asgd", "nodelay_free"])
def test_all_begin_with_the_weights_of_worker_0(strategy):
    def work(place: Place) -> torch.Tensor:
        model = net(seed=place.rank)
        with make(place, model, None, strategy):
            return flat(model)

    began = together(4, work)
    for weights in began:
        assert torch.equal(weights, flat(net(seed=0)))


def other_shape(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 3)


def other_type(model: nn.Sequential) -> None:
    model[2].double()


def one_more(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


DIFFERENT = [
    (other_shape, r"2\.weight of shape \(3, 8\) in float32 here, 2\.weight of shape \(2, 8\)"),
    (other_type, r"2\.weight of shape \(2, 8\) in float64 here, 2\.weight of shape \(2, 8\) in float32"),
    (one_more, r"3\.weight of shape \(2, 2\) in float32 here, no further parameter at worker 0"),
]


@pytest.mark.parametrize(("change", "words"), DIFFERENT, ids=["shape", "type", "one more"])
def test_another_model_is_refused_and_those_who_wait_for_nobody_go_on(change, words, caplog):
    def work(place: Place) -> dict[str, Any]:
        model = net()
        if place.rank == 2:
            change(model)
        worker = make(place, model)
        with worker:
            for k in range(30):
                step(model, worker.optimizer, k)
            return worker.metrics()

    *others, odd = outcomes(3, work)
    assert isinstance(odd, fw.ConfigError)
    assert odd.args[0].startswith("worker 2 was refused")
    with pytest.raises(fw.ConfigError, match=words):
        raise odd
    for rank, metrics in enumerate(others):
        assert metrics["steps"] == 30
        assert metrics["members"] == [0, 1]
        for said in ("the run goes on without worker 2", "the mean of worker 0, 1; it lacks worker 2"):
            (line,) = (one for one in caplog.messages if one.startswith(f"worker {rank}: ") and said in one)
            assert "it was refused: its model differs from worker 0's. The first difference: " in line


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd", "nodelay", "dpsgd", "grouping"])
def test_another_model_is_a_clear_error_where_all_are_needed(strategy):
    def work(place: Place) -> None:
        model = net()
        if place.rank == 1:
            other_shape(model)
        with make(place, model, None, strategy):
            pytest.fail("it began without worker 1")

    first, odd, last = outcomes(3, work)
    assert isinstance(odd, fw.ConfigError)
    for error in (first, last):
        assert isinstance(error, fw.WorkerLost)
        assert "needs worker 1, which is not coming: it was refused: its model differs" in str(error)
        assert "2.weight" in str(error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("adpsgd", "sasgd"), "it has strategy=sasgd, worker 0 has strategy=adpsgd"),
        (("sasgd:interval=4", "sasgd:interval=8"), "it has interval=8, worker 0 has interval=4"),
    ],
)
def test_another_strategy_or_setting_is_refused_by_name(given, words):
    def work(place: Place) -> None:
        with make(place, net(), None, given[place.rank]):
            pass

    first, odd = outcomes(2, work)
    assert isinstance(odd, fw.ConfigError)
    assert words in str(odd)
    assert len(str(odd).split()) <= 30
    assert first is None or f"it was refused: {words}" in str(first)


@pytest.mark.parametrize("what", ["seed", "optimizer", "momentum"])
def test_another_seed_or_optimizer_is_refused_by_name(what, caplog):
    kinds = (torch.optim.SGD, torch.optim.AdamW)

    def work(place: Place) -> None:
        model = net()
        kind, seed = (kinds[place.rank], 0) if what == "optimizer" else (kinds[0], place.rank)
        optimizer = kind(model.parameters(), lr=0.1 + place.rank)
        if what == "momentum":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 * place.rank)
            seed = 0
        with make(place, model, optimizer, seed=seed):
            pass

    first, odd = outcomes(2, work)
    assert first is None
    words = {
        "seed": "it has seed=1, worker 0 has seed=0",
        "optimizer": "it has optimizer=AdamW, worker 0 has optimizer=SGD",
        "momentum": "it has momentum=yes, worker 0 has momentum=no",
    }
    assert f"{words[what]}. Give all" in str(odd)
    assert f"it lacks worker 1: it was refused: {words[what]}" in caplog.text


def test_a_worker_that_is_refused_later_is_named_while_the_others_train(caplog):
    """It comes when they have begun, and they look at the store; to be told once is enough."""
    said = "worker 0: the run goes on without worker 1: it was refused: it has optimizer=AdamW"

    def work(place: Place) -> None:
        model = net()
        if place.rank == 0:
            end_s = time.monotonic() + 30
            with make(place, model) as worker:
                while said not in caplog.text and time.monotonic() < end_s:
                    step(model, worker.optimizer, 0)
                    time.sleep(0.01)
                return
        with contextlib.suppress(ArithmeticError), make(place, model):
            raise ArithmeticError
        other = torch.optim.AdamW(model.parameters(), lr=0.1)
        with (
            pytest.raises(fw.ConfigError, match="worker 1 was refused"),
            make(next_life(place), model, other),
        ):
            pass

    together(2, work)
    assert caplog.text.count(said) == 1
    assert "it lacks worker 1: it was refused" in caplog.text


def test_a_worker_that_never_comes_is_a_clear_error():
    def work(place: Place) -> None:
        if place.rank < 2:
            with make(place, net(), join_timeout_s=2.0):
                pass

    first, second, _ = outcomes(3, work)
    for error in (first, second):
        assert isinstance(error, fw.WorkerLost)
        assert "2 to join. Start all workers" in str(error)


# -- the record --

KEYS = {
    "rank", "steps", "elapsed_s", "steps_per_s", "blocked_share", "exchanges", "merges", "staleness_mean",
    "staleness_max", "discrepancy_max", "bytes_out", "bytes_in", "messages_dropped", "members", "loss",
}  # fmt: skip


def test_metrics_and_records(tmp_path):
    def work(place: Place) -> tuple[dict[str, Any], int]:
        model = net(place.rank)
        worker = make(place, model, folder=tmp_path / "run")
        with worker:
            made, inside = 0, worker.metrics()
            while made < 30 or not inside["bytes_in"]:  # quick steps may meet nobody
                worker.report(step(model, worker.optimizer, made + 1000 * place.rank))
                made, inside = made + 1, worker.metrics()
        assert worker.metrics()["members"] == [0, 1], "after the block, those who were there when it ended"
        return inside, made

    for rank, (metrics, made) in enumerate(together(2, work)):
        assert set(metrics) >= KEYS
        assert set(metrics["exchanges"]) == {"done", "busy", "half", "failed"}
        assert metrics["rank"] == rank
        assert metrics["steps"] == made >= 30
        assert metrics["members"] == [0, 1]
        assert 0 <= metrics["blocked_share"] < 1
        assert metrics["loss"] < 100
        text = (tmp_path / "run" / f"worker-{rank}.jsonl").read_text()
        records = [json.loads(line) for line in text.splitlines()]
        assert [record["last"] for record in records] == [False] * (len(records) - 1) + [True]
        assert set(records[-1]) >= KEYS | {"time"}
        assert records[-1]["steps"] == made


def test_records_of_a_loss_that_is_no_number_are_json(tmp_path, no_environment):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, folder=tmp_path) as worker:
        step(model, optimizer)
        worker.report(float("inf"))
    (record,) = (tmp_path / "worker-0.jsonl").read_text().splitlines()[-1:]
    assert json.loads(record, parse_constant=pytest.fail)["loss"] is None


def test_a_folder_that_cannot_be_written_costs_only_the_records(tmp_path, no_environment, caplog):
    (tmp_path / "file").write_text("")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, folder=tmp_path / "file") as worker:
        step(model, optimizer)
    assert worker.metrics()["steps"] == 1
    assert [record.levelname for record in caplog.records if record.name == "freewheel"] == ["WARNING"]


def test_leader_asks_for_losses():
    def work(place: Place) -> None:
        model = net()
        worker = make(place, model, None, "leader")
        with worker:
            for k in range(5):
                step(model, worker.optimizer, k)

    for error in outcomes(2, work):
        assert isinstance(error, fw.FreewheelError)
    errors = outcomes(2, work)
    assert any(isinstance(e, fw.ConfigError) and "call worker.report(loss)" in str(e) for e in errors)


# -- nothing is left behind --


@pytest.mark.slow
def test_two_hundred_runs_leave_no_thread_and_no_socket():
    """A script may attach again and again."""
    cycles, counts = 200, []
    both = threading.Barrier(2, action=lambda: counts.append((threading.active_count(), handles())))

    def work(place: Place) -> None:
        model = net(place.rank)
        for k in range(cycles):
            worker = make(place, model)
            with worker:
                for _ in range(3):
                    step(model, worker.optimizer, k)
            both.wait(DEADLINE_S)

    together(2, work, deadline_s=110.0)
    assert len(counts) == cycles
    assert counts[-1] == counts[0]


def handles() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_connections_that_do_not_close_are_told_and_keep_no_answer_back(monkeypatch, caplog):
    close, go_on, waiting = TcpFabric.close, threading.Event(), list[threading.Thread]()

    async def slow(fabric, why):
        waiting.append(threading.current_thread())
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await close(fabric, why)

    monkeypatch.setattr(TcpFabric, "close", slow)
    monkeypatch.setattr(agent, "CLOSE_S", 0.05)

    def work(place):
        with make(place, net()) as worker:
            pass
        return worker.consensus()

    try:
        assert len(together(2, work)) == 2
        assert caplog.text.count("its connections have not closed in 0.05 s") == 2
    finally:
        go_on.set()
        for thread in waiting:
            thread.join()
