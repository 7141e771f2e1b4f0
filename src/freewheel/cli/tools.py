"""Commands that are one call and a few words: ``export``, ``keys``, ``store`` and ``strategies``."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path

from rich.table import Table

from freewheel.cli.options import argument, option
from freewheel.cli.results import output


def export(
    folder: Path = argument(..., "What worker.checkpoint was given.", metavar="FOLDER"),
    out: Path = argument(..., "Where to write the state_dict.", metavar="FILE"),
    step: int | None = option(None, "Take the checkpoint of this step; default: the newest."),
    force: bool = option(False, "Write over a file that is there.", "--force"),
) -> None:
    """Turn a checkpoint folder into one state_dict: the mean of all workers, for model.load_state_dict."""
    from freewheel.runtime.checkpoint import export

    print(export.export(folder, out, step, force))


def keys(
    folder: Path = argument(..., "Where to write the set.", metavar="DIR"),
    days: int = option(30, "How long it is valid."),
) -> None:
    """Make the keys of a run: workers that have them talk to each other, encrypted, and to nobody else."""
    from freewheel.runtime.launch.keys import FILES, make

    until = make(folder, days)
    print(f"Wrote {', '.join(FILES)} to {folder}, valid until {until:%Y-%m-%d %H:%M} UTC.")
    print(f"Copy the folder to every host, keep worker.key secret, and give --tls {folder}.")


def store(address: str = argument(..., "Where to listen.", metavar="HOST:PORT")) -> None:
    """Hold the place where workers meet, for torchrun, Slurm or Kubernetes; Ctrl-C or SIGTERM ends it.

    Without it worker 0 holds the store: started again, it would begin a second run. Training goes on when
    the store is lost; nobody can join until it is back.
    """
    from freewheel.runtime.membership.hosts import host_store
    from freewheel.runtime.membership.place import STORE

    held, host, port = host_store(address)
    print(f"Workers: {STORE}={host}:{port}, RANK, WORLD_SIZE and the same FREEWHEEL_SECRET_FILE", flush=True)
    wanted = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.sigwait(wanted)
    del held


def list_strategies(
    name: str | None = argument(None, "Explain this one: its rule, settings and reference."),
) -> None:
    """List the strategies and where each comes from; or explain one."""
    from freewheel import strategies, tasks, topology

    if name is not None:
        strategy = type(strategies.resolve(name))
        settings = " ".join(f"{key}={value}" for key, value in vars(strategy()).items())
        print(f"{name}: {inspect.getdoc(strategy)}\n\nWaits for: {strategy.waits_for}.")
        print(f"Staleness counts: {strategy.staleness}.\nDefaults: {settings or 'no settings'}")
        return
    table = Table("strategy", "waits for", "what it does", "reference", box=None, pad_edge=False)
    for name, strategy in strategies.ALL.items():
        table.add_row(name, strategy.waits_for, strategy.summary(), strategy.reference)
    console = output()
    console.print(table)
    explained = "\nfreewheel strategies NAME explains one. Settings: NAME:key=value:key=value."
    known = f"Topologies: {', '.join(topology.NAMES)}. Tasks: {', '.join(tasks.ALL)}."
    console.print(f"{explained}\n{known}", highlight=False)
