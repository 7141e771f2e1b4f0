"""Ideal forms of strategies whose workers are out of phase, on a small net on the CPU.

    python benchmarks/phases.py --data cifar10.npz all late pairs pairs:meetings=2 merge:part=0.5

Workers step in four phases, so each averages while others are in the middle of a gradient. They share a batch
of 256. A form is a name with settings:

all         gradients of all are averaged, in step
late        all merge; it counts at each one's next boundary
late_pairs  each meets one; it counts at the next boundary of both
pairs       each meets so many (`meetings`) at its boundary, one after the other; each difference counts
            1/(meetings + 1), at once, and for the other at its next boundary
merge       all merge at each boundary; `part` of the difference counts, at once for those who are there
            (both: in the `first` share of the steps; after that it counts for all at their next boundaries)
local       weights and momentum are averaged every 8 steps, with `outer` momentum, and at every step in the
            first share of them (`early`)

Nothing here uses Freewheel's engine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812

from freewheel.tasks.cifar10 import Cifar10

PHASES, BATCH_OF_ALL, LR, MOMENTUM, DECAY, INTERVAL = 4, 256, 0.4, 0.9, 5e-4, 8


def net() -> nn.Module:
    """Three convolutions for images of 16×16."""

    def layer(before: int, after: int, stride: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        return [convolution, nn.BatchNorm2d(after, track_running_stats=False), nn.ReLU()]

    torch.manual_seed(0)
    layers = [*layer(3, 16), *layer(16, 32, 2), *layer(32, 32)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Lab:
    """The images, the net and its gradients for several vectors of weights at once."""

    def __init__(self, data: str, workers: int) -> None:
        task = Cifar10(data=data)
        task.prepare(workers, 0)
        self.workers, self.size = workers, BATCH_OF_ALL // workers
        self.images, self.tests = self._small(task.images), self._small(task.test_images)
        self.labels, self.test_labels = task.labels, task.test_labels
        self.net = net()
        self.start = torch.cat([one.detach().flatten() for one in self.net.parameters()])
        self.gradients = vmap(grad(lambda x, a, b: F.cross_entropy(self._out(x, a), b)))

    @staticmethod
    def _small(images: Tensor) -> Tensor:
        return (F.avg_pool2d(images.float(), 2) - 120) / 62

    def _out(self, vector: Tensor, images: Tensor) -> Tensor:
        named = dict(self.net.named_parameters())
        parts = vector.split([one.numel() for one in named.values()])
        given = {name: part.view(named[name].shape) for name, part in zip(named, parts, strict=True)}
        return functional_call(self.net, given, (images,))

    def batch(self, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """For so many workers, some images mirrored."""
        at = torch.randint(len(self.labels), (count * self.size,), generator=draws)
        mirror = torch.rand(len(at), generator=draws).view(-1, 1, 1, 1) < 0.5
        images = torch.where(mirror, self.images[at].flip(3), self.images[at])
        return images.view(count, self.size, *images.shape[1:]), self.labels[at].view(count, self.size)

    @torch.no_grad()
    def accuracy(self, vector: Tensor) -> float:
        """On the test images, in per cent."""
        found = torch.cat([self._out(vector, part).argmax(1) for part in self.tests.split(2500)])
        return 100 * (found == self.test_labels).float().mean().item()


def others(rank: int, workers: int, count: int, draws: torch.Generator) -> Iterator[int]:
    """So many of the others, in random order."""
    for other in torch.randperm(workers - 1, generator=draws)[:count].tolist():
        yield other + (other >= rank)


def run(lab: Lab, form: str, steps: int, seed: int) -> float:
    """Train by one form; the accuracy of the mean."""
    kind, *settings = form.split(":")
    given = {key: float(value) for key, value in (one.split("=") for one in settings)}
    phases = 1 if kind in ("all", "local") else PHASES
    draws = torch.Generator().manual_seed(seed)
    x = lab.start.repeat(lab.workers, 1)
    v, pending = torch.zeros_like(x), torch.zeros_like(x)
    common, way = lab.start, torch.zeros_like(lab.start)
    order = torch.randperm(lab.workers, generator=draws).view(phases, -1)
    for tick in range(steps * phases):
        step, here, warmup = tick / phases, order[tick % phases], steps / 20
        share, fresh = (step - warmup) / (steps - warmup), step < given.get("first", 1.0) * steps
        lr = LR * ((step + 1) / (warmup + 1) if share < 0 else 0.5 * (1 + math.cos(math.pi * share)))
        g = lab.gradients(x[here], *lab.batch(len(here), draws))
        g = g.mean(0).expand_as(g) if kind == "all" else g
        g = g + DECAY * x[here]
        v[here] = MOMENTUM * v[here] + g
        x[here] += pending[here] - lr * (g + MOMENTUM * v[here])
        pending[here] = 0
        if kind in ("late", "merge"):
            moved = given.get("part", 1.0) * ((x + pending).mean(0) - x - pending)
            if kind == "merge" and fresh:
                x[here] += moved[here]
                moved[here] = 0
            pending += moved
        elif kind in ("pairs", "late_pairs"):
            meetings = int(given.get("meetings", 1))
            for rank in here.tolist():
                for other in others(rank, lab.workers, meetings, draws):
                    moved = (x[other] + pending[other] - x[rank] - pending[rank]) / (meetings + 1)
                    (x if kind == "pairs" and fresh else pending)[rank] += moved
                    pending[other] -= moved
        elif kind == "local" and ((tick + 1) % INTERVAL == 0 or tick < given.get("early", 0) * steps):
            to = x.mean(0) + given.get("outer", 0.0) * way
            common, way = to, to - common
            x, v = to.repeat(lab.workers, 1), v.mean(0).repeat(lab.workers, 1)
    return lab.accuracy((x + pending).mean(0))


def main() -> None:
    """Run the forms that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forms", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lab = Lab(given.data, given.workers)
    for form in given.forms:
        found = [run(lab, form, given.steps, seed) for seed in range(1, given.seeds + 1)]
        around = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        print(f"{form:28s} {mean(found):.1f} ± {around:.1f} %", flush=True)


if __name__ == "__main__":
    main()
