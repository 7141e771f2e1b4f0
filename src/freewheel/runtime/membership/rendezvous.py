"""How the workers of a run find each other through the store.

The store (a c10d TCPStore of the launcher, torchrun or worker 0) holds the run's options, the model's
signature and the address book, all sealed (entries.py). It is needed to join, not to train: when it is lost,
training goes on, and when it comes back, empty, the workers enter themselves again.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from freewheel.errors import ConfigError, PeerLost, WorkerLost, first_line
from freewheel.fabric.secret import Forged, derive
from freewheel.fabric.tcp import TcpFabric
from freewheel.records.counters import Noticed
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options
from freewheel.runtime.membership.generation import GIVEN_UP, Beginning, Beginnings, Entry, Orphaned, TooLate
from freewheel.runtime.membership.hosts import STORE_S, BoundedStore, reach, within
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker.checks import first_difference, other_settings, signature
from freewheel.strategy import Strategy

POLL_S = 0.05
REGISTER_S = 1.0  # between two looks whether the store still knows this worker
SAY_S = 10.0  # how long to wait for others before a warning
LISTENS_S = 1.0  # how long a process that is there may take to accept a connection
MISSES = 2  # a store that did not answer so often in a row is lost
REFUSED = "it was refused: "  # begins the reason that a worker which was not let in leaves for the others

log = logging.getLogger("freewheel")

# The store of each place in this process, and how often it was used: a script may attach several times.
_stores: dict[Place, tuple[BoundedStore, int]] = {}


class Rendezvous:
    """One worker's view of the store."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place, self.timeout_s, self.most = place, timeout_s, place.world_size
        self._line, self._used = _stores.get(place) or (_connect(place, timeout_s), 0)
        _stores[place] = self._line, self._used + 1
        self._line.timeout_s = timeout_s
        self._prefix = f"freewheel/{place.attempt}/{self._used}"
        self._base = Entries(self._line, place.secret)
        self._store = self._base.under(self._prefix)  # later: the entries of its beginning
        self._beginning, self._late = Beginning(0, ()), False
        self._options = self._model = self._address = ""
        self._name = OPTIONS
        self.there, self._missed = True, 0  # whether the store answers
        self._probes: dict[int, socket.socket] = {}  # connections with workers that are out of reach

    def hurry(self) -> None:
        """Wait for the store only briefly from now on."""
        self._line.timeout_s = STORE_S

    def options(self) -> Options:
        """The launcher's options; without a launcher, the run's number that the first worker wrote."""
        if self.place.launched:
            if not self._base.check(OPTIONS):
                self._await_others()
            # A worker that joins from another host has options of its own.
            own = f"{OPTIONS}/worker/{self.place.rank}"
            self._name = own if self._base.check(own) else OPTIONS
            self._options = self._base.get(self._name)
            options = Options.read(self._options)
        else:  # nothing else that lies there is a launcher's word
            ours = json.dumps({"run": secrets.token_hex(16)})
            self._options = self._store.compare_set(OPTIONS, "", ours)
            options = Options(str(json.loads(self._options)["run"]))
        workers = options.workers or self.place.world_size
        self.most = max(options.most, options.workers, self.place.world_size)
        of_run = self._base.of_run(options.run)
        self._beginnings = Beginnings(of_run, self._prefix, workers, self.most)
        self._store = of_run.under(self._prefix)
        # The number is the key of all connections: nobody knows it without the secret, and a process's second
        # use of a run has another one.
        run = derive(self.place.secret, "run", options.run, str(self._used)).hex()
        return replace(options, run=run, tls=self.place.tls or options.tls)

    def _await_others(self) -> None:
        """Wait until workers of the run have entered themselves again into a store that was started anew."""
        log.warning("the rendezvous at %s was started anew; waiting for others", self.place.where)
        for _ in rounds(self.timeout_s):
            if self._base.check(OPTIONS):
                return time.sleep(2 * REGISTER_S)  # all of them
        raise WorkerLost(
            f"the rendezvous at {self.place.where} was started anew, and no worker of the run "
            f"came back to it within {self.timeout_s:g} s. If none is left, start a new run."
        )

    def incarnation(self) -> int:
        """Which life of this rank this is, from 1 on."""
        key = f"life/{self.place.rank}"
        # Lives that ended before they came this far count, too, where their launcher counts.
        counted = max(self._beginnings.started(self.place.rank) or 0, self.place.life)
        life = self._store.add(key, 1)
        return life if counted <= life else self._store.add(key, counted - life)

    def enter(self, life: int, strategy: Strategy) -> Entry:
        """Enter the run, or its next beginning if no worker is left to copy from."""
        entry = self._beginnings.enter(self.place.rank, life, strategy)
        self._beginning, self._late = entry.beginning, entry.late
        self._store = self._beginnings.store(entry.beginning)
        if entry.late and self.over():
            raise self.too_late(life)
        return entry

    def too_late(self, life: int) -> TooLate:
        """What to raise if the run is over.

        A later life is done, unless an earlier one had the answer and failed, or the script's next run goes
        on already.
        """
        had_it = str(self.place.rank) in (self._store.read("over") or "").split()
        after = self._base.under(f"freewheel/{self.place.attempt}/{self._used + 1}")
        goes_on = any(after.check(f"life/{peer}") for peer in range(self.most))
        return TooLate(self.place.rank, life > 1 and not had_it and not goes_on, had_it)

    def lost(self, strategy: Strategy) -> bool:
        """Whether this worker's beginning cannot go on, or another has begun."""
        newest = self._beginnings.newest()
        return newest != self._beginning or bool(self._beginnings.lost(newest, strategy))

    def living(self) -> list[int]:
        """The workers that may have weights to copy."""
        return [rank for rank, lives in self._beginnings.marks(self._beginning).items() if lives]

    def begun(self) -> bool:
        return self._store.read("begun") is not None

    def begin(self, life: int) -> None:
        """This worker trains: from now on it can be copied."""
        self._store.set(f"here/{self.place.rank}", str(life))
        self._store.set("begun", "yes")

    def check_model(self, model: nn.Module, settings: Mapping[str, Any]) -> str:
        """Compare model and settings with those of the first worker; return the digest of what both have."""
        mine, first = json.dumps([settings, signature(model)]), self._beginning.ranks[0]
        self._model = mine
        if self.place.rank == first and not self._late:
            self._store.set("model", mine)
        elif (theirs := self.hear("model", first)) != mine:
            (their_settings, their_model), (my_settings, my_model) = json.loads(theirs), json.loads(mine)
            if what := other_settings(their_settings, my_settings, f"worker {first}"):
                why, cure = f"it has {what}.", "Give all workers the same strategy, settings and optimizer."
            else:
                what = first_difference(their_model, my_model, f"at worker {first}")
                why = f"its model differs from worker {first}'s. {what}"
                cure = "Build the same model on every worker."
            self.leave(REFUSED + why)
            raise ConfigError(f"worker {self.place.rank} was refused: {why} {cure}")
        return hashlib.sha256(mine.encode()).hexdigest()[:32]

    def refused(self, members: Collection[int]) -> dict[int, str]:
        """Workers that were not let in, and why."""
        found = {}
        with contextlib.suppress(RuntimeError, OSError, Forged):
            for rank in set(range(self.most)).difference(members) if self.there else ():
                if (why := self._store.read(f"absent/{rank}") or "").startswith(REFUSED):
                    found[rank] = why
        return found

    def publish(self, host: str, port: int, incarnation: int) -> None:
        self._store.set(f"absent/{self.place.rank}", "")  # an earlier life may have said so
        self._address = json.dumps([host, port, incarnation])
        self._store.set(f"address/{self.place.rank}", self._address)

    def register(self, lives: Mapping[int, int], members: Collection[int]) -> dict[int, tuple[str, int]]:
        """Enter this worker, and what it knows of the run, again into a store that does not know it.

        Returned are the addresses of workers out of reach whose entry is no older than what was seen of them:
        they joined while this worker was out of reach, or called it until they were cut off.
        """
        found: dict[int, tuple[str, int]] = {}
        try:
            self._line.renew()
            store, rank = self._store, self.place.rank
            if store.read(f"address/{rank}") is None:
                # A restarted worker must not count as an earlier life than anybody has seen.
                self._beginnings.restore(self._beginning, lives)
                store.compare_set("model", "", self._model)
                self.begin(lives.get(rank, 1))
                store.set(f"address/{rank}", self._address)
                options = self._base if self.place.launched else self._base.under(self._prefix)
                options.compare_set(self._name, "", self._options)
                options.compare_set(OPTIONS, "", self._options)  # last, since with it the rest must be there
                text = "the rendezvous at %s was started anew; entered this worker again"
                log.warning(text, self.place.where)
            for peer in set(range(self.most)).difference(members):
                host, port, life = self.look_up(peer) or ("", 0, -1)
                if life >= lives.get(peer, 0) and not store.read(f"absent/{peer}"):
                    found[peer] = host, port
            self.there, self._missed = True, 0
        except (Forged, OSError, RuntimeError) as error:
            if isinstance(error, Forged) and not self._missed:  # an intruder writes there: nobody can join
                log.warning("%s", error)
            self._missed += 1
            self.there = self._missed < MISSES
        return found

    def look_up(self, peer: int) -> tuple[str, int, int] | None:
        """A peer's host, port and life; None: not known yet."""
        text = self._store.read(f"address/{peer}")
        return tuple(json.loads(text)) if text is not None else None

    def listens(self, peer: int) -> bool:
        """Whether a peer's process is there: the kernel takes connections for a stopped one, too."""
        try:
            if peer in self._probes:  # kept, since a stopped process takes only so many connections
                with contextlib.suppress(BlockingIOError):
                    if not self._probes[peer].recv(1):
                        raise ConnectionResetError
            elif (where := self.look_up(peer)) is not None:
                self._probes[peer] = socket.create_connection(where[:2], timeout=LISTENS_S)
                self._probes[peer].setblocking(False)
        except (RuntimeError, OSError):
            if peer in self._probes:
                self._probes.pop(peer).close()
        return peer in self._probes

    def coming(self, lives: Mapping[int, int]) -> list[int]:
        """Workers that our launcher has started again and that have not joined yet."""
        if self.there:
            with contextlib.suppress(RuntimeError, OSError):
                ranks = range(self.most)
                return [rank for rank in ranks if (self._beginnings.started(rank) or 0) > lives.get(rank, 0)]
            self.there = False  # without a store nobody can come
        return []

    def end(self, members: Sequence[int]) -> tuple[int, ...]:
        """Tell late workers that the run is over, and whose mean its answer is.

        Returned is what the first worker said: if it lacks this one, this one's answer is not the run's.
        """
        for probe in self._probes.values():
            probe.close()
        with contextlib.suppress(RuntimeError, OSError, Forged):  # a stranger's word is none
            self._line.renew()  # a slow call may have ended the connection a moment ago
            said = self._store.compare_set("over", "", " ".join(map(str, members)))
            return tuple(map(int, said.split()))
        return tuple(members)

    def over(self) -> bool:
        return self._store.read("over") is not None

    def leave(self, why: str) -> None:
        """Tell the others that this worker is not coming, and that it cannot be copied."""
        self.hurry()  # the store may be the reason, or may have gone with worker 0
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"absent/{self.place.rank}", why)
            if self._store.check(here := f"here/{self.place.rank}"):
                self._store.set(here, "0")

    def absent(self, peer: int) -> str | None:
        """Why a peer is not coming, if it or its launcher said so."""
        if self._beginnings.newest() != self._beginning:
            raise Orphaned("the others have begun again")
        if self._beginnings.started(peer) == 0:
            return GIVEN_UP
        return self._store.read(f"absent/{peer}") or None

    def first(self, key: str, text: str) -> str:
        """Write an entry unless it is there; return what was written first."""
        return self._store.compare_set(key, "", text)

    def hear(self, key: str, peer: int) -> str:
        """Wait for another worker's entry; WorkerLost: it is not coming."""
        waiting = Waiting(self.place.rank, self.timeout_s)
        for _ in rounds(self.timeout_s):
            if self._store.check(key):
                return self._store.get(key)
            why = self.absent(peer)
            if why is not None and not self._store.check(key):  # it may have said it and then left
                raise WorkerLost(f"worker {peer} is not coming: {why.rstrip('.')}.")
            waiting.say([peer])
        raise WorkerLost(
            f"worker {peer} has said nothing of {key!r} for {self.timeout_s:g} s. "
            "Start it, give all workers the same arguments, and look at its output."
        )

    def agree(self, key: str, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Write `mine`; the first worker decides by what all that begin wrote, and all get its decision."""
        ranks = self._beginning.ranks
        self._store.set(f"{key}/{self.place.rank}", json.dumps(mine))
        if self.place.rank == ranks[0]:
            said = [json.loads(self.hear(f"{key}/{rank}", rank)) for rank in ranks]
            self._store.set(key, json.dumps(decide(said)))
        return json.loads(self.hear(key, ranks[0]))


def rounds(timeout_s: float) -> Iterator[None]:
    """Yield every POLL_S until the time is over, once at least."""
    end_s = time.monotonic() + timeout_s
    yield
    while time.monotonic() < end_s:
        time.sleep(POLL_S)
        yield


class Waiting:
    """Warns, once, that a worker that joins waits for others."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._say_at_s = rank, timeout_s, time.monotonic() + SAY_S

    def say(self, peers: Sequence[int]) -> None:
        if time.monotonic() > self._say_at_s:
            self._say_at_s = math.inf
            log.warning(
                "worker %d waits for worker %s to join, for %g s at most. If their run has ended and its "
                "store was started anew, nobody comes",
                self._rank,
                ", ".join(map(str, peers)),
                self._timeout_s,
            )


async def stay_registered(
    rendezvous: Rendezvous, fabric: TcpFabric, events: Noticed, lack: Callable[[Mapping[int, str]], None]
) -> None:
    """Keep this worker's entry in the store until it leaves; `lack` is told who was not let in."""
    rendezvous.hurry()  # and ask in threads: where a network is cut, the store hangs
    there, where = True, rendezvous.place.where
    while True:
        await asyncio.sleep(REGISTER_S)
        if events.muted:
            return
        before, members = there, fabric.members
        missed = await asyncio.to_thread(rendezvous.register, dict(fabric.lives), members)
        for peer, address in missed.items():  # they came while this one could not be found
            with contextlib.suppress(PeerLost):
                if peer not in fabric.members:
                    await fabric.connect(peer, *address)
        if there := rendezvous.there:
            lack(await asyncio.to_thread(rendezvous.refused, fabric.members))
        if there != before:
            what = "answers again" if there else "does not answer; training goes on, nobody can join"
            text = f"the rendezvous at {where} {what}"
            events.note("store back" if there else "store lost", rendezvous.place.rank, text)
            if not there:
                log.warning("%s", text)


def launched_options(place: Place) -> Options | None:
    """What our launcher tells its workers; None: it did not start this one."""
    if place.launched:
        with contextlib.suppress(OSError, RuntimeError), contextlib.closing(_reach(place, STORE_S)) as store:
            entries = Entries(store, place.secret)
            if entries.check(OPTIONS):
                options = Options.read(entries.get(OPTIONS))
                return replace(options, tls=place.tls or options.tls)
    return None


def patiently(join: Callable[[], None], place: Place, timeout_s: float) -> None:
    """Join; if the store is lost meanwhile, join again through the next one."""
    end, used = time.monotonic() + timeout_s, _stores[place][1] if place in _stores else 0
    while True:
        try:
            return join()
        except DistError as error:
            if time.monotonic() > end or (place.rank == 0 and not place.hosted):
                raise WorkerLost(
                    f"worker {place.rank} lost the rendezvous at {place.where} while it joined "
                    f"({first_line(error)})."
                ) from None
            log.warning("the rendezvous was lost while worker %d joined; trying again", place.rank)
            time.sleep(POLL_S)
            _stores[place] = _connect(place, max(1.0, end - time.monotonic())), used


def _reach(place: Place, timeout_s: float) -> BoundedStore:
    """Connect with a store that is there already."""
    if place.meeting is not None:
        return BoundedStore(place.meeting.connect, None, timeout_s)
    return reach(place.host, place.port, timeout_s)


def _connect(place: Place, timeout_s: float) -> BoundedStore:
    """Connect for the first time: worker 0 may have to hold the store, others wait for it."""
    host, port = place.host, place.port
    if place.rank == 0 and not place.hosted and place.meeting is None:
        try:
            given_s = timedelta(seconds=timeout_s)
            store = within(timeout_s + 1, lambda: TCPStore(host, port, None, True, given_s, False))
        except RuntimeError as error:
            raise ConfigError(
                f"worker 0 cannot hold the rendezvous at {place.where} ({first_line(error)}). If the port is "
                "in use, set another MASTER_PORT, for all workers."
            ) from None
        return BoundedStore(lambda _: store, (host, port), timeout_s)
    end_s = time.monotonic() + timeout_s
    while True:
        try:  # a second more than there is: what it has to say is better than that it hangs
            return _reach(place, end_s - time.monotonic() + 1)
        except (OSError, RuntimeError) as error:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"worker {place.rank} cannot reach the rendezvous at {place.where} "
                    f"({first_line(error)}). Check MASTER_ADDR and MASTER_PORT, and worker 0."
                ) from None
            time.sleep(POLL_S)
