"""A small soak of real processes: the laws hold, and a law that is broken is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from freewheel.data.order import order
from freewheel.errors import ConfigError
from freewheel_bench import laws
from freewheel_bench.footprint import Footprint, family, footprint
from freewheel_bench.soak import CUT, KILL, STORE, Soak, soak
from freewheel_bench.workers import Life, Place, Step, Workers

pytestmark = pytest.mark.integration


class Ended:
    """A process that has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def life(pid: int, killed: bool = False, again: int = 0, pause_s: float = 0.05, members: int = 2) -> Life:
    result = {"finite": True, "apart": 0.01, "answer": "same", "accuracy": 0.9, "again": again}
    said = {"ready": 0.5} | ({} if killed else {"result": result})
    made = Life(Ended(pid), None, 1, said, killed)  # type: ignore[arg-type]
    made.stepped(Step(1.0, 0, members))
    made.stepped(Step(1.0 + pause_s, 1, members, 2.0, again))
    return made


def written(folder: Path, length: int, batch: int, used: dict[str, list[tuple[int, int]]]) -> laws.Uses:
    """Journals in which workers used these batches of these passes."""
    for name, batches in used.items():
        lines = []
        for number, place in batches:
            samples = order(length, True, 3, number).tolist()[place * batch : (place + 1) * batch]
            lines.append(" ".join(map(str, samples)) + "\n")
        (folder / f"{name}.samples").write_text("".join(lines))
    return laws.uses(folder, length, batch, 3, passes=2)


ALL = [(number, place) for number in range(2) for place in range(4)]


def broken(found: laws.Found) -> set[str]:
    return {law.name for law in laws.judge(found) if not law.held}


BEFORE = laws.Taken(Footprint(3, 5, 30, 400.0), Footprint(1, 9, 60, 300.0))


def found(
    uses: laws.Uses, lives: list[list[Life]], left: tuple[str, ...] = (), after: laws.Taken = BEFORE
) -> laws.Found:
    return laws.Found(2, lives, {99}, uses, list(left), [], BEFORE, after)


def test_batches_are_known_by_their_samples_and_used_once(tmp_path):
    uses = written(tmp_path, 15, 4, {"0-0": ALL[:5], "1-0": ALL[5:]})
    assert uses.batches == 4
    assert uses.missing() == uses.strange == uses.again() == 0
    assert broken(found(uses, [[life(1)], [life(2)]])) == set()


def test_a_killed_worker_s_last_batches_may_come_again_if_they_are_counted(tmp_path):
    uses = written(tmp_path, 15, 4, {"0-0": ALL, "1-0": [ALL[0], ALL[3]], "1-1": []})
    assert uses.again() == 4 + 3  # the last batch of an order is short
    lives = [[life(1, again=8)], [life(2, killed=True), life(3)]]
    assert broken(found(uses, lives)) == set()
    lives[0] = [life(1, again=6)]
    assert broken(found(uses, lives)) == {"samples used again"}


def test_nobody_else_may_use_a_batch_twice_but_one_that_was_cut_off(tmp_path):
    uses = written(tmp_path, 15, 4, {"0-0": ALL, "1-0": [ALL[2]]})
    lives = [[life(1, again=100)], [life(2)]]
    assert broken(found(uses, lives)) == {"twice, by processes that lived"}
    assert broken(found(uses, [lives[0], [life(99)]])) == set()


@pytest.mark.parametrize("strange", [False, True])
def test_a_batch_that_nobody_used_or_that_is_none_is_seen(tmp_path, strange):
    if strange:
        (tmp_path / "1-0.samples").write_text("1 2 3 4\n")
    uses = written(tmp_path, 15, 4, {"0-0": ALL if strange else ALL[1:]})
    assert broken(found(uses, [[life(1)], [life(2)]])) == {"batches nobody used"}


def test_what_is_wrong_with_workers_is_seen(tmp_path):
    uses = written(tmp_path, 15, 4, {"0-0": ALL})
    lives = [[life(1, pause_s=11.0)], [life(2, members=1)]]
    lives[1][0].said["result"] |= {"answer": "other", "apart": 0.2}
    assert broken(found(uses, lives, ("process group 7",))) == {
        "answer",
        "replicas from their mean",
        "longest pause",
        "members",
        "left behind",
    }


@pytest.mark.parametrize(
    ("beside", "spared", "seen"),
    [
        ((0, -1, -1, 99.0), (0, 8, 16, 99.0), set()),
        ((1, 0, 0, 0.0), (0, 0, 0, 0.0), {"growth beside the workers"}),
        ((0, 1, 0, 0.0), (0, 0, 0, 0.0), {"growth beside the workers"}),
        ((0, 0, 1, 0.0), (0, 0, 0, 0.0), {"growth beside the workers"}),
        ((0, 0, 0, 101.0), (0, 0, 0, 0.0), {"growth beside the workers"}),
        ((0, 0, 0, 0.0), (0, 0, 17, 0.0), {"growth of the spared worker"}),
    ],
)
def test_what_grows_with_the_faults_is_seen(tmp_path, beside, spared, seen):
    uses = written(tmp_path, 15, 4, {"0-0": ALL})
    after = laws.Taken(BEFORE.beside + Footprint(*beside), BEFORE.spared + Footprint(*spared))
    assert broken(found(uses, [[life(1)], [life(2)]], after=after)) == seen


def test_workers_that_are_killed_and_started_again_leave_nothing_in_the_benchmark(tmp_path, monkeypatch):
    module = tmp_path / "waits_to_be_killed.py"
    module.write_text(
        "from freewheel_bench.parent import Parent\n"
        "def main():\n"
        "    parent = Parent()\n"
        "    parent.say(up=True)\n"
        "    parent.hear()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    taken = []
    with Workers(module.stem, {}, [Place()], forked=True) as workers:
        for _ in range(4):
            workers.collect("up", 60.0)
            taken.append(footprint(family(without=[workers.present[0].process.pid])))
            workers.kill(0)
            workers.start(0)
    assert [(one.processes, one.threads, one.descriptors) for one in taken[1:]] == [
        (taken[0].processes, taken[0].threads, taken[0].descriptors)
    ] * 3


def test_faults_may_come_at_an_even_pace():
    asked = Soak(kinds=(KILL,), faults=2000, every=1.0, workers=8)
    assert [fault.at for fault in asked.drawn()] == [float(second) for second in range(2000)]
    assert asked.seconds == pytest.approx(2015.0)
    assert len(Soak(minutes=1.0, every=2.0).drawn()) == 22


def test_a_worker_may_be_spared():
    assert {rank for fault in Soak(spare=2, seed=1).drawn() for rank in fault.ranks} == {0, 1, 3}
    with pytest.raises(ConfigError, match="--spare: worker 4 does not exist; there are workers 0 to 3"):
        Soak(spare=4)


def test_a_seed_draws_the_same_faults_and_leaves_the_end_alone():
    asked = Soak(kinds=(KILL, STORE), seed=5)
    faults = asked.drawn()
    assert faults == asked.drawn() != Soak(kinds=(KILL, STORE), seed=6).drawn()
    assert len(faults) == 45
    assert {fault.kind for fault in faults} == {KILL, STORE}
    assert max(fault.at for fault in faults) < 1 - 14 / 180


def test_mistakes_are_named(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for kinds, words in (((CUT,), "root|iproute2"), ((), "names no fault"), (("flood",), "flood")):
        with pytest.raises(ConfigError, match=words):
            Soak(kinds=kinds)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kinds", "faults"), [((KILL,), 5), ((STORE, KILL), 4)])
def test_real_kills_and_lost_stores_break_no_law(kinds, faults):
    report = soak(Soak(3, 0.4, kinds, faults, seed=faults), lambda what, share: None)
    assert [law for law in report.laws if not law.held] == []
    assert sum(report.faults.values()) == faults
    assert report.figures["killed"] == report.faults[KILL]
