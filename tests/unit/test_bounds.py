from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import freewheel as fw
import promises
from freewheel.records.result import Result, Sample
from freewheel.show.bounds import Bound, bounds

COMPUTE = {"ms": 10.0, "kind": "constant", "spread": 0.3, "slow": {}, "pauses": (), "trace": ()}
LINKS = {
    "mbit": 1000.0,
    "latency_ms": 1.0,
    "slow": {},
    "backbone_mbit": None,
    "workers_per_node": 1,
    "node_mbit": 1e5,
    "node_latency_ms": 0.01,
}


def made(
    strategy: str,
    settings: dict[str, Any] | None = None,
    *,
    waits_for: str = "all",
    compute: dict[str, Any] | None = None,
    links: dict[str, Any] | None = None,
    faults: tuple[Any, ...] = (),
    momentum: float = 0.0,
    sampled_at: int = 400,
    **figures: Any,
) -> Result:
    """Four workers, 100 steps each, whose gradients had norms up to 3 at a learning rate of 0.1."""
    # A hop of a ring carries a quarter of 4 MB: 8 ms at 1000 Mbit/s, and 1 ms of latency; six make 54 ms.
    # Then "have" and "commit", 1 ms each: three and three of 64 bytes, of four workers.
    worker = {"gradient_norm_max": 2.0, "bytes_out": 6_000_000 + 96, "messages_out": 7.5}
    result = Result(
        strategy=strategy,
        workers=4,
        seed=0,
        virtual_s=1.0,
        worker_steps=400,
        steps_per_s=400.0,
        ideal_share=1.0,
        idle_share=0.0,
        staleness_mean=0.0,
        staleness_max=0.0,
        discrepancy_max=0.0,
        bytes_per_step=0.0,
        loss=0.5,
        accuracy=0.9,
        trace_sha256="0" * 64,
        target=None,
        target_s=None,
        curve=(Sample(0.5, sampled_at, 0.7, 0.8, 0.0, 0.0),),
        by_worker=(worker, {**worker, "gradient_norm_max": 3.0}, worker, worker),
        settings={
            "strategy": settings or {},
            "scenario": {
                "compute": {**COMPUTE, **(compute or {})},
                "links": {**LINKS, **(links or {})},
                "faults": faults,
            },
            "lr": 0.1,
            "momentum": momentum,
            "model_bytes": 4_000_000,
            "waits_for": waits_for,
            "staleness": "own gradients",
        },
    )
    return dataclasses.replace(result, **figures)


def rows(result: Result) -> dict[str, Bound]:
    found = {bound.name: bound for bound in bounds(result)}
    assert len(found) == len(bounds(result))
    return found


RING_S = 6 * (0.001 + 0.008) + 2 * 0.001  # a merge: the ring, "have" and "commit"


# -- one row -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "measured", "bound", "holds", "share"),
    [
        ("at most", 2.0, 4.0, True, 0.5),
        ("at most", 4.0, 4.0, True, 1.0),
        ("at most", 4.0 * (1 + 1e-9), 4.0, True, 1.0),
        ("at most", 4.1, 4.0, False, 1.025),
        ("about", 4.5, 4.0, True, 1.125),
        ("about", 3.5, 4.0, True, 0.875),
        ("about", 4.7, 4.0, False, 1.175),
        ("about", 3.3, 4.0, False, 0.825),
        ("at most", 0.0, 0.0, True, None),
        ("about", 0.0, 0.0, True, None),
        ("at most", 0.1, 0.0, False, None),
    ],
)
def test_a_row_knows_its_share_and_whether_it_holds(
    kind: Any, measured: float, bound: float, holds: bool, share: float | None
) -> None:
    row = Bound("figure", measured, bound, "", "theory", kind)
    assert row.holds is holds
    assert row.share == pytest.approx(share)


# -- nodelay -------------------------------------------------------------------------------------


def test_nodelay_has_the_papers_discrepancy_and_staleness() -> None:
    found = rows(made("nodelay", {"tau": 8}, discrepancy_max=1.2, staleness_max=7.0, idle_share=0.28))
    assert found["largest discrepancy"].bound == pytest.approx(2 * 3.0 * 8 * 0.1)  # 2·L·τ·η
    assert found["largest discrepancy"].measured == 1.2
    assert found["largest discrepancy"].share == pytest.approx(0.25)
    assert found["largest staleness"].bound == 8
    assert all(row.holds for row in found.values())


def test_nodelay_beyond_its_bounds_does_not_hold() -> None:
    found = rows(made("nodelay", {"tau": 8}, discrepancy_max=4.9, staleness_max=9.0))
    assert not found["largest discrepancy"].holds
    assert not found["largest staleness"].holds


def test_nodelay_with_momentum_has_no_discrepancy_row() -> None:
    assert "largest discrepancy" not in rows(made("nodelay", {"tau": 8}, momentum=0.9))


def test_a_merge_that_outlasts_its_cycle_makes_nodelay_idle() -> None:
    # Four gradients of 10 ms beside a merge of 56 ms: 16 of 56 ms are idle.
    row = rows(made("nodelay", {"tau": 8}, idle_share=0.28))["idle share"]
    assert row.kind == "about"
    assert row.bound == pytest.approx(16 / 56)
    assert row.holds


def test_a_merge_that_fits_into_its_cycle_leaves_nodelay_busy() -> None:
    row = rows(made("nodelay", {"tau": 20}, idle_share=0.01))["idle share"]
    assert (row.kind, row.bound) == ("at most", 0)
    assert not row.holds


@pytest.mark.parametrize(
    "other",
    [
        {"compute": {"slow": {0: 5.0}}},
        {"compute": {"kind": "exponential"}},
        {"compute": {"pauses": ((0, 0.1, 0.1),)}},
        {"links": {"slow": {1: 2.0}}},
        {"links": {"backbone_mbit": 100.0}},
        {"links": {"workers_per_node": 2}},
        {"faults": ({"kind": "slow", "rank": 0, "at_s": 0.1, "peer": None, "factor": 2.0},)},
    ],
)
def test_nodelays_idle_share_needs_equal_workers_and_links_and_no_faults(other: dict[str, Any]) -> None:
    assert "idle share" not in rows(made("nodelay", {"tau": 8}, **other))


def test_an_unfinished_cycle_says_nothing_about_the_idle_share() -> None:
    assert "idle share" not in rows(made("nodelay", {"tau": 120}))


def test_only_a_free_nodelay_with_a_bound_is_held_to_it() -> None:
    bound = rows(made("nodelay_free", {"tau": 4, "every": 1}, waits_for="nobody", staleness_max=5.0))
    assert list(bound) == ["largest staleness"]  # it may wait, so nothing is said about its speed
    assert not bound["largest staleness"].holds
    assert "largest staleness" not in rows(made("nodelay_free", {"tau": None}, waits_for="nobody"))


# -- the synchronous ones ------------------------------------------------------------------------


def test_allreduce_keeps_replicas_equal() -> None:
    found = rows(made("allreduce", virtual_s=100 * (0.01 + RING_S)))
    assert found["largest discrepancy"].bound == 0
    assert found["largest staleness"].bound == 0
    assert found["time per step"].bound == pytest.approx(66.0)  # ms
    assert found["time per step"].share == pytest.approx(1.0)
    assert all(row.holds for row in found.values())
    assert not rows(made("allreduce", discrepancy_max=1e-3))["largest discrepancy"].holds


def test_allreduce_sampled_between_two_workers_steps_may_differ_by_one_update() -> None:
    row = rows(made("allreduce", sampled_at=402, discrepancy_max=0.2))["largest discrepancy"]
    assert row.bound == pytest.approx(0.3)
    assert row.holds


def test_allreduce_takes_as_long_as_its_slowest_worker() -> None:
    slow = made("allreduce", compute={"slow": {"2": 5.0}}, steps_per_s=70.0, virtual_s=100 * (0.05 + RING_S))
    found = rows(slow)  # ranks are text where settings went through JSON
    assert found["time per step"].bound == pytest.approx(106.0)
    assert found["worker-steps per second"].bound == pytest.approx(4 / 0.05)
    assert found["worker-steps per second"].kind == "at most"
    assert all(row.holds for row in found.values())
    assert not rows(dataclasses.replace(slow, steps_per_s=81.0))["worker-steps per second"].holds


def test_sasgd_drifts_for_one_interval_and_shares_the_ring_among_its_steps() -> None:
    found = rows(made("sasgd", {"interval": 10, "scale": None}, virtual_s=1.56, discrepancy_max=1.0))
    assert found["largest discrepancy"].bound == pytest.approx(promises.sasgd_drift(0.1, 10, 3.0)) == 6.0
    assert found["time per step"].bound == pytest.approx(10 + 56 / 10)
    assert found["time per step"].share == pytest.approx(1.0)
    summed = rows(made("sasgd", {"interval": 10, "scale": 1.0}))
    assert list(summed) == ["time per step"]
    assert "time per step" not in rows(made("sasgd", {"interval": 60, "scale": None}))


def test_hierarchical_sasgd_drifts_between_two_global_merges() -> None:
    found = rows(made("hierarchical_sasgd", {"nodes": 2, "interval": 4, "global_every": 3}))
    assert found["largest discrepancy"].bound == pytest.approx(2 * 0.1 * 12 * 3.0)


@pytest.mark.parametrize("strategy", ["dpsgd", "leader", "one of somebody else"])
def test_whoever_waits_for_all_is_as_slow_as_the_slowest(strategy: str) -> None:
    waits = "neighbours" if strategy == "dpsgd" else "all"
    assert bounds(made(strategy, waits_for=waits)) == []
    found = rows(made(strategy, waits_for=waits, compute={"slow": {1: 2.0, 3: 4.0}}, steps_per_s=100.0))
    assert list(found) == ["worker-steps per second"]
    assert found["worker-steps per second"].bound == pytest.approx(4 / 0.04)


# -- the free ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["adpsgd", "dasgd", "nodelay_free", "none"])
def test_who_waits_for_nobody_is_never_idle_and_reaches_the_ideal(strategy: str) -> None:
    found = rows(made(strategy, waits_for="nobody", compute={"slow": {0: 5.0}}, steps_per_s=310.0))
    assert list(found) == ["idle share", "worker-steps per second"]
    assert found["worker-steps per second"].bound == pytest.approx(320.0)
    assert all(row.holds for row in found.values())
    late = rows(made(strategy, waits_for="nobody", steps_per_s=300.0, idle_share=0.2))
    assert not any(row.holds for row in late.values())


def test_random_or_broken_workers_have_no_ideal_to_reach() -> None:
    assert list(rows(made("adpsgd", waits_for="nobody", compute={"kind": "exponential"}))) == ["idle share"]
    assert bounds(made("adpsgd", waits_for="nobody", faults=({"kind": "crash"},))) == []


# -- the parameter server ------------------------------------------------------------------------


def test_asgd_has_a_mean_delay_of_the_other_workers() -> None:
    row = rows(made("asgd", waits_for="server", staleness_mean=2.9, staleness_max=9.0))["mean gradient delay"]
    assert (row.kind, row.bound, row.holds) == ("about", 3, True)
    assert row.share == pytest.approx(2.9 / 3)
    assert not rows(made("asgd", staleness_mean=2.0, staleness_max=9.0))["mean gradient delay"].holds
    assert bounds(made("asgd", waits_for="server", staleness_max=60.0)) == []  # too short a run to tell
    assert bounds(made("asgd", waits_for="server", faults=({"kind": "crash"},))) == []


# -- what is not known ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("nodelay", {"tau": 8}),
        ("sasgd", {"interval": 10}),
        ("hierarchical_sasgd", {"interval": 4, "global_every": 3}),
        ("allreduce", {}),
    ],
)
def test_timing_alone_says_nothing_about_weights(strategy: str, settings: dict[str, Any]) -> None:
    found = rows(made(strategy, settings, loss=None, accuracy=None))
    assert "largest discrepancy" not in found


def test_a_run_without_a_simulated_scenario_has_rows_about_weights_only() -> None:
    run = made("nodelay", {"tau": 8})
    run.settings.pop("scenario")
    assert set(rows(run)) == {"largest discrepancy", "largest staleness"}


# -- real runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", ["allreduce", "sasgd:interval=5", "nodelay:tau=4", "adpsgd", "asgd", "dasgd", "none"]
)
@pytest.mark.parametrize("slow", [{}, {0: 3.0}], ids=["equal", "slow"])
def test_simulated_runs_keep_to_their_bounds(strategy: str, slow: dict[int, float]) -> None:
    result = fw.simulate(
        strategy, "quadratic", workers=4, steps=60, compute=fw.Compute(slow=slow), model_mb=2
    )
    found = bounds(result)
    assert found
    assert [row for row in found if not row.holds] == []
