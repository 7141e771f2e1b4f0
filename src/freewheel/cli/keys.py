"""``freewheel keys``: a set of keys for one run."""

from __future__ import annotations

from pathlib import Path

from freewheel.cli.options import argument, option


def keys(
    folder: Path = argument(..., "Where to write the set.", metavar="DIR"),
    days: int = option(30, "How long it is valid."),
) -> None:
    """Make the keys of a run: workers that have them talk to each other, encrypted, and to nobody else."""
    from freewheel.runtime.launch.keys import FILES, make

    until = make(folder, days)
    print(f"Wrote {', '.join(FILES)} to {folder}, valid until {until:%Y-%m-%d %H:%M} UTC.")
    print(f"Copy the folder to every host, keep worker.key secret, and give --tls {folder}.")
