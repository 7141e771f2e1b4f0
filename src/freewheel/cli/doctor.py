"""``freewheel doctor``: is this host ready for a run, and the way to the others?"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from freewheel.cli.options import argument, option
from freewheel.errors import ConfigError, at_least
from freewheel.numbers import count

if TYPE_CHECKING:
    from freewheel.runtime.doctor.rules import Finding

COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
WIDTH = 80


def doctor(
    hosts: list[str] | None = argument(
        None, "Hosts on which freewheel doctor --serve runs.", metavar="[HOST[:PORT]]..."
    ),
    workers: int | None = option(
        None, "Workers on each host; default: one for each core.", "-n", "--workers"
    ),
    model_mb: float | None = option(None, "The model's weights, for memory and links."),
    bind: str = option("127.0.0.1", "The address that workers, or --serve, listen on."),
    port: int | None = option(
        None, "Is this port free? With --serve: the one to serve on, default 29600.", min=0, max=65535
    ),
    folder: Path = option(Path("runs"), "Where records would go."),
    mb: float = option(64.0, "At most so much is sent each way to measure a link."),
    tls: Path | None = option(None, "Keys, as freewheel keys makes them."),
    serve: bool = option(False, "Let doctors on other hosts measure; Ctrl-C ends it.", "--serve"),
    as_json: bool = option(False, "Print JSON, not a table.", "--json"),
) -> None:
    """Check this host and the links to others, and say what to do about each problem.

    Ends with 0 when a run is possible, with 1 when something is in its way.
    """
    from freewheel.runtime.doctor import bandwidth
    from freewheel.runtime.doctor.probe import gather
    from freewheel.runtime.doctor.rules import diagnose
    from freewheel.runtime.membership.place import parse_address

    if serve:
        if hosts or as_json:
            raise ConfigError("--serve stands alone: measure from another host, with freewheel doctor HOST.")
        asyncio.run(_serve(bind, bandwidth.PORT if port is None else port, tls))
        return
    at_least("workers", workers, 1)
    at_least("model-mb", model_mb, 0)
    addresses = [parse_address(host, "the host", bandwidth.PORT) for host in hosts or []]
    with Console(stderr=True).status("looking at this host and its links"):
        facts = gather(addresses, bind=bind, port=port, folder=folder, mb=mb, tls=tls)
    workers = workers or facts.cores
    found = diagnose(facts, workers, model_mb, tls is not None)
    states = Counter(finding.state for finding in found)
    if as_json:
        figures = {host: asdict(link) for host, link in facts.links.items() if not isinstance(link, str)}
        rows = [asdict(finding) for finding in found]
        usable = not states["problem"]
        print(
            json.dumps({"usable": usable, "workers": workers, "findings": rows, "links": figures}, indent=2)
        )
    else:
        _print(found)
        ready = "Not ready" if states["problem"] else "Ready to run"
        print(f"\n{ready}: {count(states['problem'], 'problem')}, {count(states['warning'], 'warning')}.")
    raise typer.Exit(1 if states["problem"] else 0)


async def _serve(bind: str, port: int, tls: Path | None) -> None:
    from freewheel.runtime.doctor import bandwidth

    def say(text: str) -> None:
        print(f"freewheel: {text}", flush=True)

    async with bandwidth.serving(bind, port, tls, say) as found:
        keys = f" --tls {tls}" if tls else ""
        say(f"on the other host (which must reach this address): freewheel doctor {bind}:{found}{keys}")
        await asyncio.Event().wait()


def _print(found: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold", max_width=18)
    table.add_column(overflow="fold")
    for finding in found:
        table.add_row(Text(finding.state, COLOURS[finding.state]), finding.what, Text(finding.value))
        if finding.advice:
            table.add_row("", "", Text(finding.advice, "italic"))
    console = Console()
    console.print(table, width=min(console.width, WIDTH), highlight=False, markup=False)
