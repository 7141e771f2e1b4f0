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
FRAMES = """new Promise((tell) => { let frames = 0; const began = performance.now();
  const one = () => { frames++;
    performance.now() - began < 500 ? requestAnimationFrame(one) : tell(frames); };
  requestAnimationFrame(one); })"""


@pytest.fixture
def chromium():
    started = browser.Browser()
    yield started
    started.close()


def test_it_plays(chromium, tmp_path):
    for strategy in ("allreduce", "adpsgd"):
        compute = fw.Compute(ms=50, slow={0: 5})
        fw.simulate(strategy, "digits", workers=16, steps=20, folder=tmp_path / strategy, compute=compute)
    path = tmp_path / "replay.html"
    path.write_text(html([Run(tmp_path / one) for one in ("allreduce", "adpsgd")], "digits"))
    page = chromium.page(1280, 900)
    page.open(path.as_uri())
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
