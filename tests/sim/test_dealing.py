"""Dealing in virtual time: every batch at least once, and once only but for those that are counted."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

import freewheel as fw
import lab
from freewheel.data.batches import Batch, Key
from freewheel.data.dealing import ASK, NOTE, TELL, Dealing
from freewheel.data.leases import LeaseQueue
from freewheel.data.ledger import Ledger
from freewheel.fabric.frames import NOTES
from freewheel.fabric.notes import whole
from freewheel.records.counters import Counters
from freewheel.sim.clock import Trace, VirtualLoop
from freewheel.sim.fabric import Wire
from freewheel.sim.links import Network


class Crew:
    """Workers that only draw batches: each sleeps through a step for every batch it is dealt."""

    def __init__(
        self,
        workers: int,
        batches: int,
        passes: int = 2,
        slow: dict[int, float] | None = None,
        seed: int = 0,
        parts: bool = False,
        silence_s: float = 0.3,
        sizes: dict[int, int] | None = None,
        late: dict[int, float] | None = None,
        drop: bool = False,
        leaves: dict[int, int] | None = None,
    ) -> None:
        self.loop = VirtualLoop()
        links = fw.Links(latency_ms=0.5)
        self.wire = Wire(self.loop, Network(links, workers), Trace(None), workers, 4.0)
        self.wire.silence_s = silence_s
        self.batches, self.passes, self.slow, self.parts = batches, passes, slow or {}, parts
        self.sizes, self.late, self.drop = sizes or {}, late or {}, drop
        self.leaves = leaves or {}
        """After how many batches of its first pass a worker leaves; it stays within reach."""
        self.random = random.Random(seed)
        self.used: Counter[tuple[int, int]] = Counter()
        self.by: Counter[tuple[int, int]] = Counter()
        """How many batches each worker used in each pass."""
        self.short = 0
        self.whose: dict[tuple[int, int], int] = {}
        self.waited_s: Counter[int] = Counter()
        """How long each worker waited for a batch at most."""
        self.ended: dict[int, float] = {}
        self.born: dict[int, float] = {}
        self.counters: list[Counters] = []
        self.lives: dict[int, list[asyncio.Task]] = {}
        self.dealings: dict[int, Dealing] = {}
        for rank in range(workers):
            self.start(rank)

    def start(self, rank: int) -> None:
        fabric, counters = self.wire.attach(rank), Counters()
        tasks = self.lives[rank] = []
        self.born[rank] = self.loop.time()
        self.counters.append(counters)

        def spawn(work):
            tasks.append(self.loop.create_task(work))
            return tasks[-1]

        dealing = self.dealings[rank] = Dealing(fabric, self.wire.life[rank], counters, spawn)
        key = Key(self.batches, 7, grid=self.batches * self.parts)
        spawn(self.train(rank, LeaseQueue(dealing, key, self.sizes.get(rank, 1), self.parts, self.drop)))

    async def train(self, rank: int, leases: LeaseQueue) -> None:
        await asyncio.sleep(self.late.get(rank, 0.0))
        for number in range(self.passes):
            leases.begin(number, last=number == self.passes - 1)
            while (batch := await self.drawn(rank, leases)) is not None:
                await asyncio.sleep(0.01 * self.slow.get(rank, 1.0) * self.random.uniform(0.8, 1.2))
                for place in range(batch.place, batch.stop):
                    self.used[batch.number, place] += 1
                    self.whose[batch.number, place] = rank
                self.by[rank, number] += 1
                self.short += batch.stop - batch.place < leases.size
                leases.finish(batch)
                if self.by[rank, 0] == self.leaves.get(rank):
                    await self.dealings[rank].give_back()
                    self.dealings[rank].part()
                    self.ended[rank] = self.loop.time()
                    return
            await leases.settle()
        self.ended[rank] = self.loop.time()

    async def drawn(self, rank: int, leases: LeaseQueue) -> Batch | None:
        since_s = self.loop.time()
        batch = await leases.draw()
        if batch is not None:
            self.waited_s[rank] = max(self.waited_s[rank], self.loop.time() - since_s)
        return batch

    def crash(self, rank: int) -> None:
        """Unless nobody would be left who has lived long enough to know anything."""
        now = self.loop.time()
        others = [born for one, born in self.born.items() if one != rank and one in self.wire.ends]
        if rank in self.wire.ends and (
            min(others, default=now) == 0 or now - min(others, default=now) > 0.02
        ):
            for task in self.lives.pop(rank):
                task.cancel()
            self.ended.pop(rank, None)
            self.wire.crash(rank)

    def restart(self, rank: int) -> None:
        if rank not in self.wire.ends:
            self.start(rank)

    def cut(self, *group: int) -> None:
        self.each_link(group, self.wire.cut_link)

    def heal(self, *group: int) -> None:
        self.each_link(group, self.wire.heal_link)

    def each_link(self, group, act) -> None:
        for one in group:
            for other in range(self.wire.workers):
                if other not in group:
                    act(one, other)

    def at(self, moment: float, act, *args) -> None:
        self.loop.call_at(moment, act, *args)

    def run(self) -> Crew:
        self.loop.call_at(200.0, self.loop.stop)
        self.loop.run_until_idle()
        assert set(self.ended) == set(self.wire.ends), "somebody hangs"
        for tasks in self.lives.values():
            for task in tasks:
                task.cancel()
        self.loop.run_until_idle()
        return self

    @property
    def again(self) -> int:
        return sum(counters.samples_again for counters in self.counters)

    def check(self) -> None:
        """The law."""
        everything = {(p, b) for p in range(self.passes) for b in range(self.batches)}
        assert set(self.used) == everything
        twice = sum(self.used.values()) - len(everything)
        assert twice <= self.again, f"{twice} used again, {self.again} counted"


def test_without_faults_every_batch_is_used_once_and_fast_workers_use_more():
    crew = Crew(4, 1000, slow={3: 10.0}).run()
    crew.check()
    assert crew.again == 0
    assert set(crew.used.values()) == {1}
    shares = [crew.by[rank, 0] for rank in range(4)]
    assert min(shares[:3]) > 6 * shares[3] > 0
    assert max(crew.ended.values()) < 1.1 * 2 * 1000 * 0.01 / 3.1


BRIEF = dict.fromkeys(range(4), 0.01)
"""Steps of 0.1 ms, where a question and its answer take ten times as long."""


@pytest.mark.parametrize("late", [{}, {0: 0.3}, {3: 0.3}, {1: 0.1, 2: 0.2}])
def test_in_a_short_pass_of_fast_steps_all_have_as_much(late):
    crew = Crew(4, 16, passes=4, slow=BRIEF, late=late).run()
    crew.check()
    assert crew.again == 0
    assert {crew.by[rank, number] for rank in range(4) for number in range(4)} == {4}


@pytest.mark.parametrize(
    ("workers", "length", "batch"), [(2, 50, 32), (3, 70, 32), (4, 100, 32), (4, 20, 32)]
)
def test_where_a_share_is_less_than_a_batch_somebody_begins(workers, length, batch):
    """Each kept a whole batch for each of the others, and nobody got any."""
    crew = Crew(workers, length, passes=2, sizes=dict.fromkeys(range(workers), batch)).run()
    crew.check()
    assert set(crew.used.values()) == {1}


def test_in_a_short_pass_a_slow_worker_has_less():
    crew = Crew(4, 64, passes=4, slow={3: 5.0}).run()
    crew.check()
    assert 0 < sum(crew.by[3, number] for number in range(1, 4)) < 3 * 64 / 12
    assert max(crew.ended.values()) < 1.15 * 4 * 64 * 0.01 / 3.2 + 0.2  # once, before its speed is known


def test_nobody_waits_long_for_a_worker_that_does_not_come():
    crew = Crew(4, 16, passes=20, slow=BRIEF, late={2: 30.0}).run()
    crew.check()
    assert sorted(crew.ended.values())[2] < 1.5
    assert max(crew.waited_s[rank] for rank in (0, 1, 3)) < 1.2


def test_a_slow_worker_s_step_is_not_waited_for():
    """Not even by those who are a thousand times faster and have nothing else to do."""
    crew = Crew(4, 16, passes=20, slow={**BRIEF, 3: 100.0}).run()
    crew.check()
    assert sorted(crew.ended.values())[2] < 4.0  # the last pass waits for what the slow one holds


@pytest.mark.parametrize("sizes", [{1: 4}, {0: 16, 1: 4, 2: 7}, {0: 50, 3: 3}])
def test_workers_with_different_batch_sizes_share_one_pass(sizes):
    crew = Crew(4, 1000, passes=3, sizes={**dict.fromkeys(range(4), 8), **sizes}).run()
    crew.check()
    assert crew.again == 0
    assert set(crew.used.values()) == {1}
    assert crew.short < 3 * 8  # at the ends of passes
    assert all(crew.by[rank, number] for rank in range(4) for number in range(3))


def crash_at_random(crew: Crew, seed: int, times: int, *, workers: int, within_s: float) -> None:
    """Let workers die and come back."""
    dice = random.Random(seed)
    for _ in range(times):
        rank, moment = dice.randrange(workers), dice.uniform(0, within_s)
        crew.at(moment, crew.crash, rank)
        crew.at(moment + dice.uniform(0.001, 0.5), crew.restart, rank)


@pytest.mark.parametrize("seed", lab.seeds(8, quick=4))
def test_different_batch_sizes_and_crashes(seed):
    crew = Crew(4, 900, passes=3, sizes={0: 5, 1: 8, 2: 3, 3: 16}, seed=seed)
    crash_at_random(crew, seed, 8, workers=4, within_s=2.0)
    crew.run().check()


def test_what_is_too_short_for_a_batch_may_be_left_out():
    crew = Crew(3, 100, passes=2, sizes={0: 8, 1: 8, 2: 8}, drop=True).run()
    assert crew.short == 0
    assert sum(crew.by.values()) == 2 * 12
    assert set(crew.used.values()) == {1}


def test_a_question_that_has_just_brought_nothing_to_use_is_asked_again():
    """Who waits for it in the moment in which it ends must not wait for ever, and everybody with it."""
    crew = Crew(1, 1, passes=0)
    leases = LeaseQueue(crew.dealings[0], Key(1, 8), size=2, drop=True)  # all there is is too short
    refill, asked, found = leases.refill, [], []

    async def counted() -> None:
        asked.append(len(leases.ready))
        assert len(asked) < 9
        await refill()

    async def draw() -> None:
        leases.begin(0)
        first = crew.loop.create_task(leases.refill())
        await asyncio.sleep(0)  # it asks
        await asyncio.sleep(0)  # it is answered
        leases.refill = counted
        await leases.fill(patient=False)
        await first
        found.append(leases.data.finished)

    crew.lives[0].append(crew.loop.create_task(draw()))
    crew.run()
    assert found == [1]


def test_other_data_are_refused_by_name():
    crew = Crew(2, 40, passes=1)
    crew.run()
    with pytest.raises(fw.ConfigError, match=r"worker 1's loader has 41 samples, .* worker 0's has 40"):
        LeaseQueue(crew.dealings[1], Key(41, 7))
    with pytest.raises(
        fw.ConfigError, match=r"worker 1's loader has 40 samples, shuffled with seed 3; worker 0's .* in or"
    ):
        LeaseQueue(crew.dealings[1], Key(40, 7, 1, 3))
    with pytest.raises(fw.ConfigError, match=r"1's .* in 10 batches; worker 0's has 40 samples, in"):
        LeaseQueue(crew.dealings[1], Key(40, 7, grid=10))


def kept(dealing: Dealing) -> int:
    """How much a worker remembers of what others told it."""
    each = (
        one.ledger.entries() + one.news.entries() + len(one.orders) + len(one.counted)
        for one in dealing.datasets.values()
    )
    return len(dealing.datasets) + sum(each)


def said(kind: str, k: int, key: Key) -> list[float]:
    """A message in good form that no worker would send, the k-th of its kind."""
    ledger = Ledger(key.length)
    for number in range(k, k + 3):
        ledger.finish((k, k), number, 2 * (k % 10), 2 * (k % 10) + 1)
    ledger.passes[k].held[1, k] = [(5, 7)]
    if kind == "tell":
        return [k, *key]
    if kind in ("dealt", "back"):
        return [0, *key, 1, k, *ledger.encode(held=kind == "dealt")]
    number = k if kind == "ask" else 10**9 - k
    flags = [k, number, 0, k % 2, 0, 1, 0, 1, 0, 0, 10**6]  # life, pass, since, wants, …, rate
    return [10**6 + k, *key, *flags, *ledger.encode(held=True)]


@pytest.mark.parametrize("kind", ["ask", "ask backwards", "tell", "dealt", "back"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_member_that_names_data_and_passes_without_end_fills_no_memory(kind, streams, monkeypatch):
    """And where it leaves the others' data alone, they are dealt as ever."""
    monkeypatch.setattr("freewheel.data.dealing.MOST_DATASETS", 5)
    monkeypatch.setattr("freewheel.data.ledger.MOST_ENTRIES", 400)
    tag = {"tell": TELL, "dealt": NOTE, "back": NOTE}.get(kind, ASK)
    found = []
    for messages in (500, 2000):
        crew = Crew(2, 300, passes=3)
        for k in range(messages):
            key = Key(300, 1000 + k if streams else 7)
            note = tuple(said(kind, k, key))
            crew.at(0.1 + k * 1e-3, crew.dealings[1].fabric.post, 0, tag, None, note)
        for moment in (1e-3 * k for k in range(0, 3000, 100)):
            crew.at(moment, lambda crew=crew, n=messages: found.append((n, kept(crew.dealings[0]))))
        if streams:
            crew.run().check()
            assert crew.again == 0
        else:
            crew.loop.call_at(5.0, crew.loop.stop)
            crew.loop.run_until_idle()
    most = {messages: max(many for one, many in found if one == messages) for messages in (500, 2000)}
    assert most[2000] < 1.2 * most[500] + 50
    assert most[2000] < 1500


def test_a_ledger_always_fits_into_a_message():
    """The newest passes are told; of those that are left out others take what they have not heard of."""
    ledger = Ledger(10**6)
    for number in range(40):
        for k in range(600):
            ledger.finish((k, 1), number, 3 * k, 3 * k + 1)
            ledger.passes[number].held[k, 1] = [(3 * k + 1, 3 * k + 2)]
    for held in (False, True):
        encoded = ledger.encode(held)
        assert len(encoded) < NOTES - 1000
        told = Ledger.decode(10**6, whole(encoded))
        assert 0 < len(told.passes) < 40
        assert max(told.passes) == 39
    Ledger.decode(10**6, whole(Ledger(10**6).encode()))


def test_leases_shrink_so_that_all_end_together():
    crew = Crew(4, 2000, passes=1, slow={3: 4.0})
    crew.run()
    assert max(crew.ended.values()) - min(crew.ended.values()) < 0.2


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_lost_worker_s_lease_is_dealt_again(victim, passes):
    crew = Crew(4, 300, passes)
    crew.at(0.4, crew.crash, victim)
    crew.run().check()
    assert 0 < crew.again < 150
    assert sum(crew.used.values()) - 300 * passes <= crew.again


def test_a_dealer_that_dies_takes_no_knowledge_with_it():
    crew = Crew(4, 2000, passes=1)
    crew.at(2.0, crew.crash, 0)
    crew.run().check()
    assert sum(crew.used.values()) - 2000 < 110  # at most what it and nobody else knew: its own last lease


@pytest.mark.parametrize("moment", [4.0, 4.33, 6.71, 8.05])
def test_nobody_waits_for_a_dealer_whose_link_is_cut(moment):
    """That it is gone is noticed only when it has been silent for two seconds."""
    crew = Crew(4, 8000, passes=1, slow={3: 3.0}, silence_s=2.0)
    crew.at(moment, crew.cut, 0)
    crew.at(moment + 5.0, crew.heal, 0)
    crew.run().check()
    assert max(crew.waited_s.values()) < 0.02


@pytest.mark.parametrize("seed", lab.seeds(25, quick=8))
def test_random_crashes_and_restarts(seed):
    workers = 2 + seed % 5
    crew = Crew(workers, 400, passes=3, slow={workers - 1: 3.0}, seed=seed)
    crash_at_random(crew, seed, 100 // 5, workers=workers, within_s=6.0)
    crew.run().check()


@pytest.mark.parametrize("seed", lab.seeds(10, quick=3))
def test_a_hundred_random_kills_in_one_run(seed):
    crew = Crew(8, 4000, passes=3, seed=seed)
    crash_at_random(crew, seed, 100, workers=8, within_s=15.0)
    crew.run().check()
    assert crew.again < 100 * 150


@pytest.mark.parametrize("seed", lab.seeds(10, quick=3))
def test_cuts_that_heal(seed):
    crew = Crew(5, 600, passes=3, seed=seed)
    dice = random.Random(seed)
    for k in range(4):
        group = dice.sample(range(5), dice.choice([1, 2]))
        crew.at(0.2 + 0.8 * k, crew.cut, *group)
        crew.at(0.2 + 0.8 * k + dice.uniform(0.05, 0.75), crew.heal, *group)
    crew.run().check()


def test_parts_that_cannot_reach_each_other_begin_with_different_batches():
    crew = Crew(4, 2000, passes=1)
    crew.at(0.1, crew.cut, 2, 3)
    crew.at(2.1, crew.heal, 2, 3)
    crew.run().check()
    assert sum(crew.used.values()) - 2000 <= 150


def test_a_worker_that_comes_back_finds_its_way_to_the_pass_of_the_others():
    crew = Crew(3, 300, passes=4)
    crew.at(2.2, crew.crash, 0)
    crew.at(2.4, crew.restart, 0)
    crew.run().check()
    assert crew.by[0, 3] > 50
    assert sum(crew.used.values()) < 1200 + 100


def test_in_parts_every_worker_keeps_to_its_own_whatever_the_speeds():
    crew = Crew(4, 40, passes=3, slow={1: 5.0}, parts=True).run()
    crew.check()
    assert crew.again == 0
    for number in range(3):
        owners = [crew.whose[number, batch] for batch in range(40)]
        turn = [(k - number) % 4 for k in range(4)]
        assert owners == [rank for rank in turn for _ in range(10)]  # and parts go round


@pytest.mark.parametrize("victim", [0, 2])
def test_what_a_lost_worker_leaves_of_its_part_is_dealt_to_the_others(victim):
    crew = Crew(4, 200, passes=3, parts=True)
    crew.at(0.25, crew.crash, victim)
    crew.run()
    crew.check()
    assert crew.by[victim, 0] < 50
    assert sum(crew.used[0, batch] for batch in range(200)) >= 200


@pytest.mark.parametrize("moment", [0.2, 0.25, 0.3, 0.34])
def test_what_is_lost_while_others_use_their_last_lease_is_dealt_before_the_last_pass_is_over(moment):
    crew = Crew(3, 100, passes=1, parts=True)
    crew.at(moment, crew.crash, 0)
    crew.run()
    crew.check()
    assert set(crew.used) == {(0, place) for place in range(100)}


@pytest.mark.parametrize(("leaver", "batches"), [(0, 5), (1, 5), (0, 32), (1, 32)])
def test_what_a_worker_that_leaves_leaves_of_its_part_is_dealt_while_it_is_within_reach(leaver, batches):
    crew = Crew(3, 99, passes=1, parts=True, leaves={leaver: batches}, slow={2: 1.3}).run()
    crew.check()
    assert crew.by[leaver, 0] == batches
    assert crew.used == dict.fromkeys(((0, place) for place in range(99)), 1)


def test_a_worker_that_joins_gets_a_part_of_the_next_pass():
    crew = Crew(4, 200, passes=4, parts=True)
    crew.at(0.1, crew.crash, 3)
    crew.at(0.6, crew.restart, 3)
    crew.run()
    crew.check()
    assert crew.by[3, 2] == 50


@pytest.mark.parametrize("strategy", ["allreduce", "dpsgd"])
def test_parts_are_even_where_all_step_together(strategy):
    simulation = lab.run(strategy, workers=4, steps=50, batches=40, gradients=False)
    assert set(simulation.used.values()) == {1}
    assert len(simulation.used) == 200


@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free"])
def test_simulated_workers_draw_what_they_are_dealt(strategy):
    faults = [fw.Fault.parse(text) for text in ("crash:0@0.35", "restart:0@0.5", "crash:2@0.9")]
    slow = fw.Compute(slow={3: 5})
    simulation = lab.run(
        strategy, workers=4, steps=150, batches=100, gradients=False, compute=slow, faults=faults
    )
    used = simulation.used
    newest = max(number for number, _ in used)
    assert newest >= 4
    assert {(p, b) for p in range(newest - 1) for b in range(100)} <= set(used)
    counted = sum(one.samples_again for one in simulation.counters())
    assert 0 < sum(used.values()) - len(used) <= counted
