"""Scripts of other libraries' trainers as workers: one of them is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = [sys.executable, "-c", "import freewheel_start; freewheel_start.main()", "run"]
TESTS = Path(__file__).parent


def run(folder: Path, script: str, *options: str, deadline_s: float = 110.0) -> dict[int, dict[str, Any]]:
    """What each worker of a script said at its end, by rank; none may fail for good."""
    (folder / "train.py").write_text(script)
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*RUN, "--folder", "records", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = [line.partition("END ")[2] for line in done.stdout.splitlines() if "END " in line]
    found = {one["rank"]: one for one in map(json.loads, said)}
    return {rank: found[rank] for rank in sorted(found)}


def say(**what: Any) -> None:
    """Tell the test; from a worker's script."""
    sys.stdout.write(f"\nEND {json.dumps(what)}\n")
    sys.stdout.flush()


class Accident:
    """Worker 1 is killed after some steps, once; the others wait with theirs until it is back at work."""

    def __init__(self, worker: Callable[[], Any], at: int) -> None:
        self.worker, self.at, self.steps = worker, at, 0

    def step(self) -> None:
        """A step was made."""
        self.steps += 1
        killed, back = Path("killed"), Path("back")
        if self.worker().rank != 1:
            end_s = time.monotonic() + 60
            while self.steps == 2 * self.at and not back.exists() and time.monotonic() < end_s:
                time.sleep(0.05)
        elif not killed.exists():
            if self.steps == self.at:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif self.steps == 3:
            back.touch()
