"""A few thousand of the messages that benchmarks/fuzz.py sends by the million."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
FRAMES = 4000
GROWTH = 64 << 20


def test_nothing_that_strangers_the_line_or_members_send_crashes_a_worker_or_stays(monkeypatch):
    spec = importlib.util.spec_from_file_location("fuzz", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fuzz", fuzz)
    spec.loader.exec_module(fuzz)
    found, grown = fuzz.fuzz(FRAMES, seed=1)
    assert not fuzz.bad(found)
    assert sum(one.total() for who, one in found.items() if who != "the log") >= 0.95 * FRAMES
    assert all(found[who]["refused"] for who in ("strangers", "the line", "members, adpsgd"))
    assert grown < GROWTH
