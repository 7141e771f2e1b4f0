"""Workers that a scheduler starts: in its words, with a store of their own, one killed and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import forked
from crew import free_port
from freewheel.fabric import secret

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 90.0
SCRIPT = """
import hashlib, os, pathlib, time
import torch
import freewheel as fw
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with fw.attach(model, optimizer, "adpsgd") as worker:
    print("rank", worker.rank, "of", worker.world_size, "trains", flush=True)
    back = pathlib.Path("back")
    if pathlib.Path("killed").exists():
        back.touch()
    while not back.exists():
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
answer = torch.cat([one.flatten() for one in worker.consensus().parameters()])
print("answer", hashlib.sha256(answer.detach().numpy().tobytes()).hexdigest(), flush=True)
"""
PROCID, TASKS = "SLURM_PROCID", "SLURM_NTASKS"


def start(folder: Path, *words: str, **environment: str) -> forked.Forked:
    inherited = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return forked.start(*words, cwd=folder, env={**inherited, **environment})


def test_tasks_of_slurm_meet_in_a_store_of_their_own_and_a_lost_one_comes_back(tmp_path):
    """Worker 0 is the one: had it held the store, its next life would begin a second run."""
    (tmp_path / "train.py").write_text(SCRIPT)
    secret.write(tmp_path / "secret", secret.make())
    at = f"127.0.0.1:{free_port()}"
    store = start(tmp_path, *forked.FREEWHEEL, "store", at)
    words = {TASKS: "3", "FREEWHEEL_STORE": at, "FREEWHEEL_SECRET_FILE": "secret", "FREEWHEEL_RUN": "7.0"}
    everybody = [store]
    try:
        assert store.stdout is not None
        assert at in store.stdout.readline()
        tasks = [start(tmp_path, "train.py", **words, **{PROCID: str(rank)}) for rank in range(3)]
        everybody += tasks
        for rank, task in enumerate(tasks):
            assert task.stdout is not None
            assert task.stdout.readline() == f"rank {rank} of 3 trains\n"
        tasks[0].send_signal(signal.SIGKILL)
        tasks[0].wait(DEADLINE_S)
        (tmp_path / "killed").touch()
        tasks[0] = start(tmp_path, "train.py", **words, **{PROCID: "0"})
        everybody.append(tasks[0])
        said = [task.communicate(timeout=DEADLINE_S) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0, 0], said
        assert len({output.split()[-1] for output, _ in said}) == 1, said
        store.send_signal(signal.SIGTERM)
        assert store.wait(DEADLINE_S) == 0
    finally:
        for one in everybody:
            one.kill()
            one.communicate()


def test_the_sbatch_script_is_one(tmp_path):
    """Bash understands it, and it starts the tasks so that one that fails does not end the others."""
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "--kill-on-bad-exit=0" in text
    for folder, name in ((tmp_path, "srun"), (tmp_path, "freewheel")):
        tool = folder / name
        tool.write_text('#!/bin/bash\nif [ "${0##*/}" = freewheel ]; then exec sleep 60; fi\n'
                        'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')  # fmt: skip
        tool.chmod(0o755)
    (tmp_path / "lives.py").write_text(
        "import os, pathlib, sys\nlife = pathlib.Path('lives')\nlife.open('a').write('x')\n"
        "print(os.environ['FREEWHEEL_RUN'], os.environ['FREEWHEEL_BIND'], *sys.argv[1:])\n"
        "sys.exit(life.read_text() != 'xxx')\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                   "SLURM_JOB_ID": "42"}  # fmt: skip
    ended = subprocess.run(
        ["bash", script, "lives.py", "--lr", "0.1"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["42.0 auto --lr 0.1"] * 3


def test_the_manifest_says_what_a_worker_needs():
    service, store, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    worker = job["spec"]["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in worker["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(environment["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    port = service["spec"]["ports"][0]["port"]
    assert environment["FREEWHEEL_STORE"] == f"{service['metadata']['name']}:{port}"
    command = store["spec"]["template"]["spec"]["containers"][0]["command"]
    assert re.fullmatch(rf"freewheel store \S+:{port}", " ".join(command))
