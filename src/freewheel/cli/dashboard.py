"""``freewheel dashboard``: a page that shows runs while they go on."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path

from freewheel.cli.options import argument, option
from freewheel.show.dashboard import Board, Dashboard
from freewheel.show.dashboard.server import PORT


def dashboard(
    folder: Path = argument(
        Path("runs"),
        "The folder of a run, or one with runs in it; default: runs.",
        metavar="[RUN]",
        show_default=False,
    ),
    port: int | None = option(None, f"Which port; default: {PORT}, or a free one.", show_default=False),
    browser: bool = option(True, "Open the page in a browser."),
) -> None:
    """Show runs on a page of this machine, live or ended, and compare them; Ctrl-C ends it."""
    server = Dashboard(Board(folder), port)
    try:
        print(f"{folder} is shown at {server.address}\nCtrl-C ends this, and no run.", flush=True)
        # What is shown first is read while the browser starts.
        threading.Thread(target=server.board.answer, daemon=True).start()
        if browser and (sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
            threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(0)  # that is how it ends; taking torch apart would take longer than people wait
