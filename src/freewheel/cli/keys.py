"""``freewheel keys``: a set of keys for one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the set.")],
    days: Annotated[int, typer.Option(help="How long it is valid.")] = 30,
) -> None:
    """Make the keys of a run: workers that have them talk to each other, encrypted, and to nobody else."""
    from freewheel.runtime.launch.keys import FILES, make

    until = make(folder, days)
    print(f"Wrote {', '.join(FILES)} to {folder}, valid until {until:%Y-%m-%d %H:%M} UTC.")
    print(f"Copy the folder to every host, keep worker.key secret, and give --tls {folder}.")
