"""Workers whose connections are encrypted with the keys of the run."""

from __future__ import annotations

import threading

import pytest
import torch

import freewheel as fw
from crew import next_life, outcomes, together
from freewheel.runtime.membership.place import Place
from loops import DEADLINE_S, flat, make, net, run

pytestmark = pytest.mark.integration


def test_with_keys_of_the_run(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    keys.make(tmp_path)
    workers = together(3, lambda place: run(place, steps=20, tls=tmp_path))
    answers = [flat(worker.consensus()) for worker in workers]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert sum(worker.metrics()["exchanges"]["done"] for worker in workers) > 0


def test_keys_of_another_run_do_not_fit(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    for rank in range(2):
        keys.make(tmp_path / str(rank))

    def work(place: Place) -> None:
        run(place, "allreduce", tls=tmp_path / str(place.rank))

    called, calling = outcomes(2, work)
    assert isinstance(calling, fw.ConfigError)
    assert "worker 1 cannot join" in str(calling)
    assert "its keys are not of this worker's set (self-signed certificate" in str(calling)
    assert isinstance(called, fw.WorkerLost)
    assert "its keys are not" in str(called), "why the other is not coming"


def test_who_joins_with_keys_of_another_run_is_told(tmp_path):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    for name in ("ours", "theirs"):
        keys.make(tmp_path / name)
    there = threading.Barrier(2)

    def work(place: Place) -> None:
        with make(place, net(), tls=tmp_path / "ours"):
            there.wait(DEADLINE_S)
            if place.rank == 1:
                late = make(next_life(place), net(), tls=tmp_path / "theirs")
                with pytest.raises(fw.ConfigError, match="its keys are not of this worker's set"), late:
                    pass
            there.wait(DEADLINE_S)

    together(2, work)
