"""BatchNorm's statistics of a mean model.

They are not the mean of the workers' statistics, which belong to their own weights. They are measured anew,
by running some batches through the model.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from freewheel.errors import ConfigError


@torch.no_grad()
def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    count: int | None = 32,
    forward: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """Measure BatchNorm's statistics anew, from `count` batches of a loader (None: all); returns the model.

    A batch is what the model is called with: a tensor, a tuple or list whose first part is, or a dict of
    keywords; `forward` is called with it instead, where that does not fit. ConfigError if there is none.

        >>> import freewheel as fw, torch
        >>> model = torch.nn.BatchNorm1d(2)
        >>> fw.recalibrate(model, [torch.tensor([[1.0, 10.0], [3.0, 30.0]])]).running_mean
        tensor([ 2., 20.])
    """
    if count is not None and (int(count) != count or count < 1):
        raise ConfigError(f"recalibrate: count must be a whole number from 1 on, not {count!r}.")
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
    if not norms:
        return model
    modes = {one: one.training for one in model.modules()}
    momenta = [one.momentum for one in norms]
    before = [{name: value.clone() for name, value in one.named_buffers()} for one in norms]
    measured = False
    model.eval()
    for one in norms:
        one.reset_running_stats()
        one.momentum = None  # the mean of all batches
        one.train()
    try:
        for batch in itertools.islice(batches, count):
            if forward is not None:
                forward(batch)
            elif isinstance(batch, dict):
                model(**batch)
            else:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
            measured = True
        if not measured:
            raise ConfigError(
                "recalibrate: the loader gave no batch. Give one that has not been read to its end."
            )
    except BaseException:
        for one, values in zip(norms, before, strict=True):
            for name, value in one.named_buffers():
                value.copy_(values[name])
        raise
    finally:
        for one, momentum in zip(norms, momenta, strict=True):
            one.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
    return model
