"""Flat scripts: start and finish, means over workers, a checkpoint at the end, one state_dict out of it."""

from __future__ import annotations

import contextlib
import math
import threading

import pytest
import torch
from torch import nn

import forked
import freewheel as fw
from crew import outcomes, together, worker
from freewheel.runtime.checkpoint.resume import export
from freewheel.runtime.worker import answers, checks

pytestmark = pytest.mark.integration


class Net(nn.Module):
    """Tied weights, BatchNorm, a mask with -inf, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


MASK = torch.nn.Transformer.generate_square_subsequent_mask(12)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(8, 3) + rank).square().mean().backward()
    optimizer.step()


def test_a_script_without_a_with_block_and_what_its_checkpoint_holds_at_the_end(tmp_path):
    def work(place):
        net = Net()
        net.mask.zero_()  # with -inf the workers' buffers could not be averaged at the end
        made, optimizer = worker(place, net, "adpsgd")
        me = made.start()
        assert me is made
        made.checkpoint(tmp_path / "saved", every=1000)
        for _ in range(3 + place.rank):
            step(net, optimizer, place.rank)
        mean = made.mean(
            {"loss": float(place.rank), "seen": torch.tensor([1.0, place.rank]), "mask": MASK}, wait=True
        )
        answer = made.finish()
        with pytest.raises(fw.RunStopped, match=r"ends what .* began, once"):
            made.finish()
        return mean, answer.state_dict()

    ended = together(2, work)
    for mean, _ in ended:
        assert mean["loss"] == 0.5
        assert torch.equal(mean["seen"], torch.tensor([1.0, 0.5]))
        assert torch.equal(mean["mask"], MASK)
    export(tmp_path / "saved", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    net = Net()
    net.load_state_dict(state)  # every name, and no other
    assert torch.equal(state["last.weight"], state["first.weight"])
    # Two steps apart at the end, and what was under way has arrived since.
    for name, tensor in ended[0][1].items():
        torch.testing.assert_close(state[name].float(), tensor.float(), atol=0.3, rtol=0.3)
    with pytest.raises(fw.ConfigError, match=r"model\.pt is there already: give another file, or --force"):
        export(tmp_path / "saved", tmp_path / "model.pt")
    with pytest.raises(fw.ConfigError, match=r"it has no checkpoint of step 77\. Give the folder"):
        export(tmp_path / "saved", tmp_path / "other.pt", step=77)
    with pytest.raises(fw.ConfigError, match="nothing is no folder"):
        export(tmp_path / "nothing", tmp_path / "other.pt")


def test_the_end_s_checkpoint_is_exactly_what_was_trained(tmp_path):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    worker = fw.attach(net, optimizer, "none").start()
    worker.checkpoint(tmp_path / "saved", every=5)
    for _ in range(7):
        step(net, optimizer, 0)
    worker.finish()
    export(tmp_path / "saved", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state.keys() == net.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in net.state_dict().items())
    export(tmp_path / "saved", tmp_path / "fifth.pt", step=5)
    assert not torch.equal(torch.load(tmp_path / "fifth.pt")["first.weight"], state["first.weight"])


def test_a_finished_run_has_nothing_left_to_do_when_it_is_resumed(tmp_path):
    def run() -> int:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with fw.attach(net, optimizer, "none", resume=tmp_path / "saved") as worker:
            worker.checkpoint(tmp_path / "saved", every=3)
            loader = worker.loader(torch.ones(20, 2), batch_size=4)
            for _ in range(loader.epoch, 2):
                for x in loader:
                    optimizer.zero_grad()
                    net(x).sum().backward()
                    optimizer.step()
        return worker.metrics()["steps"]

    assert [run(), run()] == [10, 10]


def test_the_answer_of_a_strategy_with_a_server_is_the_server_s(tmp_path):
    def work(place):
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        made, optimizer = worker(place, net, "asgd")
        with made as me:
            me.checkpoint(tmp_path / "saved", every=1000)
            for _ in range(5):
                optimizer.zero_grad()
                net(torch.ones(1, 2) * (place.rank + 1)).square().sum().backward()
                optimizer.step()
            me.mean(0.0, wait=True)  # so that the server has everything when it is saved
        return me.consensus().state_dict()

    first, _ = together(2, work)
    export(tmp_path / "saved", tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.testing.assert_close(state, {**first}, atol=0.05, rtol=0.05)


def test_a_mean_waits_for_nobody_unless_it_is_told_to():
    said, asked = threading.Event(), threading.Event()

    def work(place):
        net = nn.Linear(30, 30)
        made, _ = worker(place, net, "none")
        with made as me:
            if me.rank == 1:
                assert asked.wait(60)
                me.mean([2.0, 4.0], "score")
                said.set()
                return me.mean(list(net.parameters()), wait=True)
            alone = me.mean([0.0, 0.0], "score")
            asked.set()
            assert said.wait(60)
            both = me.mean([0.0, 0.0], "score")
            assert (alone, both) == ([0.0, 0.0], [1.0, 2.0])
            with pytest.raises(fw.ConfigError, match=r"worker 1 has 2 numbers for the mean of 'score', this"):
                me.mean(1.0, "score")
            with pytest.raises(fw.ConfigError, match="mean takes numbers, tensors, and lists"):
                me.mean("text")
            return me.mean(list(net.parameters()), wait=True)

    first, second = together(2, work)
    assert [one.shape for one in first] == [(30, 30), (30,)]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_means_without_a_name_are_of_what_was_said_on_the_same_line_under_the_same_keys():
    said = threading.Event()

    def work(place):
        made, _ = worker(place, nn.Linear(2, 1), "none")
        with made as me:
            assert me.rank == 1 or said.wait(60)  # worker 1 has said all of it before

            def same_line(value):
                return me.mean(value)

            first, second = me.mean(1.0), me.mean([3.0, 5.0])
            third = me.mean(100.0)
            found = [first, second, third, same_line({"loss": 7.0}), same_line({"accuracy": 50.0})]
            said.set()
            return found, me.mean(2.0, wait=True) if me.rank == 0 else me.mean(4.0, wait=True)

    expected = [1.0, [3.0, 5.0], 100.0, {"loss": 7.0}, {"accuracy": 50.0}]
    assert together(2, work) == [(expected, 3.0)] * 2


def test_one_that_never_says_anything_is_not_waited_for_when_its_loop_has_ended():
    def work(place):
        made, _ = worker(place, nn.Linear(2, 1), "none")
        with made as me:
            return me.mean(3.0, wait=True) if place.rank == 0 else None

    assert together(2, work) == [3.0, None]


def test_two_that_wait_for_each_other_in_a_mean_and_in_a_merge_come_to_an_end(monkeypatch, caplog):
    monkeypatch.setattr(answers, "STUCK_S", 0.2)
    all_there = threading.Barrier(3)

    def work(place):
        net = Net()
        made, optimizer = worker(place, net, "sasgd:interval=1")
        with contextlib.suppress(KeyError), made as me:
            all_there.wait(60)
            if place.rank == 2:
                raise KeyError
            found = []
            for turn in range(2):
                for _ in range(3 + (place.rank if turn == 0 else 1 - place.rank)):
                    step(net, optimizer, place.rank)
                found.append(me.mean(float(place.rank), wait=True))
            return found, me.metrics()["steps"]

    first, second, _ = together(3, work)
    assert first[0][0] == 0.0
    assert second[0][0] == 0.5  # what was said is kept
    assert first[1] == second[1] == 7
    assert "the mean of '' is without worker 1: it waits for a step here" in caplog.text


def test_what_start_needs():
    net = nn.Linear(2, 1)
    worker = fw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), "none")
    with pytest.raises(fw.ConfigError, match="inside the with-block, or between start and finish"):
        worker.mean(1.0)
    with pytest.raises(fw.RunStopped, match=r"ends what .* began"):
        worker.finish()


def test_a_script_that_ends_without_finish_leaves_the_run():
    def work(place):
        made, _ = worker(place, nn.Linear(2, 1), "adpsgd")
        me = made.start()
        if place.rank == 1:
            assert me._unfinished(fw.RunStopped("over"))  # as Python does at its end
            assert not me._unfinished(fw.RunStopped("over"))
            with contextlib.suppress(fw.RunStopped):
                return me.consensus()
            return None
        return me.finish()

    first, second = outcomes(2, work)
    assert isinstance(first, nn.Linear)
    assert second is None


FLAT = """
import sys
import torch
import freewheel as fw
left = open("left", "w")
left.write("written")
net = torch.nn.Linear(2, 1)
worker = fw.attach(net, torch.optim.SGD(net.parameters(), lr=0.1)).start()
print("last words")
if sys.argv[1] == "raise":
    raise ArithmeticError("on purpose")
if sys.argv[1] == "finish":
    worker.finish()
"""


OUTSIDE = """
import os
import torch
import freewheel as fw
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
worker = fw.attach(net, optimizer)
optimizer.step()
print("trained")
"""


def test_a_script_that_trains_and_never_begins_its_worker_exits_with_an_error(tmp_path):
    (tmp_path / "outside.py").write_text(OUTSIDE)
    done = forked.run("outside.py", cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (120, "trained\n")
    assert "the script trained outside of `with fw.attach(…)`" in done.stderr


def test_a_scheduler_with_too_few_steps_is_explained():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    with pytest.raises(ValueError, match="Tried to step") as raised, fw.attach(net, optimizer):  # noqa: PT012
        for _ in range(3):
            optimizer.step()
            scheduler.step()
    assert "fast workers take more batches" in raised.value.__notes__[0]


@pytest.mark.parametrize(("how", "code"), [("forget", 120), ("raise", 1), ("finish", 0)])
def test_a_script_that_forgets_finish_is_told_so_and_exits_with_an_error(how, code, tmp_path):
    """All else ends as ever: what was printed is printed, files are written."""
    (tmp_path / "flat.py").write_text(FLAT)
    done = forked.run("flat.py", how, cwd=tmp_path, timeout=60)
    assert done.returncode == code
    assert done.stdout == "last words\n"
    assert (tmp_path / "left").read_text() == "written"
    assert ("ended without worker.finish()" in done.stderr) == (how == "forget")
    assert ("Traceback" in done.stderr) == (how == "raise")


@pytest.mark.parametrize(("asks", "told"), [("never", 1), ("inside", 0), ("behind", 0), ("checkpoint", 0)])
def test_a_script_that_never_asks_for_the_answer_is_told_so(asks, told, tmp_path, monkeypatch):
    due = set[str]()

    def watch_answer():
        due.add("told")
        return due.clear

    def work(place):
        net = Net()
        net.mask.zero_()
        made, optimizer = worker(place, net, "none")
        made._watched = True  # as where the environment says who it is
        with made:
            step(net, optimizer, place.rank)
            if asks == "inside":
                made.consensus()
            if asks == "checkpoint":
                made.checkpoint(tmp_path / "saved")
        if asks == "behind":
            made.consensus()

    monkeypatch.setattr(checks, "watch_answer", watch_answer)
    together(2, work)
    assert len(due) == told


UNASKED = """
import sys
from freewheel.runtime.worker import checks
asked = checks.watch_answer()
if sys.argv[1:]:
    asked()
"""


@pytest.mark.parametrize("asks", [False, True])
def test_what_is_told_at_the_end_of_a_script(asks, tmp_path):
    (tmp_path / "unasked.py").write_text(UNASKED)
    done = forked.run("unasked.py", *["asks"] * asks, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("freewheel: the script never asked for worker.consensus()") == (not asks)
