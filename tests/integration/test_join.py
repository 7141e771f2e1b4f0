"""Joining a run: who has its secret comes in, with the command he types and no other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import IO

import pytest
from torch.distributed import TCPStore

import forked
from crew import free_port
from freewheel.fabric import secret

pytestmark = pytest.mark.integration

DEADLINE_S = 90.0
SCRIPT = """
import pathlib, sys, time
import torch
import freewheel as fw
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
with fw.attach(model, optimizer, "adpsgd") as worker:
    print("in with", len(worker.metrics()["members"]), flush=True)
    while len(worker.metrics()["members"]) < 3 and not pathlib.Path("end").exists():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
print("ended", *sys.argv[1:])
"""


def start(folder: Path, *words: str) -> forked.Forked:
    return forked.start(*forked.FREEWHEEL, *words, cwd=folder)


def until(stream: IO[str] | None, words: str) -> str:
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"it never said {words!r}: {''.join(seen)}")


def test_who_types_the_printed_line_joins_and_nobody_else(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "evil.py").write_text("print('evil')")
    at, folder = f"127.0.0.1:{free_port()}", tmp_path / "records"
    run = start(
        tmp_path, "run", "-n", "2", "--max", "3", "--master", at, "--folder", str(folder), "train.py", "a b"
    )
    try:
        printed = until(run.stderr, "others come with").split("others come with freewheel ")[1]
        until(run.stdout, "in with 2")
        path = folder / "secret"
        assert path.stat().st_mode & 0o777 == 0o600
        words = shlex.split(printed)
        assert words == ["join", at, "--secret", str(path), "--", "train.py", "a b"]

        # Nobody comes without the secret, with another one, or with one that others can read.
        (tmp_path / "open").write_text(path.read_text())
        (tmp_path / "open").chmod(0o640)
        secret.write(tmp_path / "other", secret.make())
        refused = {
            "a run lets in who has its secret": [],
            r"others can read the secret 'open' \(mode 640\)": ["--secret", "open"],
            "is not sealed with this worker's secret": ["--secret", "other"],
            "cannot read the secret 'none': No such file": ["--secret", "none"],
        }
        others = [start(tmp_path, "join", at, *options, "--", "train.py") for options in refused.values()]
        for said, other in zip(refused, others, strict=True):
            out, err = other.communicate(timeout=DEADLINE_S)
            assert (other.returncode, out) == (2, ""), err
            assert re.search(said, err), err
            assert "Traceback" not in err

        # Nor does the store say what is run: what a stranger writes there is not even read.
        host, port = at.split(":")
        TCPStore(host, int(port), is_master=False).set("freewheel/options/command", '["python", "evil.py"]')
        joined = start(tmp_path, *words)
        out, err = joined.communicate(timeout=DEADLINE_S)
        assert joined.returncode == 0, err
        assert "in with 3" in out
        assert "ended a b" in out
        assert "evil" not in out
        assert re.search(r"joining 127\S+ as worker 2, running: \S+ train.py 'a b'", err), err
        assert run.wait(DEADLINE_S) == 0
        assert not path.exists(), "it serves nobody any more"
    finally:
        (tmp_path / "end").touch()
        run.kill()
        run.communicate()
