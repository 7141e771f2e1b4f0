"""Who computes the gradients of simulated workers: each its own, or those that overlap in one call.

A worker's weights stand still while it computes, so its gradient may be computed at any moment of that time.
When the first of several workers is done, the gradients of all that are computing are computed in one
vmap over their weights. What each worker draws and when does not change, so one seed gives one trace.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, replace_all_batch_norm_modules_, vmap
from torch.utils import _pytree as pytree

from freewheel.errors import ConfigError, first_line
from freewheel.sim.study import School, Study
from freewheel.task import Task

log = logging.getLogger("freewheel")


class Gradients:
    """Computes gradients for studies: together on a device, unless the scenario says otherwise."""

    def __init__(self, school: School) -> None:
        scenario = school.scenario
        together = scenario.device != "cpu" if scenario.batched is None else scenario.batched
        self.alone = not (together and scenario.gradients)
        self._task = school.task
        self._draws: dict[Study, Any] = {}  # what decides the batch of each that computes, in order
        # Gradients that are there before their workers are done: how often the worker's weights had been
        # overwritten then, the gradient, the loss and the gradient's norm.
        self._ready: dict[Study, tuple[int, Tensor, float, float]] = {}
        self._most = scenario.workers  # so many fit at once
        if self.alone:
            return
        trained = [one for one in school.model.parameters() if one.requires_grad]
        if len({one.dtype for one in trained}) > 1 or not all(one.is_contiguous() for one in trained):
            self._give_up("weights of several types or layouts")
        # BatchNorm keeps no statistics: vmap cannot write them, and the answer's are measured anew.
        model = replace_all_batch_norm_modules_(copy.deepcopy(school.model).train())
        self._loss = _Loss(self._task, model)
        self._compute = vmap(grad_and_value(self._loss_at), randomness="different")

    def begin(self, study: Study) -> None:
        """A worker has begun to compute."""
        study.statistics = self.alone
        self._ready.pop(study, None)
        if not self.alone:
            self._draws[study] = self._task.draw(study.rank, study.generator)

    def end(self, study: Study) -> tuple[float, float]:
        """It is done: its gradient is in its replica; the loss and the gradient's norm."""
        self._compute_with(study)
        draw, found = self._draws.pop(study, None), self._ready.pop(study, None)
        if found is not None and found[0] == study.replica.loads:
            study.replica.set_gradient(found[1])
            return found[2:]
        if draw is None:
            return study.gradient(self._task.batch(study.rank, study.generator))
        return study.gradient(pytree.tree_map(lambda stack: stack[0], self._task.batches([draw])))

    def drop(self, study: Study) -> None:
        """It has died."""
        self._draws.pop(study, None)
        self._ready.pop(study, None)

    def _give_up(self, why: str) -> None:
        self.alone = True
        log.warning("simulate: this model cannot be batched (%s); gradients one by one", why)

    def _compute_with(self, first: Study) -> None:
        """One worker's gradient, and those of others that compute, as many as fit."""
        others = [study for study in self._draws if study not in self._ready and study is not first]
        while first not in self._ready and not self.alone:
            studies = [first, *others][: self._most]
            try:
                self._compute_some(studies)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                self._most = len(studies) // 2
                if not self._most:
                    raise ConfigError(
                        "the GPU has no memory left for the gradient of one worker beside all replicas: take "
                        "fewer workers or a smaller batch."
                    ) from None
                log.warning("simulate: %d gradients at once fit the GPU, not %d", self._most, len(studies))
            except Exception as error:  # one by one whatever is really wrong is raised again
                self._give_up(first_line(error))

    def _compute_some(self, studies: list[Study]) -> None:
        rows = torch.stack([study.replica.weights for study in studies])
        batches = self._task.batches([self._draws[study] for study in studies])
        gradients, losses = self._compute(rows, batches)
        norms = torch.linalg.vector_norm(gradients, dim=1).tolist()
        for study, gradient, loss, norm in zip(studies, gradients, losses.tolist(), norms, strict=True):
            self._ready[study] = study.replica.loads, gradient, loss, norm

    def _loss_at(self, vector: Tensor, batch: Any) -> Tensor:
        named, at = {}, 0
        for name, parameter in self._loss.named_parameters():
            if parameter.requires_grad:
                named[name] = vector[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
        loss: Tensor = functional_call(self._loss, named, (batch,))
        return loss


class _Loss(nn.Module):
    """A task's loss as a module, which can be called with other weights."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)
