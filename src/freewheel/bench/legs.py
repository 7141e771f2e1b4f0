"""One worker of one leg: the same model and the same step, with whatever communication the leg stands for.

    alone                no communication: the rate all others are a share of
    ddp                  PyTorch DistributedDataParallel on gloo
    STRATEGY             Freewheel with that strategy, as in adpsgd:topology=ring

A step sleeps for the time a gradient would take, so that workers sharing a core do not slow each other. The
gradient it then gets costs nothing: what is left of a step is plain SGD, and what the leg is about. On a GPU
a step is that of a real GPT instead: bf16 autocast, AdamW, random tokens.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from freewheel import strategies
from freewheel.bench.processes import Parent, job
from freewheel.tasks.nets import GPT

ALONE, DDP = "alone", "ddp"
FLOATS_PER_MB = 250_000
SIDE = 500
VOCABULARY = 256
WARM_UP_STEPS = 3


def in_step(leg: str) -> bool:
    """Whether a worker of this leg cannot make a step that the others do not make."""
    return leg == DDP or (leg != ALONE and strategies.resolve(leg).merges())


class Weights(nn.Module):
    """So many MB of weights in layers of 1 MB, whose gradients are there already."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        whole, rest = divmod(round(mb * FLOATS_PER_MB), SIDE * SIDE)
        shapes = [(SIDE, SIDE)] * whole + ([(rest,)] if rest else [])
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.gradients = [1e-3 * torch.randn(shape) for shape in shapes]

    def forward(self) -> torch.Tensor:
        """The loss; its backward pass hands out the gradients."""
        loss: torch.Tensor = _Given.apply(self.gradients, *self.layers)  # type: ignore[no-untyped-call]
        return loss


class Transformer(nn.Module):
    """A GPT that makes up its own batch; forward is the loss."""

    def __init__(self, layers: int, width: int, context: int, batch: int) -> None:
        super().__init__()
        self.context, self.batch = context, batch
        self.net = GPT(VOCABULARY, context, width, layers, width // 64).cuda()

    def forward(self) -> torch.Tensor:
        """The loss of one batch."""
        tokens = torch.randint(VOCABULARY, (self.batch, self.context + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            guesses = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(guesses.flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Given(torch.autograd.Function):
    """A loss with given gradients: to autograd and its listeners, a backward pass like any other."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A new tensor on the same memory is one that autograd takes as it is, without a copy.
        return None, *(gradient.detach() for gradient in ctx.gradients)


def main() -> None:
    """Step from the given moment to the given moment, tell how often, and leave."""
    parent, asked = Parent(), job()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    gpt = Transformer(**asked["gpt"]) if asked.get("gpt") else None
    model: nn.Module = Weights(asked["model_mb"]) if gpt is None else gpt
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if gpt is not None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compute_s = asked["compute_ms"] / 1e3 * asked["slow"].get(str(rank), 1.0)
    with _communication(asked, model, optimizer) as (module, metrics):
        spent = Spent()

        def step(compute_s: float = compute_s) -> None:
            begin = time.monotonic()
            if gpt is None:
                time.sleep(compute_s)
            woken, cpu_s = time.monotonic(), time.thread_time()
            optimizer.zero_grad()
            module().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            spent.overslept_s += (woken - begin - compute_s) * (gpt is None)
            spent.stepping_s += time.monotonic() - woken
            spent.cpu_s += time.thread_time() - cpu_s

        for _ in range(WARM_UP_STEPS):
            step(asked["compute_ms"] / 1e3)
        parent.say(ready=True)
        window = parent.hear()
        time.sleep(max(0.0, window["begin"] - time.monotonic()))
        before, spent = metrics(), Spent()
        process_s = time.process_time()
        steps = count_steps(step, window["begin"], window["end"])
        result = {"steps": steps, "process_cpu_s": time.process_time() - process_s, **asdict(spent)}
        parent.say(result={**result, "before": before, "after": metrics()})
        while in_step(asked["leg"]):  # its workers can only stop together: when the benchmark hangs up
            step()


@dataclass
class Spent:
    """Where the training thread's time went beside what it was asked to sleep."""

    overslept_s: float = 0.0
    """Awake too late: no core was free, or another thread had Python's lock."""
    stepping_s: float = 0.0
    cpu_s: float = 0.0
    """The part of stepping_s in which the thread ran; in the rest it waited, for others or for a core."""


def count_steps(step: Callable[[], None], begin: float, end: float) -> float:
    """Step until the end has passed; the steps inside the window, the last one by its share."""
    count, last = 0, begin
    while True:
        step()
        now = time.monotonic()
        if now >= end:
            return count + (end - last) / (now - last)
        count, last = count + 1, now


@contextlib.contextmanager
def _communication(
    asked: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Callable[[], torch.Tensor], Callable[[], dict[str, Any]]]]:
    """What the leg adds to a plain loop: the module to call, and what it counts."""
    if asked["leg"] == ALONE:
        yield model, dict
    elif asked["leg"] == DDP:
        torch.distributed.init_process_group("gloo")
        # The bucket view saves DDP a copy of all gradients: the opponent at its best.
        yield nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), dict
    else:
        import freewheel as fw

        options = {"wire": asked["wire"], "bind": asked["bind"][int(os.environ["RANK"])]}
        with fw.attach(model, optimizer, asked["leg"], **options) as worker:
            yield model, worker.metrics


if __name__ == "__main__":
    main()
