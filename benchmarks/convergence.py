r"""Accuracy at equal samples and time to a target, for strategies, sizes, speeds and seeds, in virtual time.

    python benchmarks/convergence.py run --task cifar10:data=cifar10.npz --device cuda --out rows.jsonl
    python benchmarks/convergence.py run --task small:data=cifar10.npz --worker-steps 3200 \
        --batch-of-all 256 --out small.jsonl
    python benchmarks/convergence.py table rows.jsonl --picture convergence.svg

`run` adds one line of JSON for each cell and leaves out the cells that are there, so it can be stopped and
started again. All cells see the same number of samples, unless `--steps-of-each` is given. The rate is that
of one worker times their number, up to 8 of them, and times the square root of what is beyond; AdamW's is
times the square root of up to 8. `--batch-of-all` divides one batch among the workers: all sizes then have
the rate and the steps of 8 workers. `--steps-of-each` gives every worker as many steps, with the task's
batch: twice the workers, twice the samples. The task `small` is CIFAR-10 at 16×16 pixels with three
convolutions, or `net=vgg`: a CPU computes a cell in ten seconds, or 25. `--jobs` cells are computed at the
same time. `--by loss` measures by the loss and not by the accuracy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from freewheel import names, tasks
from freewheel.show.shown import COLOURS, hues

ROUNDS = ("allreduce", "adpsgd", "nodelay_free", "sasgd:interval=8", "asgd", "dasgd", "nodelay")
LESS, MORE = 0.005, 0.01  # how far below all-reduce's final accuracy, and above its loss, the target is
Row = dict[str, Any]


@dataclass
class Small(tasks.Cifar10):
    """CIFAR-10 at 16×16 pixels, 4,000 of its test images, and a net of 15,000 weights, or a VGG of 73,000.

    Settings: those of cifar10 but net (convs: three convolutions; vgg: six, and pooling), and norm (batch or
    group: statistics of a batch, or of each image alone).
    """

    augment: bool = False
    net: Literal["convs", "vgg"] = "convs"  # type: ignore[assignment]
    norm: str = "batch"

    def prepare(self, workers: int, seed: int) -> None:
        """Read the images and make them smaller, unless that was done."""
        super().prepare(workers, seed)
        if self.images.shape[-1] > 16:
            self.images, self.test_images = halved(self.images), halved(self.test_images)[:4000]
            self.test_labels = self.test_labels[:4000]

    def model(self) -> nn.Module:
        """Three convolutions, or three times two with pooling behind them."""
        norms = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 4)}
        convs = [(3, 16, 1), (16, 32, 2), (32, 32, 1)]
        if self.net == "vgg":
            convs = [(3, 16, 1), (16, 16, 1), (16, 32, 1), (32, 32, 1), (32, 64, 1), (64, 64, 1)]
        layers: list[nn.Module] = []
        for at, (inputs, outputs, stride) in enumerate(convs):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))
            layers += [norms[self.norm](outputs), nn.ReLU()]
            if self.net == "vgg" and at % 2:
                layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(convs[-1][1], 10))


def halved(images: Tensor) -> Tensor:
    """Images of half the width and height."""
    return F.avg_pool2d(images.float(), 2).round().to(torch.uint8)


def cells(given: argparse.Namespace) -> list[Row]:
    """What is asked for, the most telling first."""
    strategies = given.strategies.split(",") if given.strategies else ROUNDS
    seeds, speeds = given.seeds.split(","), given.slow.split(",")
    sizes = [int(size) for size in given.workers.split(",")]
    keys = itertools.product(seeds, speeds, sizes, strategies)
    return [
        {"task": given.name or given.task.split(":")[0], "strategy": strategy, "workers": workers,
         "slow": float(slow), "seed": int(seed), "by": given.by}
        for seed, slow, workers, strategy in keys
    ]  # fmt: skip


def key(row: Row) -> tuple[Any, ...]:
    """Which cell it is."""
    return tuple(row[name] for name in ("task", "strategy", "workers", "slow", "seed"))


def compute(row: Row, given: argparse.Namespace) -> Row:
    """One cell."""
    import freewheel as fw

    workers = row["workers"]
    like = workers  # whose rate and steps
    if given.batch_of_all:
        like, given.loaded.batch_size = 8, given.batch_of_all // workers
    steps = given.steps_of_each or round(given.worker_steps / like)
    adam = given.optimizer == "adamw"
    lr = given.lr * (math.sqrt(min(like, 8)) if adam else min(like, 8) * math.sqrt(max(1.0, like / 8)))
    slow = {workers - 1: row["slow"]} if row["slow"] > 1 else {}
    began_s = time.perf_counter()
    result = fw.simulate(
        row["strategy"],
        given.loaded,
        workers=workers, steps=steps, seed=row["seed"], device=given.device, lr=lr,
        optimizer=given.optimizer, momentum=None if adam else 0.9, weight_decay=0.0 if adam else 5e-4,
        schedule="cosine", warmup=given.warmup * steps, evaluations=given.evaluations,
        compute=fw.Compute(ms=20, kind="lognormal", spread=0.1, slow=slow),
        links=fw.Links(mbit=10_000, latency_ms=0.05),
    )  # fmt: skip
    curve = [(round(at.virtual_s, 3), at.accuracy, at.loss) for at in result.curve]
    took_s = round(time.perf_counter() - began_s, 1)
    return {**row, "lr": lr, "steps": steps, "accuracy": result.accuracy, "loss": result.loss,
            "virtual_s": result.virtual_s, "took_s": took_s, "curve": curve}  # fmt: skip


def run(given: argparse.Namespace) -> None:
    """Compute what is missing; with several jobs, each its part."""
    out = Path(given.out)
    out.touch()
    have = {key(row) for row in read(out)}
    todo = [row for row in cells(given) if key(row) not in have]
    if given.jobs > 1:
        rest = sys.argv[1:]
        jobs = [
            subprocess.Popen([sys.executable, __file__, *rest, "--jobs", "1", "--part", f"{at}/{given.jobs}"])
            for at in range(given.jobs)
        ]
        raise SystemExit(max(job.wait() for job in jobs))
    at, of = map(int, given.part.split("/"))
    if given.device == "cpu":
        torch.set_num_threads(1)  # `--jobs` takes more
    given.loaded = names.build("task", given.task, tasks.ALL | {"small": Small})
    end_s = time.monotonic() + given.seconds
    for row in todo[at::of]:
        if time.monotonic() > end_s:
            print("time is over; start again for the rest", flush=True)
            return
        found = compute(row, given)
        line = json.dumps(found) + "\n"
        handle = os.open(out, os.O_WRONLY | os.O_APPEND)
        os.write(handle, line.encode())  # in one piece, beside other jobs
        os.close(handle)
        print(*key(found), f"{score(found):.3f}", f"{found['took_s']:.0f} s", flush=True)


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def spread(values: list[float], digits: int) -> str:
    """A mean and its standard deviation."""
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def grouped(rows: list[Row]) -> dict[tuple[str, float], dict[tuple[str, int], list[Row]]]:
    """By task and speed, and then by strategy and size."""
    found: dict[Any, Any] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["task"], row["slow"]][row["strategy"], row["workers"]].append(row)
    return found


def score(row: Row) -> float:
    """Per cent of the answers that are right, or the loss."""
    return 100 * row["accuracy"] if row["by"] == "accuracy" else row["loss"]


def reached_s(row: Row, base: list[Row]) -> float | None:
    """When it was first as good as all-reduce's end, less a little."""
    if row["by"] == "loss":
        most = mean(other["loss"] for other in base) + MORE
        return next((at_s for at_s, _, loss in row["curve"] if loss <= most), None)
    least = mean(other["accuracy"] for other in base) - LESS
    return next((at_s for at_s, accuracy, _ in row["curve"] if accuracy >= least), None)


def cell(rows: list[Row], base: list[Row]) -> str:
    """One field of the table: accuracy, and how much sooner the target was reached than by all-reduce."""
    if not rows:
        return ""
    text = spread([score(row) for row in rows], 1 if rows[0]["by"] == "accuracy" else 3)
    if base and rows[0]["strategy"] != "allreduce":
        ours, theirs = ([reached_s(row, base) for row in some] for some in (rows, base))
        if None not in theirs:  # each run of all-reduce comes there, too
            sooner = "never" if None in ours else f"{mean(theirs) / mean(ours):.2f}×"  # type: ignore[type-var]
            text += f", {sooner}"
    return text


def table(given: argparse.Namespace) -> None:
    """Markdown, and a picture where one is asked for."""
    groups = grouped(read(Path(given.rows)))
    for (task, slow), found in groups.items():
        sizes = sorted({workers for _, workers in found})
        names = dict.fromkeys(strategy for strategy, _ in found)
        print(f"\n{task}, {'equal speeds' if slow <= 1 else f'one worker {slow:g}× slower'}\n")
        print("| | " + " | ".join(f"{size} workers" for size in sizes) + " |")
        print("|---" * (len(sizes) + 1) + "|")
        for name in names:
            fields = [cell(found[name, size], found["allreduce", size]) for size in sizes]
            print(f"| {name} | " + " | ".join(fields) + " |")
    if given.picture:
        Path(given.picture).write_text(picture(groups))


def picture(groups: dict[tuple[str, float], dict[tuple[str, int], list[Row]]]) -> str:
    """Accuracy over the number of workers, a panel for each task and speed."""
    panels, names = [], list(dict.fromkeys(name for found in groups.values() for name, _ in found))
    colours = [COLOURS[hue % len(COLOURS)] for hue in hues(names)]
    width, height = 300, 220
    for number, ((task, slow), found) in enumerate(groups.items()):
        sizes = sorted({workers for _, workers in found})
        means = {place: mean(score(row) for row in rows) for place, rows in found.items() if rows}
        low, high = math.floor(min(means.values())) - 1, math.ceil(max(means.values())) + 1

        def x(size: int, sizes: list[int] = sizes) -> float:
            return 45 + (width - 75) * sizes.index(size) / max(1, len(sizes) - 1)

        def y(value: float, low: float = low, high: float = high) -> float:
            return 30 + (height - 60) * (high - value) / (high - low)

        marks = [f'<text x="{width / 2}" y="16" text-anchor="middle" font-weight="600">{task}, '
                 f"{'equal speeds' if slow <= 1 else f'one {slow:g}× slower'}</text>"]  # fmt: skip
        for value in range(low, high + 1, max(1, (high - low) // 5)):
            marks.append(f'<line x1="40" x2="{width - 20}" y1="{y(value)}" y2="{y(value)}" stroke="#8884"/>')
            marks.append(f'<text x="36" y="{y(value) + 4}" text-anchor="end">{value}</text>')
        marks += [f'<text x="{x(s)}" y="{height - 12}" text-anchor="middle">{s}</text>' for s in sizes]
        for colour, name in zip(colours, names, strict=True):
            points = [(x(size), y(means[name, size])) for size in sizes if (name, size) in means]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            marks += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        across, down = number % 2 * width, number // 2 * height
        panels.append(f'<g transform="translate({across},{down})">{"".join(marks)}</g>')
    bottom = height * ((len(groups) + 1) // 2)
    for number, (colour, name) in enumerate(zip(colours, names, strict=True)):
        at, down = 20 + number % 3 * 200, bottom + 18 + number // 3 * 18
        panels.append(f'<circle cx="{at}" cy="{down - 4}" r="4" fill="{colour}"/>')
        panels.append(f'<text x="{at + 9}" y="{down}">{name}</text>')
    whole = bottom + 30 + 18 * ((len(names) - 1) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {whole}" font-family="sans-serif" '
        f'font-size="11" fill="#666">{"".join(panels)}</svg>\n'
    )


def main() -> None:
    """Compute cells, or show them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    computing = commands.add_parser("run")
    computing.set_defaults(go=run)
    computing.add_argument("--task", required=True)
    computing.add_argument("--name", default="", help="what the rows call the task")
    computing.add_argument("--out", required=True)
    computing.add_argument("--device", default="cpu")
    computing.add_argument("--strategies", default="")
    computing.add_argument("--workers", default="4,8,16,32")
    computing.add_argument("--slow", default="1,5")
    computing.add_argument("--seeds", default="0,1,2")
    computing.add_argument("--worker-steps", type=int, default=7840, help="in all: 20 epochs of 392 batches")
    computing.add_argument("--steps-of-each", type=int, default=0, help="instead of --worker-steps")
    computing.add_argument("--batch-of-all", type=int, default=0, help="of all workers together")
    computing.add_argument("--lr", type=float, default=0.05, help="for one worker")
    computing.add_argument("--by", choices=["accuracy", "loss"], default="accuracy")
    computing.add_argument("--optimizer", default="sgd")
    computing.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    computing.add_argument("--evaluations", type=int, default=20)
    computing.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after these")
    computing.add_argument("--jobs", type=int, default=1)
    computing.add_argument("--part", default="0/1")
    showing = commands.add_parser("table")
    showing.set_defaults(go=table)
    showing.add_argument("rows")
    showing.add_argument("--picture")
    given = parser.parse_args()
    given.go(given)


if __name__ == "__main__":
    main()
