"""Makes the pictures of the documentation from simulated runs: the same runs, the same pictures.

    python benchmarks/pictures.py        # into docs/pictures

Needs Chromium. Fonts are the machine's, so a picture may differ from another machine's in its letters.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser import Browser, Page
from freewheel.show.dashboard import Board, Dashboard

COMMAND = "from freewheel.cli.main import main; main()"
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIMULATION = (
    "simulate --strategy adpsgd,nodelay_free,allreduce --workers 12 --task digits --steps 120 "
    "--compute-ms 50 --compute lognormal:0.2 --slow 0:4 --fault crash:3@2 --fault restart:3@3.5 "
    "--target 0.9 --folder runs"
)
REPORT = "report runs -o report.html"
RACE = (
    "simulate --strategy allreduce,adpsgd --workers 8 --task digits --steps 60 --compute-ms 50 "
    "--compute lognormal:0.1 --slow 0:5 --model-mb 2 --target 0.8 --folder race"
)
REPLAY = "replay race -o replay.html"
MOMENT_S = 2.68
# name: which runs, width, height, dark
PICTURES = {
    "dashboard": ("0", 1280, 1210, False),
    "dashboard-dark": ("0", 1280, 1210, True),
    "dashboard-compared": ("0,1,2", 1280, 1500, False),
    "dashboard-narrow": ("0", 400, 1150, False),
}
DRAWN = """[...document.querySelectorAll("figure")].filter(
  (box) => !box.hidden && box.getBoundingClientRect().top < innerHeight
).every((box) => box.querySelector(".js-plotly-plot .plot-container, .none"))"""


def take(page: Page, address: str, name: str, ready: str = DRAWN) -> None:
    """A picture of what an address shows when all of it is drawn."""
    page.open(address)
    page.until(ready)
    page.run("document.fonts.ready.then(() => new Promise((then) => setTimeout(then, 300)))")
    page.picture(FOLDER / f"{name}.png")
    page.close()
    print(f"{name}.png: {(FOLDER / f'{name}.png').stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Simulate, serve, look."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as spare:
        for words in (SIMULATION, REPORT, RACE, REPLAY):
            subprocess.run([sys.executable, "-c", COMMAND, *words.split()], check=True, cwd=spare)
        server = Dashboard(Board(Path(spare) / "runs"), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser()
        try:
            for name, (picked, width, height, dark) in PICTURES.items():
                take(browser.page(width, height, dark), f"{server.address}#runs={picked}", name)
            take(browser.page(1280, 1190), (Path(spare) / "report.html").as_uri(), "report")
            replay = (Path(spare) / "replay.html").as_uri()
            take(browser.page(1160, 960), replay, "replay", f"go({MOMENT_S}), true")
        finally:
            browser.close()
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    main()
