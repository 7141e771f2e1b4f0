"""What stands in a line of records: samples and evaluations, the same in real, simulated and DDP runs.

`docs/RECORDS.md` says what each key means. A reader takes numbers from a sample, by column: `SUMS` grow
during a life of the worker, `LEVELS` are what they are at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack, get_type_hints

from freewheel.records.counters import CAUSES, Counters

Number = float | None


class WorkerSample(TypedDict, total=False):
    """A line of worker-R.jsonl."""

    time: float
    rank: int
    life: int
    state: str
    began: Number
    steps: int
    resumed_at: int
    elapsed_s: float
    steps_per_s: float
    compute_s: float
    blocked_s: dict[str, float]
    blocked_share: float
    exchanges: dict[str, int]
    merges: dict[str, int]
    peers: dict[int, tuple[int, Number]]
    discrepancy: Number
    discrepancy_max: float
    staleness_mean: float
    staleness_max: float
    staleness_counts: dict[int, int]
    bytes_out: int
    bytes_in: int
    messages_out: int
    messages_dropped: int
    samples: int
    samples_again: int
    gradient_norm_max: float
    checkpoints: dict[str, int]
    progress: float
    windows: Mapping[int, str]
    node: str
    members: list[int]
    view: int
    loss: Number
    last: bool


SUMS = ("steps", "elapsed_s", "compute_s", *(f"{cause}_s" for cause in CAUSES), "exchanges", "merges",
        "bytes_out", "bytes_in", "samples")  # fmt: skip
LEVELS = ("loss", "staleness_mean", "discrepancy", "progress", "members", "life")
_HINTS = get_type_hints(WorkerSample)
_NUMBERS = [name for name, kind in _HINTS.items() if kind in (int, float, Number)]
_TABLES = ("exchanges", "merges", "staleness_counts")


def worker_sample(counters: Counters, **said: Unpack[WorkerSample]) -> WorkerSample:
    """What a worker says of itself now: what it has counted, and what else is known where it runs."""
    elapsed_s, blocked_s = said["elapsed_s"], sum(said["blocked_s"].values())
    return {
        "resumed_at": 0,
        "steps_per_s": said["steps"] / elapsed_s if elapsed_s else 0.0,
        "blocked_share": min(1.0, blocked_s / elapsed_s) if elapsed_s else 0.0,
        **counters.figures(),  # type: ignore[typeddict-item]
        "checkpoints": {"done": 0, "skipped": 0, "failed": 0},
        "progress": 0.0,
        "windows": {},
        "node": "",
        "view": 0,
        **said,
    }


def columns(line: Mapping[str, Any]) -> dict[str, Number]:
    """The numbers of a sample that was read, by column; raises TypeError or KeyError where it is none."""
    kinds = {"time": int | float, "rank": int, "steps": int}
    if not all(isinstance(line[name], kind) for name, kind in kinds.items()):
        raise TypeError("time, rank and steps must be numbers")
    blocked, members = line.get("blocked_s") or {}, line.get("members")
    row = {
        **{name: line.get(name) for name in ("time", *SUMS, *LEVELS)},
        **{f"{cause}_s": blocked.get(cause, 0.0) for cause in CAUSES},
        **{name: (line.get(name) or {}).get("done", 0) for name in ("exchanges", "merges")},
        "members": None if members is None else len(members),
    }
    numbers = (*row.values(), *(line.get(name) for name in _NUMBERS))
    if not all(value is None or isinstance(value, int | float) for value in numbers):
        raise TypeError("what is counted must be numbers")
    counted = (value for name in _TABLES for value in (line.get(name) or {}).values())
    if not all(isinstance(value, int | float) for value in counted):
        raise TypeError("what is counted by name must be numbers")
    return row


def began_s(line: Mapping[str, Any]) -> float:
    """When the life of a sample began to train; records of earlier versions do not say it."""
    began: Number = line.get("began")
    return line["time"] - (line.get("elapsed_s") or 0.0) if began is None else began


@dataclass
class Evaluation:
    """What was measured of the answer at one moment; a line of evaluations-*.jsonl."""

    time: float
    worker_steps: int | None = None
    samples: Number = None
    loss: Number = None
    accuracy: Number = None
    discrepancy: Number = None
    consensus: Number = None
    discrepancy_max: Number = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What else was measured, by a name that the script has given it."""

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Evaluation:
        """The evaluation in a line; raises TypeError where there is none."""
        told = {name: value for name, value in line.items() if value is not None and name != "metrics"}
        known = {name: value for name, value in told.items() if name in MEASURED}
        if not all(isinstance(value, int | float) for value in known.values()):
            raise TypeError("what was measured must be numbers")
        others = {name: value for name, value in told.items() if name not in MEASURED and name.isidentifier()}
        metrics = {name: float(value) for name, value in others.items() if isinstance(value, int | float)}
        return cls(**known, metrics=metrics)

    def told(self) -> dict[str, Any]:
        """All that was measured, by name."""
        flat = {**vars(self), **self.metrics}
        return {name: value for name, value in flat.items() if value is not None and name != "metrics"}

    def join(self, other: Evaluation) -> bool:
        """Take in what another line says of the same moment; False where both measured the same thing."""
        new = other.told()
        if not self.told().keys() & new.keys() <= {"time", "worker_steps", "samples"}:
            return False
        vars(self).update({name: value for name, value in new.items() if name in MEASURED})
        self.metrics |= other.metrics
        return True


MEASURED = tuple(one.name for one in fields(Evaluation) if one.name != "metrics")
