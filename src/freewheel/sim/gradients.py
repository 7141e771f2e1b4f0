"""Who computes the gradients of simulated workers: each its own, or those that overlap in one call.

A worker's weights stand still while it computes, so its gradient may be computed at any moment of that time.
When the first of several workers is done, `Together` computes the gradients of all that are computing, in one
vmap over their weights. What each worker draws and when does not change, so one seed gives one trace.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from freewheel.errors import ConfigError, FreewheelError
from freewheel.sim.scenario import Scenario
from freewheel.sim.study import Study
from freewheel.task import Task

log = logging.getLogger("freewheel")


class Gradients(Protocol):
    """Computes gradients for studies."""

    def begin(self, study: Study) -> None:
        """A worker has begun to compute."""

    def end(self, study: Study) -> tuple[float, float]:
        """It is done: its gradient is in its replica; the loss and the gradient's norm."""

    def drop(self, study: Study) -> None:
        """It has died."""


class Alone:
    """Each worker computes its own gradient when it is done."""

    def begin(self, study: Study) -> None:
        """Nothing to do yet."""

    def end(self, study: Study) -> tuple[float, float]:
        """See Gradients.end."""
        return study.gradient(study.task.batch(study.rank, study.generator))

    def drop(self, study: Study) -> None:
        """Nothing is kept."""


@dataclass
class Computed:
    """A gradient that is there before its worker is done."""

    loads: int
    """How often the worker's weights had been overwritten then."""
    gradient: Tensor
    loss: float
    norm: float


class Together:
    """The gradients of all workers that are computing, in one vmap; without it where a model cannot."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self._task = task
        self._model = _without_statistics(model)
        self._draws: dict[Study, Any] = {}
        """Who computes, and what decides its batch; in the order in which they began."""
        self._ready: dict[Study, Computed] = {}
        self._most = 0
        """So many fit at once; 0: all."""
        trained = [one for one in model.parameters() if one.requires_grad]
        alike = len({one.dtype for one in trained}) == 1 and all(one.is_contiguous() for one in trained)
        self._fails = not alike
        if self._fails:
            log.warning("simulate: weights of several types or layouts cannot be batched; one by one, then")
        self._compute = vmap(grad_and_value(self._loss), randomness="different")

    def begin(self, study: Study) -> None:
        """Remember it."""
        self._ready.pop(study, None)
        self._draws[study] = study.draw()
        study.statistics = self._fails

    def end(self, study: Study) -> tuple[float, float]:
        """See Gradients.end."""
        if study not in self._ready and not self._fails:
            self._compute_all(study)
        draw = self._draws.pop(study)
        found = self._ready.pop(study, None)
        if found is None or found.loads != study.replica.loads:  # it was given other weights meanwhile
            return study.gradient(pytree.tree_map(lambda stack: stack[0], self._task.batches([draw])))
        study.replica.set_gradient(found.gradient)
        return found.loss, found.norm

    def drop(self, study: Study) -> None:
        """A worker has died."""
        self._draws.pop(study, None)
        self._ready.pop(study, None)

    def _compute_all(self, first: Study) -> None:
        waiting = [study for study in self._draws if study not in self._ready and study is not first]
        studies = [first, *waiting]
        while studies:
            some = studies[: self._most or len(studies)]
            try:
                self._compute_some(some)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(some) == 1:
                    raise ConfigError(
                        "the GPU has no memory left for the gradient of one worker beside all replicas: take "
                        "fewer workers or a smaller batch."
                    ) from None
                self._most = len(some) // 2
                log.warning("simulate: %d gradients at once fit the GPU, not %d", self._most, len(some))
                continue
            except FreewheelError:
                raise
            except Exception as error:  # one by one whatever is really wrong is raised again
                self._fails = True
                why = str(error).splitlines()[0][:150]
                log.warning("simulate: this model cannot be batched (%s); gradients one by one", why)
                return
            studies = studies[len(some) :]

    def _compute_some(self, studies: list[Study]) -> None:
        rows = torch.stack([study.replica.weights for study in studies])
        batches = self._task.batches([self._draws[study] for study in studies])
        gradients, losses = self._compute(rows, batches)
        norms = torch.linalg.vector_norm(gradients, dim=1).tolist()
        for study, gradient, loss, norm in zip(studies, gradients, losses.tolist(), norms, strict=True):
            self._ready[study] = Computed(study.replica.loads, gradient, loss, norm)

    def _loss(self, vector: Tensor, batch: Any) -> Tensor:
        named, at = {}, 0
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                named[name] = vector[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
        return self._task.loss(_Called(self._model, named), batch)


class _Called(nn.Module):
    """A model with other weights."""

    def __init__(self, model: nn.Module, named: dict[str, Tensor]) -> None:
        super().__init__()
        self._call: Callable[..., Any] = lambda *inputs: functional_call(model, named, inputs)

    def forward(self, *inputs: Any) -> Any:
        """As the model."""
        return self._call(*inputs)


def _without_statistics(model: nn.Module) -> nn.Module:
    """A copy whose BatchNorm keeps none: vmap cannot write them, and the answer's are measured anew."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model


def chosen(task: Task, model: nn.Module, scenario: Scenario) -> Alone | Together:
    """Together on a device, unless the scenario says otherwise."""
    together = scenario.device != "cpu" if scenario.batched is None else scenario.batched
    return Together(task, model) if scenario.gradients and together else Alone()
