"""What a script does to an attached model or its optimizers that would be merged by accident, or never.

Optimizers that `attach` was not given: one made anew, a second one, one for each parameter in the backward
pass. One hook, for all optimizers of the process, sees them step.

`load_state_dict` while the model is attached with others: refused, before it changes anything. An exchange
may be under way with the old weights, or read half of the new ones; and what one worker loads, the others
only average with. The hook is a plain function, so that a model can still be copied and pickled.

Steps outside of the with-block, and an end of the script without the run's answer: `worker.finish()` was not
called, or the worker has never begun. It is not finished for it: what such a script has saved is one worker's
own weights. It is told so, and its exit code is not 0.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.worker.optimizers import members

log = logging.getLogger("freewheel")

Watcher: TypeAlias = Callable[[torch.optim.Optimizer], None]

_watchers: tuple[Watcher, ...] = ()
"""Replaced, never changed: a step may be looking at it."""
_lock = threading.Lock()
_hooked = False
ENDED = "the script ended without worker.finish()"
OUTSIDE = "the script trained outside of `with fw.attach(…)`, where nothing is merged"
begun = False
"""Whether any worker of this process has begun."""


def watch(watcher: Watcher) -> None:
    """Let every optimizer's step be seen before it is made."""
    global _watchers, _hooked
    with _lock:
        if not _hooked:  # once and for all: other threads may be in the midst of the hooks
            register_optimizer_step_pre_hook(_see)
            _hooked = True
        _watchers = (*_watchers, watcher)


def unwatch(watcher: Watcher) -> None:
    """The way back."""
    global _watchers
    with _lock:
        _watchers = tuple(one for one in _watchers if one != watcher)


def _see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in _watchers:
        watcher(optimizer)


_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Guard:
    """Guards the modules of a model that have trainable parameters of their own, until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            one for one in model.modules() if any(w.requires_grad for w in one.parameters(recurse=False))
        ]
        self._hooks: list[RemovableHandle] = [
            one.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
            for one in self._modules
        ]
        _guarded.update(self._modules)

    def remove(self) -> None:
        """Let weights be loaded again."""
        for hook in self._hooks:
            hook.remove()
        for one in self._modules:
            _guarded.discard(one)


def without_guard(model: nn.Module) -> nn.Module:
    """A copy of a guarded model, free of the hooks: they would go into its pickle."""
    for one in model.modules():
        hooks = one._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is refuse]:
            del hooks[key]
    return model


def refuse(module: nn.Module, *_: Any) -> None:
    """Copies of the model have the hook, too: they are not attached."""
    if module in _guarded:
        raise ConfigError(
            "load_state_dict in the with-block would overwrite weights that other workers average with. "
            "Load them before attach, or into a copy of the model."
        )


def warn_outside(optimizer: torch.optim.Optimizer, rank: int | None) -> Callable[[], None]:
    """Say so once if an optimizer steps that was attached and has not come into its with-block.

    A worker whose rank is given has no answer if it never comes there. What is returned ends it.
    """
    hooks: list[RemovableHandle] = []

    def end() -> None:
        while hooks:
            hooks.pop().remove()

    def warn(stepping: torch.optim.Optimizer, *_: Any) -> None:
        end()
        if rank is not None:
            watch_end(rank, lambda _: not begun, OUTSIDE)
        log.warning(
            "%s steps outside of its with-block, where nothing is merged: train inside "
            "`with fw.attach(…) as worker:`",
            type(stepping).__name__,
        )

    hooks += [one.register_step_post_hook(warn) for one in members(optimizer)]
    return end


def watch_end(rank: int, leave: Callable[[RunStopped], bool], why: str = ENDED) -> None:
    """When the script ends, let the worker leave; `leave` says whether it has no answer."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() != process or not leave(RunStopped(why)):
            return
        if getattr(sys, "last_value", None) is None:  # else Python has said why, and exits with 1
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(
                    f"freewheel: {why}: worker {rank} has no consensus; what it saved is one worker's "
                    f"weights. {'Call worker.finish() at its end.' if why is ENDED else 'Train inside.'}\n"
                )
            sys.stdout = Refusing(sys.stdout)

    atexit.register(end)


class Refusing:
    """In the place of standard output at the very end: Python exits with 120 where it cannot be flushed.

    Nothing else changes the exit code then and lets files be written and other libraries clean up, as ever.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Write what is left, then fail, without a traceback."""
        sys.stdout, sys.unraisablehook = self._stream, lambda _: None
        if self._stream is not None:
            self._stream.flush()
        raise RunStopped(ENDED)
