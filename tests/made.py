"""Run folders written by hand, as docs/RECORDS.md describes them, for whatever reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def about(**changes: Any) -> dict[str, Any]:
    """A run.json."""
    return {
        "format": 1,
        "freewheel": "0.1.0",
        "torch": "2.13.0",
        "python": "3.12.0",
        "clock": "wall",
        "name": "train.py",
        "command": "freewheel run -n 4 train.py",
        "started": 1000.0,
        "strategy": "adpsgd",
        "workers": 4,
        "seed": 0,
        "settings": {
            "strategy": {"topology": "complete"},
            "scenario": {},
            "lr": 0.1,
            "momentum": 0.0,
            "model_bytes": 4_000_000,
            "waits_for": "nobody",
            "staleness": "own steps between a snapshot and its correction",
        },
        "target": None,
        **changes,
    }


def sample(
    rank: int, number: int, workers: int = 4, steps_per_s: float = 20.0, **changes: Any
) -> dict[str, Any]:
    """The sample of a worker after `number` half seconds."""
    elapsed_s = 0.5 * number
    steps = int(steps_per_s * elapsed_s)
    peer = (rank + 1 + number % max(1, workers - 1)) % workers
    return {
        "time": 1000.0 + elapsed_s,
        "rank": rank,
        "life": 1,
        "state": "training",
        "steps": steps,
        "elapsed_s": elapsed_s,
        "steps_per_s": steps_per_s,
        "compute_s": 0.97 * elapsed_s,
        "blocked_s": {"peers": 0.02 * elapsed_s, "data": 0.01 * elapsed_s},
        "blocked_share": 0.03,
        "exchanges": {"done": steps, "busy": 3, "half": 0, "failed": 0},
        "merges": {"done": 0, "dropped": 0, "half": 0},
        "peers": {str(peer): [steps // 2, 0.5 * math.exp(-number / 200)]} if workers > 1 else {},
        "discrepancy": 0.5 * math.exp(-number / 200),
        "discrepancy_max": 0.6,
        "staleness_mean": 1.5,
        "staleness_max": 4.0,
        "staleness_counts": {"0": steps // 4, "1": steps // 2, "2": steps // 4},
        "bytes_out": 4_000_000 * steps,
        "bytes_in": 4_000_000 * steps,
        "messages_dropped": 0,
        "samples": 32 * steps,
        "samples_again": 0,
        "progress": 32 * steps * workers / 50_000,
        "checkpoints": {"written": 0, "failed": 0},
        "members": list(range(workers)),
        "view": 0,
        "loss": 2.3 * math.exp(-number / 300),
        "last": False,
        **changes,
    }


def event(time: float, what: str, rank: int, by: int | str, **changes: Any) -> dict[str, Any]:
    """An event."""
    return {
        "time": time,
        "what": what,
        "rank": rank,
        "life": 1,
        "by": by,
        "text": f"{what} {rank}",
        **changes,
    }


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Write lines as a worker does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def run(folder: Path, workers: int = 4, samples: int = 20, ended: bool = True, **changes: Any) -> Path:
    """A whole run, with a death, a return and evaluations; `changes` are made to its run.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(about(workers=workers, **changes)))
    for rank in range(workers):
        lines = [sample(rank, number, workers, 20.0 / (1 + rank % 3)) for number in range(samples)]
        if ended:
            lines[-1] |= {"last": True, "state": "finished"}
        append(folder / f"worker-{rank}.jsonl", *lines)
    if workers > 1:
        for by in range(workers - 1):
            lost = event(1002.0 + by / 100, "died", workers - 1, by)
            back = event(1003.0 + by / 100, "joined", workers - 1, by, life=2)
            append(folder / f"events-{by}.jsonl", lost, back)
    for number in range(0, samples, max(1, samples // 10)):
        append(
            folder / "evaluations.jsonl",
            {
                "time": 1000.0 + 0.5 * number,
                "worker_steps": 10 * number * workers,
                "samples": 320 * number * workers,
                "loss": 2.3 * math.exp(-number / 30),
                "accuracy": 1 - 0.9 * math.exp(-number / 30),
                "discrepancy": 0.5 * math.exp(-number / 20),
                "consensus": 0.1 * math.exp(-number / 20),
            },
        )
    return folder
