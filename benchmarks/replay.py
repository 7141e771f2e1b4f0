"""What a frame of a replay costs: two runs of 16 workers, 60 s of virtual time, played in Chromium.

    python benchmarks/replay.py        # --seconds 10, --workers 16

Counts frames, and what the page's main thread did for them (DevTools' Performance.getMetrics).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import freewheel as fw
from browser import Browser
from freewheel.records.run import Run
from freewheel.show.replay import html

FRAMES = """new Promise((tell) => { let frames = 0; const began = performance.now();
  const one = () => { frames++; const s = (performance.now() - began) / 1000;
    s < SECONDS ? requestAnimationFrame(one) : tell([frames, s]); };
  requestAnimationFrame(one); })"""


def main() -> None:
    """Simulate, play, print."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--seconds", type=float, default=10.0)
    asked.add_argument("--workers", type=int, default=16)
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = Path(spare)
        compute = fw.Compute(ms=50, kind="lognormal", spread=0.1, slow={0: 5})
        for strategy, steps in (("allreduce", 235), ("adpsgd", 1150)):
            fw.simulate(
                strategy, "quadratic", workers=given.workers, steps=steps, compute=compute,
                folder=folder / strategy, evaluations=150,
            )  # fmt: skip
        path = folder / "replay.html"
        path.write_text(html([Run(folder / one) for one in ("allreduce", "adpsgd")], "16 workers"))
        print(f"page: {path.stat().st_size / 1e3:.0f} kB")
        browser = Browser()
        try:
            page = browser.page(1280, 900)
            page.open(path.as_uri())
            page.call("Performance.enable", timeDomain="threadTicks")  # of the thread, whatever else runs
            shown = page.run(
                "`${performance.now().toFixed(0)} ms to now, ${length.toFixed(1)} s long, ${speed}×`"
            )
            print(f"opened: {shown}")
            for speed in (1, 2, 5):
                page.run(f"play(false), now = 10, speed = {speed}, play(true)")
                before = metrics(page)
                frames, seconds = page.run(FRAMES.replace("SECONDS", str(given.seconds)))
                after = metrics(page)
                script, task = (
                    1000 * (after[k] - before[k]) / frames for k in ("ScriptDuration", "TaskDuration")
                )
                print(
                    f"at {speed}×: {frames / seconds:.0f} frames/s; a frame takes {task:.1f} ms of the main "
                    f"thread, {script:.1f} ms of it script"
                )
        finally:
            browser.close()


def metrics(page: object) -> dict[str, float]:
    """What the page has used so far."""
    found = page.call("Performance.getMetrics")["metrics"]  # type: ignore[attr-defined]
    return {one["name"]: one["value"] for one in found}


if __name__ == "__main__":
    main()
