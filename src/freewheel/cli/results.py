"""What simulate, train and compare do with their results: a table, and files where those were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from freewheel.cli.options import command_line
from freewheel.numbers import UNKNOWN, share, short
from freewheel.records.files import check_writable, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.settings import setting
from freewheel.show.report import write
from freewheel.show.shown import ranked
from freewheel.show.tables import printed, results_tables
from freewheel.show.versus import versus


@dataclass(frozen=True)
class Outputs:
    """What is made of results."""

    json: Path | None = setting(None, "Write the figures here.", rare=True)
    report: Path | None = setting(None, "Write an HTML report here.")
    force: bool = setting(False, "Overwrite records in --folder.", rare=True)
    wide: bool = setting(False, "Print all figures, not the six that matter most.")

    def check(self) -> None:
        """Refuse files that cannot be written, before anything is run."""
        for path in (self.json, self.report):
            check_writable(path)

    def show(self, console: Console, results: Sequence[Result]) -> None:
        """Print a table of six columns, or all there is."""
        for table in results_tables(results, console.width) if self.wide else [_short_table(results)]:
            console.print(table, highlight=False)

    def save(
        self, console: Console, results: Sequence[Result], runs: Sequence[Run | None], title: str
    ) -> None:
        """Write the figures and a report; `runs` are the records of the results."""
        if self.json is not None:
            beside = versus(results)
            rows = beside.as_json() if beside is not None else [{}] * len(results)
            found = [{**result.as_json(), **row} for result, row in zip(results, rows, strict=True)]
            write_whole(self.json, json.dumps(found, indent=2) + "\n")
        if self.report is not None:
            write(self.report, results, runs, title=f"Freewheel: {title}", command=command_line())
            console.print(f"Report: {self.report.resolve()}", highlight=False, soft_wrap=True)


def _short_table(results: Sequence[Result]) -> Table:
    """How fast, how much of the time is lost, and what was learned: when, and how well."""
    beside = versus(results)
    clock = str(results[0].settings.get("clock", "virtual"))
    columns = {
        "strategy": [run.label for run in ranked(results)],
        "steps/s": [short(one.steps_per_s, 4) for one in results],
        "time waiting": [share(one.idle_share) for one in results],
    }
    target = results[0].target if beside is None else beside.target
    if beside is not None and beside.target is not None:
        columns[f"s to {share(target)}"] = [_moment(row.target_s) for row in beside.rows]
        if beside.baseline is not None:
            times = [f"{'> ' if row.at_least else ''}{short(row.speedup)}" for row in beside.rows]
            columns[f"speed-up over {beside.baseline}"] = times
    else:
        reached = [_moment(one.target_s) for one in results]
        columns |= {f"{clock} s": [short(one.virtual_s, 4) for one in results]}
        columns |= {f"s to {share(target)}": reached} if target is not None else {}
    learned = [one.accuracy for one in results]
    if any(one is not None for one in learned):
        columns["accuracy"] = [share(one) for one in learned]
    else:
        columns["loss"] = [short(one.loss) for one in results]
    columns = {head: cells for head, cells in columns.items() if set(cells) != {UNKNOWN}}
    return printed(list(columns), zip(*columns.values(), strict=True))


def _moment(at_s: float | None) -> str:
    return "never" if at_s is None else short(at_s, 4)
