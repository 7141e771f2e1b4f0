"""Mistakes of scripts that would otherwise be noticed late, or never, are refused where they are made.

First those with a model and its optimizers. Then `load_state_dict` into an attached model, before it changes
anything. Who saves an attached model, or never asks for the answer, is warned: these are one worker's own
weights. A flat script that ends without `finish` has no answer, and its exit code is not 0.
"""

import atexit
import contextlib
import functools
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from freewheel.errors import ConfigError, RunStopped
from freewheel.moments import momentum_of
from freewheel.strategy import Strategy

log = logging.getLogger("freewheel")

HOOKS = "_optimizer_step_pre_hooks"
SPREAD = ("DistributedDataParallel", "FullyShardedDataParallel")  # they average or shard by themselves

attached = weakref.WeakSet[nn.Module]()  # the models of this process that are in a with-block
watchers: list[Callable[[Optimizer], None]] = []  # see every optimizer that steps in this process
begun = False  # whether any worker of this process has begun
warned_own = False  # whether a script of this process has been warned of its own weights
_guarded, _trusted = weakref.WeakSet[nn.Module](), weakref.WeakSet[nn.Module]()
_unasked = set[object]()  # blocks that have ended, whose answer nobody has asked for


def check(model: Any, given: Any, strategy: Strategy, wire: str) -> Optimizer:
    """Refuse what cannot be attached; return the optimizers as one."""
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
    optimizer = joined(given)
    mine = dict(model.named_parameters())
    for name, parameter in mine.items():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"the parameter {name} has no shape yet: let the model compute once before.")
    theirs = {id(one): one for one in parameters(optimizer)}
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
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return [[name, list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in trained]


def first_difference(theirs: list[list[Any]], mine: list[list[Any]], there: str) -> str:
    for pair in itertools.zip_longest(mine, theirs):
        if pair[0] != pair[1]:
            here, other = (
                f"{one[0]} of shape {tuple(one[1])} in {one[2]}" if one else "no further parameter"
                for one in pair
            )
            return f"The first difference: {here} here, {other} {there}."
    return "They differ."


def settings(strategy: Strategy, optimizer: Optimizer, seed: int) -> dict[str, str]:
    """What must be the same on all workers besides the model; learning rates may differ."""
    given = ((name, str(value)) for name, value in strategy.settings().items())
    return {
        "strategy": strategy.name,
        **{name: text for name, text in given if " at 0x" not in text},
        "optimizer": name_of(optimizer),
        "momentum": "yes" if momentum_of(optimizer) else "no",
        "seed": str(seed),
    }


def other_settings(theirs: dict[str, str], mine: dict[str, str], them: str) -> str:
    """Which settings differ, in words; empty: none. With another strategy only that is said."""
    names = [name for name in {**mine, **theirs} if theirs.get(name) != mine.get(name)]
    if "strategy" in names:
        names = ["strategy"]
    here, there = (" ".join(f"{name}={one.get(name)}" for name in names) for one in (mine, theirs))
    return f"{here}, {them} has {there}" if names else ""


class SeveralOptimizers(Optimizer):
    """Several optimizers as one: their groups and states. They step by themselves; this one never does."""

    def __init__(self, members: Sequence[Optimizer]) -> None:  # the base's would want parameters of its own
        self.members = tuple(members)
        self.defaults: dict[str, Any] = {}
        self._opt_called = True  # else schedulers warn that it never stepped

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.members for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {parameter: kept for one in self.members for parameter, kept in one.state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [one.state_dict() for one in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for one, state in zip(self.members, state_dict["optimizers"], strict=True):
            one.load_state_dict(state)


def joined(given: Any) -> Optimizer:
    found = [_unwrapped(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if not found:
        raise ConfigError("attach takes an optimizer or a list of them second, not an empty list.")
    if len({id(one) for one in found}) < len(found):
        raise ConfigError("attach was given the same optimizer twice; name each one once.")
    return found[0] if len(found) == 1 else SeveralOptimizers(found)


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def name_of(optimizer: Optimizer) -> str:
    return "+".join(type(one).__name__ for one in members(optimizer))


def parameters(optimizer: Optimizer) -> Iterable[torch.nn.Parameter]:
    return (one for group in optimizer.param_groups for one in group["params"])


def _unwrapped(given: Any) -> Optimizer:
    """The optimizer whose steps count: wrappers, such as Accelerate's and Lightning's, hold it inside."""
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


def _see(optimizer: Optimizer, *_: Any) -> None:
    for watcher in (*watchers,):  # others come and go in other threads
        watcher(optimizer)


register_optimizer_step_pre_hook(_see)  # for good: other threads may be in the midst of the hooks


def guard(model: nn.Module, alike: bool, undo: contextlib.ExitStack) -> None:
    """Until `undo` refuse load_state_dict on a model, and warn of state_dict unless replicas are `alike`."""
    modules = [one for one in model.modules() if any(w.requires_grad for w in one.parameters(recurse=False))]
    _guarded.update(modules)
    alike = alike or model in _trusted
    undo.callback(_guarded.difference_update, modules)
    for one in modules:
        undo.callback(one.register_load_state_dict_pre_hook(refuse).remove)  # type: ignore[no-untyped-call]
        if not alike:
            undo.callback(one.register_state_dict_pre_hook(warn_own).remove)  # type: ignore[no-untyped-call]


def without_guard(model: nn.Module) -> nn.Module:
    """A copy of a guarded model without the hooks, which would go into its pickle."""
    for one in model.modules():
        for hooks in (one._load_state_dict_pre_hooks, one._state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in HOOKED]:
                del hooks[key]
    return model


def refuse(module: nn.Module, *_: Any) -> None:
    """A hook. Copies of the model have it, too, and are not guarded."""
    if module in _guarded:
        raise ConfigError(
            "load_state_dict in the with-block would overwrite weights that other workers average with. "
            "Load them before attach, or into a copy of the model."
        )


def warn_own(module: nn.Module, *_: Any) -> None:
    """A hook, too. Warns once in a process."""
    global warned_own
    if module in _guarded and not warned_own:
        warned_own = True
        log.warning(
            "state_dict in the with-block is of this worker's own weights. To save or evaluate the model of "
            "all workers take worker.consensus()"
        )


def trust(model: nn.Module) -> None:
    """Let state_dict of this model be no mistake: a trainer calls it."""
    _trusted.add(getattr(model, "_orig_mod", model))


HOOKED = (refuse, warn_own)


def watch_answer() -> Callable[[], None]:
    """Warn when the script ends, unless what is returned was called: it has asked for the answer."""
    if not _unasked:
        atexit.register(_say_unasked, os.getpid())
    mark = object()
    _unasked.add(mark)
    return functools.partial(_unasked.discard, mark)


def _say_unasked(process: int) -> None:
    if _unasked and os.getpid() == process and getattr(sys, "last_value", None) is None:
        _unasked.clear()
        _say(
            "the script never asked for worker.consensus(): if it has saved or measured the model, that was "
            "one worker's own"
        )


def _say(text: str) -> None:
    """On stderr, as far as there is one at a script's end."""
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"freewheel: {text}\n")


def warn_outside(optimizer: Optimizer, rank: int | None) -> Callable[[], None]:
    """Warn once if an attached optimizer steps before its with-block; the function returned ends that."""
    undo = contextlib.ExitStack()

    def warn(stepping: Optimizer, *_: Any) -> None:
        undo.close()
        log.warning("%s steps outside of its with-block, where nothing is merged", type(stepping).__name__)
        if rank is not None:
            watch_end(rank, lambda _: not begun, "the script trained outside of `with fw.attach(…)`")

    for one in members(optimizer):
        undo.callback(one.register_step_post_hook(warn).remove)
    return undo.close


def watch_end(
    rank: int, leave: Callable[[RunStopped], bool], why: str = "the script ended without worker.finish()"
) -> None:
    """When the script ends, call `leave`, which says whether this worker is left without an answer."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() != process or not leave(RunStopped(why)):
            return
        if getattr(sys, "last_value", None) is None:  # else Python has said why, and exits with 1
            _say(f"{why}: worker {rank} has no consensus; it has saved one worker's weights")
            sys.stdout = Refusing(sys.stdout)

    atexit.register(end)


class Refusing:
    """Standard output whose last flush fails: Python then exits with 120.

    Nothing else changes the exit code so late and still lets files be written and other libraries clean up.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        sys.stdout, sys.unraisablehook = self._stream, lambda _: None
        if self._stream is not None:
            self._stream.flush()
        raise RunStopped("no consensus")
