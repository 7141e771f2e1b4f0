"""What a plan says."""

from __future__ import annotations

from freewheel.planning import plan, words
from freewheel.planning.forecast import Forecast
from freewheel.planning.plan import Plan
from freewheel.planning.setting import Setting

SETTING = Setting(workers=4, model_mb=10_000, compute_ms=120, link_mbit=2_000_000)


def forecast(strategy: str, useful: float, **changes: object) -> Forecast:
    figures: dict[str, object] = dict.fromkeys(Forecast.__dataclass_fields__, 1.0)
    figures |= {"strategy": strategy, "useful_steps_per_s": useful, "steps_per_s": useful, "grows": False}
    return Forecast(**{**figures, "why": "", "waits_for": "nobody", "keeps_mean": True, **changes})


def said(*forecasts: Forecast) -> str:
    found = plan.ranked(forecasts)
    return " ".join(words.recommendation(Plan(SETTING, tuple(found), plan.best(found), (), {}), ["t.py"]))


def test_who_is_as_good_is_named():
    alike = forecast("adpsgd", 103.0), forecast("asgd", 99.0), forecast("sasgd:interval=8", 80.0)
    text = said(forecast("allreduce", 100.0, discrepancy=0.0), *alike)
    assert "Use allreduce." in text
    assert "As good within 5 %, but asking more of you: adpsgd, asgd." in text


def test_large_numbers_are_written_out():
    text = said(forecast("allreduce", 1.0), forecast("adpsgd", 920.0, bytes_per_step=9e9))
    assert "920 times as fast as allreduce" in text
    assert "links of 2,000 Gbit/s" in words.setting_in_words(SETTING)
    assert "a model of 10,000 MB" in words.setting_in_words(SETTING)
    assert "a model of 1,000 MB" in [what for what, _ in plan.changed(SETTING)]
