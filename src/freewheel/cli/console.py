"""Where commands print to."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def output() -> Console:
    """Standard output; what goes into a file or a pipe is as wide as it needs to be."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def bars(width: int = 20) -> Progress:
    """Bars on stderr, so that a table sent into a file stays a table; none where it is no terminal."""
    columns = (
        TextColumn(f"{{task.description:<{width}}}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    errors = Console(stderr=True)
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
