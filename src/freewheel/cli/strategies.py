"""``freewheel strategies``: which there are, and what each does."""

from __future__ import annotations

import inspect

from rich.table import Table

from freewheel import strategies, tasks, topology
from freewheel.cli.console import output
from freewheel.cli.options import argument


def list_strategies(
    name: str | None = argument(None, "Explain this one: its rule, settings and reference."),
) -> None:
    """List the strategies and where each comes from; or explain one."""
    if name is not None:
        strategy = type(strategies.resolve(name))
        settings = " ".join(f"{key}={value}" for key, value in vars(strategy()).items())
        print(f"{name}: {inspect.getdoc(strategy)}\n\nWaits for: {strategy.waits_for}.")
        print(f"Staleness counts: {strategy.staleness}.\nDefaults: {settings or 'no settings'}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("strategy", "waits for", "what it does", "reference"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("strategy", "waits for"))
    for name, strategy in strategies.ALL.items():
        table.add_row(name, strategy.waits_for, strategy.summary(), strategy.reference)
    console = output()
    console.print(table)
    explained = "\nfreewheel strategies NAME explains one. Settings: NAME:key=value:key=value."
    known = f"Topologies: {', '.join(topology.NAMES)}. Tasks: {', '.join(tasks.ALL)}."
    console.print(f"{explained}\n{known}", highlight=False)
