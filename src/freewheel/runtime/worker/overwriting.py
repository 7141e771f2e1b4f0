"""`load_state_dict` into a model while it is attached with others: refused, before it changes anything.

An exchange may be under way with the old weights, or read half of the new ones; and what one worker loads,
the others only average with. The hook is a plain function, so that a model can still be copied and pickled.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from freewheel.errors import ConfigError

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
