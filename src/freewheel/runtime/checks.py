"""Mistakes with a model or an optimizer that would otherwise be noticed late, or never."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from freewheel.errors import ConfigError, Diverged, RunStopped
from freewheel.strategy import Strategy

WIRES = {"fp32": None, "bf16": torch.bfloat16}

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def wire_type(wire: str, strategy: Strategy) -> torch.dtype | None:
    """What vectors are rounded to on their way; None: nothing."""
    if wire not in WIRES:
        raise ConfigError(f"wire must be one of {', '.join(WIRES)}, not {wire!r}.")
    if wire != "fp32" and not strategy.defines("meet"):
        raise ConfigError(
            f"wire={wire!r} is for strategies that swap snapshots, such as adpsgd. With {strategy.name} "
            "small updates would be lost in the rounding; take fp32."
        )
    return WIRES[wire]


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot be attached."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach takes a torch.nn.Module first, not a {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"attach takes a torch.optim optimizer second, not a {type(optimizer).__name__}.")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"the parameter {name} has no shape yet: let the model compute once before.")
    mine = {id(parameter) for parameter in model.parameters()}
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in mine for parameter in theirs):
        raise ConfigError(
            "the optimizer trains none of the model's parameters; make it of model.parameters()."
        )


def finite(weights: Tensor, rank: int) -> None:
    """Refuse an answer that is none."""
    if not weights.isfinite().all():
        raise Diverged(f"worker {rank} ended with weights that are not finite. Lower the learning rate.")


def score(loss: float, steps: int, strategy: Strategy) -> float:
    """What a strategy compares workers by: the loss that was last reported, in this life of so many steps."""
    if not math.isnan(loss):
        return loss
    if steps > 1:
        raise ConfigError(
            f"{strategy.name} compares the workers' losses: call worker.report(loss) in every step."
        )
    return math.inf


def enter(model: nn.Module) -> None:
    """A model is attached once at a time."""
    if model in _attached:
        raise ConfigError("this model is attached already; leave its with-block first.")
    _attached.add(model)


def leave(model: nn.Module) -> None:
    """It may be attached again."""
    _attached.discard(model)


class Homes:
    """Sees to it that parameters stay where they were put: as parts of one vector.

    `model.double()` and the like give them memory of their own, and the replica would never move again. One
    parameter is looked at in every step, each in its turn.
    """

    def __init__(self, model: nn.Module) -> None:
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._next = itertools.cycle([(name, one, one.data_ptr()) for name, one in trained])

    def look(self) -> None:
        """RunStopped if the next parameter has moved away."""
        name, parameter, pointer = next(self._next)
        if parameter.data_ptr() != pointer:
            raise RunStopped(
                f"the parameter {name} lies in other memory than when the model was attached, so it would no "
                "longer be merged with the others'. Call model.to(), .half(), .double() and load_state_dict("
                "assign=True) before attach."
            )


def signature(model: nn.Module) -> list[list[Any]]:
    """Name, shape and type of every trainable parameter."""
    return [
        [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def first_difference(theirs: list[list[Any]], mine: list[list[Any]], there: str) -> str:
    """Where two models' signatures begin to differ, in words."""
    for k in range(max(len(theirs), len(mine))):
        one = mine[k] if k < len(mine) else None
        other = theirs[k] if k < len(theirs) else None
        if one != other:
            return f"The first difference: {_describe(one)} here, {_describe(other)} {there}."
    return "They differ."


def _describe(parameter: list[Any] | None) -> str:
    if parameter is None:
        return "no further parameter"
    name, shape, dtype = parameter
    return f"{name} of shape {tuple(shape)} in {dtype}"
