"""``freewheel export``: a checkpoint folder as one state_dict."""

from __future__ import annotations

import os
from pathlib import Path

from freewheel.cli.options import argument, option
from freewheel.errors import ConfigError
from freewheel.records.files import check_writable


def export(
    folder: Path = argument(..., "What worker.checkpoint was given.", metavar="FOLDER"),
    out: Path = argument(..., "Where to write the state_dict.", metavar="FILE"),
    step: int | None = option(None, "Take the checkpoint of this step; default: the newest."),
    force: bool = option(False, "Write over a file that is there.", "--force"),
) -> None:
    """Turn a checkpoint folder into one state_dict: the mean of all workers, for model.load_state_dict."""
    import torch

    from freewheel.runtime.checkpoint.export import chosen, state_dict

    if out.exists() and not force:
        raise ConfigError(f"{out} is there already: give another file, or --force.")
    check_writable(out)
    parts = chosen(folder, step)
    state = state_dict(parts)
    temporary = out.with_name(f"{out.name}.tmp")
    torch.save(state, temporary)
    os.replace(temporary, out)
    steps = sorted({one.manifest.step for one in parts})
    made = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    print(f"Wrote {out}: {len(state)} tensors of {len(parts)} worker{'s' * (len(parts) > 1)} at {made}.")
