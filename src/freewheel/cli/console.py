"""Where commands print to."""

from __future__ import annotations

from rich.console import Console


def output() -> Console:
    """Standard output; what goes into a file or a pipe is as wide as it needs to be."""
    console = Console()
    return console if console.is_terminal else Console(width=240)
