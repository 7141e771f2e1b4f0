"""Windows between real processes: the best kind that works is used, and a peer may die at any moment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, signal, sys, torch
import freewheel as fw
from freewheel.fabric import together, windows

how, strategy = sys.argv[1:3]
if how == "no windows":
    def unseen(self, offers, secret):
        return []
    windows.Windows.tried = unseen
if how == "no IPC":
    def refuse(self, handle):
        raise OSError("invalid device context")
    windows.Cuda.open = refuse
if how == "no library":
    def missing(self):
        raise OSError("CUDA's runtime library is not loaded")
    windows.Cuda.__init__ = missing
rank = int(os.environ["RANK"])
device = "cpu" if how == "mixed" and rank == 1 else sys.argv[3]
if how == "killed" and rank == 2:
    combine, calls = together.combine_two, []
    def die(*vectors):
        combine(*vectors)
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    together.combine_two = die
torch.manual_seed(rank)
model = torch.nn.Linear(512, 513, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with fw.attach(model, optimizer, strategy) as worker:
    kinds = sorted(set(worker.metrics()["windows"].values()))
    for k in range(100 if strategy.startswith(("allreduce", "sasgd")) else 3000):
        optimizer.zero_grad()
        model(torch.ones(2, 512, device=device)).sum().backward()
        optimizer.step()
        done = worker.metrics()
        merged = done["exchanges"]["done"] + done["merges"]["done"]
        if merged > 20 and how != "killed" and strategy in ("adpsgd", "nodelay_free"):
            break
mean = worker.consensus()
total = sum(p.detach().double().sum().item() for p in mean.parameters())
print("RESULT", rank, "+".join(kinds), merged, total)
"""


def launch(tmp_path, how: str, device: str, strategy: str = "adpsgd") -> tuple[list[list[str]], str]:
    """Three real processes; what each says at its end (rank, kinds, merges, sum), and everything they say."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-c", "import freewheel_start; freewheel_start.main()", "run", "-n", "3"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if how == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    ended = subprocess.run(
        [*command, str(script), how, strategy, device],
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
    )
    said = ended.stdout + ended.stderr
    return [line.split("RESULT")[1].split() for line in said.splitlines() if "RESULT" in line], said


def on(device: str, *values: str):
    """A case for one device."""
    missing = device == "cuda" and not torch.cuda.is_available()
    return pytest.param(device, *values, marks=pytest.mark.skipif(missing, reason="needs a CUDA device"))


DEVICES = [on("cpu"), on("cuda")]


@pytest.mark.parametrize(
    ("device", "how", "kinds"),
    [
        on("cpu", "plain", "host"),
        on("cpu", "no windows", "stream"),
        on("cuda", "plain", "device"),
        on("cuda", "expandable", "device"),
        on("cuda", "no IPC", "host"),
        on("cuda", "no library", "host"),
        on("cuda", "no windows", "stream"),
        on("cuda", "mixed", "device+host host"),
    ],
)
def test_the_best_kind_of_window_that_works_is_used(tmp_path, device, how, kinds):
    results, said = launch(tmp_path, how, device)
    assert len(results) == 3, said
    sums = []
    for _, kind, merged, total in results:
        assert kind in kinds.split(), said
        assert int(merged) > 10, said
        sums.append(float(total))
    assert sums == pytest.approx([sums[0]] * 3, abs=1e-3)
    if how.startswith("no "):
        assert "window" in said


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["nodelay_free", "allreduce", "sasgd:interval=4"])
def test_merges_of_processes(tmp_path, strategy, device):
    results, said = launch(tmp_path, "plain", device, strategy)
    assert len(results) == 3, said
    sums = [float(total) for *_, total in results]
    assert sums == pytest.approx([sums[0]] * 3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_that_is_killed_while_it_combines_spoils_nobody(tmp_path, device):
    results, said = launch(tmp_path, "killed", device)
    assert len(results) == 2, said
    assert "signal 9" in said
    for *_, total in results:
        assert abs(float(total)) < 1e3, said
