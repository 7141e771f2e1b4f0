"""How long a gradient is made to take: a model's layers sleep, forward and backward.

So a machine with few cores can stand for many, and a worker for a slower one. The time lies inside the
layers, as in a real model: gradients of the last layers are there first, and can be reduced while the others
are being computed, as DistributedDataParallel does.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

FORWARD = 1 / 3  # the forward pass's share of a gradient's time; the backward pass computes twice as much
SHORTEST_S = 0.001  # shorter sleeps are left to the next layer: many would keep the machine busy


class Tempo:
    """Lets the gradient of a model take `span_s`, forward and backward, in equal parts for its layers.

    Each layer sleeps until its own moment, counted from `begin`, so its computation lies within its time, and
    delays in waking up do not add up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.span_s = 0.0
        # When the last gradient began and its last sleep ended, and the thread's CPU time then.
        self.began_s = self.woken_s = self.cpu_s = 0.0
        self._forward = self._backward = 0
        self._layers = (0, 0)  # how many a pass calls, forward and backward
        layers = [one for one in model.modules() if next(one.parameters(recurse=False), None) is not None]
        self._hooks = [layer.register_forward_hook(self._computed) for layer in layers]

    def measure(self, compute: Callable[[], Any], times: int) -> float:
        """How long a gradient takes without sleeps; counts its layers, too."""
        took = []
        for _ in range(times):
            self.begin()
            compute()
            took.append(time.monotonic() - self.began_s)
        self._layers = self._forward, self._backward
        return statistics.median(took)

    def take(self, step_s: float, own_s: float = 0.0) -> None:
        """Let each gradient take `step_s`, of which it computes `own_s`."""
        if step_s <= own_s:
            self.end()
        # The first layer's own backward pass comes after the last sleep.
        self.span_s = step_s - (1 - FORWARD) * own_s / max(1, self._layers[1])

    def begin(self) -> None:
        self._forward = self._backward = 0
        self.began_s = time.monotonic()

    def rest(self) -> None:
        """Sleep after a backward pass that called no layer: the model uses its weights directly."""
        if self._hooks and not self._layers[1]:
            self._sleep(1.0)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _computed(self, _: nn.Module, __: Any, output: Any) -> None:
        self._forward += 1
        if self.span_s:
            self._sleep(FORWARD * self._forward / self._layers[0])
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._called_back)  # type: ignore[no-untyped-call]

    def _called_back(self, _: Tensor) -> None:
        self._backward += 1
        if self.span_s:
            self._sleep(FORWARD + (1 - FORWARD) * self._backward / self._layers[1])

    def _sleep(self, share: float) -> None:
        left_s = self.began_s + share * self.span_s - time.monotonic()
        if left_s >= SHORTEST_S or (left_s > 0 and self._backward == self._layers[1]):
            time.sleep(left_s)
        if self._backward == self._layers[1]:
            self.woken_s, self.cpu_s = time.monotonic(), time.thread_time()
