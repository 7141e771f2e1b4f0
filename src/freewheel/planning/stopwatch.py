"""Times a training script from outside: ``python -m freewheel.planning.stopwatch OUT STEPS [-m] SCRIPT …``.

It runs the script as Python would, hears every optimizer's step through torch's own global hook, and ends the
script after so many steps. The script need not know; it need not even use Freewheel.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UP = 3
"""Steps that are not counted: memory is being allocated, kernels are being chosen."""
LEAST = 5
"""Steps that must be counted."""
LONG = 3.0
"""What takes so many times as long as the usual step has more in it than a step."""


class Enough(BaseException):
    """Ends the script: not an Exception, which a script may catch and go on."""


class Stopwatch:
    """The moments at which the optimizer with the most weights has stepped."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps = out, steps + WARM_UP + 1
        self.moments: list[float] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.size = 0

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped; those of smaller parts of the model belong to the same step."""
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

    def write(self) -> bool:
        """Write what was measured; False: too few steps were made."""
        took = [after - before for before, after in itertools.pairwise(self.moments)][WARM_UP:]
        if self.optimizer is None or len(took) < LEAST:
            self.out.write_text(json.dumps({"made": len(self.moments)}))
            return False
        usual_s = statistics.median(took)
        # An evaluation, a new pass or a checkpoint between two steps is no jitter: half the way between the
        # sixths of what may be a step.
        logs = sorted(math.log(max(one, 1e-6)) for one in took if one <= LONG * usual_s)
        sixths = statistics.quantiles(logs, n=6)
        state = [value for kept in self.optimizer.state.values() for value in kept.values()]
        kept_bytes = sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))
        found = {
            "steps": len(took),
            "compute_ms": 1e3 * usual_s,
            "jitter": (sixths[-1] - sixths[0]) / 2,
            "model_mb": self.size / 1e6,
            "optimizer_mb": kept_bytes / 1e6,
            "device": weights(self.optimizer)[0].device.type,
        }
        self.out.write_text(json.dumps(found))
        return True


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer trains."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def main(out: Path, steps: int, command: list[str]) -> NoReturn:
    """Run the script until it has made enough steps."""
    watch = Stopwatch(out, steps)
    register_optimizer_step_post_hook(watch.stepped)
    try:
        if command[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).resolve().parent)
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:  # as scripts end that call sys.exit(main())
        if end.code not in (None, 0):
            raise
    enough = watch.write()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if enough else 3)  # the script's threads and loaders need not be waited for


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
