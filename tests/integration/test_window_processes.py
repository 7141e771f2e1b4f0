"""Windows between real processes: the best kind that works is used, and a peer may die at any moment."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import forked

SCRIPT = """
import os, signal, sys, torch
import freewheel as fw
from freewheel.fabric import together, windows

def unseen(self, offers, secret):
    return []

def refuse(self, handle):
    raise OSError("invalid device context")

def missing(self):
    raise OSError("CUDA's runtime library is not loaded")

def prepare(how):
    if how == "no windows":
        windows.Windows.tried = unseen
    if how == "no IPC":
        windows.Cuda.open = refuse
    if how == "no library":
        windows.Cuda.__init__ = missing
    if how == "killed" and rank == 2:
        combine, calls = together.combine_two, []
        def die(*vectors):
            combine(*vectors)
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        together.combine_two = die

def train(how, strategy):
    prepare(how)
    at = "cpu" if how == "mixed" and rank == 1 else device
    torch.manual_seed(rank)
    model = torch.nn.Linear(512, 513, device=at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with fw.attach(model, optimizer, strategy) as worker:
        kinds = sorted(set(worker.metrics()["windows"].values()))
        for k in range(100 if strategy.startswith(("allreduce", "sasgd")) else 30_000):
            optimizer.zero_grad()
            model(torch.ones(2, 512, device=at)).sum().backward()
            optimizer.step()
            done = worker.metrics()
            merged = done["exchanges"]["done"] + done["merges"]["done"]
            enough = merged > 20 and (how != "killed" or len(done["members"]) < 3)
            if enough and strategy in ("adpsgd", "nodelay_free"):
                break
    mean = worker.consensus()
    total = sum(p.detach().double().sum().item() for p in mean.parameters())
    print("RESULT", strategy, rank, "+".join(kinds), merged, total)

rank = int(os.environ["RANK"])
device, how, *strategies = sys.argv[1:]
for strategy in strategies:
    train(how, strategy)
"""
STRATEGIES = ("adpsgd", "nodelay_free", "allreduce", "sasgd:interval=4")


class Ran:
    """What three real processes have said, which trained with one strategy after the other."""

    def __init__(self, folder: Path, how: str, device: str, *strategies: str) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if how == "expandable":
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [*forked.FREEWHEEL, "run", "-n", "3", str(script), device, how, *strategies]
        ended = forked.run(*command, env=env, timeout=110, cwd=folder)
        self.said = ended.stdout + ended.stderr

    def results(self, strategy: str) -> list[list[str]]:
        """What each says at its end: rank, kinds, merges, sum."""
        told = [line.split("RESULT")[1].split() for line in self.said.splitlines() if "RESULT" in line]
        return [words for name, *words in told if name == strategy]


@pytest.fixture(scope="module")
def plainly(tmp_path_factory) -> Callable[[str], Ran]:
    """As it is with nothing in the way, on a device: processes are started once for all strategies."""
    return functools.cache(lambda device: Ran(tmp_path_factory.mktemp("plain"), "plain", device, *STRATEGIES))


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
def test_the_best_kind_of_window_that_works_is_used(tmp_path, plainly, device, how, kinds):
    ran = plainly(device) if how == "plain" else Ran(tmp_path, how, device, "adpsgd")
    results, said = ran.results("adpsgd"), ran.said
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
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_merges_of_processes(plainly, strategy, device):
    results, said = plainly(device).results(strategy), plainly(device).said
    assert len(results) == 3, said
    sums = [float(total) for *_, total in results]
    assert sums == pytest.approx([sums[0]] * 3, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_that_is_killed_while_it_combines_spoils_nobody(tmp_path, device):
    ran = Ran(tmp_path, "killed", device, "adpsgd")
    results, said = ran.results("adpsgd"), ran.said
    assert len(results) == 2, said
    assert "signal 9" in said
    for *_, total in results:
        assert abs(float(total)) < 1e3, said
