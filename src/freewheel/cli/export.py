"""``freewheel export``: a checkpoint folder as one state_dict."""

from __future__ import annotations

from pathlib import Path

from freewheel.cli.options import argument, option


def export(
    folder: Path = argument(..., "What worker.checkpoint was given.", metavar="FOLDER"),
    out: Path = argument(..., "Where to write the state_dict.", metavar="FILE"),
    step: int | None = option(None, "Take the checkpoint of this step; default: the newest."),
    force: bool = option(False, "Write over a file that is there.", "--force"),
) -> None:
    """Turn a checkpoint folder into one state_dict: the mean of all workers, for model.load_state_dict."""
    from freewheel.runtime.checkpoint import export

    print(export.export(folder, out, step, force))
