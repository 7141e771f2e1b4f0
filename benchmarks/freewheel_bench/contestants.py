"""One worker of one contestant: the same model and the same step, each with its own communication.

    alone                no communication: the rate all others are a share of
    ddp                  PyTorch DistributedDataParallel on gloo
    STRATEGY             Freewheel with that strategy, as in adpsgd:topology=ring

Layers sleep for the time their gradients would take, forward and backward (`tempo.py`), so that workers
sharing a core do not slow each other, and DDP reduces what is there while the rest is computed. The gradients
they then hand out cost nothing: what is left of a step is plain SGD and communication. On a GPU a step is
that of a real GPT instead: bf16 autocast, AdamW, random tokens.
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
from freewheel.tasks.nets import GPT
from freewheel.tempo import Tempo
from freewheel.training.ddp import parallel
from freewheel_bench.parent import Parent, job

ALONE, DDP = "alone", "ddp"
FLOATS_PER_MB = 250_000
SIDE = 500
VOCABULARY = 256
WARM_UP_STEPS = 3


def in_step(contestant: str) -> bool:
    """Whether a worker of this contestant cannot make a step that the others do not make."""
    return contestant == DDP or (contestant != ALONE and strategies.resolve(contestant).merges())


class Weights(nn.Module):
    """So many MB of weights in layers of 1 MB, whose gradients are there already."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        whole, rest = divmod(round(mb * FLOATS_PER_MB), SIDE * SIDE)
        shapes = [(SIDE, SIDE)] * whole + ([(rest,)] if rest else [])
        self.layers = nn.Sequential(*(Layer(shape) for shape in shapes))

    def forward(self) -> torch.Tensor:
        """The loss; its backward pass hands out the gradients, the last layer's first."""
        loss: torch.Tensor = self.layers(torch.zeros(()))
        return loss


class Layer(nn.Module):
    """Weights with a given gradient."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.gradient = 1e-3 * torch.randn(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Given.apply(self.gradient, x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Transformer(nn.Module):
    """A GPT that makes up its own batch; forward is the loss."""

    def __init__(self, layers: int, width: int, context: int, batch: int) -> None:
        super().__init__()
        self.context, self.batch = context, batch
        self.net = GPT(VOCABULARY, context, width, layers, width // 64).cuda()

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (self.batch, self.context + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            guesses = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(guesses.flatten(0, 1).float(), tokens[:, 1:].flatten())


class _Given(torch.autograd.Function):
    """A layer with a given gradient: to autograd and its listeners, one like any other."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *of_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A new tensor on the same memory is one that autograd takes as it is, without a copy.
        return None, of_output[0], ctx.gradient.detach()


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
    tempo = Tempo(model)
    if gpt is None:
        tempo.measure(lambda: model().backward(), 1)
    else:
        tempo.end()
    with _communication(asked, model, optimizer) as (module, metrics):
        spent = Spent()

        def step() -> None:
            woken, cpu_s = time.monotonic(), time.thread_time()
            tempo.begin()
            optimizer.zero_grad()
            module().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if gpt is None:
                woken, cpu_s = tempo.woken_s, tempo.cpu_s
                spent.overslept_s += woken - tempo.began_s - tempo.span_s
            spent.stepping_s += time.monotonic() - woken
            spent.cpu_s += time.thread_time() - cpu_s

        if gpt is None:
            tempo.take(asked["compute_ms"] / 1e3)
        for _ in range(WARM_UP_STEPS):
            step()
        if gpt is None:
            tempo.take(compute_s)
        parent.say(ready=True)
        window = parent.hear()
        time.sleep(max(0.0, window["begin"] - time.monotonic()))
        before, spent = metrics(), Spent()
        process_s = time.process_time()
        steps = count_steps(step, window["begin"], window["end"])
        result = {"steps": steps, "process_cpu_s": time.process_time() - process_s, **asdict(spent)}
        parent.say(result={**result, "before": before, "after": metrics()})
        while in_step(asked["contestant"]):  # these can only stop together: when the benchmark hangs up
            step()


@dataclass
class Spent:
    """Where the training thread's time went beside what its layers were asked to take."""

    overslept_s: float = 0.0  # awake too late: no core was free, or another thread had Python's lock
    stepping_s: float = 0.0  # after the last layer's time was over
    # The part of stepping_s in which the thread ran; in the rest it waited, for others or for a core.
    cpu_s: float = 0.0


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
    """What the contestant adds to a plain loop: the module to call, and what it counts."""
    if asked["contestant"] == ALONE:
        yield model, dict
    elif asked["contestant"] == DDP:
        with parallel(model) as module:
            yield module, dict
    else:
        import freewheel as fw

        options = {"wire": asked["wire"], "bind": asked["address"]}
        with fw.attach(model, optimizer, asked["contestant"], **options) as worker:
            yield model, worker.metrics
        worker.consensus()  # else it is said that nobody has asked for it


if __name__ == "__main__":
    main()
