"""Where the command `freewheel` begins. Importing the package takes seconds, as torch does: Ctrl-C must end
that, too, without a traceback. So this file lies beside the package."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Import the commands and run the one that was typed."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, _end)
    from freewheel.cli.main import main as command

    signal.signal(signal.SIGINT, before)
    command()


def _end(_: int, __: FrameType | None) -> None:
    os._exit(128 + signal.SIGINT)
