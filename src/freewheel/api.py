"""The functions people call: names become objects here, and only here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, Unpack

import torch
from torch import nn

from freewheel import __version__, strategies, tasks
from freewheel.planning.plan import Plan, make
from freewheel.planning.setting import Setting
from freewheel.records.result import Result
from freewheel.records.schema import typed
from freewheel.runtime.worker.attach import Worker
from freewheel.runtime.worker.settings import Given, Settings
from freewheel.sim.driver import Simulation
from freewheel.sim.records import RecordedSimulation
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: str | Strategy = "adpsgd",
    **settings: Unpack[Given],
) -> Worker:
    """Make a training loop one worker of a run; use it in a with-statement around the loop.

    The worker's rank and the number of workers are read from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    which `freewheel run` and torchrun set; without them the script trains alone. The loop does not change:
    corrections are added in the optimizer's own step. Where several optimizers train the model, give all of
    them in a list: a step is complete when all have stepped.

    Args:
        model: The module; all parameters that are trainable on entering the block are exchanged.
        optimizer: Any `torch.optim` optimizer of the model's parameters, or a list of them.
        strategy: A name with settings ("adpsgd:topology=ring") or an object (`fw.ADPSGD(topology="ring")`).
        settings: By name, any of these.

    Keyword Args:
        wire (str): What vectors travel as: "fp32", or "bf16" for half the bytes.
        bind (str): The address to listen on (default: loopback; "auto": the one that reaches MASTER_ADDR).
        tls (Path): A folder of `freewheel keys`.
        folder (Path): Where to write records (JSON lines).
        tensorboard (Path): Where to write them for TensorBoard, too.
        resume (Path): A folder of `worker.checkpoint` to go on from, where it holds one already.
        seed (int): Of the choice of peers.
        join_timeout_s (float): How long to wait for the others and for the rendezvous, 300 unless given.
        heartbeat_s (float): A worker that gives no sign of life for so long is gone, 2 unless given.
        leave_s (float): How long it may take to leave after SIGTERM; default: FREEWHEEL_LEAVE_S, or 10.

    Returns:
        The worker, which trains in a with-block.

    Examples:
        >>> import freewheel as fw, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with fw.attach(model, optimizer, "adpsgd") as worker:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(4, 2)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> worker.rank, worker.world_size, worker.metrics()["steps"]
        (0, 1, 3)
    """
    return Worker(model, optimizer, strategies.resolve(strategy), Settings.of(settings), version=__version__)


def simulate(
    strategy: str | Strategy,
    task: str | Task = "digits",
    scenario: Scenario | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    trace_file: TextIO | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    command: str | None = None,
    **settings: Any,
) -> Result:
    """Train a task with a strategy in virtual time and return what was measured.

    The settings are those of `Scenario` (workers, steps, compute, links, faults, seed, …), given as
    keywords or as one value. The same arguments give the same result, to the last event. With a `folder` the
    run is recorded there as a real one is (docs/RECORDS.md), in virtual time; `name` and `command` tell
    people what it is and what was typed.

        >>> import freewheel as fw
        >>> fast = fw.simulate("adpsgd", workers=4, steps=50, compute=fw.Compute(slow={0: 10}))
        >>> slow = fw.simulate("allreduce", workers=4, steps=50, compute=fw.Compute(slow={0: 10}))
        >>> round(fast.steps_per_s / slow.steps_per_s)
        8
    """
    if scenario is not None and settings:
        raise TypeError("give the settings as a Scenario or as keywords, not both")
    objects = strategies.resolve(strategy), tasks.resolve(task), scenario or Scenario(**settings)
    how: dict[str, Any] = {"progress": progress, "trace_file": trace_file}
    if folder is None:
        return Simulation(*objects, **how).run()
    name = name or (task if isinstance(task, str) else type(task).__name__)
    about = {"freewheel": __version__, "name": name, "command": command or typed()}
    return RecordedSimulation(*objects, Path(folder), about=about, **how).run()


def plan(
    workers: int,
    model_mb: float,
    compute_ms: float,
    *,
    strategies: Sequence[str] = (),
    steps: int | None = None,
    what_if: bool = True,
    progress: Callable[[str, float], None] = lambda what, share: None,
    **settings: Any,
) -> Plan:
    """Say which strategy to use: simulate all (or those named), rank them by what their steps are worth.

    The settings are those of `planning.setting.Setting`: link_mbit, latency_ms, slow, jitter, …

        >>> import freewheel as fw
        >>> found = fw.plan(4, 10, 50, strategies=["allreduce", "adpsgd"], slow={3: 10}, what_if=False)
        >>> found.recommended.strategy
        'adpsgd'
        >>> found.run_line(["train.py"])
        'freewheel run --ray -n 4 train.py'
    """
    setting = Setting(workers=workers, model_mb=model_mb, compute_ms=compute_ms, **settings)
    return make(setting, strategies, steps=steps, what_if=what_if, progress=progress)
