"""``freewheel``: the command line. A command is imported when it is called: torch takes seconds."""

import importlib
import importlib.util
import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

import freewheel
from freewheel.cli.options import arrange, option
from freewheel.errors import ConfigError, FreewheelError

# By group and name: where a command is, and what it does in a line.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "demo": ("train:demo", "Show in a minute what a slow worker costs"),
        "run": ("run:run", "Train with your script on several workers"),
        "join": ("run:join", "Add workers to a run that goes on"),
        "train": ("train:train", "Train a built-in task on this machine"),
        "compare": ("train:compare", "Train a task with several strategies, and DDP"),
        "export": ("tools:export", "Turn a checkpoint into one state_dict"),
    },
    "See": {
        "watch": ("show:watch", "Follow a run in the terminal"),
        "dashboard": ("show:dashboard", "Follow runs in the browser, and compare them"),
        "report": ("show:report", "Write one page on what runs measured"),
        "replay": ("show:replay", "Write a page that plays runs"),
    },
    "Decide": {
        "plan": ("plan:plan", "Say which strategy suits your machines"),
        "simulate": ("train:simulate", "Train in virtual time, with faults and slow links"),
        "strategies": ("tools:list_strategies", "List the strategies, or explain one"),
        "bench": ("", "Measure Freewheel beside DDP and gloo here"),
        "chaos": ("tools:chaos", "Check the laws under random faults"),
    },
    "Set up": {
        "doctor": ("tools:doctor", "Check this host, and the links to others"),
        "keys": ("tools:keys", "Make TLS keys for a run"),
        "store": ("tools:store", "Hold the rendezvous for torchrun or Slurm"),
    },
}
LOOKS: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": "rich"}


class Commands(TyperGroup):
    """Shows all commands from the table, and imports the one that was typed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(str(name)), rest


app = typer.Typer(
    name="freewheel",
    cls=Commands,
    help="Train one PyTorch model on many workers of which none waits for another.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **LOOKS,
)
for _group, _commands in GROUPS.items():
    for _name, (_, _summary) in _commands.items():
        app.command(_name, help=_summary, rich_help_panel=_group)(lambda: None)


def load(name: str) -> Any:
    if name == "bench":
        if importlib.util.find_spec("freewheel_bench") is None:
            raise ConfigError(
                "freewheel bench needs freewheel-bench, which is not installed here. Install it from "
                "Freewheel's repository: pip install ./benchmarks."
            )
        from freewheel_bench.cli import app as alone
    else:
        where = next(commands[name][0] for commands in GROUPS.values() if name in commands)
        module, _, function = where.partition(":")
        command = getattr(importlib.import_module(f"freewheel.cli.{module}"), function)
        arrange(command)
        alone = typer.Typer(add_completion=False, **LOOKS)
        how = {"allow_interspersed_args": name not in ("run", "plan")}  # behind a script all is the script's
        alone.command(name, context_settings=how)(command)
    # Ctrl-C now interrupts the command, which cleans up: until here it ended the process (freewheel_start).
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return typer.main.get_command(alone)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"freewheel {freewheel.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = option(False, "Print the version.", "--version", callback=_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Run a command; a mistake of the user's is one line and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False, prog_name="freewheel"))
    except BrokenPipeError:  # the reader of our output is gone, as head after its lines
        os._exit(141)
    except KeyboardInterrupt:
        print("freewheel: interrupted", file=sys.stderr, flush=True)
        os._exit(130)  # unloading torch takes long
    except FreewheelError as error:
        said = str(error)
    except Exception as error:
        # The option parser's word on a wrong option; anything else is our bug and keeps its traceback.
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message()
    if said:  # a command without arguments has shown its help
        print(f"freewheel: {said}", file=sys.stderr, flush=True)
    store = sys.modules.get("freewheel.runtime.membership.hosts")
    if store is not None and store.left_behind:
        os._exit(2)  # a request to it during Python's shutdown would abort the process
    sys.exit(2)
