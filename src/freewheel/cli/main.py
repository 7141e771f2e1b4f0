"""``freewheel``: the command line."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from typing import Annotated, NoReturn

import typer
from rich.table import Table

import freewheel
from freewheel import strategies, tasks, topology
from freewheel.cli.chaos import chaos
from freewheel.cli.console import output
from freewheel.cli.dashboard import dashboard
from freewheel.cli.demo import demo
from freewheel.cli.doctor import doctor
from freewheel.cli.export import export
from freewheel.cli.keys import keys
from freewheel.cli.plan import plan
from freewheel.cli.replay import replay
from freewheel.cli.report import report
from freewheel.cli.run import join, run
from freewheel.cli.simulate import simulate
from freewheel.cli.store import store
from freewheel.cli.train import compare, train
from freewheel.cli.watch import watch
from freewheel.errors import ConfigError, FreewheelError
from freewheel.runtime.membership.store_client import left_behind

app = typer.Typer(
    name="freewheel",
    help="Train one model on many workers of which none has to wait for another.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="demo")(demo)
app.command(name="simulate")(simulate)
app.command(name="run", context_settings={"allow_interspersed_args": False})(run)
app.command(name="join")(join)
app.command(name="watch")(watch)
app.command(name="chaos")(chaos)
app.command(name="plan", context_settings={"allow_interspersed_args": False})(plan)
app.command(name="train")(train)
app.command(name="compare")(compare)
app.command(name="dashboard")(dashboard)
app.command(name="report")(report)
app.command(name="replay")(replay)
app.command(name="keys")(keys)
app.command(name="doctor")(doctor)
app.command(name="export")(export)
app.command(name="store")(store)


@app.command(
    name="bench",
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
    add_help_option=False,
)
def bench(context: typer.Context) -> int | None:
    """Measure Freewheel beside others on this machine, in one run."""
    if importlib.util.find_spec("freewheel_bench") is None:
        raise ConfigError(
            "freewheel bench needs freewheel-bench, which is not installed here. Install it from "
            "Freewheel's repository: pip install ./benchmarks."
        )
    from freewheel_bench.cli import app as benchmarks

    code: int | None = benchmarks(context.args, prog_name="freewheel bench", standalone_mode=False)
    return code


@app.command(name="strategies")
def list_strategies(
    name: Annotated[
        str | None, typer.Argument(help="Explain this one: its rule, settings and reference.")
    ] = None,
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
    known = f"Topologies: {', '.join(topology.NAMES)}. Tasks: {', '.join(tasks.ALL)}."
    console.print(
        "\nfreewheel strategies NAME explains one. Settings: NAME:key=value:key=value.", highlight=False
    )
    console.print(known, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"freewheel {freewheel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Run a command; a mistake of the user's is one line and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except FreewheelError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        print("freewheel: interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # taking torch apart would take longer than people wait
    except Exception as error:
        # The option parser's word on a wrong option; anything else is our bug and keeps its traceback.
        if not hasattr(error, "format_message"):
            raise
        _complain(error.format_message())


def _complain(message: str) -> NoReturn:
    print(message if message.startswith("Usage:") else f"freewheel: {message}", file=sys.stderr, flush=True)
    if left_behind():
        os._exit(2)  # one that is answered while Python shuts down would abort it
    sys.exit(2)
