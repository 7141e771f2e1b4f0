"""Mistakes with a model or an optimizer that would otherwise be noticed late, or never."""

from __future__ import annotations

import itertools
import logging
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from freewheel.errors import ConfigError
from freewheel.moments import momentum_of
from freewheel.runtime.worker import optimizers
from freewheel.strategy import Strategy

log = logging.getLogger("freewheel")

SPREAD = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers that average or shard by themselves."""

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models of this process that are in a with-block."""


def wire(given: str, strategy: Strategy) -> None:
    """Refuse to round what does not bear it."""
    if given != "fp32" and not strategy.defines("meet"):
        raise ConfigError(
            f"wire={given!r} is for strategies that swap snapshots, such as adpsgd. With {strategy.name} "
            "small updates would be lost in the rounding; take fp32."
        )


def check(model: Any, given: Any) -> torch.optim.Optimizer:
    """What was given as optimizers, as one; refuses what cannot be attached, or is spread over processes."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach takes a torch.nn.Module first, not a {type(model).__name__}.")
    for one in model.modules():
        if type(one).__name__ in SPREAD:
            raise ConfigError(
                f"attach takes the model itself, not {type(one).__name__} around it: give its .module, and "
                "leave the process group out. Freewheel does what it does."
            )
    optimizer = optimizers.joined(given)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"the parameter {name} has no shape yet: let the model compute once before.")
    mine = {id(parameter): name for name, parameter in model.named_parameters()}
    theirs = {id(parameter): parameter for parameter in optimizers.parameters(optimizer)}
    if not mine.keys() & theirs.keys():
        raise ConfigError(
            "the optimizer trains none of the model's parameters; make it of model.parameters()."
        )
    others = [one for key, one in theirs.items() if key not in mine and one.requires_grad]
    if others:
        raise ConfigError(
            f"the optimizer trains a parameter of shape {tuple(others[0].shape)} that is not the model's and "
            "would not be merged. Attach all that is trained: nn.ModuleList([model, other])."
        )
    tied = {one.data_ptr() for one in theirs.values()}
    without = [
        name
        for name, one in model.named_parameters()
        if one.requires_grad and id(one) not in theirs and one.data_ptr() not in tied
    ]
    if without:
        log.warning(
            "no optimizer that attach was given trains %s%s yet. Give it all that step, "
            "fw.attach(model, [a, b]); what is added later by add_param_group is merged, too",
            without[0],
            f" (and {len(without) - 1} more)" * (len(without) > 1),
        )
    return optimizer


TOO_MANY_STEPS = (
    "Of a worker's steps nobody knows the number: fast workers take more batches than len(loader) says. "
    'worker.scheduler("cosine") goes by what all workers have done.'
)
"""What a scheduler that ends at a step does not know."""


def enter(model: nn.Module) -> None:
    """A model is attached once at a time."""
    if model in attached:
        raise ConfigError("this model is attached already; leave its with-block first.")
    attached.add(model)


def room(strategy: Strategy, shared: bool) -> None:
    """Refuse a strategy that needs worker 0 where the room a lost worker leaves may go to one that waits."""
    if shared and strategy.needs(0):
        raise ConfigError(
            f"{strategy.name} needs worker 0, whose room may go to a worker that waits for some. Leave --max "
            "out, and ask for as many workers as there is room for."
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
    for one, other in itertools.zip_longest(mine, theirs):
        if one != other:
            return f"The first difference: {_describe(one)} here, {_describe(other)} {there}."
    return "They differ."


def settings(strategy: Strategy, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, str]:
    """What all workers must have been given alike beside the model.

    Of the optimizer that is its class, and whether it has momentum: one that comes late copies its state.
    Rates may differ.
    """
    given = {name: str(value) for name, value in strategy.settings().items()}
    return {
        "strategy": strategy.name,
        **{name: text for name, text in given.items() if " at 0x" not in text},
        "optimizer": optimizers.name(optimizer),
        "momentum": "yes" if momentum_of(optimizer) else "no",
        "seed": str(seed),
    }


def other_settings(theirs: dict[str, str], mine: dict[str, str], them: str) -> str:
    """Which settings differ, in words; nothing: none."""
    if theirs["strategy"] != mine["strategy"]:
        theirs, mine = ({"strategy": one["strategy"]} for one in (theirs, mine))
    names = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    if not names:
        return ""
    here, there = (
        " ".join(f"{name}={one[name]}" for name in names if name in one) or "none" for one in (mine, theirs)
    )
    return f"{here}, {them} has {there}"


def _describe(parameter: list[Any] | None) -> str:
    if parameter is None:
        return "no further parameter"
    name, shape, dtype = parameter
    return f"{name} of shape {tuple(shape)} in {dtype}"
