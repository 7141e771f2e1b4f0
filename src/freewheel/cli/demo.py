"""``freewheel demo``: one minute that shows what a slow worker costs, with DDP and without waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from freewheel.cli.console import output
from freewheel.cli.options import command_line, option
from freewheel.cli.train import run_all
from freewheel.errors import RunStopped
from freewheel.numbers import share
from freewheel.records.files import check_unused, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.replay import LABELS, html
from freewheel.show.report import recorded, write
from freewheel.show.tables import brief_table
from freewheel.show.versus import race
from freewheel.training.job import Job, name

STRATEGIES = ("ddp", "adpsgd", "nodelay_free")
SLOW, FACTOR = 0, 5.0
TARGET = 0.9
TITLE = f"handwritten digits on 4 workers, worker {SLOW} is {FACTOR:g}× slower"
SAME = 0.01
"""Accuracies that differ by no more are called the same: a point is less than four of the 360 test images."""
WAITS = 0.1
"""A share of the time that is worth a sentence."""


def demo(
    seconds: float = option(15.0, "For each of the three."),
    folder: Path = option(Path("runs/demo"), "Where records, report and replay go."),
) -> None:
    """Show in a minute what a slow worker costs with DDP, AD-PSGD and nodelay_free, in equal time."""
    jobs = [_job(strategy, seconds) for strategy in STRATEGIES]
    homes = [folder / name(number, one) for number, one in enumerate(jobs)]
    check_unused([folder, *homes], force=True)
    console = output()
    console.print(
        f"4 workers train a small net on handwritten digits, mixed evenly; worker {SLOW} is {FACTOR:g} times "
        f"slower. {', '.join(map(_label, STRATEGIES))}: {seconds:g} s each.",
        highlight=False,
    )
    outcomes = run_all(jobs, folder.resolve(), None)
    for one in outcomes:
        if isinstance(one, RunStopped):
            raise one
    results = [one for one in outcomes if isinstance(one, Result)]
    console.print(
        "",
        brief_table(results, [_label(one.strategy) for one in results]),
        "",
        *story(results),
        "",
        sep="\n",
        highlight=False,
    )
    report, replay = folder / "report.html", folder / "replay.html"
    write(
        report,
        results,
        [recorded(home) for home in homes],
        title=f"Freewheel: {TITLE}",
        command=command_line(),
    )
    write_whole(replay, html([Run(home) for home in homes[:2]], TITLE))
    for what, path in (("Report, all figures", report), ("Replay, open it in a browser", replay)):
        console.print(f"{what}: {path.resolve()}", highlight=False, soft_wrap=True)


def _job(strategy: str, seconds: float) -> Job:
    """Steps of 30 ms, most of it asleep: four workers fit on two cores, and a busy machine changes little."""
    return Job(
        task="digits", strategy=strategy, workers=4, seconds=seconds, slow={SLOW: FACTOR}, compute_ms=30.0,
        target=TARGET, lr=0.15, momentum=0.9, schedule="cosine", evaluations=math.ceil(10 * seconds),
    )  # fmt: skip


def _label(strategy: str) -> str:
    return LABELS.get(strategy, strategy)


def story(results: Sequence[Result]) -> list[str]:
    """What was measured, in words: who was first, then a sentence for each beside the first, which is DDP."""
    ddp, *others = results
    first = race([_label(one.strategy) for one in results], results)
    return [first, *(f"{_waiting(ddp, other)}: {_accuracy(ddp, other)}." for other in others)]


def _waiting(ddp: Result, other: Result) -> str:
    base, who = _label(ddp.strategy), _label(other.strategy)
    waited, waits = (f"{100 * one.idle_share:.0f} %" for one in (ddp, other))
    if ddp.idle_share > WAITS and other.idle_share < ddp.idle_share / 2:
        return f"{base} waits for the slow worker, {waited} of its time; {who} does not ({waits})"
    return f"{base} waited {waited} of its time, {who} {waits}"


def _accuracy(ddp: Result, other: Result) -> str:
    """Whether they ended alike."""
    if ddp.accuracy is None or other.accuracy is None:
        return "accuracy not measured"
    both = f"{share(other.accuracy)}, {_label(ddp.strategy)} {share(ddp.accuracy)}"
    more = other.accuracy - ddp.accuracy
    if abs(more) <= SAME:
        return f"the same final accuracy within a point ({both})"
    return f"a {'higher' if more > 0 else 'lower'} final accuracy ({both})"
