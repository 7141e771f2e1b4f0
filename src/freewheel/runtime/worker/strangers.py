"""Optimizers that `attach` was not given: one hook, for all optimizers of the process, sees them step.

An optimizer that was made anew, a second one, one for each parameter in the backward pass: its steps would be
merged by accident, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

Watcher: TypeAlias = Callable[[torch.optim.Optimizer], None]

_watchers: tuple[Watcher, ...] = ()
"""Replaced, never changed: a step may be looking at it."""
_lock = threading.Lock()
_hooked = False


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
