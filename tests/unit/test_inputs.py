"""Compute times, links and faults: what is allowed, what is refused, what they mean."""

from __future__ import annotations

import random
import statistics

import pytest

import freewheel as fw
from freewheel.sim.scenario import KINDS
from freewheel.sim.worker import Clockwork


def times(compute: fw.Compute, rank: int = 0, count: int = 4000) -> list[float]:
    clockwork = Clockwork(compute, rank, random.Random(1))
    return [clockwork.next_s(0.0)[0] for _ in range(count)]


@pytest.mark.parametrize("kind", ["constant", "uniform", "exponential", "lognormal"])
def test_every_distribution_keeps_the_mean(kind):
    compute = fw.Compute(ms=20, kind=kind, slow={1: 3})
    for rank, mean in ((0, 0.02), (1, 0.06)):
        assert statistics.fmean(times(compute, rank)) == pytest.approx(mean, rel=0.05)
        assert compute.mean_s(rank) == pytest.approx(mean)


def test_distributions_have_their_shapes():
    assert set(times(fw.Compute(ms=20))) == {0.02}
    uniform = times(fw.Compute(ms=20, kind="uniform", spread=0.5))
    assert 0.0100 < min(uniform) < 0.0101
    assert 0.0299 < max(uniform) < 0.0300
    assert statistics.stdev(times(fw.Compute(ms=20, kind="exponential"))) == pytest.approx(0.02, rel=0.1)
    assert min(times(fw.Compute(ms=20, kind="lognormal", spread=1.0))) < 0.002


def test_a_trace_from_a_file_is_repeated(tmp_path):
    path = tmp_path / "times"
    path.write_text("# ms\n10 20\n30, 40\n")
    compute = fw.Compute.parse(f"trace:{path}", ms=1.0)
    assert times(compute, 1, 3) == pytest.approx([0.02, 0.04, 0.02])
    assert compute.mean_s(0) == pytest.approx(0.02)
    path.write_text("5\n15\n")
    assert times(fw.Compute.parse(f"trace:{path}"), 7, 2) == pytest.approx([0.005, 0.015])
    assert compute.ideal_rate(2) == pytest.approx(1 / 0.02 + 1 / 0.03)


def test_one_worker_may_have_a_model_of_its_own():
    own = fw.Compute(ms=40, kind="uniform", spread=0.5)
    compute = fw.Compute(ms=20, of={1: own}, slow={1: 2})
    assert set(times(compute, 0)) == {0.02}
    assert len(set(times(compute, 1))) > 100
    assert statistics.fmean(times(compute, 1)) == pytest.approx(compute.mean_s(1), rel=0.05) == 0.08
    assert compute.ideal_rate(2) == pytest.approx(1 / 0.02 + 1 / 0.08)


def test_a_pause_holds_a_worker_up_once():
    usual = fw.simulate("none", "quadratic", workers=1, steps=10)
    paused = fw.simulate(
        "none", "quadratic", workers=1, steps=10, compute=fw.Compute(pauses=[(0, 0.05, 1.0)])
    )
    assert paused.virtual_s == pytest.approx(usual.virtual_s + 1.0)
    assert paused.idle_share == pytest.approx(1.0 / 1.1)


@pytest.mark.parametrize("text", ["crash:3@0.5", "restart:3@1", "cut:3@0.5", "cut:3-5@0.5", "slow:3x10@0.5"])
def test_faults_read_as_they_are_written(text):
    assert str(fw.Fault.parse(text)) == text


def refused(make, message):
    with pytest.raises(fw.ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fw.Compute(ms=0), r"compute time must be above 0 .*not 0"),
        (lambda: fw.Compute(kind="normal"), r"unknown compute model 'normal'\. Did you mean 'lognormal'"),
        (lambda: fw.Compute.parse("uniform:lots"), r"spread in 'uniform:lots' must be a number"),
        (lambda: fw.Compute.parse("uniform:2"), r"between 0 and 1, not 2"),
        (lambda: fw.Compute.parse("trace:/nowhere"), r"cannot read the trace .*nowhere.*No such file"),
        (lambda: fw.Compute(slow={0: -1}), r"slowness of worker 0 must be above 0"),
        (
            lambda: fw.Scenario(workers=2, compute=fw.Compute(slow={5: 2})),
            r"slow: there is no worker 5.*0 to 1",
        ),
        (
            lambda: fw.Scenario(workers=2, compute=fw.Compute(pauses=[(2, 0, 1)])),
            r"pause: there is no worker 2",
        ),
        (lambda: fw.Links(mbit=0), r"link bandwidth in Mbit/s must be above 0 .*not 0"),
        (lambda: fw.Links(mbit=float("nan")), r"link bandwidth in Mbit/s must be above 0"),
        (lambda: fw.Links(backbone_mbit=-1), r"backbone bandwidth in Mbit/s must be above 0 .*not -1"),
        (lambda: fw.Links(latency_ms=-1), r"latency must be at least 0"),
        (
            lambda: fw.Scenario(workers=2, links=fw.Links(slow={2: 2})),
            r"slow link: there is no worker 2.*0 to 1",
        ),
        (lambda: fw.Scenario(workers=0), r"workers must be at least 1, not 0"),
        (lambda: fw.Scenario(steps=0), r"steps must be at least 1"),
        (lambda: fw.Scenario(lr=-0.1), r"learning rate must be 0 or more"),
        (lambda: fw.Scenario(momentum=1.0), r"momentum must be at least 0 and below 1"),
        (lambda: fw.Scenario(target=90), r"target accuracy must lie between 0 and 1, not 90"),
        (lambda: fw.Scenario(model_mb=0), r"model's size in MB must be above 0"),
        (lambda: fw.Fault.parse("explode:1@1"), r"unknown fault 'explode'.*" + ", ".join(sorted(KINDS))),
        (lambda: fw.Fault.parse("crash:1"), r"cannot read the fault 'crash:1'\. Write KIND:WORKER@SECONDS"),
        (lambda: fw.Fault.parse("crash:1-2@1"), r"only cut and heal take two workers"),
        (lambda: fw.Fault.parse("slow:1@1"), r"take a factor, as in slow:1x10@1"),
        (lambda: fw.Fault.parse("crash:1@1e"), r"cannot read the (numbers|fault)"),
        (
            lambda: fw.Scenario(workers=3, faults=[fw.Fault("crash", 3, 1)]),
            r"no worker 3, only workers 0 to 2",
        ),
        (lambda: fw.Scenario(faults=[fw.Fault("restart", 3, 1)]), r"restart:3@1: worker 3 lives then"),
        (
            lambda: fw.Scenario(faults=[fw.Fault("crash", 3, 2), fw.Fault("crash", 3, 1)]),
            r"crash:3@2: worker 3 is dead then",
        ),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(make, message):
    refused(make, message)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sasgd:interval=0", r"interval T must be at least 1, not 0"),
        ("nodelay:tau=5", r"tau must be even, .*not 5\. Take 4 or 6"),
        ("nodelay:tau=0", r"tau must be at least 2"),
        ("nodelay_free:every=4:tau=2", r"tau must be at least 4"),
        ("adpsgd:topology=rign", r"unknown topology 'rign'.*Did you mean 'ring'"),
        ("adpsgd:topology=bipartite_ring", r"even number of workers, not 5"),
        ("dpsgd:topology=moebius", r"unknown topology 'moebius'"),
        ("dasgd:interval=0", r"broadcast interval must be at least 1"),
        ("easgd:alpha=2", r"alpha must lie between 0 and 1, not 2"),
        ("leader:pull=0", r"pull must be above 0"),
        ("hierarchical_sasgd:nodes=9", r"5 workers .* 9 nodes"),
        ("grouping:ratio=0.5", r"ratio must be at least 1"),
    ],
)
def test_settings_of_a_strategy_are_checked_before_anything_runs(spec, message):
    refused(lambda: fw.simulate(spec, "quadratic", workers=5, steps=5), message)


def test_a_disconnected_topology_names_its_parts():
    from freewheel.topology import from_edges

    with pytest.raises(fw.ConfigError, match=r"not connected.*\{0, 1\}.*\{2, 3\}"):
        from_edges(4, [(0, 1), (2, 3)])


def test_eamsgd_wants_momentum():
    with pytest.raises(fw.ConfigError, match="eamsgd needs an optimizer with momentum"):
        fw.simulate("eamsgd", "quadratic", workers=2, steps=5, momentum=0.0)


def test_a_diverging_run_says_who_was_first():
    with pytest.raises(
        fw.Diverged, match=r"adpsgd diverged: worker \d got .* first, in its step \d+ at [\d.]+ s\. Lower"
    ):
        fw.simulate("adpsgd", "quadratic", workers=3, steps=900, lr=50.0)


def test_settings_are_not_swallowed():
    with pytest.raises(TypeError, match="learning_rate"):
        fw.simulate("adpsgd", "quadratic", learning_rate=1.0)
