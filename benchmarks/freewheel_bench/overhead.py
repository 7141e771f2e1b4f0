"""What being attached costs a step when nothing is exchanged.

Models of the same make in one process: one in a plain loop, one attached with adpsgd to an idle peer. They
take turns in short slices, there and back, so that what slows the machine slows both. A third, plain like the
first, says how far apart two equal loops come out: the noise. Where a model happens to lie in memory matters
too, so it is all done again in new processes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, at_least
from freewheel_bench.figure import Figure
from freewheel_bench.parent import Parent, job
from freewheel_bench.rates import Progress
from freewheel_bench.workers import START_S, Place, Workers

LOOPS = PLAIN, ATTACHED, AGAIN = "plain", "attached", "plain again"
NEVER = "adpsgd:every=1000000000"  # adpsgd that is there and never calls: the network stays idle
SLICE_MS = 100.0


def overhead(devices: Sequence[str], slices: int, rounds: int, progress: Progress) -> list[Figure]:
    """Measure on each device, each round in new processes; one figure for each device."""
    at_least("--slices", slices, 3)
    at_least("--rounds", rounds, 1)
    found = []
    for done, device in enumerate(devices):
        results = []
        for turn in range(rounds):

            def show(share: float, done: float = done + turn / rounds, device: str = device) -> None:
                progress(device, (done + share / rounds) / len(devices))

            asked = {"device": device, "slices": slices}
            with Workers("freewheel_bench.overhead", asked, [Place()] * 2) as pair:
                results.append(pair.collect("result", START_S + slices * 30 * SLICE_MS / 1e3, show)[0])
                pair.finish(START_S)
        found.append(_figure(device, results))
    return found


def devices_named(name: str) -> list[str]:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, not {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here. Leave it out or give cpu.")
    if name == "auto":
        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [name]


def _figure(device: str, results: list[dict[str, Any]]) -> Figure:
    ms = {who: [1e3 * s for result in results for s in result["step_s"][who]] for who in LOOPS}
    turns = list(zip(*ms.values(), strict=True))
    # The attached loop stands between the two plain ones in every turn: a drift cancels out.
    ratio = statistics.median(2 * attached / (plain + again) for plain, attached, again in turns)
    noise = statistics.median(again / plain for plain, _, again in turns)
    raw = {
        "overhead_percent": 100 * (ratio - 1),
        "noise_percent": 100 * (noise - 1),
        "parameters": results[0]["parameters"],
        "steps_in_a_slice": [result["steps_in_a_slice"] for result in results],
        "step_ms": ms,
    }
    ours, theirs = statistics.median(ms[ATTACHED]), statistics.median(ms[PLAIN] + ms[AGAIN])
    return Figure("overhead", device, ours, "plain", theirs, ratio, "ms per step", raw)


# -- in the process that steps, and in its idle peer --


class Loop:
    """A model, its optimizer and its data, stepped in slices."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        batch = 192 if device == "cpu" else 512
        self.model = _network(device).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(batch, *_shape(device), device=self.device)
        self.targets = torch.randint(0, 10, (batch,), device=self.device)
        self.loss: Tensor | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def slice_s(self, steps: int) -> float:
        self._settle()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._settle()
        return (time.perf_counter() - begin) / steps

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _shape(device: str) -> tuple[int, ...]:
    return (256,) if device == "cpu" else (3, 32, 32)


def _network(device: str) -> nn.Module:
    """About 5 ms a step: a perceptron on a CPU core, convolutions on a GPU."""
    if device == "cpu":
        return nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
    layers: list[nn.Module] = []
    channels = [3, 64, 64, 128, 128, 256, 256]
    for before, after in itertools.pairwise(channels):
        stride = 2 if after > before > 3 else 1
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def main() -> None:
    """Step in slices and tell how long each took; or, as the peer, be there and idle."""
    parent, asked = Parent(), job()
    torch.set_num_threads(1)
    import freewheel as fw

    loops = {who: Loop(asked["device"]) for who in LOOPS}
    attached = loops[ATTACHED]
    with fw.attach(attached.model, attached.optimizer, NEVER) as worker:
        if os.environ["RANK"] != "0":
            parent.say(result=None)
        else:
            parent.say(result=_measure(loops, asked["slices"], lambda share: parent.say(progress=share)))
    worker.consensus()  # else it is said that nobody has asked for it


def _measure(loops: dict[str, Loop], slices: int, show: Callable[[float], None]) -> dict[str, Any]:
    for loop in loops.values():  # warms up
        loop.slice_s(20)
    steps = max(3, round(SLICE_MS / 1e3 / loops[PLAIN].slice_s(20)))
    step_s: dict[str, list[float]] = {who: [] for who in loops}
    order = list(loops)
    for turn in range(slices):
        for who in order if turn % 2 == 0 else reversed(order):
            step_s[who].append(loops[who].slice_s(steps))
        show((turn + 1) / slices)
    parameters = sum(p.numel() for p in loops[PLAIN].model.parameters())
    return {"step_s": step_s, "steps_in_a_slice": steps, "parameters": parameters}


if __name__ == "__main__":
    main()
