"""How long the dashboard takes to open a large run, how late it shows what is written, and what it costs.

    python benchmarks/dashboard.py [--workers 64] [--samples 3400] [--folder FOLDER]

Writes a run of 64 workers x 100,000 steps (3,400 samples each), opens it in Chromium with the real command,
then goes on writing two samples a second for each worker and looks at when the page shows them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import made
from browser import Browser, Page

STEPS_PER_S = 100_000 / 1700
COMMAND = "from freewheel.cli.main import main; main()"
# Looked at in every frame, from before the page's own scripts on: since when the numbers are there, the
# sketch of the graph, the first figure of plotly's and all on the screen. And how long the page stood still.
OPENING = """(() => {
  window.opened = {};
  window.still = [];
  const painted = (what) => { opened[what] = 0; setTimeout(() => opened[what] = performance.now() / 1000); };
  const look = () => {
    const boxes = [...document.querySelectorAll("figure")].filter((box) =>
      box.offsetParent && box.getBoundingClientRect().top < innerHeight);
    const by = (names) => boxes.filter((box) => box.querySelector(names));
    const plotly = by(".plot-container .trace, .plot-container .point");
    const all = (some) => some.length && some.length === boxes.length;
    const known = { numbers: document.querySelector(".tile"), graph: by(".sketch path").length,
      plotly: plotly.length, "all plotly": all(plotly) };
    for (const what in known) if (known[what] && !(what in opened)) painted(what);
    if (!opened["all plotly"]) requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
  new PerformanceObserver((list) => still.push(...list.getEntries().map((one) =>
    [one.startTime / 1000, one.duration / 1000]))).observe({ type: "longtask", buffered: true });
})()"""
# Every moment at which a figure was drawn, with the run's time that it then showed.
WATCH = """(() => {
  const place = document.querySelector("#box-throughput .plot");
  window.drawn = [];
  place.on("plotly_afterplot", () => {
    const shown = place.data[1].x.at(-1);
    if (!window.drawn.length || window.drawn.at(-1)[0] < shown) window.drawn.push([shown, Date.now() / 1000]);
  });
})()"""


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--samples", type=int, default=3400)
    parser.add_argument("--folder", type=Path, help="where the run is, or is to be written")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to go on writing")
    parser.add_argument("--openings", type=int, default=3, help="how often it is opened, each time anew")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        folder = given.folder or Path(spare) / "run"
        if not (folder / "run.json").exists():
            write(folder, given.workers, given.samples)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"run: {given.workers} workers, {given.samples} samples each, {size / 1e6:.0f} MB")
        measure(folder, given.workers, given.openings, given.seconds)


def write(folder: Path, workers: int, samples: int) -> None:
    """A run that was going on until now."""
    began = time.time() - 0.5 * samples
    made.run(folder, 1, 2, started=began)
    for path in folder.glob("*.jsonl"):
        path.unlink()
    (folder / "run.json").write_text(json.dumps(made.about(workers=workers, started=began)))
    for rank in range(workers):
        lines = (sample(rank, number, workers, began) for number in range(samples))
        made.append(folder / f"worker-{rank}.jsonl", *lines)
    for number in range(0, samples, max(1, samples // 100)):
        told = {
            "loss": 2.0 / (1 + number),
            "accuracy": number / samples,
            "discrepancy": 0.5,
            "consensus": 0.1,
        }
        when = {"time": began + 0.5 * number, "worker_steps": number * workers, "samples": None}
        made.append(folder / "evaluations.jsonl", when | told)


def sample(rank: int, number: int, workers: int, began: float) -> dict[str, Any]:
    """As a worker writes it that has met all others."""
    peers = {
        str(peer): [int(number * STEPS_PER_S / 128) + (peer + number) % 3, 0.25 + (peer * number) % 100 / 400]
        for peer in range(workers)
        if peer != rank
    }
    return made.sample(rank, number, workers, STEPS_PER_S, time=began + 0.5 * number, peers=peers)


def measure(folder: Path, workers: int, openings: int, seconds: float) -> None:
    """Open it, follow it."""
    start_s = time.monotonic()
    command = [sys.executable, "-c", COMMAND, "dashboard", str(folder), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        print(f"from the command to its address: {time.monotonic() - start_s:.2f} s")
        browser = Browser()
        try:
            for round_ in range(openings):
                page = browser.page()
                page.call("Page.addScriptToEvaluateOnNewDocument", source=OPENING)
                page.open(address)
                page.until("opened['all plotly']")
                found = page.run("opened")
                still = max((took for _, took in page.run("still")), default=0.0)
                print(f"opened: the numbers after {found['numbers']:.2f} s, the graph after "
                      f"{found['graph']:.2f} s; plotly's first after {found['plotly']:.2f} s, all after "
                      f"{found['all plotly']:.2f} s; stood still for {still:.2f} s")  # fmt: skip
                if round_ < openings - 1:
                    page.close()
            follow(folder, workers, seconds, page, server.pid, browser.pid)
        finally:
            browser.close()
            server.terminate()


def follow(folder: Path, workers: int, seconds: float, page: Page, server: int, browser: int) -> None:
    """Write on as the workers would, and see when the page has it."""
    about = json.loads((folder / "run.json").read_text())
    page.run(WATCH)
    page.run("still.length = 0")
    ended, written = threading.Event(), []
    number = int(2 * (time.time() - about["started"])) + 1

    def write_on() -> None:
        now = number
        while not ended.wait(max(0.0, about["started"] + 0.5 * now - time.time())):
            for rank in range(workers):
                made.append(folder / f"worker-{rank}.jsonl", sample(rank, now, workers, about["started"]))
            written.append((0.5 * now, time.time()))
            now += 1

    writer = threading.Thread(target=write_on)
    writer.start()
    before, begin_s = (cpu_s(server), cpu_s(browser)), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - begin_s
    after = cpu_s(server), cpu_s(browser)
    ended.set()
    writer.join()
    drawn = page.run("window.drawn")
    unit = 60.0 if drawn and drawn[-1][0] * 30 < written[-1][0] else 1.0
    late = [
        min((at for shown, at in drawn if shown * unit >= time_s - 0.2), default=float("inf")) - at_s
        for time_s, at_s in written[2:-3]
    ]
    print(f"written to drawn: median {statistics.median(late):.2f} s, longest {max(late):.2f} s "
          f"({len(late)} samples)")  # fmt: skip
    print(f"CPU while following: dashboard {100 * (after[0] - before[0]) / took_s:.0f} %, "
          f"browser {100 * (after[1] - before[1]) / took_s:.0f} % of a core")  # fmt: skip
    still = max((took for _, took in page.run("still")), default=0.0)
    print(f"stood still while following: at most {still:.2f} s")
    sizes = page.run("performance.getEntriesByType('resource').filter((one) => one.name.includes('since='))"
                     ".map((one) => one.decodedBodySize)")  # fmt: skip
    sent = [size for size in sizes if size > 100]
    print(f"sent for a change: median {statistics.median(sent) / 1e3:.1f} kB")


def cpu_s(root: int) -> float:
    """What a process and all below it have used so far."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(path.parent.name)], used[int(path.parent.name)] = (
            int(fields[1]),
            int(fields[11]) + int(fields[12]),
        )
    total = 0
    for pid in used:
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        total += used[pid] if above == root else 0
    return total / 100


if __name__ == "__main__":
    main()
