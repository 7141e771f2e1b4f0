"""A replay in a real browser: it draws, plays, obeys keys, and asks for nothing."""

from __future__ import annotations

import pytest

import browser
import freewheel as fw
from freewheel.records.run import Run
from freewheel.show.replay import html

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(browser.program() is None, reason=f"no browser: none of {', '.join(browser.NAMES)}"),
]

INK = """[...document.querySelectorAll("canvas")].every((one) =>
  one.getContext("2d").getImageData(0, 0, one.width, one.height).data.some((value) => value))"""
TOO_WIDE = """[...document.querySelectorAll("section, nav, canvas")].filter(
  (one) => one.getBoundingClientRect().right > innerWidth + 1).length"""
COVERED = """(() => { scrollTo(0, 0); const bar = document.querySelector("nav").getBoundingClientRect();
  return [...document.querySelectorAll("header p, section, #legend")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.top < bar.bottom - 1 && box.bottom > bar.top + 1; }).length; })()"""
FRAMES = """new Promise((tell) => { let frames = 0; const began = performance.now();
  const one = () => { frames++;
    performance.now() - began < 500 ? requestAnimationFrame(one) : tell(frames); };
  requestAnimationFrame(one); })"""


@pytest.fixture
def chromium():
    started = browser.Browser()
    yield started
    started.close()


@pytest.fixture(scope="module")
def replay(tmp_path_factory):
    """Two runs of 16 workers, one of which ends long before the other; a worker dies and comes back."""
    folder = tmp_path_factory.mktemp("runs")
    compute = fw.Compute(ms=50, slow={0: 5})
    faults = [fw.Fault("crash", 2, 0.12), fw.Fault("restart", 2, 0.3)]
    for strategy in ("allreduce", "adpsgd"):
        struck = faults if strategy == "adpsgd" else []
        fw.simulate(
            strategy, "digits", workers=16, steps=20, folder=folder / strategy, compute=compute, faults=struck
        )
    path = folder / "replay.html"
    path.write_text(html([Run(folder / one) for one in ("allreduce", "adpsgd")], "digits"))
    return path.as_uri()


def test_it_plays(chromium, replay):
    page = chromium.page(1280, 900)
    page.open(replay)
    page.until("now > 0")  # by itself
    assert page.run("playing") is True
    assert "times sooner" in page.run("document.getElementById('story').textContent")
    page.run("document.getElementById('play').click()")
    assert page.run("playing") is False
    page.run("go(length / 3)")
    assert page.run(INK)
    assert page.run(TOO_WIDE) == 0
    before = page.run("now")
    page.run("document.getElementById('play').click()")
    page.until(f"now > {before}")
    assert page.run(FRAMES) > 2
    page.run("dispatchEvent(new KeyboardEvent('keydown', {key: ' '}))")
    assert page.run("playing") is False
    page.run("dispatchEvent(new KeyboardEvent('keydown', {key: 'End'}))")
    assert page.run("now === length")
    assert page.run("data.runs[0].shown.steps.textContent") == "320"
    page.look(400, dark=True)
    page.until(f"{TOO_WIDE} === 0")


@pytest.mark.parametrize("width", [390, 360])
def test_it_fits_a_phone(chromium, replay, width):
    page = chromium.page(width, 800)
    page.open(replay)
    assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [width, width]
    assert page.run(TOO_WIDE) == 0
    assert page.run(COVERED) == 0


def test_nothing_is_covered_and_all_fits_a_window(chromium, replay):
    page = chromium.page(1280, 900)
    page.open(replay)
    assert page.run(COVERED) == 0
    assert page.run("document.documentElement.scrollHeight") <= 900


def test_who_wants_no_motion_gets_none(chromium, replay):
    page = chromium.page(1280, 900)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.open(replay)
    assert page.run("[playing, Math.round(100 * now / length)]") == [False, 10]


def test_what_happened_can_be_found_again(chromium, replay):
    page = chromium.page(1280, 900)
    page.open(replay)
    page.run("play(false)")
    said = "[...document.querySelectorAll('#marks button')].map((one) => one.title)"
    assert page.run(said) == [
        "AD-PSGD: worker 2 died at 0.12 s",
        "AD-PSGD: worker 2 came back at 0.30 s",
    ]
    assert page.run("document.querySelectorAll('.plot .marks button').length") == 2
    page.run("document.querySelector('#marks button').click()")
    assert page.run("now") == 0.12


def test_axes_have_round_numbers(chromium, replay):
    page = chromium.page(1280, 900)
    page.open(replay)
    assert page.run("ticks(0, 15.13, 5)[0]") == [0, 5, 10, 15]
    assert page.run("scales().marks.map(scales().words)") == ["0 %", "25 %", "50 %", "75 %", "100 %"]


def test_a_frame_costs_little(chromium, replay):
    page = chromium.page(1280, 900)
    page.open(replay)
    page.call("Performance.enable", timeDomain="threadTicks")
    page.run("play(false)")
    before = _script_s(page)
    page.run("for (let k = 0; k < 50; k++) go(length * k / 50)")
    assert (_script_s(page) - before) / 50 < 0.05  # of the thread's own time; 2 to 4 ms on a quiet machine


def _script_s(page):
    return next(
        one["value"]
        for one in page.call("Performance.getMetrics")["metrics"]
        if one["name"] == "ScriptDuration"
    )
