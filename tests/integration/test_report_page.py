"""A report in a real browser: it draws everything, asks for nothing, and can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import browser
import made
from freewheel.records.run import Run
from freewheel.show import report
from freewheel.show.rates import result_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(browser.program() is None, reason=f"no browser: none of {', '.join(browser.NAMES)}"),
]

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
# How many points each figure has drawn.
DRAWN = """Object.fromEntries([...document.querySelectorAll(".plot")].map((place) => [place.id.slice(7),
  (place.data || []).reduce((sum, trace) => sum + trace.x.filter((x) => x !== null).length, 0)]))"""
TOO_WIDE = """[...document.querySelectorAll("figure, .scroll, .see, .command, h1, h2, details")].filter(
  (one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 80))"""
GROUND = "getComputedStyle(document.querySelector('figure')).backgroundColor"


@pytest.fixture
def chromium():
    started = browser.Browser()
    yield started
    started.close()


def written(folder: Path) -> Path:
    """A report of two runs, one of them with a hostile name."""
    made.run(folder / "a", workers=4, samples=20, name=EVIL, command=EVIL, strategy=EVIL)
    made.append(folder / "a" / "events-0.jsonl", made.event(1004.0, "joined", 1, 0, text=EVIL))
    made.run(folder / "b", workers=8, samples=20, strategy="nodelay_free")
    runs = [Run(folder / name) for name in "ab"]
    path = folder / "report.html"
    path.write_text(report.html([result_of(run) for run in runs], runs, title=EVIL, command=EVIL))
    return path


def test_all_figures_are_drawn_and_fit_and_nothing_is_asked_for(
    chromium: browser.Browser, tmp_path: Path
) -> None:
    page, path = chromium.page(1280, 900), written(tmp_path)
    page.open(path.as_uri())
    page.until(f"Object.values({DRAWN}).every((points) => points > 0)")
    assert len(page.run(DRAWN)) == 12
    assert page.run(TOO_WIDE) == []
    assert sum(int(part) for part in page.run(GROUND)[4:-1].split(",")) > 600
    page.look(400, dark=True)
    page.until(f"{TOO_WIDE}.length === 0")
    assert sum(int(part) for part in page.run(GROUND)[4:-1].split(",")) < 200
    # Hiding a run hides it in every figure that shows it.
    page.run("document.querySelector('.legend button').click()")
    page.until("document.getElementById('figure-speed').data.some((trace) => trace.visible === false)")
    # A figure's own buttons: a linear axis instead of a logarithmic one, smooth lines, and back.
    loss = "document.getElementById('figure-loss-time')"
    press = f"{loss}.parentNode.querySelector('[title^=\"{{}}\"]').click()"
    before = page.run(f"{loss}.data.map((trace) => trace.y)")
    assert page.run(f"{loss}.layout.yaxis.type") == "log"
    page.run(press.format("A linear"))
    page.run(press.format("Smooth"))
    page.until(f"{loss}.layout.yaxis.type === 'linear'")
    page.until(f"JSON.stringify({loss}.data.map((trace) => trace.y)) !== {json.dumps(json.dumps(before))}")
    assert page.run(f"{loss}.data.some((trace) => trace.visible === false)")  # what was hidden stays so
    page.run(press.format("A linear"))
    page.run(press.format("Smooth"))
    page.until(f"{loss}.layout.yaxis.type === 'log'")
    page.run(press.format("Save the numbers"))
    assert page.requests == [path.as_uri()]
    assert page.problems == []
