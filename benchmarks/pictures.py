"""Makes the pictures of the documentation from simulated runs: the same runs, the same pictures.

    python benchmarks/pictures.py           # into docs/pictures
    python benchmarks/pictures.py replay    # only what has this word in its name

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
    "simulate --strategy allreduce,adpsgd --workers 8 --task digits --steps 60 --compute-ms 50 --lr 0.2 "
    "--momentum 0.9 --compute lognormal:0.1 --slow 0:5 --model-mb 2 --target 0.9 --folder race"
)
REPLAY = "replay race -o replay.html"
MOMENT_S = 2.68
# Slowly while both train, then faster to the end: seconds of the run and frames.
FILM = ((3.4, 30), (17.0, 26))
FRAME_MS, LAST_MS = 150, 3000
FILM_WIDTH, FILM_HEIGHT = 960, 880
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
    page.run("play(false)")
    moments, begin_s = [], 0.0
    for end_s, count in FILM:
        moments += [begin_s + (end_s - begin_s) * number / count for number in range(count)]
        begin_s = end_s
    frames = []
    with tempfile.TemporaryDirectory() as spare:
        one = Path(spare) / "frame.png"
        for moment in (*moments, begin_s):
            page.run(f"go({moment})")
            page.run("new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)))")
            page.picture(one)
            with Image.open(one) as taken:
                frames.append(taken.convert("RGB"))
    page.close()
    first, *others = frames
    times = [FRAME_MS] * len(moments) + [LAST_MS]
    path = FOLDER / f"{name}.webp"
    first.save(path, save_all=True, append_images=others, duration=times, loop=0, quality=55, method=4)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Simulate, serve, look."""
    FOLDER.mkdir(exist_ok=True)
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as spare:
        made = (RACE, REPLAY) if wanted == "replay" else (SIMULATION, REPORT, RACE, REPLAY)
        for words in made:
            subprocess.run([sys.executable, "-c", COMMAND, *words.split()], check=True, cwd=spare)
        server = Dashboard(Board(Path(spare) / ("race" if wanted == "replay" else "runs")), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser()
        try:
            for name, (picked, width, height, dark) in PICTURES.items():
                if wanted in name:
                    take(browser.page(width, height, dark), f"{server.address}#runs={picked}", name)
            if wanted in "report":
                take(browser.page(1280, 1190), (Path(spare) / "report.html").as_uri(), "report")
            if wanted in "replay":
                replay = (Path(spare) / "replay.html").as_uri()
                take(browser.page(1160, 880), replay, "replay", f"play(false), go({MOMENT_S}), true")
                film(browser.page(FILM_WIDTH, FILM_HEIGHT), replay, "replay")
        finally:
            browser.close()
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    main()
