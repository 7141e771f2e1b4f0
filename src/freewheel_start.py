"""Where the command `freewheel` begins. Importing the package takes seconds, as torch does: Ctrl-C must end
that, too, without a traceback. So this file lies beside the package."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Import the commands and run the one that was typed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from freewheel.cli.main import main as command

    command()
