"""A real transformer on a GPU that several workers share: how much of their own speed do they keep?

The contestants are those of the straggler benchmark, with a GPT's forward and backward pass in place of the
sleep, and DDP on gloo, as NCCL has no two ranks on one GPU. Several processes share a GPU well under CUDA's
MPS (`nvidia-cuda-mps-control -d`); without it they take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freewheel.errors import ConfigError
from freewheel_bench.figure import Figure
from freewheel_bench.rates import Load, Progress, Span, measure
from freewheel_bench.straggler import figures


def gpu(load: Load, strategies: Sequence[str], span: Span, progress: Progress) -> list[Figure]:
    """Measure all contestants; one figure for each strategy."""
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, and torch sees none here. Try bench straggler.")
    return figures("gpu", load, strategies, span, measure(load, strategies, span, progress))
