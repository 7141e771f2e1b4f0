"""One pass over a device's memory instead of several: kernels made at run time, where PyTorch offers that.

NVRTC, which comes with PyTorch, compiles them; no compiler has to be installed. Each has a form in PyTorch's
own operations beside it, which is used where this one cannot be: see `for_device` and `fits`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 8
"""Vectors that are combined in one pass; it stands in the source too."""
LONGEST = 1 << 30
"""Numbers of one launch: kernels count in 32 bits."""
THREADS, BLOCKS = 512, 1056

SOURCE = r"""
#define EACH(n) int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x
#define MOST 8

// A copy, with what is pending; *bad = 1 if a number is not finite.
extern "C" __global__ void fw_copy(const float* from, const float* pending, float* into, int* bad, int n) {
  bool good = true;
  const float4 *from4 = (const float4*)from, *pending4 = (const float4*)pending;
  for (EACH(n / 4)) {
    float4 x = from4[i];
    if (pending) { float4 p = pending4[i]; x.x += p.x; x.y += p.y; x.z += p.z; x.w += p.w; }
    good = good && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
    ((float4*)into)[i] = x;
  }
  int rest = n / 4 * 4 + blockIdx.x * blockDim.x + threadIdx.x;
  if (rest < n) {
    float x = pending ? from[rest] + pending[rest] : from[rest];
    good = good && isfinite(x);
    into[rest] = x;
  }
  if (!good) *bad = 1;
}

// mine <- share (theirs - mine), theirs <- the negative.
extern "C" __global__ void fw_pull(float* mine, float* theirs, double share, int n) {
  float s = (float)share;
  for (EACH(n / 4)) {
    float4 a = ((float4*)mine)[i], b = ((float4*)theirs)[i];
    float4 c = make_float4((b.x - a.x) * s, (b.y - a.y) * s, (b.z - a.z) * s, (b.w - a.w) * s);
    ((float4*)mine)[i] = c;
    ((float4*)theirs)[i] = make_float4(-c.x, -c.y, -c.z, -c.w);
  }
  int rest = n / 4 * 4 + blockIdx.x * blockDim.x + threadIdx.x;
  if (rest < n) {
    float c = (theirs[rest] - mine[rest]) * s;
    mine[rest] = c;
    theirs[rest] = -c;
  }
}

// Each vector <- the weighted sum of all, or how far that is from it.
extern "C" __global__ void fw_all(float* v0, float* v1, float* v2, float* v3, float* v4, float* v5, float* v6,
                                  float* v7, double w0, double w1, double w2, double w3, double w4, double w5,
                                  double w6, double w7, int count, int offset, int n) {
  float* vectors[MOST] = {v0, v1, v2, v3, v4, v5, v6, v7};
  float weights[MOST] = {(float)w0, (float)w1, (float)w2, (float)w3,
                         (float)w4, (float)w5, (float)w6, (float)w7};
  for (EACH(n)) {
    float x[MOST], total = 0;
#pragma unroll
    for (int k = 0; k < MOST; k++) if (k < count) total += weights[k] * (x[k] = vectors[k][i]);
#pragma unroll
    for (int k = 0; k < MOST; k++) if (k < count) vectors[k][i] = offset ? total - x[k] : total;
  }
}
"""

log = logging.getLogger("freewheel")


class Kernels:
    """The kernels of one device."""

    def __init__(self, device: torch.device) -> None:
        compiled: Any = torch.cuda._compile_kernel
        with torch.cuda.device(device):
            self._copy, self._pull, self._all = (
                compiled(SOURCE, name) for name in ("fw_copy", "fw_pull", "fw_all")
            )

    def copy(self, weights: Tensor, pending: Tensor | None, into: Tensor, bad: Tensor) -> None:
        """A copy with what is pending; `bad`, in pinned memory, becomes 1 if a number is not finite."""
        for at, size in _launches(weights):
            nothing = weights.new_empty(0)  # its address is 0
            add = nothing if pending is None else pending[at : at + size]
            self._run(self._copy, weights, size, weights[at:], add, into[at:], bad)

    def pull(self, mine: Tensor, theirs: Tensor, share: float) -> None:
        """mine <- share·(theirs - mine), theirs <- its negative."""
        for at, size in _launches(mine):
            self._run(self._pull, mine, size, mine[at:], theirs[at:], float(share))

    def all(self, vectors: Sequence[Tensor], weights: Sequence[float], offset: bool) -> None:
        """Each vector <- the weighted sum of all, or how far that is from it."""
        home, none = vectors[0], MOST - len(vectors)
        for at, size in _launches(home):
            table = [vector[at:] for vector in vectors] + [home] * none
            factors = [float(weight) for weight in weights] + [0.0] * none
            self._run(self._all, home, size, *table, *factors, len(vectors), int(offset))

    def _run(self, kernel: Any, home: Tensor, size: int, *arguments: Any) -> None:
        blocks = min(BLOCKS, -(-size // THREADS))
        stream = torch.cuda.current_stream(home.device)
        kernel((blocks, 1, 1), (THREADS, 1, 1), [*arguments, size], stream=stream)


def fits(*vectors: Tensor) -> bool:
    """Whether kernels can take vectors: fp32, on one device, aligned to four numbers."""
    device = vectors[0].device
    return device.type == "cuda" and all(
        one.dtype == torch.float32
        and one.device == device
        and one.is_contiguous()
        and one.data_ptr() % 16 == 0
        for one in vectors
    )


@functools.cache
def for_device(device: torch.device) -> Kernels | None:
    """The kernels of a device; None: they cannot be made, and PyTorch's operations do."""
    try:
        return Kernels(device)
    except Exception as error:
        log.info("no kernels of our own on %s: %s", device, error)
        return None


def _launches(vector: Tensor) -> list[tuple[int, int]]:
    return [(at, min(LONGEST, vector.numel() - at)) for at in range(0, vector.numel(), LONGEST)]
