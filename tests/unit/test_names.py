from __future__ import annotations

import pytest

import freewheel as fw
from freewheel import names, strategies, tasks


def test_names_with_settings():
    assert strategies.resolve("sasgd:interval=3:scale=0.5") == fw.SASGD(interval=3, scale=0.5)
    assert strategies.resolve("nodelay_free:tau=none").tau is None
    assert strategies.resolve("dasgd:form=mean").form == "mean"
    assert tasks.resolve("quadratic:alike=true:sigma=1").alike is True
    topology = "hierarchical"
    assert strategies.resolve(f"adpsgd:topology={topology}").topology == topology
    assert [s.name for s in strategies.resolve_all("adpsgd, none,")] == ["adpsgd", "none"]
    assert [s.name for s in strategies.resolve_all("all")] == list(strategies.ALL)
    given = fw.ADPSGD()
    assert strategies.resolve(given) is given


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("adspgd", r"unknown strategy 'adspgd'\. Did you mean 'adpsgd'\? Known: adpsgd, allreduce, "),
        ("xyzzy", r"unknown strategy 'xyzzy'\. Known:"),
        ("sasgd:intervall=3", r"unknown setting of strategy 'sasgd'.*'intervall'.*Did you mean 'interval'"),
        ("none:x=1", r"unknown setting of strategy 'none'"),
        ("sasgd:interval=often", r"sasgd:interval must be a whole number, not 'often'"),
        ("sasgd:interval", r"cannot read 'interval'.*key=value"),
        ("dasgd:form=median", r"'median'.*Did you mean 'mean'|'median'.*mean, sum"),
    ],
)
def test_a_wrong_name_or_setting_is_named(spec, message):
    with pytest.raises(fw.ConfigError, match=message):
        strategies.resolve(spec)


def test_no_strategy_at_all():
    with pytest.raises(fw.ConfigError, match="no strategy given"):
        strategies.resolve_all(" , ")


def test_an_unknown_task_is_named():
    with pytest.raises(fw.UnknownName, match=r"unknown task 'digit'\. Did you mean 'digits'\?"):
        tasks.resolve("digit")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("No", False), ("1", True)])
def test_booleans(text, value):
    assert names.read_value("x", text, bool) is value


def test_ddp_is_told_from_a_strategy_whose_name_is_like_it():
    with pytest.raises(fw.ConfigError, match="Elsewhere take allreduce"):
        strategies.resolve("ddp")


def test_a_setting_of_a_task_that_cannot_be_is_refused():
    with pytest.raises(fw.ConfigError, match=r"quadratic: clip must be above 0, not nan"):
        tasks.resolve("quadratic:clip=nan")
