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

SPREAD = ("DistributedDataParallel", "FullyShardedDataParallel")  # they average or shard by themselves

attached = weakref.WeakSet[nn.Module]()  # the models of this process that are in a with-block


def check(model: Any, given: Any, strategy: Strategy, wire: str) -> torch.optim.Optimizer:
    """What was given as optimizers, as one; refuses what cannot be attached, or is spread over processes."""
    if wire != "fp32" and not strategy.defines("meet"):
        raise ConfigError(
            f"wire={wire!r} is for strategies that swap snapshots, such as adpsgd. With {strategy.name} "
            "small updates would be lost in the rounding; take fp32."
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach takes a torch.nn.Module first, not a {type(model).__name__}.")
    if found := [type(one).__name__ for one in model.modules() if type(one).__name__ in SPREAD]:
        raise ConfigError(
            f"attach takes the model itself, not {found[0]} around it: give its .module, and leave the "
            "process group out. Freewheel does what it does."
        )
    optimizer = optimizers.joined(given)
    mine = dict(model.named_parameters())
    for name, parameter in mine.items():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"the parameter {name} has no shape yet: let the model compute once before.")
    theirs = {id(one): one for one in optimizers.parameters(optimizer)}
    others = theirs.keys() - set(map(id, mine.values()))
    if len(others) == len(theirs):
        raise ConfigError(
            "the optimizer trains none of the model's parameters; make it of model.parameters()."
        )
    for other in (one for one in others if theirs[one].requires_grad):
        raise ConfigError(
            f"the optimizer trains a parameter of shape {tuple(theirs[other].shape)} that is not the model's "
            "and would not be merged. Attach all that is trained: nn.ModuleList([model, other])."
        )
    trained = {one.data_ptr() for one in theirs.values()}  # also those that are tied to one
    without = [name for name, one in mine.items() if one.requires_grad and one.data_ptr() not in trained]
    if without:
        log.warning(
            "no optimizer that attach was given trains %s yet. Give it all that step, fw.attach(model, "
            "[a, b]); what is added later by add_param_group is merged, too",
            ", ".join(without),
        )
    return optimizer


def signature(model: nn.Module) -> list[list[Any]]:
    """Name, shape and type of every trainable parameter."""
    return [
        [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def first_difference(theirs: list[list[Any]], mine: list[list[Any]], there: str) -> str:
    """Where two models' signatures begin to differ, in words."""
    for pair in itertools.zip_longest(mine, theirs):
        if pair[0] != pair[1]:
            here, other = (
                f"{one[0]} of shape {tuple(one[1])} in {one[2]}" if one else "no further parameter"
                for one in pair
            )
            return f"The first difference: {here} here, {other} {there}."
    return "They differ."


def settings(strategy: Strategy, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, str]:
    """What all workers must have been given alike beside the model; of the optimizer not its rates."""
    given = {name: str(value) for name, value in strategy.settings().items()}
    return {
        "strategy": strategy.name,
        **{name: text for name, text in given.items() if " at 0x" not in text},
        "optimizer": optimizers.name(optimizer),
        "momentum": "yes" if momentum_of(optimizer) else "no",
        "seed": str(seed),
    }


def other_settings(theirs: dict[str, str], mine: dict[str, str], them: str) -> str:
    """Which settings differ, in words; nothing: none. Those of another strategy are others, of course."""
    names = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    if "strategy" in names:
        names = ["strategy"]
    here, there = (" ".join(f"{name}={one.get(name)}" for name in names) for one in (mine, theirs))
    return f"{here}, {them} has {there}" if names else ""
