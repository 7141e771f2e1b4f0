"""What simulated workers learn: a model, its optimizer, its batches and its gradients.

Gradients are computed one by one, or together: a worker's weights stand still while it computes, so when the
first of several workers is done, one vmap computes the gradients of all that are computing. What each worker
draws and when does not change, so one seed gives one trace.
"""

import copy
import dataclasses
import gc
import inspect
import logging
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, replace_all_batch_norm_modules_, vmap
from torch.utils import _pytree as pytree

from freewheel.errors import ConfigError, first_line
from freewheel.moments import Moments, QuasiGlobal, momentum_of
from freewheel.replica import Replica
from freewheel.sim.scenario import Scenario
from freewheel.strategy import Strategy
from freewheel.task import Task, check_optimizer, optimizer_of

log = logging.getLogger("freewheel")


class School:
    """What all workers of a run begin with: the model, its size on the wire, the optimizer's settings."""

    def __init__(self, task: Task, strategy: Strategy, scenario: Scenario) -> None:
        check_optimizer(scenario.optimizer, scenario.momentum, strategy)
        self.task, self.strategy, self.scenario = task, strategy, scenario
        device = torch.device(scenario.device if scenario.gradients else "cpu")
        task.prepare(scenario.workers, scenario.seed)
        if device.type != "cpu":
            gc.collect()  # an earlier run's replicas
            torch.cuda.empty_cache()
            task.to(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(scenario.seed)
            self.model = task.model().to(device)
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.size = sum(p.numel() for p in weights)
        self.model_bytes = sum(p.nbytes for p in weights)
        if scenario.model_mb is not None:
            self.model_bytes = round(scenario.model_mb * 1e6)
        if not scenario.gradients:  # a short vector stands for the model; a ring cuts it into equal parts
            self.size = scenario.workers * -(-1024 // scenario.workers)
        self.value_bytes = self.model_bytes / self.size
        # Workers that train nothing share the moments of this optimizer, which has made a step.
        optimizer, self.moments = self.optimizer(Replica.blank(1 if scenario.gradients else self.size))
        optimizer.step()
        self.lr: float = optimizer.param_groups[0]["lr"]
        self.momentum = momentum_of(optimizer)

    def optimizer(self, replica: Replica) -> tuple[torch.optim.Optimizer, Moments]:
        """An optimizer of whole blocks, for fewer calls in a step, and its moments."""
        blocks = []
        for block in replica.blocks:
            whole = nn.Parameter(block.weights)
            whole.grad = block.gradient
            blocks.append(dataclasses.replace(block, parameters=[whole]))
        weights = [one for block in blocks for one in block.parameters]
        optimizer = optimizer_of(self.scenario, self.task, self.strategy, weights)
        optimizer.param_groups[0]["foreach"] = False  # torch need not find out in every step
        return optimizer, Moments(optimizer, Replica(blocks))


class Study:
    """What one simulated worker learns, in one of its lives."""

    def __init__(self, school: School, rank: int, life: int) -> None:
        self.task, self.rank = school.task, rank
        self.model = copy.deepcopy(school.model)
        self.replica = Replica.of(self.model)
        self.optimizer, self.moments = school.optimizer(self.replica)
        self._step = inspect.unwrap(type(self.optimizer).step)  # without torch's hooks
        plain = all(not self.optimizer.defaults.get(name) for name in ("momentum", "weight_decay"))
        self._plain = plain and type(self.optimizer) is torch.optim.SGD
        self.quasi_global = QuasiGlobal(self.optimizer) if school.strategy.quasi_global else None
        self.statistics = True  # whether BatchNorm's are kept up to date while it learns
        seed = random.Random(f"data/{school.scenario.seed}/{rank}/{life}").getrandbits(62)
        self.generator = torch.Generator().manual_seed(seed)

    def gradient(self, batch: Any) -> tuple[float, float]:
        """Compute a gradient in the replica; the loss and the gradient's norm."""
        for block in self.replica.blocks:
            block.gradient.zero_()
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), torch.linalg.vector_norm(self.replica.gradient).item()

    def step(self, lr: float) -> None:
        if self._plain:  # torch's takes longer than a small model's gradient
            for block in self.replica.blocks:
                block.weights.add_(block.gradient, alpha=-lr)
            return
        self.optimizer.param_groups[0]["lr"] = lr
        if self.quasi_global is not None:
            self.quasi_global.begin()
        with torch.no_grad():
            self._step(self.optimizer)

    def boundary(self) -> None:
        self.replica.boundary()
        if self.quasi_global is not None:
            self.quasi_global.end()

    def score(self) -> float:
        self.model.eval()
        if not self.statistics:
            self.task.recalibrate(self.model, self.rank + 1, 0)
        loss = self.task.score(self.model)
        self.model.train()
        return loss


class Gradients:
    """Computes gradients: on a GPU those that overlap together, unless the scenario says otherwise."""

    def __init__(self, school: School) -> None:
        scenario = school.scenario
        together = scenario.device != "cpu" if scenario.batched is None else scenario.batched
        self.alone = not (together and scenario.gradients)
        self._task = school.task
        self._draws: dict[Study, Any] = {}  # what decides the batch of each that computes, in order
        # Gradients of workers that are not done: the replica's `loads`, the gradient, the loss, the norm.
        self._ready: dict[Study, tuple[int, Tensor, float, float]] = {}
        self._most = scenario.workers  # how many fit at once
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
        study.statistics = self.alone
        self._ready.pop(study, None)
        if not self.alone:
            self._draws[study] = self._task.draw(study.rank, study.generator)

    def end(self, study: Study) -> tuple[float, float]:
        """Put the gradient into the replica; the loss and the gradient's norm."""
        others = [one for one in self._draws if one not in self._ready and one is not study]
        while study not in self._ready and not self.alone:
            self._compute_most([study, *others][: self._most])
        draw, found = self._draws.pop(study, None), self._ready.pop(study, None)
        if found is not None and found[0] == study.replica.loads:
            study.replica.set_gradient(found[1])
            return found[2:]
        if draw is None:
            return study.gradient(self._task.batch(study.rank, study.generator))
        return study.gradient(pytree.tree_map(lambda stack: stack[0], self._task.batches([draw])))

    def drop(self, study: Study) -> None:
        self._draws.pop(study, None)
        self._ready.pop(study, None)

    def _give_up(self, why: str) -> None:
        self.alone = True
        log.warning("simulate: this model cannot be batched (%s); gradients one by one", why)

    def _compute_most(self, studies: list[Study]) -> None:
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
        except Exception as error:  # if it is no matter of batching, it is raised again one by one
            self._give_up(first_line(error))

    def _compute_some(self, studies: list[Study]) -> None:
        rows = torch.stack([study.replica.weights for study in studies])
        batches = self._task.batches([self._draws[study] for study in studies])
        gradients, losses = self._compute(rows, batches)
        norms = torch.linalg.vector_norm(gradients, dim=1).tolist()
        for study, gradient, loss, norm in zip(studies, gradients, losses.tolist(), norms, strict=True):
            self._ready[study] = study.replica.loads, gradient, loss, norm

    def _loss_at(self, vector: Tensor, batch: Any) -> Tensor:
        trained = {name: one for name, one in self._loss.named_parameters() if one.requires_grad}
        pieces = torch.split(vector, [one.numel() for one in trained.values()])
        named = {name: piece.view(trained[name].shape) for name, piece in zip(trained, pieces, strict=True)}
        loss: Tensor = functional_call(self._loss, named, (batch,))
        return loss


class _Loss(nn.Module):
    """A task's loss as a module, which can be called with other weights."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)
