"""CUDA kernels that make one pass over memory instead of several, compiled by PyTorch's NVRTC at run time.

Where `for_device` or `fits` say no, the callers use PyTorch's own operations.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 8  # vectors that are combined in one pass; it stands in the source too
THREADS, BLOCKS = 512, 1056

SOURCE = r"""
#define HERE ((long long)blockIdx.x * blockDim.x + threadIdx.x)
#define EACH(n) long long i = HERE; i < (n); i += (long long)gridDim.x * blockDim.x
#define MOST 8

// A copy, with what is pending; *bad = 1 if a number is not finite.
extern "C" __global__ void fw_copy(const float* from, const float* pending, float* into, int* bad,
                                   double size) {
  long long n = size;
  bool good = true;
  const float4 *from4 = (const float4*)from, *pending4 = (const float4*)pending;
  for (EACH(n / 4)) {
    float4 x = from4[i];
    if (pending) { float4 p = pending4[i]; x.x += p.x; x.y += p.y; x.z += p.z; x.w += p.w; }
    good = good && isfinite(x.x) && isfinite(x.y) && isfinite(x.z) && isfinite(x.w);
    ((float4*)into)[i] = x;
  }
  long long rest = n / 4 * 4 + HERE;
  if (rest < n) {
    float x = pending ? from[rest] + pending[rest] : from[rest];
    good = good && isfinite(x);
    into[rest] = x;
  }
  if (!good) *bad = 1;
}

// mine <- share (theirs - mine), theirs <- the negative.
extern "C" __global__ void fw_pull(float* mine, float* theirs, double share, double size) {
  long long n = size;
  float s = (float)share;
  for (EACH(n / 4)) {
    float4 a = ((float4*)mine)[i], b = ((float4*)theirs)[i];
    float4 c = make_float4((b.x - a.x) * s, (b.y - a.y) * s, (b.z - a.z) * s, (b.w - a.w) * s);
    ((float4*)mine)[i] = c;
    ((float4*)theirs)[i] = make_float4(-c.x, -c.y, -c.z, -c.w);
  }
  long long rest = n / 4 * 4 + HERE;
  if (rest < n) {
    float c = (theirs[rest] - mine[rest]) * s;
    mine[rest] = c;
    theirs[rest] = -c;
  }
}

// Each vector <- the weighted sum of all, or a part of how far that is from it.
extern "C" __global__ void fw_all(float* v0, float* v1, float* v2, float* v3, float* v4, float* v5, float* v6,
                                  float* v7, double w0, double w1, double w2, double w3, double w4, double w5,
                                  double w6, double w7, int count, double part, double size) {
  long long n = size;
  float* vectors[MOST] = {v0, v1, v2, v3, v4, v5, v6, v7};
  float weights[MOST] = {(float)w0, (float)w1, (float)w2, (float)w3,
                         (float)w4, (float)w5, (float)w6, (float)w7};
  float toward = (float)part;
  for (EACH(n)) {
    float x[MOST], total = 0;
#pragma unroll
    for (int k = 0; k < MOST; k++) if (k < count) total += weights[k] * (x[k] = vectors[k][i]);
#pragma unroll
    for (int k = 0; k < MOST; k++) if (k < count) vectors[k][i] = toward ? toward * (total - x[k]) : total;
  }
}
"""

log = logging.getLogger("freewheel")


class Kernels:
    """The kernels of one device; the comments in SOURCE say what each does."""

    def __init__(self, device: torch.device) -> None:
        compiled: Any = torch.cuda._compile_kernel
        with torch.cuda.device(device):
            self._copy = compiled(SOURCE, "fw_copy")
            self._pull = compiled(SOURCE, "fw_pull")
            self._all = compiled(SOURCE, "fw_all")

    def copy(self, weights: Tensor, pending: Tensor | None, into: Tensor, bad: Tensor) -> None:
        """A copy with what is pending; `bad`, in pinned memory, becomes 1 if a number is not finite."""
        nothing = weights.new_empty(0)  # its address is 0
        self._run(self._copy, weights, nothing if pending is None else pending, into, bad)

    def pull(self, mine: Tensor, theirs: Tensor, share: float) -> None:
        self._run(self._pull, mine, theirs, float(share))

    def all(self, vectors: Sequence[Tensor], weights: Sequence[float], part: float) -> None:
        none = MOST - len(vectors)
        factors = [float(weight) for weight in weights] + [0.0] * none
        self._run(self._all, *vectors, *[vectors[0]] * none, *factors, len(vectors), float(part))

    def _run(self, kernel: Any, *arguments: Any) -> None:
        home: Tensor = arguments[0]
        blocks = min(BLOCKS, max(1, -(-home.numel() // THREADS)))  # a share may be empty
        stream = torch.cuda.current_stream(home.device)
        size = float(home.numel())  # whole numbers travel in 32 bits
        kernel((blocks, 1, 1), (THREADS, 1, 1), [*arguments, size], stream=stream)


def fits(*vectors: Tensor) -> bool:
    """Whether kernels can take vectors: fp32, on one device, aligned to four numbers."""
    device = vectors[0].device
    alike = device.type == "cuda" and {(one.dtype, one.device) for one in vectors} == {
        (torch.float32, device)
    }
    return alike and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in vectors)


@functools.cache
def for_device(device: torch.device) -> Kernels | None:
    """None if they cannot be made."""
    try:
        return Kernels(device)
    except Exception as error:
        log.info("no kernels of our own on %s: %s", device, error)
        return None
