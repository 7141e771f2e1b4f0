"""What a script does to an attached model or its optimizers that would be merged by accident, or never.

`load_state_dict` is refused before it changes anything. A script that ends without the run's answer is told
so, and its exit code is not 0: what it has saved is one worker's own weights.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.worker.checks import members

log = logging.getLogger("freewheel")

watchers: list[Callable[[torch.optim.Optimizer], None]] = []  # see every optimizer that steps in this process
begun = False  # whether any worker of this process has begun
_guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _see(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for watcher in (*watchers,):  # others come and go in other threads
        watcher(optimizer)


register_optimizer_step_pre_hook(_see)  # for good: other threads may be in the midst of the hooks


def guard(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let nobody load weights into a model that is attached, until it is undone."""
    modules = [one for one in model.modules() if any(w.requires_grad for w in one.parameters(recurse=False))]
    _guarded.update(modules)
    undo.callback(_guarded.difference_update, modules)
    for one in modules:
        undo.callback(one.register_load_state_dict_pre_hook(refuse).remove)  # type: ignore[no-untyped-call]


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
    """Say so once if an attached optimizer steps before its with-block; what is returned ends it."""
    undo = contextlib.ExitStack()

    def warn(stepping: torch.optim.Optimizer, *_: Any) -> None:
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
    """When the script ends, let the worker leave; `leave` says whether it has no answer."""
    process = os.getpid()

    def end() -> None:
        if os.getpid() != process or not leave(RunStopped(why)):
            return
        if getattr(sys, "last_value", None) is None:  # else Python has said why, and exits with 1
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(
                    f"freewheel: {why}: worker {rank} has no consensus; it has saved one worker's weights\n"
                )
            sys.stdout = Refusing(sys.stdout)

    atexit.register(end)


class Refusing:
    """Standard output that cannot be flushed at the very end: Python then exits with 120.

    Nothing else changes the exit code so late and lets files be written and other libraries clean up.
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
        raise RunStopped("no consensus")
