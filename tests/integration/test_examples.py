"""The examples: a script as PyTorch users write it is a worker with four lines more."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = "  # Freewheel"


def ran(*command: str | Path, cwd: Path) -> str:
    done = forked.run(*command, cwd=cwd, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(said: str) -> list[float]:
    return [float(one) for one in re.findall(r"test set: .* \((\S+) %\)", said)]


def test_a_plain_script_runs_on_three_workers_with_four_lines_more(tmp_path):
    text = (EXAMPLES / "images.py").read_text()
    lines = text.splitlines(keepends=True)
    plain = [line for line in lines if not line.rstrip().endswith(MARK)]
    assert len(lines) - len(plain) == 4
    assert "fw" not in re.findall(r"\w+", "".join(plain))
    (tmp_path / "plain.py").write_text("".join(plain))
    said = ran("plain.py", "--epochs", "1", cwd=tmp_path)
    assert "epoch 1 [0/1437 (0 %)]" in said
    assert len(accuracies(said)) == 2
    script = str(EXAMPLES / "images.py")
    options = ["run", "-n", "3", "--folder", "run", script, "--epochs", "3"]
    said = ran(*forked.FREEWHEEL, *options, cwd=tmp_path)
    lines = [[line for line in said.splitlines() if line.startswith(f"[{rank}]")] for rank in range(3)]
    found = [accuracies("\n".join(one)) for one in lines]
    assert [len(one) for one in found] == [4, 4, 4]  # after each pass, and of the consensus
    assert found[0][-1] == found[1][-1] == found[2][-1] > 50.0
    samples = [
        json.loads((tmp_path / "run" / f"worker-{rank}.jsonl").read_text().splitlines()[-1])["samples"]
        for rank in range(3)
    ]
    assert sum(samples) == 3 * 1437
