"""``freewheel demo``: one minute that shows what a slow worker costs, with DDP and without waiting."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from freewheel.cli.console import output
from freewheel.cli.options import command_line, option
from freewheel.cli.train import run_all
from freewheel.errors import RunStopped
from freewheel.records.files import check_unused, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show.replay import LABELS, html
from freewheel.show.report import recorded, write
from freewheel.show.report.words import findings
from freewheel.show.shown import ranked
from freewheel.show.tables import brief_table
from freewheel.training.job import Job, name

STRATEGIES = ("ddp", "adpsgd", "nodelay_free")
SLOW, FACTOR = 0, 5.0
TARGET = 0.9
TITLE = f"handwritten digits on 4 workers, worker {SLOW} is {FACTOR:g}× slower"


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
    runs = [replace(one, label=_label(one.label)) for one in ranked(results)]
    console.print("", brief_table(runs), "", *findings(runs), "", sep="\n", highlight=False)
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
