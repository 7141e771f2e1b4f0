"""What the workers of a job wrote down, as one result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freewheel.errors import RunStopped
from freewheel.observe.outcome import combined
from freewheel.observe.result import Result
from freewheel.observe.run import Evaluation


def read_outcome(folder: Path, job: dict[str, Any]) -> Result:
    """The figures of a run on real processes; its seconds are the clock's."""
    workers = [_read(folder / f"outcome-{rank}.json") for rank in range(job["workers"])]
    failed = [worker["failed"] for worker in workers if "failed" in worker]
    if failed:
        raise RunStopped(failed[0])
    judge = next(worker for worker in workers if "curve" in worker)
    evaluations = [Evaluation(**sample) for sample in judge["curve"]]
    steps = sum(worker["steps"] + worker.get("resumed_at", 0) for worker in workers)
    ended = max(worker["ended"] for worker in workers)
    evaluations.append(Evaluation(ended, steps, loss=judge["loss"], accuracy=judge["accuracy"]))
    about = {
        **{key: job[key] for key in ("strategy", "workers", "seed", "target")},
        "clock": "wall",
        "settings": {
            "strategy": judge.get("strategy", {}),
            "scenario": {key: value for key, value in job.items() if key != "strategy"},
            **{key: judge[key] for key in ("lr", "momentum", "model_bytes", "waits_for", "staleness")},
        },
    }
    lives = [{**worker, "elapsed_s": worker["ended"] - worker["began"]} for worker in workers]
    return combined(about, lives, evaluations)


def _read(path: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise RunStopped("") from None  # the worker's last words are in its log
    return outcome
