"""The rendezvous goes and comes back, empty, at the worst moments of joining."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

import crew
import forked
from crew import Launcher
from freewheel.errors import ConfigError, WorkerLost
from freewheel.fabric.secret import Forged
from freewheel.runtime.membership import rendezvous
from freewheel.runtime.membership.generation import STARTS, Outlived
from freewheel.runtime.membership.hosts import left_behind, reach
from freewheel.runtime.membership.place import LAUNCHED, Place
from freewheel.runtime.membership.rendezvous import OPTIONS, Options, Rendezvous
from freewheel.strategies import resolve

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


class Left(Exception):
    """What ends a worker's first life."""


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(3)
    yield made
    made.forget()


def attach(place: Place) -> tuple[torch.nn.Module, crew.Worker]:
    torch.manual_seed(place.rank)
    model = torch.nn.Linear(4, 1)
    return model, crew.worker(place, model)[0]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(DEADLINE_S)
    return not any(thread.is_alive() for thread in threads)


def wait_until(true: Callable[[], bool]) -> None:
    end = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if true():
            return
        end.wait(0.02)
    raise AssertionError("waited in vain")


def test_a_store_that_is_lost_while_a_worker_joins_is_joined_when_it_is_back(launcher):
    members: dict[int, list[int]] = {}
    late = threading.Event()

    def work(place: Place) -> None:
        if place.rank == 0:
            assert late.wait(DEADLINE_S)
        _, worker = attach(place)
        with worker:
            members[place.rank] = worker.metrics()["members"]

    threads = launcher.run(work)
    wait_until(lambda: all(launcher.store.check([f"freewheel/0/0/life/{k}"]) for k in (1, 2)))
    launcher.lose()  # two wait for worker 0's model, which has not come
    launcher.host_again(launcher.options)
    late.set()
    assert ended(threads)
    assert members == {rank: [0, 1, 2] for rank in range(3)}


def test_one_that_comes_back_to_an_empty_store_does_not_take_itself_for_the_first(launcher):
    """Worker 0 dies with the store: the others know the run, the new store does not."""
    trained, gone, back = threading.Barrier(3), threading.Event(), threading.Barrier(3)
    found: dict[int, object] = {}

    def work(place: Place) -> None:
        model, worker = attach(place)
        with worker:
            trained.wait(DEADLINE_S)
            if place.rank == 0:
                gone.set()
                raise Left
            back.wait(DEADLINE_S)
            wait_until(lambda: worker.metrics()["members"] == [0, 1, 2])
            found[place.rank] = model.weight.detach().clone()
            back.wait(DEADLINE_S)

    def first(place: Place) -> None:
        with pytest.raises(Left):
            work(place)
        launcher.lose()
        launcher.host_again()
        model, worker = attach(crew.next_life(place))
        with torch.no_grad():
            model.weight.fill_(7.0)
        with worker:
            found[0] = (worker._agent.late, worker.metrics()["life"], model.weight.detach().clone())
            back.wait(DEADLINE_S)
            back.wait(DEADLINE_S)

    threads = launcher.run(lambda place: first(place) if place.rank == 0 else work(place))
    assert ended(threads)
    is_late, life, weights = found[0]
    assert is_late
    assert life == 2
    assert torch.equal(weights, found[1])  # not its own: a living worker's
    assert torch.equal(found[1], found[2])


def test_workers_that_missed_each_other_meet_by_the_address_book(launcher):
    """Worker 2 comes back when the book has lost worker 1's address; nobody told either of the other."""
    trained, gone = threading.Barrier(3), threading.Event()
    members: dict[int, list[int]] = {}
    met = threading.Barrier(3)

    def stay(worker: crew.Worker, rank: int) -> None:
        wait_until(lambda: worker.metrics()["members"] == [0, 1, 2])
        members[rank] = worker.metrics()["members"]
        met.wait(DEADLINE_S)

    def work(place: Place) -> None:
        _, worker = attach(place)
        with worker:
            trained.wait(DEADLINE_S)
            if place.rank == 2:
                raise Left
            assert gone.wait(DEADLINE_S)
            stay(worker, place.rank)

    def last(place: Place) -> None:
        with pytest.raises(Left):
            work(place)
        launcher.store.delete_key("freewheel/0/0/address/1")
        _, worker = attach(crew.next_life(place))
        with worker:
            gone.set()
            stay(worker, 2)

    threads = launcher.run(lambda place: last(place) if place.rank == 2 else work(place))
    assert ended(threads)
    assert members == {rank: [0, 1, 2] for rank in range(3)}


def test_a_connection_with_one_that_had_come_back_is_made_again():
    """Worker 1 was called by it, has to call when the connection breaks, and knows its old address only."""
    trained, back, broken = threading.Barrier(2), threading.Event(), threading.Barrier(2)
    launcher = Launcher(2)

    def stay(worker: crew.Worker) -> None:
        broken.wait(DEADLINE_S)
        wait_until(lambda: worker.metrics()["members"] == [0, 1])
        broken.wait(DEADLINE_S)

    def first(place: Place) -> None:
        with contextlib.suppress(Left), attach(place)[1]:
            trained.wait(DEADLINE_S)
            raise Left
        with attach(crew.next_life(place))[1] as worker:
            back.set()
            stay(worker)

    def second(place: Place) -> None:
        with attach(place)[1] as worker:
            trained.wait(DEADLINE_S)
            assert back.wait(DEADLINE_S)
            fabric = worker._agent.fabric
            epoch = fabric.epoch(0)
            worker._agent.loop.call_soon_threadsafe(crew.cut, fabric, 0)
            wait_until(lambda: fabric.epoch(0) > epoch)
            stay(worker)

    assert ended(launcher.run(lambda place: second(place) if place.rank else first(place)))
    launcher.forget()


def test_lives_that_ended_before_they_joined_are_counted_and_not_waited_for(launcher):
    """Killed while they imported torch, say: at the end nobody is still to come."""
    launcher.of_run.set(f"{STARTS}/0", "3")
    one = Rendezvous(launcher.places[0], DEADLINE_S)
    one.options()
    assert one.incarnation() == 3
    assert one.coming({0: 3}) == []
    assert one.incarnation() == 4
    launcher.forget()


def test_who_says_something_and_then_leaves_is_heard(launcher, monkeypatch):
    one, other = (Rendezvous(place, DEADLINE_S) for place in launcher.places[:2])
    for each in (one, other):
        each.options()
        each.enter(1, resolve("allreduce"))
    absent = one.absent

    def meanwhile(peer: int) -> str | None:  # between looking for the word and looking for who is to say it
        other._store.set("word", "a damaged shard")
        other.leave("it could not go on")
        return absent(peer)

    monkeypatch.setattr(one, "absent", meanwhile)
    assert one.hear("word", 1) == "a damaged shard"
    with pytest.raises(WorkerLost, match="worker 1 is not coming: it could not go on"):
        one.hear("another word", 1)
    launcher.forget()


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_looking_at_the_store_again_and_again_leaves_no_connection_and_no_thread(launcher, monkeypatch):
    """The garbage collector is off: what is let go must be gone at once. The store is in this process."""
    monkeypatch.setattr(rendezvous, "REGISTER_S", 0.002)
    looks, counted = [0, 0, 0], threading.Barrier(4)
    register = Rendezvous.register

    def counting(one: Rendezvous, *arguments: object) -> object:
        looks[one.place.rank] += 1
        return register(one, *arguments)

    monkeypatch.setattr(Rendezvous, "register", counting)

    def work(place: Place) -> None:
        _, worker = attach(place)
        with worker:
            counted.wait(DEADLINE_S)
            counted.wait(DEADLINE_S)

    threads = launcher.run(work)
    counted.wait(DEADLINE_S)
    gc.collect()
    gc.disable()
    try:
        wait_until(lambda: min(looks) > 5)
        before, begun = (handles(), threading.active_count()), min(looks)
        wait_until(lambda: min(looks) > begun + 100)
        now = (handles(), threading.active_count())
    finally:
        gc.enable()
        counted.wait(DEADLINE_S)
    assert ended(threads)
    assert now[0] <= before[0] + 3, "a call that is under way has a handle or two"
    assert now[1] <= before[1] + 6, "and a thread"


def test_a_store_that_is_lost_is_noticed_without_asking_it_and_used_again_on_one_connection(launcher):
    one = Rendezvous(launcher.places[0], DEADLINE_S)
    one.options()
    one.publish("127.0.0.1", 1, 1)
    one._model = "[]"
    line = one._line
    assert line.alive()
    launcher.lose()
    wait_until(lambda: not line.alive())
    launcher.host_again()
    one.register({0: 1}, members=(0,))
    assert line.alive()
    assert one._store.check("address/0"), "it has entered itself again"
    before = handles()
    for _ in range(20):
        one.register({0: 1}, members=(0,))
    assert handles() == before


def test_what_a_stranger_writes_into_the_store_is_not_used(launcher, caplog):
    """He knows all names and all texts that were ever there; the secret he does not know."""
    one, two = (Rendezvous(place, DEADLINE_S) for place in launcher.places[:2])
    for rank, each in enumerate((one, two)):
        each.options()
        each.enter(1, resolve("adpsgd"))
        each._model = "[]"
        each.publish("127.0.0.1", 1000 + rank, 1)
    store, name = launcher.store, "freewheel/0/0/address/1"
    sealed = bytes(store.get(name)).decode()
    for forged in (
        '["10.6.6.6", 666, 9]',
        sealed[:-2] + "9]",
        bytes(store.get("freewheel/options")).decode(),
    ):
        store.set(name, forged)
        assert one.look_up(1) is None
        assert one.register({0: 1}, members=(0,)) == {}
    store.set("freewheel/0/0/address/0", sealed)  # a good entry, under another name
    assert two.look_up(0) is None
    store.set(f"{STARTS}/1", "0")
    store.set("freewheel/0/0/absent/1", "it is gone")
    assert one.absent(1) is None
    assert one.coming({0: 1, 1: 1}) == []
    two.register({1: 1}, members=(1,))
    assert one.look_up(1) == ("127.0.0.1", 1001, 1), "whose place it was has taken it back"
    assert "is not sealed with this worker's secret" in caplog.text
    options = json.loads(launcher.options)
    for changed in ({"tls": None}, {"bind": "0.0.0.0"}, {"folder": "/elsewhere"}):
        store.set("freewheel/options", json.dumps(options | changed))
        with pytest.raises(ConfigError, match="'freewheel/options' is not sealed with this worker's secret"):
            Rendezvous(crew.next_life(launcher.places[2]), 5.0).options()


def test_an_entry_of_another_run_with_the_same_secret_does_not_fit(launcher):
    mine, other = launcher.of_run, launcher.entries.of_run("another")
    other.set("over", "yes")
    assert mine.read("over") is None
    with pytest.raises(Forged):
        mine.get("over")
    with pytest.raises(Forged):
        mine.compare_set("over", "", "no")
    assert other.read("over") == "yes"


def test_those_who_count_at_once_are_all_counted(launcher):
    threads = [
        threading.Thread(target=lambda: [launcher.of_run.add("count", 1) for _ in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert ended(threads)
    assert launcher.of_run.number("count") == 80


def test_a_worker_without_a_launcher_believes_a_store_nothing_but_the_number_of_its_run():
    """torchrun's, say, with no secret given: whoever reaches it can write there."""
    place = crew.places(1)[0]
    place = replace(place, world_size=2, secret=b"")
    one = Rendezvous(place, DEADLINE_S)
    evil = {
        "run": "00",
        "bind": "0.0.0.0",
        "folder": "/elsewhere",
        "tls": "/none",
        "tensorboard": "/elsewhere",
    }
    one._base.set(OPTIONS, json.dumps(evil))
    one._base.under("freewheel/0/0").set(OPTIONS, json.dumps(evil))
    options = one.options()
    assert options == Options(options.run)
    crew.forget(place)


def test_a_worker_that_was_given_keys_uses_them_whatever_the_store_says(launcher):
    launcher.entries.set(OPTIONS, json.dumps(json.loads(launcher.options) | {"tls": None}))
    keyed = replace(launcher.places[0], tls="/the/keys")
    assert Rendezvous(keyed, DEADLINE_S).options().tls == "/the/keys"
    crew.forget(keyed)


# -- a store that hangs --


HOSTED = """
import sys, threading
from freewheel.runtime.membership.entries import Entries
from freewheel.runtime.membership.hosts import host_store
store, _, port = host_store(None)
Entries(store, b"").set("freewheel/options", sys.argv[1])
print(port, flush=True)
threading.Event().wait()
"""


class Stoppable:
    """A store in a process of its own, which can be stopped and go on."""

    def __init__(self) -> None:
        options = json.dumps({"run": secrets.token_hex(16), "workers": 2})
        self.process = forked.start("-c", HOSTED, options, stderr=2)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.tests = 0

    def places(self) -> list[Place]:
        attempt = str(self.tests)
        return [
            Place(k, 2, 2, "127.0.0.1", self.port, hosted=True, launched=True, attempt=attempt)
            for k in range(2)
        ]

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        wait_until(lambda: self.state() == "T")  # from now on it does nothing

    def state(self) -> str:
        """What the system says of the process."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2][0]

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def hosted() -> Iterator[Stoppable]:
    made = Stoppable()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def stoppable(hosted, monkeypatch) -> Iterator[Stoppable]:
    monkeypatch.setattr(rendezvous, "STORE_S", 0.5)
    monkeypatch.setattr(rendezvous, "REGISTER_S", 0.1)
    hosted.tests += 1
    yield hosted
    hosted.go_on()
    wait_until(lambda: not left_behind)  # torch says much of stores that are killed while one waits
    crew.forget(*hosted.places())


def lasting() -> set[threading.Thread]:
    """Threads for which the end of a process would wait."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def test_a_store_that_hangs_holds_up_nobody_and_is_used_again_when_it_goes_on(stoppable):
    book, mine = reach("127.0.0.1", stoppable.port, DEADLINE_S), f"freewheel/{stoppable.tests}/0/address/1"
    joined, before = threading.Barrier(3), lasting()

    def work(place: Place) -> None:
        _, worker = attach(place)
        with worker:
            joined.wait(DEADLINE_S)
            wait_until(lambda: not worker._store.there)  # it hangs, and that is noticed
            joined.wait(DEADLINE_S)
            wait_until(lambda: worker._store.there)
            joined.wait(DEADLINE_S)
            joined.wait(DEADLINE_S)  # and now it hangs again: the end does not wait for it

    threads = [threading.Thread(target=work, args=(place,)) for place in stoppable.places()]
    for thread in threads:
        thread.daemon = True
        thread.start()
    joined.wait(DEADLINE_S)
    stoppable.stop()
    joined.wait(DEADLINE_S)
    stoppable.go_on()
    book.delete_key(mine)
    wait_until(lambda: book.check([mine]))  # worker 1 has entered itself again
    joined.wait(DEADLINE_S)
    stoppable.stop()
    joined.wait(DEADLINE_S)
    assert ended(threads)
    assert not lasting() - before


def test_a_store_that_hangs_is_not_asked_again_and_again(stoppable):
    one = Rendezvous(stoppable.places()[0], DEADLINE_S)
    one.options()
    one.publish("127.0.0.1", 1, 1)
    one.hurry()
    stoppable.stop()
    before = len(left_behind)
    for missed in range(1, 4):
        assert one.register({0: 1}, members=(0,)) == {}
        assert one.there == (missed < 2), "one miss is none"
    assert len(left_behind) == before + 1
    assert one.coming({0: 1}) == []
    one.leave("the test is over")
    stoppable.go_on()
    wait_until(lambda: len(left_behind) <= before)
    one.register({0: 1}, members=(0,))
    assert one.there


def test_who_joins_a_store_that_hangs_does_not_wait_for_ever(stoppable):
    stoppable.stop()
    with pytest.raises(
        ConfigError, match=r"worker 1 cannot reach the rendezvous at .*no answer within 1\.2 s"
    ):
        Rendezvous(stoppable.places()[1], 0.2)


def test_only_the_store_of_our_launcher_is_known_to_have_options_before_workers():
    """Another launcher may be started by a worker of ours, with its environment."""
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert not Place.read(there).launched
    assert Place.read({**there, LAUNCHED: "127.0.0.1:29500"}).launched
    assert not Place.read({**there, LAUNCHED: "127.0.0.1:29501"}).launched


def test_the_latest_life_that_anybody_has_seen_counts(launcher):
    """Else one that comes back would be taken for a life that is dead."""
    seen = [{0: 1, 1: 1, 2: 3}, {0: 1, 1: 1, 2: 5}, {0: 1, 1: 1, 2: 4}]
    known = [Rendezvous(place, 5.0) for place in launcher.places]
    for rank, one in enumerate(known):
        one.options()
        one.publish("127.0.0.1", 1, 1)
        one._model = "[]"
        launcher.store.delete_key(f"freewheel/0/0/address/{rank}")
    for rank in range(3):
        launcher.store.delete_key(f"freewheel/0/0/life/{rank}")
    for one, lives in zip(known, seen, strict=True):
        one.register(lives, members=(0, 1, 2))
    second = Rendezvous(launcher.places[2], 5.0)
    second.options()
    assert second.incarnation() == 1  # of a second use of the run
    assert known[2].incarnation() == 6


@pytest.mark.parametrize("rank", [0, 1])  # the higher one calls; the other finds it in the store
def test_an_earlier_life_that_is_still_there_ends_and_says_nothing_any_more(rank, tmp_path):
    launcher, trained, back = Launcher(2), threading.Barrier(3), threading.Event()
    found: dict[str, object] = {}

    def train(life: str, place: Place) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        worker, optimizer = crew.worker(place, model, folder=tmp_path)
        try:
            with worker:
                if life != "new":
                    trained.wait(DEADLINE_S)
                while not (life != "old" and back.is_set()):
                    model(torch.ones(2, 4)).square().mean().backward()
                    optimizer.step()
                    threading.Event().wait(0.01)
        except BaseException as error:
            found[life] = error
        else:
            found[life] = worker.metrics()["members"]

    def begin(life: str, place: Place) -> threading.Thread:
        thread = threading.Thread(target=train, args=(life, place), daemon=True)
        thread.start()
        return thread

    other = begin("other", launcher.places[1 - rank])
    old = begin("old", launcher.places[rank])
    trained.wait(DEADLINE_S)
    new = begin("new", crew.next_life(launcher.places[rank]))
    assert ended([old])
    assert isinstance(found["old"], Outlived), found
    back.set()
    assert ended([other, new])
    assert found["other"] == found["new"] == [0, 1]
    assert launcher.of_run.read(f"freewheel/0/0/here/{rank}") == "2"  # it has not said that nobody is there
    assert not [path for path in tmp_path.glob("events-*") if "Outlived" in path.read_text()]
    launcher.forget()


def test_a_store_that_is_gone_is_not_asked(launcher, capfd):
    """Torch's store would find out with a stack of its own on stderr, for each call."""
    store = reach("127.0.0.1", launcher.port, 5.0)
    assert not store.check(["nothing"])
    launcher.lose()
    for call in (
        lambda: store.check(["a"]),
        lambda: store.set("a", "b"),
        lambda: store.compare_set("a", "", "b"),
    ):
        with pytest.raises(DistNetworkError):
            call()
    assert "c10d" not in capfd.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_others_says_so(launcher, rank, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "SAY_S", 0.1)
    worker, _ = crew.worker(launcher.places[rank], torch.nn.Linear(4, 1), join_timeout_s=1.0)
    with pytest.raises(WorkerLost), worker:
        pass
    others = {0: "1, 2", 1: "0"}[rank]
    assert caplog.text.count(f"worker {rank} waits for worker {others} to join, for 1 s at most") == 1
