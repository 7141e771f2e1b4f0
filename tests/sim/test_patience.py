"""Who waits a moment at its boundary averages without delay, and nobody waits long in vain."""

from __future__ import annotations

import pytest

import freewheel as fw
from freewheel.patience import AGAIN, SELDOM, Patience
from lab import after_every_step, make, run, timing

QUICK = fw.Links(mbit=10_000, latency_ms=0.05)
SLOW = fw.Links(mbit=10, latency_ms=0.05)


@pytest.mark.parametrize("slow", [{}, {0: 5}, {rank: 1 + rank / 7 for rank in range(8)}])
def test_a_moment_makes_the_last_update_count_at_once(slow):
    compute = fw.Compute(ms=20, kind="lognormal", spread=0.1, slow=slow)
    free, patient = (
        timing(spec, workers=8, steps=150, compute=compute, links=QUICK, model_mb=1)
        for spec in ("adpsgd", "adpsgd:patience=0.25")
    )
    assert free.staleness_mean > 0.9
    assert patient.staleness_mean < 0.1
    assert free.idle_share == 0
    assert patient.idle_share < 0.12


@pytest.mark.parametrize(
    ("strategy", "momentum", "workers", "waits"),
    [
        ("adpsgd", 0.0, 8, False),
        ("adpsgd", 0.9, 2, False),
        ("adpsgd", 0.9, 4, True),
        ("adpsgd", 0.9, 8, True),
        ("nodelay_free", 0.0, 8, False),
        ("nodelay_free", 0.9, 4, False),
        ("nodelay_free", 0.9, 8, True),
        ("nodelay_free:patience=0", 0.9, 8, False),
    ],
)
def test_where_momentum_carries_an_update_on_a_moment_is_waited_unasked(strategy, momentum, workers, waits):
    compute = fw.Compute(ms=20, kind="lognormal", spread=0.1)
    result = timing(
        strategy, workers=workers, steps=100, compute=compute, links=QUICK, model_mb=1, momentum=momentum
    )
    assert (result.staleness_mean < 0.1) is waits
    assert (result.idle_share > 0) is waits


@pytest.mark.parametrize("strategy", ["adpsgd:patience=1", "nodelay_free:patience=1"])
def test_once_the_rate_has_fallen_nobody_waits(strategy):
    compute = fw.Compute(ms=20, kind="lognormal", spread=0.1)
    alike = {"workers": 4, "steps": 200, "compute": compute, "links": QUICK, "model_mb": 1}
    always, while_high = (timing(strategy, schedule=schedule, **alike) for schedule in ("constant", "cosine"))
    assert 0.4 < while_high.idle_share / always.idle_share < 0.6
    assert always.staleness_mean < 0.1 < 0.3 < while_high.staleness_mean


def test_exchanges_that_take_long_are_hardly_ever_waited_for():
    compute = fw.Compute(ms=20, kind="lognormal", spread=0.1)
    free, patient = (
        timing(spec, workers=8, steps=400, compute=compute, links=SLOW, model_mb=1)
        for spec in ("adpsgd", "adpsgd:patience=0.5")
    )
    assert 0 < patient.idle_share < 0.04
    assert patient.steps_per_s > 0.96 * free.steps_per_s


def test_what_was_waited_for_in_vain_does_not_pile_up():
    compute, links = fw.Compute(ms=2, kind="uniform", spread=0.2), fw.Links(mbit=1000, latency_ms=50)
    simulation = make(
        "adpsgd:patience=0.5",
        workers=4,
        steps=2000,
        gradients=False,
        evaluations=0,
        compute=compute,
        links=links,
    )
    most = []
    after_every_step(simulation, lambda: most.append(len(simulation.workers[0].tasks)))
    simulation.run()
    assert max(most) < 12


def test_who_only_answers_never_stops():
    result = timing(
        "adpsgd:topology=bipartite_ring:patience=0.5", workers=4, steps=50, links=QUICK, model_mb=1
    )
    assert [one["blocked_s"]["peers"] > 0 for one in result.by_worker] == [True, False, True, False]


def test_who_waits_in_vain_tries_again_later_and_goes_on_if_it_pays():
    patience = Patience(0.25)
    tried = []
    for step in range(2 * SELDOM):
        if patience.tries(step):
            tried.append(step)
            patience.learn(1.0)
    assert tried[:7] == list(range(7))
    assert tried[7:] == list(range(SELDOM, SELDOM + AGAIN))
    for _ in range(AGAIN):
        patience.learn(0.0)
    assert patience.tries(2 * SELDOM + AGAIN)
    assert not Patience(0).tries(0)


def test_a_subclass_may_meet_in_its_own_way_and_start_by_itself():
    called = []

    class Own(fw.ADPSGD):
        async def start(self, node):
            """Nothing of its base's."""

        def meet(self, mine, theirs):
            called.append(1)
            return (theirs - mine) / 2

    run(Own(), workers=4, steps=20, momentum=0.9)
    assert called


@pytest.mark.parametrize("spec", ["adpsgd:patience=0", "adpsgd", "adpsgd:meetings=4"])
def test_how_far_two_are_apart_is_recorded_whatever_part_counts(spec):
    simulation = make(spec, workers=8, steps=40, momentum=0.9, compute=fw.Compute(ms=20))
    ratios = []
    for worker in simulation.workers.values():

        def met(peer, correction, node=worker.node, inner=worker.node.met):
            inner(peer, correction)
            apart = float(correction.norm()) / node.meet.share
            ratios.append(node.counters.discrepancy / apart if apart else 1.0)

        worker.node.met = met
    simulation.run()
    assert ratios == pytest.approx([1.0] * len(ratios))


@pytest.mark.parametrize(
    ("topology", "part"), [("complete", 1 / 5), ("ring", 1 / 3), ("star", 1 / 2), ("bipartite_ring", 1 / 3)]
)
def test_who_has_few_neighbours_meets_few_and_takes_more_of_each(topology, part):
    strategy = fw.ADPSGD(topology=topology, patience=1, meetings=4)
    simulation = run(strategy, workers=8, steps=5)
    assert {worker.strategy.meet.share for worker in simulation.workers.values()} == {part}


def test_more_meetings_than_can_be_tried_are_refused():
    with pytest.raises(fw.ConfigError, match="at most 8, not 9"):
        timing("adpsgd:meetings=9", workers=16, steps=1)


@pytest.mark.parametrize(("members", "waits"), [(2, False), (5, True)])
def test_where_nobody_says_workers_that_are_there_count_and_not_their_places(members, waits):
    faults = [fw.Fault("crash", rank, 0.001) for rank in range(members, 8)]
    alike = {
        "workers": 8,
        "momentum": 0.9,
        "links": QUICK,
        "compute": fw.Compute(ms=20, kind="uniform", spread=0.2),
    }
    result = timing("nodelay_free", steps=60, faults=faults, model_mb=1, **alike)
    assert (result.idle_share > 0.01) is waits


def test_who_comes_late_in_a_schedule_knows_how_high_the_rate_was():
    simulation = make("adpsgd", workers=3, steps=40, momentum=0.9, schedule="cosine",
                      faults=[fw.Fault("crash", 2, 0.05), fw.Fault("restart", 2, 0.3)])  # fmt: skip
    simulation.run()
    assert simulation.workers[2].node.rate_left < 0.5


@pytest.mark.parametrize(("workers", "to_the_end"), [(4, False), (8, True)])
def test_few_workers_wait_while_the_rate_is_high_and_many_to_the_end(workers, to_the_end):
    simulation = make("adpsgd", workers=workers, steps=60, momentum=0.9, schedule="cosine", links=QUICK,
                      compute=fw.Compute(ms=20))  # fmt: skip
    left = []
    for worker in simulation.workers.values():

        def linger(patience, work, node=worker.node, inner=worker.node.linger):
            left.append(node.rate_left)
            return inner(patience, work)

        worker.node.linger = linger
    simulation.run()
    assert min(left) < 0.1 if to_the_end else min(left) >= 0.5
