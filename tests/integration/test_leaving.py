"""Workers that leave before the others: SIGTERM, `worker.leave()`, and what stays of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import crew
import freewheel as fw
from freewheel.runtime.launcher import Captured, launch
from freewheel.runtime.leaving import Left
from freewheel.runtime.place import Place

DEADLINE_S = 120.0
SAMPLES = 600

SCRIPT = """
import os, signal, sys, time
import torch
import freewheel as fw

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
data = torch.utils.data.TensorDataset(torch.arange(600.0).reshape(-1, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
seen = open(f"seen-{rank}", "a")
if rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: print("noticed"))
with fw.attach(model, optimizer, resume="checkpoints", leave_s=LEAVE_S) as worker:
    worker.checkpoint("checkpoints", every=1000)
    for k, (x,) in enumerate(worker.loader(data, batch_size=4, epochs=1, num_workers=LOADERS)):
        STUCK
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.write(" ".join(str(round(one)) for one in x.flatten().tolist()) + "\\n")
        seen.flush()
        time.sleep(0.01)
        LEAVE
print("done", worker.metrics()["samples_again"])
"""


def script(
    folder: Path, leave: str = "", stuck: str = "", leave_s: float = 10.0, loaders: int = 0
) -> list[str]:
    text = SCRIPT.replace("LEAVE_S", str(leave_s)).replace("LOADERS", str(loaders))
    path = folder / "train.py"
    path.write_text(text.replace("STUCK", stuck or "pass").replace("LEAVE", leave or "pass"))
    return [sys.executable, str(path)]


def seen(folder: Path) -> Counter[int]:
    return Counter(int(one) for path in folder.glob("seen-*") for one in path.read_text().split())


def events(folder: Path) -> list[tuple[str, int | None]]:
    lines = [
        json.loads(line) for path in folder.glob("events-*.jsonl") for line in path.read_text().splitlines()
    ]
    return [(line["what"], line["rank"]) for line in lines]


def test_who_is_told_to_leave_goes_and_every_sample_is_used_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave = (
        "if k == 12 and rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
        "        if k == 16 and rank == 0: worker.leave()"
    )
    output, folder = Captured(), tmp_path / "run"
    folder.mkdir()
    command = script(tmp_path, leave, loaders=1)
    assert launch(command, 3, output=output, restarts=3, folder=folder) == 0
    assert list(output.lines[2])[-1] == "done 0"
    assert "noticed" in output.lines[1]  # by the script's own handler
    assert not any("done" in line for rank in (0, 1) for line in output.lines[rank])
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}
    happened = Counter(events(folder))
    assert {what for what, _ in happened} == {"left", "checkpoint"}
    assert {rank for what, rank in happened if what == "left"} == {0, 1}
    assert not any("starts again" in line for line in output.lines[None])


def test_where_all_leave_a_resumed_run_goes_on_from_there(tmp_path):
    """As Slurm and Kubernetes do it: notice to the launcher, and the same command again."""
    command = [sys.executable, "-c", "from freewheel.cli.main import main; main()", "run", "-n", "2"]
    command += [*script(tmp_path)[1:]]
    pipe = subprocess.PIPE
    first = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
    try:
        while len(seen(tmp_path)) < SAMPLES // 5:
            assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=DEADLINE_S)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 143
    assert "SIGTERM: all workers leave" in said
    assert "Traceback" not in said
    assert len(seen(tmp_path)) < SAMPLES
    again = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=DEADLINE_S, check=False
    )
    assert again.returncode == 0, again.stderr
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}


def test_a_handler_that_exits_is_let_exit_and_what_was_used_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave = (
        "if k == 5 and rank == 1:\n"
        "            signal.signal(signal.SIGTERM, lambda *_: (worker.leave(), sys.exit(0)))\n"
        "            os.kill(os.getpid(), signal.SIGTERM)"
    )
    output = Captured()
    assert launch(script(tmp_path, leave), 2, output=output) == 0
    assert list(output.lines[0])[-1] == "done 0"
    assert set(seen(tmp_path).values()) == {1}
    assert len(seen(tmp_path)) == SAMPLES


def test_a_step_that_does_not_end_is_left_and_its_batch_is_anothers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stuck = "if k == 5 and rank == 1: os.kill(os.getpid(), signal.SIGTERM); time.sleep(1000)"
    output = Captured()
    assert launch(script(tmp_path, stuck=stuck, leave_s=2.0), 2, output=output) == 0
    assert list(output.lines[0])[-1] == "done 0"
    used = seen(tmp_path)
    assert sorted(used) == list(range(SAMPLES))
    assert set(used.values()) == {1}


@pytest.mark.parametrize("width", [2, 400])  # a few numbers; some that travel through windows
def test_the_mean_of_those_who_stay_is_the_mean_of_all(width):
    """No exchange takes place but the last one; worker 2 steps last when the others have stepped."""
    stepped = threading.Barrier(3)

    def work(place: Place) -> torch.Tensor:
        model = nn.Linear(width, width)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        worker, optimizer = crew.worker(place, model, "adpsgd:every=1000000", lr=1.0)
        with worker:
            for k in range(2):
                optimizer.zero_grad()
                sum(one.sum() * -(place.rank + 1) for one in model.parameters()).backward()
                if k and place.rank == 2:
                    stepped.wait(DEADLINE_S)
                    worker.leave()
                optimizer.step()
            stepped.wait(DEADLINE_S)
            while 2 in worker._agent.fabric.members:
                time.sleep(0.01)
        return torch.cat([one.detach().flatten() for one in worker.consensus().parameters()])

    one, two, left = crew.outcomes(3, work)
    assert isinstance(left, Left)
    assert left.code == 0
    torch.testing.assert_close(one, torch.full_like(one, 2 * (1 + 2 + 3) / 3))
    torch.testing.assert_close(one, two)


def test_one_alone_leaves_and_sigterm_is_the_scripts_again():
    def handler(*_: object) -> None:
        noticed.append(True)

    noticed: list[bool] = []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        model = nn.Linear(1, 1)
        worker = fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        steps = 0
        with pytest.raises(SystemExit) as left, worker:  # noqa: PT012
            for (x,) in worker.loader(torch.utils.data.TensorDataset(torch.ones(10, 1)), 1):
                worker._optimizer.zero_grad()
                model(x).sum().backward()
                worker._optimizer.step()
                steps += 1
                if steps == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert (left.value.code, steps, noticed) == (0, 3, [True])
        assert signal.getsignal(signal.SIGTERM) is handler
        with pytest.raises(fw.RunStopped, match="there is no consensus"):
            worker.consensus()
        with pytest.raises(fw.ConfigError, match="inside the with-block"):
            worker.leave()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_gradients_that_are_added_up_are_not_left_behind():
    """Between two batches of one step nothing is left."""
    model = nn.Linear(1, 1)
    worker = fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    used = 0
    with pytest.raises(Left), worker:  # noqa: PT012
        for (x,) in worker.loader(torch.utils.data.TensorDataset(torch.ones(20, 1)), 1):
            model(x).sum().backward()
            used += 1
            if used == 5:
                worker.leave()
            if used % 4 == 0:
                worker._optimizer.step()
    assert used == 8


@pytest.mark.parametrize("given", ["soon", "-1"])
def test_a_time_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("FREEWHEEL_LEAVE_S", given)
    model = nn.Linear(1, 1)
    with pytest.raises(fw.ConfigError, match=given):
        fw.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
