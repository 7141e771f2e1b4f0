"""What the workers of a job wrote down, as one result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freewheel.errors import RunStopped
from freewheel.observe.result import Result, Sample


def read_outcome(folder: Path, job: dict[str, Any]) -> Result:
    """The figures of a run on real processes; its seconds are the clock's."""
    workers = [_read(folder / f"outcome-{rank}.json") for rank in range(job["workers"])]
    failed = [worker["failed"] for worker in workers if "failed" in worker]
    if failed:
        raise RunStopped(failed[0])
    began, ended = min(w["began"] for w in workers), max(w["ended"] for w in workers)
    judge = next(worker for worker in workers if "curve" in worker)
    steps = sum(worker["steps"] for worker in workers)
    took_s = ended - began
    alive_s = sum(worker["ended"] - worker["began"] for worker in workers)
    compute_s = sum(worker["compute_s"] for worker in workers)
    # Of a worker that made no step nobody knows how fast it could be.
    ideal = sum(worker["steps"] / worker["compute_s"] for worker in workers if worker["steps"])
    discrepancy = max(sample["discrepancy"] for sample in judge["curve"]) if judge["curve"] else 0.0
    last = Sample(took_s, steps, judge["loss"], judge["accuracy"], 0.0, 0.0)
    curve = (
        *(
            Sample(
                max(0.0, sample["time"] - began),
                sample["worker_steps"],
                sample["loss"],
                sample["accuracy"],
                sample["discrepancy"],
                sample["consensus"],
            )
            for sample in judge["curve"]
        ),
        last,
    )
    target = job["target"]
    reached = [s.virtual_s for s in curve if target and (s.accuracy or 0.0) >= target]
    weight = sum(worker["steps"] for worker in workers) or 1
    return Result(
        strategy=job["strategy"].partition(":")[0],
        workers=job["workers"],
        seed=job["seed"],
        virtual_s=took_s,
        worker_steps=steps,
        steps_per_s=steps / took_s,
        ideal_share=steps / took_s / ideal,
        idle_share=max(0.0, 1 - compute_s / alive_s),
        staleness_mean=sum(w["staleness_mean"] * w["steps"] for w in workers) / weight,
        staleness_max=max(worker["staleness_max"] for worker in workers),
        discrepancy_max=max(discrepancy, *(worker["discrepancy_max"] for worker in workers)),
        bytes_per_step=sum(worker["bytes_out"] for worker in workers) / weight,
        loss=judge["loss"],
        accuracy=judge["accuracy"],
        trace_sha256="",
        target=target,
        target_s=reached[0] if reached else None,
        curve=curve,
        by_worker=tuple(workers),
        settings={
            "clock": "wall",
            "strategy": judge.get("strategy", {}),
            "scenario": {key: value for key, value in job.items() if key != "strategy"},
            "lr": judge["lr"],
            "momentum": judge["momentum"],
            "model_bytes": judge["model_bytes"],
            "waits_for": judge["waits_for"],
            "staleness": judge["staleness"],
        },
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise RunStopped("") from None  # the worker's last words are in its log
    return outcome
