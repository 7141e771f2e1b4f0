"""The optimizers of one model: one, or several that together make a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from freewheel.errors import ConfigError

HOOKS = "_optimizer_step_pre_hooks"


class SeveralOptimizers(Optimizer):
    """Several optimizers as one: their groups, their states. Nobody steps it; they step themselves."""

    def __init__(self, members: Sequence[Optimizer]) -> None:  # the base's would want parameters of its own
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self._opt_called = True  # else schedulers warn that it never stepped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, in order."""
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """What each remembers of its parameters."""
        return {parameter: kept for one in self.members for parameter, kept in one.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in order."""
        return {"optimizers": [one.state_dict() for one in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The way back."""
        for one, state in zip(self.members, state_dict["optimizers"], strict=True):
            one.load_state_dict(state)


def joined(given: Any) -> Optimizer:
    """What `attach` was given as one optimizer: itself where it is one; wrappers are taken off."""
    found = [_unwrapped(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if not found:
        raise ConfigError("attach takes an optimizer or a list of them second, not an empty list.")
    if len({id(one) for one in found}) < len(found):
        raise ConfigError("attach was given the same optimizer twice; name each one once.")
    return found[0] if len(found) == 1 else SeveralOptimizers(found)


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Those that step."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def name(optimizer: Optimizer) -> str:
    """What it is, for people."""
    return "+".join(type(one).__name__ for one in members(optimizer))


def parameters(optimizer: Optimizer) -> Iterable[torch.nn.Parameter]:
    """What it trains."""
    return (one for group in optimizer.param_groups for one in group["params"])


def _unwrapped(given: Any) -> Optimizer:
    """The optimizer whose steps count: a wrapper, as Accelerate and Lightning make them, has it inside."""
    inner = getattr(given, "optimizer", None)
    hooks = getattr(given, "__dict__", {}).get(HOOKS)
    if isinstance(inner, Optimizer) and (hooks is None or hooks is vars(inner).get(HOOKS)):
        return _unwrapped(inner)
    if not isinstance(given, Optimizer):
        raise ConfigError(f"attach takes a torch.optim optimizer second, not a {type(given).__name__}.")
    if hooks is None:
        raise ConfigError(
            f"the steps of this {type(given).__name__} cannot be seen: it has no step hooks. Call "
            "torch.optim.Optimizer.__init__ in its __init__, or attach the optimizer inside it."
        )
    return given
