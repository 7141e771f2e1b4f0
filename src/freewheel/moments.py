"""An optimizer's moments: what it remembers of past gradients, a number for each weight.

SGD's momentum, Adam's two averages. A merge may average them with the weights, or let momentum follow what
mixing did instead of a worker's own gradients (quasi-global momentum).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.replica import Replica

MOMENTUM = "momentum_buffer"
NU = 0.1  # how much of the last step's way enters quasi-global momentum


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """The momentum of its first weights, 0 where it has none."""
    return float(optimizer.param_groups[0].get("momentum", 0.0) or 0.0)


class Moments:
    """The moments of an optimizer as vectors, one for each name, in the order of a replica's weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
        self._optimizer, self._replica = optimizer, replica

    def names(self) -> list[str]:
        """Which there are by now; ConfigError if it keeps something else than a number for each weight."""
        found: dict[str, None] = {}
        for block in self._replica.blocks:
            for parameter in block.parameters:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel() > 1:
                        found[name] = None
                    elif not isinstance(value, int | float | None) and getattr(value, "numel", int)() != 1:
                        raise ConfigError(
                            f"state=averaged: {type(self._optimizer).__name__} keeps {name}, not one number "
                            "for each weight. Give state=local, or SGD, Adam or AdamW."
                        )
        return sorted(found)

    @torch.no_grad()
    def get(self, name: str) -> Tensor:
        """A copy of one of them; zeros where a weight has none yet."""
        like = self._replica.blocks[0].weights
        vector = torch.zeros(self._replica.size, dtype=self._replica.dtype, device=like.device)
        for piece, value in self._places(name, vector):
            piece.copy_(value)
        return vector

    @torch.no_grad()
    def set(self, name: str, vector: Tensor) -> None:
        """Overwrite one of them, where a weight has it; training must wait meanwhile."""
        for piece, value in self._places(name, vector):
            value.copy_(piece)
        if vector.is_cuda:
            torch.cuda.current_stream(vector.device).synchronize()

    def _places(self, name: str, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for parameter, piece in self._replica.pieces(vector):
            value = self._optimizer.state.get(parameter, {}).get(name)
            if value is not None:
                yield piece, value


class QuasiGlobal:
    """Momentum that follows the weights' whole movement, mixing included.

        m <- (1 - ν) m + ν (x - x')/γ        x, x': before the step, and after the boundary

    The optimizer is plain SGD with momentum: before its step its buffers are set to m.

    Reference: Lin, Karimireddy, Stich, Jaggi, "Quasi-global momentum", ICML 2021.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        sgd = type(optimizer) is torch.optim.SGD
        if not sgd or not all(one["momentum"] for one in groups):
            given = "one without it" if sgd else type(optimizer).__name__
            raise ConfigError(
                f"quasi_global needs one torch.optim.SGD with momentum, not {given}. "
                "Give torch.optim.SGD(…, momentum=0.9), or leave quasi_global out."
            )
        self._optimizer = optimizer
        self._weights = [one for group in groups for one in group["params"]]
        self._before: list[Tensor] = []
        self.m = [torch.zeros_like(one) for one in self._weights]

    @torch.no_grad()
    def begin(self) -> None:
        """Before the optimizer's step."""
        if not self._before:
            self._before = [torch.empty_like(one) for one in self._weights]
        torch._foreach_copy_(self._before, [one.detach() for one in self._weights])
        states = [self._optimizer.state[one] for one in self._weights]
        for one, state in zip(self._weights, states, strict=True):
            if state.get(MOMENTUM) is None:
                state[MOMENTUM] = torch.empty_like(one)
        torch._foreach_copy_([state[MOMENTUM] for state in states], self.m)

    @torch.no_grad()
    def end(self) -> None:
        """After the boundary; weights whose learning rate is 0 keep their m."""
        if not self._before:
            return
        rates = [float(group["lr"]) for group in self._optimizer.param_groups for _ in group["params"]]
        torch._foreach_sub_(self._before, [one.detach() for one in self._weights])
        torch._foreach_mul_(self._before, [NU / rate if rate > 0 else 0.0 for rate in rates])
        torch._foreach_mul_(self.m, [1 - NU if rate > 0 else 1.0 for rate in rates])
        torch._foreach_add_(self.m, self._before)
