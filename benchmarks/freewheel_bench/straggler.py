"""How much of their own speed do workers keep: beside a slow one, or on a GPU that they share?

Worker-steps per second of all workers, as a share of what the same workers reach without communication in the
same round. With no slow worker it is the equal-speeds benchmark, `equal`. On a GPU a real GPT computes, and
DDP is on gloo, as NCCL has no two ranks on one GPU. Several processes share a GPU well under CUDA's MPS
(`nvidia-cuda-mps-control -d`); without it they take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from freewheel.errors import ConfigError
from freewheel_bench.contestants import ALONE, DDP, Spent
from freewheel_bench.figure import Figure
from freewheel_bench.rates import Load, Pace, Progress, Span, measure, median_rate, share_of_alone

SPENT = [field.name for field in fields(Spent)]
UNIT = "share of the rate without communication"


def straggler(load: Load, strategies: Sequence[str], span: Span, progress: Progress) -> list[Figure]:
    if load.gpt is not None and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch sees none here. Try bench straggler.")
    name = "gpu" if load.gpt is not None else "straggler" if load.slow else "equal"
    return figures(name, load, strategies, span, measure(load, strategies, span, progress))


def figures(
    name: str, load: Load, strategies: Sequence[str], span: Span, paces: Mapping[str, Sequence[Pace]]
) -> list[Figure]:
    """Freewheel's share of the rate without communication beside DDP's, for each strategy."""
    theirs = share_of_alone(paces, DDP)
    found = []
    for strategy in strategies:
        ours = share_of_alone(paces, strategy)
        raw = {
            "alone_steps_per_s": median_rate(paces[ALONE]),
            "freewheel_steps_per_s": median_rate(paces[strategy]),
            "ddp_steps_per_s": median_rate(paces[DDP]),
            **communication(paces[strategy]),
            "alone_waiting_share": statistics.median(pace.waiting_share for pace in paces[ALONE]),
            "settings": asdict(load) | asdict(span),
            "rounds": {of: [in_one_round(pace) for pace in paces[of]] for of in (ALONE, strategy, DDP)},
        }
        found.append(Figure(name, strategy, ours, "ddp", theirs, ours / theirs, UNIT, raw))
    return found


def communication(paces: Sequence[Pace]) -> dict[str, float]:
    """What a strategy's communication came to: medians of the rounds."""
    kinds = ("exchanges", "merges")
    per_step = [sum(pace.total(kind, "done") for kind in kinds) / pace.steps for pace in paces]
    return {
        "blocked_share": statistics.median(pace.blocked_share for pace in paces),
        "waiting_share": statistics.median(pace.waiting_share for pace in paces),
        "exchanges_per_step": statistics.median(per_step),
        "failed": sum(pace.total("exchanges", "failed") + pace.total("exchanges", "half") for pace in paces),
    }


def in_one_round(pace: Pace) -> dict[str, Any]:
    return {
        "steps_per_s": pace.steps_per_s,
        "waiting_share": pace.waiting_share,
        **{key: [worker[key] for worker in pace.by_worker] for key in ("steps", "process_cpu_s", *SPENT)},
    }
