"""Measured numbers for a plan: a few steps of the user's script, and the links to other hosts.

``python -m freewheel.planning.measure OUT STEPS [-m] SCRIPT …`` runs a script as Python would, times its
optimizer's steps through torch's global hook, and ends it after so many. It need not use Freewheel.
"""

import asyncio
import itertools
import json
import math
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.doctor.bandwidth import MEGABYTES, PORT, LinkFigure, measuring
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.place import parse_address

STEPS = 30
WARM_UP, LEAST = 3, 5  # steps that are not counted, and how many must be counted
LONG = 3.0  # times the usual step: longer ones contain more, such as an evaluation or a checkpoint
PATIENCE_S = 600.0  # how long a script may take to make its first steps


@dataclass(frozen=True)
class Measurement:
    """What a few steps of a script showed."""

    steps: int
    compute_ms: float
    jitter: float
    model_mb: float
    optimizer_mb: float
    device: str


def measure_script(script: Sequence[str], steps: int = STEPS) -> Measurement:
    """Run a script as the only worker, and time its steps; it is ended after so many."""
    begun_s, output = time.monotonic(), Captured()

    def look() -> None:
        if time.monotonic() - begun_s > PATIENCE_S:
            raise RunStopped(f"{script[0]} has not made {steps} steps within {PATIENCE_S:g} s.")

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "freewheel.planning.measure", str(out), str(steps), *script]
        code = launch(command, 1, output=output, options=Options(), tick=look)
        if code in (130, 143):
            raise KeyboardInterrupt
        if code == 0:
            return Measurement(**json.loads(out.read_text()))
    said = [line for line in output.lines[0] if line.strip()] or ["it said nothing"]
    raise RunStopped(f"{script[0]} ended with exit code {code} before it could be timed: {said[-1]}")


def measure_links(hosts: Sequence[str], tls: Path | None = None) -> dict[str, LinkFigure]:
    """Time the links to hosts on which `freewheel doctor --serve` runs, one after the other."""
    addresses = {text: parse_address(text, "the host", PORT) for text in hosts}
    return {text: asyncio.run(measuring(*at, MEGABYTES, tls)) for text, at in addresses.items()}


# -- in the process of the script --


class Enough(BaseException):
    """Ends the script; not an Exception, which the script might catch."""


class Stopwatch:
    """The moments at which the optimizer with the most weights has stepped."""

    def __init__(self, steps: int) -> None:
        self.steps = steps + WARM_UP + 1
        self.moments: list[float] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.size = 0

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the moment; steps of optimizers of smaller parts of the model belong to the same step."""
        if optimizer is not self.optimizer:
            size = sum(p.numel() * p.element_size() for p in weights(optimizer))
            if size <= self.size:
                return
            self.optimizer, self.size, self.moments = optimizer, size, []
        if any(p.is_cuda for p in weights(optimizer)[:1]):
            torch.cuda.synchronize()
        self.moments.append(time.perf_counter())
        if len(self.moments) >= self.steps:
            raise Enough

    def found(self) -> Measurement:
        took = [after - before for before, after in itertools.pairwise(self.moments)][WARM_UP:]
        if self.optimizer is None or len(took) < LEAST:
            raise ConfigError(
                f"it ended after {len(self.moments)} steps of its optimizer; about 10 are needed to time it. "
                "Let it train for longer, or give --model-mb and --compute-ms."
            )
        usual_s = statistics.median(took)
        logs = [math.log(max(one, 1e-6)) for one in took if one <= LONG * usual_s]
        state = [value for kept in self.optimizer.state.values() for value in kept.values()]
        kept_bytes = sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))
        device = weights(self.optimizer)[0].device.type
        sizes_mb = self.size / 1e6, kept_bytes / 1e6
        return Measurement(len(took), 1e3 * usual_s, statistics.stdev(logs), *sizes_mb, device)


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def main(out: Path, steps: int, command: list[str]) -> NoReturn:
    watch = Stopwatch(steps)
    register_optimizer_step_post_hook(watch.stepped)
    try:
        if command[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(command[0]).resolve().parent), command
            runpy.run_path(command[0], run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:  # as scripts end that call sys.exit(main())
        if end.code not in (None, 0):
            raise
    code = 0
    try:
        out.write_text(json.dumps(asdict(watch.found())))
    except ConfigError as error:
        print(error)  # noqa: T201
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the script's threads and loaders


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
