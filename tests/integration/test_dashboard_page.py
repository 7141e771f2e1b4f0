"""The dashboard's page in a real browser: it draws, follows a run, compares, and can be read."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest

import browser
import made
from freewheel.show.dashboard import Board, Dashboard

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(browser.program() is None, reason=f"no browser: none of {', '.join(browser.NAMES)}"),
]

FIGURES = ["graph", "throughput", "loss-time", "accuracy-time", "blocked", "staleness", "consensus", "faults"]
TALL = 6000
"""Higher than the page, so that all of it is seen and drawn."""

# How many points each figure that can be seen has drawn.
DRAWN = """Object.fromEntries([...document.querySelectorAll("figure")].filter((box) => !box.hidden).map(
  (box) => {
    const place = box.querySelector(".js-plotly-plot:not([hidden])");
    const points = (trace) => trace.x.filter((x) => x !== null).length;
    return [box.id.slice(4), place ? place.data.reduce((sum, trace) => sum + points(trace), 0) : 0];
  }))"""
# What stands out of the page, or out of its own box.
TOO_WIDE = """[...document.querySelectorAll("figure, .tile, .picker, h1, h2")].filter(
  (one) => one.offsetParent && (one.getBoundingClientRect().right > innerWidth + 1
    || one.scrollWidth > one.clientWidth + 1)
).map((one) => one.id || one.className || one.tagName)"""
# How bright a figure's ground is, and the least contrast of any text to it, beside figures and in them.
CONTRAST = """(() => {
  const bright = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => part / 255).map(
      (c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = bright(getComputedStyle(document.querySelector("figure")).backgroundColor);
  const ratio = (colour) => {
    const [less, more] = [ground, bright(colour)].sort((a, b) => a - b);
    return (more + 0.05) / (less + 0.05);
  };
  const all = (names) => [...document.querySelectorAll(names)].map((one) => getComputedStyle(one));
  const texts = all("figcaption b, figcaption span, .tile dt, .tile dd, td, th, .lead");
  const inside = all(".xtick text, .ytick text, .g-xtitle text, .legendtext");
  return [ground, Math.min(...texts.map((one) => ratio(one.color)), ...inside.map((one) => ratio(one.fill)))];
})()"""
# The same of the sketch: how many workers and shades of edges it has, and how many marks stand out of it.
SKETCHED = """(() => {
  const at = (one) => one.getBoundingClientRect();
  const box = document.getElementById("box-graph"), { left, right, top, bottom } = at(box);
  const marks = [...box.querySelectorAll(".sketch *")];
  const out = marks.filter((one) => at(one).left < left || at(one).right > right || at(one).top < top
    || at(one).bottom > bottom || /NaN|undefined/.test(one.outerHTML));
  return [...["circle", "path"].map((name) => box.querySelectorAll(".sketch " + name).length), out.length];
})()"""
ALL_DRAWN = f"Object.values({DRAWN}).every((points) => points > 0)"


@pytest.fixture(scope="module")
def chromium():
    started = browser.Browser()
    yield started
    started.close()


@pytest.fixture
def serve():
    servers = []

    def start(folder):
        server = Dashboard(Board(folder), 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def look(chromium, serve):
    """A page that shows a folder; what went wrong on it fails the test."""
    pages = []

    def open_page(folder, width=1280, dark=False, picked="", plotly=True):
        server = serve(folder)
        if not plotly:
            server.files["plotly.js"] = ("text/javascript", b"")
        page = chromium.page(width, TALL, dark)
        pages.append((page, server))
        page.open(server.address + picked)
        return page

    yield open_page
    for page, server in pages:
        problems, asked = page.problems, page.requests
        page.close()
        assert problems == []
        ours = ("data:", "about:", server.address)
        assert [address for address in asked if not address.startswith(ours)] == []


def live(folder, workers=4, samples=30):
    """A run that goes on: its samples are of times to come, so that it never falls silent."""
    began = time.time() + 3600.0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(made.about(workers=workers, started=began, target=0.5)))
    for rank in range(workers):
        lines = [made.sample(rank, n, workers, time=began + 0.5 * n) for n in range(samples)]
        made.append(folder / f"worker-{rank}.jsonl", *lines)
    made.append(folder / "events-0.jsonl", made.event(began + 3.0, "died", 1, 0))
    for n in range(0, samples, 5):
        told = {"loss": 2.0 / (1 + n), "accuracy": n / samples, "discrepancy": 0.5, "consensus": 0.1}
        when = {"time": began + 0.5 * n, "worker_steps": 40 * n, "samples": 400 * n}
        made.append(folder / "evaluations.jsonl", when | told)
    return began


def test_all_figures_are_drawn_and_the_page_can_be_read_wide_and_narrow_light_and_dark(look, tmp_path):
    live(tmp_path / "a-run-with-a-rather-long-name-as-people-give-them-2026-11-15_18-20-00")
    page = look(tmp_path)
    for width, dark in ((1280, False), (400, False), (400, True), (1280, True)):
        page.look(width, TALL, dark)
        page.until(ALL_DRAWN)
        assert list(page.run(DRAWN)) == FIGURES
        page.until(f"({TOO_WIDE}).length === 0")
        assert page.run("document.documentElement.scrollWidth") <= width
        page.until(f"({CONTRAST})[1] >= 4.5")
        assert (page.run(CONTRAST)[0] < 0.2) == dark


def test_before_plotly_has_started_the_graph_is_sketched_and_the_numbers_are_there(look, tmp_path):
    began = live(tmp_path / "one")
    made.run(tmp_path / "two", samples=40, started=2000.0, strategy="<b>&", name="other.py")
    for width, picked in ((1280, "#runs=0"), (400, "#runs=0"), (1280, "#runs=0,1")):
        page = look(tmp_path, width, picked=picked, plotly=False)
        page.until(f"({SKETCHED})[0] > 0")
        workers, edges, out = page.run(SKETCHED)
        assert (workers, out) == (4, 0)
        assert edges > 0
        assert page.run("document.querySelectorAll('.tile, .compared tbody tr').length") > 1
    made.append(tmp_path / "one" / "worker-4.jsonl", made.sample(4, 30, 5, time=began + 15.0))
    page.until(f"({SKETCHED})[0] === 5")


def test_the_page_follows_a_run(look, tmp_path):
    began = live(tmp_path)
    page = look(tmp_path)
    page.until(ALL_DRAWN)
    last = "document.querySelector('#box-throughput .plot').data[1].x.at(-1)"
    before = page.run(last)
    rows = "document.querySelectorAll('#workers tbody tr').length"
    assert page.run(rows) == 4
    for rank in range(5):
        made.append(tmp_path / f"worker-{rank}.jsonl", made.sample(rank, 40, 5, time=began + 20.0, loss=0.25))
    page.until(f"{last} > {before + 4}")
    page.until(f"{rows} === 5")
    page.until("document.querySelector('#box-loss-time .plot').data.at(-2).y.at(-1) < 0.3")
    made.append(tmp_path / "events-0.jsonl", made.event(began + 21.0, "joined", 1, 0, life=2))
    page.until("document.querySelector('#box-faults .plot').data.some((trace) => trace.name === 'joined')")
    assert "live" in page.run("document.getElementById('lead').textContent")


def test_runs_are_picked_and_compared(look, tmp_path):
    made.run(tmp_path / "one", samples=40, started=1000.0)
    made.run(tmp_path / "two", samples=40, started=2000.0, strategy="dasgd", name="other.py")
    page = look(tmp_path)
    page.until(ALL_DRAWN)
    title = "document.getElementById('title').textContent"
    assert page.run(title) == "other.py"
    page.run("document.getElementById('picker').open = true")
    page.run("document.querySelector('[data-pick=name0]').click()")
    page.until(f"{title} === 'train.py'")
    page.run("document.querySelector('[data-pick=tick1]').click()")
    page.until(f"{title} === '2 runs compared'")
    page.until("document.querySelector('#box-accuracy-time .plot').data?.length === 2")
    assert page.run("document.querySelectorAll('.compared tbody tr').length") == 2
    assert page.run("[...document.querySelectorAll('#legend span')].map((one) => one.textContent)") == [
        "adpsgd",
        "dasgd",
    ]
    colours = page.run(
        "document.querySelector('#box-accuracy-time .plot').data.map((trace) => trace.line.color)"
    )
    assert len(set(colours)) == 2
    page.open(page.run("location.href"))  # the address keeps what was picked
    page.until(f"{title} === '2 runs compared'")
    page.run("document.querySelector('[data-pick=tick0]').click()")
    page.until(f"{title} === 'other.py'")


def test_curves_over_samples_and_a_sorted_table(look, tmp_path):
    made.run(tmp_path, samples=40)
    page = look(tmp_path)
    page.until(ALL_DRAWN)
    page.run("document.querySelector('.switch [data-over=samples]').click()")
    page.until(ALL_DRAWN)
    assert {"loss-samples", "accuracy-samples"} <= set(page.run(DRAWN))
    assert "loss-time" not in page.run(DRAWN)
    first = "document.querySelector('#workers tbody th').textContent"
    steps = (
        "[...document.querySelectorAll('#workers thead button')].find((one) => one.textContent === 'steps')"
    )
    page.run(f"{steps}.click()")
    assert page.run(first) in ("0", "3")  # most steps first
    page.run(f"{steps}.click()")
    assert page.run(first) == "2"


def test_what_is_wrong_is_said_in_a_line(look, tmp_path):
    folder = tmp_path / "r"
    made.append(folder / "events-launcher.jsonl", made.event(1000.0, "restarted", 0, "launcher"))
    page = look(tmp_path)
    note = "[...document.querySelectorAll('.warn')].map((one) => one.textContent).join()"
    page.until(f"{note} === 'r is starting: no worker has written anything yet.'")
    made.run(folder)
    page.until(f"{note} === '' && {ALL_DRAWN}")
    shutil.rmtree(folder)
    page.until(f"{note}.includes('is gone')")


def test_a_run_without_losses_and_faults_says_what_is_missing(look, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=1)))
    made.append(tmp_path / "worker-0.jsonl", *(made.sample(0, n, 1, loss=None) for n in range(9)))
    page = look(tmp_path)
    none = "document.querySelector('#box-{} .none')?.textContent"
    assert "worker.record(loss=…)" in page.until(none.format("loss-time"))
    assert page.until(none.format("faults")).startswith("Nothing has happened")


def test_markup_in_a_run_stays_text(look, tmp_path):
    bad = "<img src=x onerror=document.title='bad'>"
    made.run(tmp_path / "r", samples=30, name=bad, strategy=bad, command=bad)
    made.append(tmp_path / "r" / "events-0.jsonl", made.event(1004.0, bad, 0, bad, text=bad))
    page = look(tmp_path)
    page.until(ALL_DRAWN)
    assert page.run("document.getElementById('title').textContent") == bad
    assert page.run("document.images.length") == 0


def test_a_dashboard_that_has_ended_is_missed_and_found_again(chromium, serve, tmp_path):
    server = serve(made.run(tmp_path))
    page = chromium.page(1280, TALL)
    page.open(server.address)
    page.until(ALL_DRAWN)
    cut = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **cut)
    page.until("document.querySelector('.warn')?.textContent.includes('has ended')")
    page.call("Network.emulateNetworkConditions", offline=False, **cut)
    page.until("!document.querySelector('.warn')")
    page.close()
