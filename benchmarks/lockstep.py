"""The ideal forms of the strategies in lockstep, all replicas in one vmap: what an algorithm can reach.

    python benchmarks/lockstep.py --data cifar10.npz all pairs:delay=1 merge:delay=2 local:interval=8

A form is a name with settings: `all` (gradients of all are averaged), `pairs` (random pairs average, the
correction comes `delay` steps late), `merge` (all average, which takes `delay` steps), `local` (all average
every `interval` steps); with lr, warmup (steps), moments=1 (averaged too), nesterov=0, early and late (shares
of the steps, at the beginning and the end, without delay), fresh (share of pairs that meet without delay),
callers=1 (of each pair one is corrected without delay) and seed. Nothing here uses Freewheel's engine: it is
a check of it.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812

from freewheel.tasks.cifar10 import MARGIN, Cifar10, shift_and_mirror

MOMENTUM, DECAY = 0.9, 5e-4


class Replicas:
    """Stacked weights of so many ResNets, and their gradients in one call."""

    def __init__(self, task: Cifar10, workers: int, device: torch.device) -> None:
        self.task, self.workers, self.device = task, workers, device
        torch.manual_seed(0)
        self.net = task.model().to(device)
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):  # vmap cannot write statistics: they are measured later
                module.track_running_stats = False
                module.running_mean = module.running_var = module.num_batches_tracked = None
        self.shapes = {name: one.shape for name, one in self.net.named_parameters()}
        self.start = torch.cat([one.detach().flatten() for one in self.net.parameters()])
        self.gradients = vmap(grad(self._loss))

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = torch.split(vector, [math.prod(shape) for shape in self.shapes.values()])
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _loss(self, vector: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.net, self._named(vector), (images,)), labels)

    def batch(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch for each worker."""
        size = self.task.batch_size
        count, task = (self.workers * size,), self.task
        options = {"generator": draws, "device": self.device}
        at = torch.randint(len(task.labels), count, **options)
        how = [torch.randint(top, count, **options) for top in (2 * MARGIN + 1,) * 2 + (2,)]
        images = task._numbers(shift_and_mirror(task.images[at], *how))
        return images.view(self.workers, size, *images.shape[1:]), task.labels[at].view(self.workers, size)

    def accuracy(self, vector: Tensor) -> float:
        """Of one model on the test images."""
        model = self.task.model().to(self.device)
        with torch.no_grad():
            for name, value in self._named(vector).items():
                model.get_parameter(name).copy_(value)
        self.task.recalibrate(model, 1, 0)
        return self.task.evaluate(model.eval())[1] or 0.0


def pairs(workers: int, draws: torch.Generator, device: torch.device) -> Tensor:
    """Everybody's partner in a random matching."""
    order = torch.randperm(workers, generator=draws, device=device)
    partner = torch.empty_like(order)
    partner[order[0::2]], partner[order[1::2]] = order[1::2], order[0::2]
    return partner


def fresh_now(partner: Tensor, fresh: float, draws: torch.Generator) -> Tensor:
    """Who is corrected without delay: both of some pairs, or else one of each."""
    ranks = torch.arange(len(partner), device=partner.device)
    if not fresh:
        return (ranks < partner).unsqueeze(1)
    chance = torch.rand(len(partner), generator=draws, device=partner.device)
    return (chance[torch.minimum(ranks, partner)] < fresh).unsqueeze(1)


def run(replicas: Replicas, form: str, steps: int) -> str:
    """Train by one form; its figures in words."""
    kind, *settings = form.split(":")
    given: dict[str, Any] = dict(one.split("=") for one in settings)
    lr_top, warmup = float(given.get("lr", 0.4)), float(given.get("warmup", steps / 20))
    usual = {"delay": 1, "interval": 8, "moments": 0, "nesterov": 1}
    delay, interval, moments, nesterov = (int(given.get(key, usual[key])) for key in usual)
    fresh, callers = float(given.get("fresh", 0)), int(given.get("callers", 0))
    early, late = float(given.get("early", 0)) * steps, steps - float(given.get("late", 0)) * steps
    draws = torch.Generator(device=replicas.device).manual_seed(int(given.get("seed", 1)))
    x = replicas.start.repeat(replicas.workers, 1)
    v = torch.zeros_like(x)
    due, under_way, curve, began_s = 0, None, [], time.perf_counter()
    for step in range(steps):
        share = (step - warmup) / (steps - warmup)
        lr = lr_top * ((step + 1) / (warmup + 1) if share < 0 else 0.5 * (1 + math.cos(math.pi * share)))
        g = replicas.gradients(x, *replicas.batch(draws))
        if kind == "all":
            g = g.mean(0, keepdim=True).expand_as(x)
        g = g + DECAY * x
        v.mul_(MOMENTUM).add_(g)
        x.sub_(g + MOMENTUM * v if nesterov else v, alpha=lr)
        if under_way is not None and due <= step:
            x += under_way[0]
            v += moments * under_way[1]
            under_way = None
        if kind in ("pairs", "merge") and under_way is None:
            if kind == "pairs":
                partner = pairs(replicas.workers, draws, replicas.device)
                under_way = ((x[partner] - x) / 2, (v[partner] - v) / 2)
                if fresh or callers:
                    now = fresh_now(partner, fresh, draws)
                    x = x + now * under_way[0]
                    under_way = ((~now) * under_way[0], under_way[1])
            else:
                under_way = (x.mean(0) - x, v.mean(0) - v)
            due = step + delay
            if not delay or not early <= step < late:
                x, v, under_way = x + under_way[0], v + moments * under_way[1], None
        if kind == "local" and (step + 1) % interval == 0:
            x = x.mean(0, keepdim=True).repeat(replicas.workers, 1)
            v = v.mean(0, keepdim=True).repeat(replicas.workers, 1) if moments else v
        if (step + 1) in (steps // 10, steps // 4, steps // 2, 3 * steps // 4):
            curve.append(f"{100 * replicas.accuracy(x.mean(0)):.1f}")
    final = 100 * replicas.accuracy(x.mean(0))
    return f"{final:.2f} %  on the way {' '.join(curve)}  {time.perf_counter() - began_s:.0f} s"


def main() -> None:
    """Run the forms that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("forms", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=980)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    task = Cifar10(data=given.data)
    task.prepare(given.workers, 0)
    task.to(device)
    replicas = Replicas(task, given.workers, device)
    for form in given.forms:
        print(f"{form:32s} {run(replicas, form, given.steps)}", flush=True)


if __name__ == "__main__":
    main()
