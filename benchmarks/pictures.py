"""Makes the pictures of the documentation from simulated runs: the same runs, the same pictures.

    python benchmarks/pictures.py        # into docs/pictures

Needs Chromium, and Pillow for the animated one. Fonts are the machine's, so a picture may differ from another
machine's in its letters. Figures that are drawn and not photographed are by docs/figures.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image

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
FILM_S, FRAMES, FRAME_MS, LAST_MS = 2.8, 34, 150, 2500
FILM_WIDTH, FILM_HEIGHT, FILM_CUT, FILM_SHRINKS = 1100, 900, 640, 0.75
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


def film(page: Page, address: str, name: str) -> None:
    """What a replay shows, as a picture that moves."""
    page.open(address)
    frames = []
    with tempfile.TemporaryDirectory() as spare:
        one = Path(spare) / "frame.png"
        for number in range(FRAMES + 1):
            page.until(f"go({FILM_S * number / FRAMES}), true")
            page.run("new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
            page.picture(one)
            with Image.open(one) as taken:
                cut = taken.convert("RGB").crop((0, 0, FILM_WIDTH, FILM_CUT))  # no buttons, no race
                size = (int(FILM_WIDTH * FILM_SHRINKS), int(FILM_CUT * FILM_SHRINKS))
                small = cut.resize(size, Image.Resampling.LANCZOS)
            frames.append(small)
    page.close()
    first, *others = frames
    times = [FRAME_MS] * FRAMES + [LAST_MS]
    path = FOLDER / f"{name}.webp"
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, quality=60, method=6)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


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
            film(browser.page(FILM_WIDTH, FILM_HEIGHT), replay, "replay")
        finally:
            browser.close()
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    main()
