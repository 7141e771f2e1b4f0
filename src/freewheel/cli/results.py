"""Where commands print to, and what simulate, train and compare do with their results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from freewheel.cli.options import command_line
from freewheel.errors import ConfigError
from freewheel.records.files import check_writable, write_whole
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.settings import setting
from freewheel.show.report import write
from freewheel.show.shown import ranked
from freewheel.show.tables import brief_table, versus, wide_tables


def output() -> Console:
    """Standard output; what goes into a file or a pipe is as wide as it needs to be."""
    console = Console(highlight=False)
    real = console.is_terminal and not console.is_dumb_terminal
    return console if real else Console(width=240, force_terminal=False, highlight=False)


@contextlib.contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A bar that is told what goes on, and which share of all is done.

    On stderr, so that a table sent into a file stays a table; none where that is no terminal.
    """
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, share: shown.update(task, description=what, completed=share)


@dataclass(frozen=True)
class Outputs:
    """What is made of results."""

    json: Path | None = setting(None, "Write the figures here.", rare=True)
    report: Path | None = setting(None, "Write an HTML report here.")
    force: bool = setting(False, "Overwrite records in --folder.", rare=True)
    wide: bool = setting(False, "Print all figures, not the six that matter most.")

    def check(self, *others: Path | None) -> None:
        """Refuse files that cannot be written, or are one and the same, before anything is run."""
        paths = [path for path in (self.json, self.report, *others) if path is not None]
        for path in paths:
            check_writable(path)
        if len({path.resolve() for path in paths}) < len(paths):
            raise ConfigError(f"{' and '.join(map(str, paths))} must be different files.")

    def show(self, console: Console, results: Sequence[Result]) -> None:
        """Print a table of six columns, or all there is."""
        runs = ranked(results)
        for table in wide_tables(runs) if self.wide else [brief_table(runs)]:
            console.print(table)

    def finish(
        self,
        title: str,
        results: Sequence[Result],
        runs: Sequence[Run | None],
        folder: Path | None,
        notes: Sequence[str] = (),
    ) -> None:
        """Print the results of runs and write figures and a report; `folder` is where their records are."""
        console = output()
        self.show(console, results)
        for note in (*notes, *([] if folder is None else [f"Records: {folder.resolve()}"])):
            console.print(note, soft_wrap=True)
        if self.json is not None:
            rows = [{"versus": vars(row)} for row in versus(results)] or [{}] * len(results)
            found = [{**result.as_json(), **row} for result, row in zip(results, rows, strict=True)]
            write_whole(self.json, json.dumps(found, indent=2) + "\n")
        if self.report is not None:
            write(self.report, results, runs, title=f"Freewheel: {title}", command=command_line())
            console.print(f"Report: {self.report.resolve()}", soft_wrap=True)
