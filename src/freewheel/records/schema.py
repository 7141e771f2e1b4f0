"""What stands in the files of a run: run.json, samples, evaluations; `docs/RECORDS.md` explains each key."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError, at_least
from freewheel.records.counters import CAUSES, Counters

FORMAT = 1
# Keys of run.json without which it cannot be read.
KINDS = {"strategy": str, "workers": int, "seed": int, "settings": dict, "started": int | float,
         "target": int | float | None}  # fmt: skip


def run_json(**said: Any) -> dict[str, Any]:
    """The caller adds the versions of Freewheel and torch, which this room does not know."""
    return {"format": FORMAT, "python": platform.python_version(), "started": time.time(), **said}


def typed() -> str:
    """The command line of this process, near enough."""
    program, *rest = sys.orig_argv or ["python"]
    return shlex.join([Path(program).name, *rest])


def read_run_json(folder: Path) -> dict[str, Any]:
    """Empty while there is no run.json."""
    path = folder / "run.json"
    wrong = f"{str(path)!r} is not what a run writes"
    if path.exists() and not path.is_file():  # opening a pipe would wait
        raise ConfigError(f"{str(path)!r} is no file. Give a folder as `freewheel run` makes them.")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{wrong} ({error}). Give an unchanged folder of a run; or move this file away, and `freewheel "
            "watch` shows what else is there."
        ) from None
    if not isinstance(said, dict) or "format" not in said:
        raise ConfigError(
            f"{wrong}: it has no format. Give a folder as `freewheel run` makes them, unchanged."
        )
    if said["format"] != FORMAT:
        raise ConfigError(
            f"{str(folder)!r} was written by freewheel {said.get('freewheel', 'unknown')} (records of format "
            f"{said['format']}); this version reads format {FORMAT}. Show it with that version."
        )
    for key, kinds in KINDS.items():
        if not isinstance(said.get(key), kinds):
            raise ConfigError(f"{wrong}: {key} is {said.get(key)!r}.")
    at_least(f"workers in {str(path)!r}", said["workers"], 1)
    return said


Number = float | None
WorkerSample = dict[str, Any]  # a line of worker-R.jsonl
# The columns that are read of it: sums grow during a life of the worker, levels are those of one moment.
SUMS = ("steps", "elapsed_s", "compute_s", *(f"{cause}_s" for cause in CAUSES), "exchanges", "merges",
        "bytes_out", "bytes_in", "samples")  # fmt: skip
LEVELS = ("loss", "staleness_mean", "discrepancy", "progress", "members", "life")


def worker_sample(counters: Counters, **said: Any) -> WorkerSample:
    elapsed_s, blocked_s = said["elapsed_s"], sum(said["blocked_s"].values())
    return {
        "resumed_at": 0,
        "steps_per_s": said["steps"] / elapsed_s if elapsed_s else 0.0,
        "blocked_share": min(1.0, blocked_s / elapsed_s) if elapsed_s else 0.0,
        **counters.figures(),
        "checkpoints": {"done": 0, "skipped": 0, "failed": 0},
        "progress": 0.0,
        "windows": {},
        "node": "",
        "view": 0,
        **said,
    }


def columns(line: Mapping[str, Any]) -> dict[str, Number]:
    """A sample's numbers by column; raises TypeError or KeyError where the line is no sample."""
    if not all(isinstance(line[name], int | float) for name in ("time", "rank", "steps")):
        raise TypeError("time, rank and steps must be numbers")
    if not isinstance(line.get("windows", {}), dict):
        raise TypeError("windows must be kinds by rank")
    blocked, members = line.get("blocked_s") or {}, line.get("members")
    row = {
        **{name: line.get(name) for name in ("time", *SUMS, *LEVELS)},
        **{f"{cause}_s": blocked.get(cause, 0.0) for cause in CAUSES},
        **{name: (line.get(name) or {}).get("done", 0) for name in ("exchanges", "merges")},
        "members": None if members is None else len(members),
    }
    others = (line.get(name) for name in ("began", "steps_per_s", "discrepancy_max", "staleness_max"))
    if not all(isinstance(number, int | float | None) for number in (*row.values(), *others)):
        raise TypeError("what is counted must be numbers")
    return row


def began_s(line: Mapping[str, Any]) -> float:
    """When this life began to train; earlier versions did not record it."""
    began: Number = line.get("began")
    return line["time"] - (line.get("elapsed_s") or 0.0) if began is None else began


# In an evaluation, any other number is a metric of the script's own.
MEASURED = ("time", "worker_steps", "samples", "loss", "accuracy", "discrepancy", "consensus",
            "discrepancy_max")  # fmt: skip


def evaluation(line: Mapping[str, Any]) -> dict[str, float]:
    """What was measured, by name; raises TypeError or KeyError where the line is no evaluation."""
    told = {name: value for name, value in line.items() if value is not None and name.isidentifier()}
    if not all(isinstance(told.get(name, 0.0), int | float) for name in MEASURED):
        raise TypeError("what was measured must be numbers")
    return {"time": told["time"], **{k: v for k, v in told.items() if isinstance(v, int | float)}}
