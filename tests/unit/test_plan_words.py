"""What a plan says of the strategies it ranks higher and does not recommend."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bytes_per_step": 2.0}, "adpsgd sends less"),
        ({"waits_for": "all"}, "adpsgd waits for nobody, sasgd for all"),
        ({"keeps_mean": False}, "adpsgd keeps the mean of all replicas"),
    ],
)
def test_who_is_passed_over_is_named_with_the_reason(changes, why):
    text = said(forecast("adpsgd", 100.0), forecast("sasgd:interval=8", 103.0, **changes))
    assert "Use adpsgd." in text
    assert f"sasgd:interval=8 is 3 % ahead; less than 5 % a plan cannot tell apart, and {why}" in text
    assert "As good" not in text


def test_equal_replicas_come_first_and_who_is_behind_is_no_rival():
    text = said(
        forecast("allreduce", 100.0, discrepancy=0.0), forecast("adpsgd", 100.2), forecast("asgd", 99)
    )
    assert "adpsgd is less than 1 % ahead" in text
    assert "allreduce keeps all replicas equal" in text
    assert "As good within 5 %: asgd." in text


def test_large_numbers_are_written_out():
    text = said(forecast("allreduce", 1.0), forecast("adpsgd", 920.0, bytes_per_step=9e9))
    assert "920 times as fast as allreduce" in text
    assert "links of 2,000 Gbit/s" in words.setting_in_words(SETTING)
    assert "a model of 10,000 MB" in words.setting_in_words(SETTING)
    assert "a model of 1,000 MB" in [what for what, _ in plan.changed(SETTING)]
