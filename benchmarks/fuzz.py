"""What strangers, the line and members can send: python benchmarks/fuzz.py [--frames 1000000] [--seed 0]

First two real workers train with each strategy, and what they say to each other is written down. Then a third
one, with all its services running, is sent changed versions of it:

- *strangers* have no secret: greetings of others, byte for byte or changed;
- *the line* has none either, and lies between two who have: frames damaged, repeated, moved, left out, or of
  another connection;
- *members* have it: good seals on notes, tags and vectors that no worker would send.

None may raise what nobody expects, take memory that stays, or change a weight. (What a member sends in order
and in good form is applied: it is a member. Its vectors are zeros here, as the weights are.)
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import random
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from freewheel import strategies
from freewheel.fabric import frames, secret
from freewheel.fabric.connection import Connection, Goodbye
from freewheel.fabric.frames import BadFrame, Kind
from freewheel.fabric.handshake import CHALLENGE, Identity, Line, prove
from freewheel.fabric.secret import Seals
from freewheel.fabric.tcp import TcpFabric
from freewheel.fabric.windows import HOST, STREAM
from freewheel.records.counters import Counters, Noticed
from freewheel.runtime.membership.place import Place
from freewheel.runtime.worker import joining
from freewheel.runtime.worker.agent import Agent
from freewheel.runtime.worker.attach import Worker
from freewheel.runtime.worker.inventory import Inventory
from freewheel.runtime.worker.settings import Settings
from freewheel_bench.workers import free_port

SIZE, WORLD, PEER = 48, 3, 1
LONGEST = SIZE + 2  # gradients, a mark and the loss
KEY = bytes(range(32))
STRATEGIES = ("adpsgd", "allreduce", "asgd", "dasgd", "nodelay_free")
EXPECTED = {"refused", "cut off", "taken", "left"}
UNREAD_BYTES = 1 << 20
MB = 1 << 20


class Said(NamedTuple):
    """A frame of a worker, before it is sealed."""

    kind: Kind
    tag: tuple[str | int, ...]
    note: tuple[float, ...]
    dtype: torch.dtype | None
    numel: int


class Bytes:
    """A transport on which given bytes come, and then nothing; what is written is dropped."""

    local = True
    heard_s = 0.0

    def __init__(self, data: bytes = b"") -> None:
        self._data = data

    def feed(self, data: bytes) -> None:
        """More of them, in place of what is left."""
        self._data = data

    async def read(self, into: memoryview) -> None:
        """The next ones."""
        if len(into) > len(self._data):
            raise EOFError("the connection was closed")
        into[:], self._data = self._data[: len(into)], self._data[len(into) :]

    async def write(self, data: memoryview | bytes) -> None:
        """Nobody reads it."""

    def write_now(self, data: bytes) -> int:
        """Nobody reads it."""
        return len(data)

    def blocking(self) -> None:
        """Short vectors only."""

    def close(self) -> None:
        """Nothing is open."""


# -- what workers say --


def traffic(name: str) -> list[Said]:
    """What two workers say in a short run with a strategy."""
    said: list[Said] = []
    frame = Identity.frame

    def heard(me: Identity, kind: Kind, tag=(), note=(), dtype=None, numel=0) -> bytes:  # type: ignore[no-untyped-def]
        said.append(Said(kind, tag, tuple(map(float, note)), dtype, numel))
        return frame(me, kind, tag, note, dtype, numel)

    port, shared = free_port(), secret.make()
    failures: list[BaseException] = []

    def train(rank: int) -> None:
        model = nn.Linear(SIZE, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        place = Place(rank, 2, 2, "127.0.0.1", port, secret=shared)
        data = torch.utils.data.TensorDataset(torch.randn(64, SIZE))
        try:
            with Worker(model, optimizer, strategies.resolve(name), place=place) as worker:
                for (x,) in worker.loader(data, 4, epochs=1):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                worker.consensus()
        except BaseException as error:
            failures.append(error)

    with mock.patch.object(Identity, "frame", heard):
        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return said


def bytes_of(said: Said, peer: int = PEER) -> tuple[bytes, bytes]:
    """A frame up to its seal, and its vector."""
    width = said.dtype.itemsize if said.dtype is not None else 0
    return frames.pack(said.kind, peer, 1, *said[1:]), bytes(width * said.numel)


# -- strangers, and the line --


async def strangers(count: int, rng: random.Random) -> Counter[str]:
    """Greetings of those who have no secret."""
    found = Counter[str]()
    mine = rng.randbytes(32)
    good = CHALLENGE.pack(frames.MAGIC, frames.PROTOCOL, mine) + secret.derive(KEY, "caller", mine, bytes(32))
    for _ in range(count):
        data = bytearray(good)  # it was good once, for another number of the other side
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            await prove(Bytes(bytes(data)), KEY, caller=False)
            found["LET IN"] += 1
        except (BadFrame, EOFError) as error:
            found["refused" if isinstance(error, BadFrame) else "cut off"] += 1
        except Exception as error:
            found[f"CRASHED: {type(error).__name__}: {error}"] += 1
    return found


def on_the_line(corpus: list[Said], rng: random.Random) -> bytes:
    """Two good frames of a connection after what somebody on the way has done to them."""
    said = [rng.choice(corpus) for _ in range(2)]
    ours, heads = Seals(KEY), [bytes_of(one) for one in said]
    whole = []
    for head, vector in heads:
        whole.append(head + ours.next(head) + vector)
    first, second = whole
    way = rng.randrange(8)
    if way == 0:  # in another order, or one is missing
        return second + first
    if way == 1:  # of another connection
        head, vector = heads[0]
        return head + Seals(rng.randbytes(32)).next(head) + vector
    data = bytearray(first)
    end = len(first) - len(heads[0][1])  # a vector's own finite numbers nobody can tell from others
    if way == 2:  # bits
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    elif way == 3:  # bytes
        at = rng.randrange(end)
        size = min(rng.randrange(1, 9), end - at)
        data[at : at + size] = rng.randbytes(size)
    elif way == 4:  # the end is missing
        del data[rng.randrange(len(data)) :]
    elif way == 5:  # something in between
        at = rng.randrange(1, end)
        data[at:at] = rng.randbytes(rng.randrange(1, 32))
    elif way == 6:  # half of this, half of that
        at = rng.randrange(1, end)
        data[at:] = second[at // 2 :]
    elif said[0].dtype is torch.float32 and said[0].numel:  # numbers that are none
        at = end + 4 * rng.randrange(len(heads[0][1]) // 4)
        data[at : at + 4] = struct.pack("=f", rng.choice([math.nan, math.inf, -math.inf]))
    else:
        data[rng.randrange(end)] ^= 0xFF
    return bytes(data) if not data.startswith(first) else second + first


def connection(fabric: TcpFabric, transport: Bytes, kind: str, pid: int) -> Connection:
    """With the peer that the fuzzer plays."""
    line = Line(
        transport, Seals(KEY), Seals(KEY), fabric.me, fabric.counters, "fuzz", False, PEER, 1, kind, pid
    )
    return Connection(fabric, line, fabric._offended)


async def the_line(count: int, corpus: list[Said], rng: random.Random) -> Counter[str]:
    """Frames that somebody has changed on the way to a worker."""
    found = Counter[str]()
    fabric = TcpFabric(Identity(KEY, 0, WORLD, 1, "fuzz", "m", LONGEST), Counters())
    delivered: list[object] = []
    fabric.deliver = delivered.append  # type: ignore[method-assign, assignment]
    for _ in range(count):
        link = connection(fabric, Bytes(on_the_line(corpus, rng)), STREAM, 0)
        fabric._connections[PEER] = link
        try:
            await link.read()
        except (BadFrame, EOFError, OSError) as error:
            found["refused" if isinstance(error, BadFrame) else "cut off"] += 1
        except Goodbye:
            found["APPLIED"] += 1
        except Exception as error:
            found[f"CRASHED: {type(error).__name__}: {error}"] += 1
        if delivered:
            found["APPLIED"] += 1
            delivered.clear()
    fabric._connections.clear()
    await fabric.close()
    return found


# -- members --


def changed(said: Said, corpus: list[Said], rng: random.Random) -> Said:
    """What no worker says, in good form: other numbers, more or fewer of them, another's tag or vector."""
    note, tag, dtype, numel = list(said.note), list(said.tag), said.dtype, said.numel
    for _ in range(rng.randrange(1, 3)):
        way = rng.randrange(7)
        if way == 0 and note:
            note[rng.randrange(len(note))] = number(rng)
        elif way == 1 and note:
            del note[rng.randrange(len(note)) :]
        elif way == 2:
            note[len(note) :] = [number(rng) for _ in range(rng.randrange(1, 5))]
        elif way == 3:
            note = list(rng.choice(corpus).note)
        elif way == 4 and tag:
            tag[rng.randrange(len(tag))] = rng.choice([*rng.choice(corpus).tag, 0, "x"])
        elif way == 5:
            dtype = torch.float32 if rng.random() < 0.5 else None
            numel = rng.randrange(SIZE + 1) if dtype is not None else 0
        else:
            return said._replace(kind=rng.choice(list(Kind)))
    return Said(said.kind, tuple(tag) or ("x",), tuple(note), dtype, numel)


def number(rng: random.Random) -> float:
    """Ranks, counts, and what is none of them."""
    odd = [-1, 0.5, math.nan, math.inf, -math.inf, 2**31, 2**53, 2**63, 1e300, 99, 1e-9]
    return float(rng.choice([rng.randrange(-2, 8), rng.randrange(2**20), *odd]))


class Victim:
    """A worker with everything that listens in one, and a peer that the fuzzer plays."""

    def __init__(self, name: str) -> None:
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inventory = Inventory(model, optimizer)
        self.replica = inventory.replica
        me = Identity(KEY, 0, WORLD, 1, "fuzz", "m", LONGEST)
        strategy = strategies.resolve(name)
        self.agent = Agent(me, inventory, strategy, Settings(), lambda: 0.0, Noticed())
        self.agent.call(joining.start(self.agent))
        self.fabric = self.agent.fabric
        self.fabric._most_unread = UNREAD_BYTES
        self.link: Connection | None = None

    async def attack(self, count: int, corpus: list[Said], rng: random.Random) -> Counter[str]:
        """Send it so many frames; how they ended."""
        found = Counter[str]()
        before = rng.choice(corpus)
        for _ in range(count):
            link = self._connected()
            again = rng.random() < 0.1  # the same once more, in good form
            before = said = before if again else changed(rng.choice(corpus), corpus, rng)
            try:
                head, vector = bytes_of(said)
            except (ValueError, OverflowError, struct.error):
                continue
            ours = self._ours
            link.transport.feed(head + ours.next(head) + vector)  # type: ignore[attr-defined]
            found[await self._read(link)] += 1
            if self.agent.failure is not None:
                found[f"CRASHED: {self.agent.failure!r}"] += 1
                self.agent.failure = None
        return found

    def _connected(self) -> Connection:
        link = self.link
        if link is None or self.fabric._connections.get(PEER) is not link:
            self._ours = Seals(KEY)
            link = self.link = connection(self.fabric, Bytes(), HOST, 1)
            self.fabric._connections[PEER] = link
            link.task = self.fabric._spawn(link.write())
            self.fabric.gain(PEER)
        return link

    async def _read(self, link: Connection) -> str:
        how = "taken"
        try:
            await link.read()
        except EOFError:
            pass  # all of it was read
        except (BadFrame, OSError, Goodbye) as error:
            self.fabric._unlink(link, *self.fabric._ended(link, error))
            how = "left" if isinstance(error, Goodbye) else "refused"
        except Exception as error:
            self.fabric._unlink(link, "crashed", "died")
            how = f"CRASHED: {type(error).__name__}: {error}"
        for _ in range(3):  # whoever it was for
            await asyncio.sleep(0)
        cut = self.fabric._connections.get(PEER) is not link
        return "refused" if how == "taken" and cut else how

    def close(self) -> bool:
        """End it; whether all weights are what they were."""
        self.agent.close("the test is over")
        self.replica.boundary()  # corrections that were pending
        return bool((self.replica.weights == 0).all())


class Tracebacks(logging.Handler):
    """What the log has of errors that nobody expected."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        if record.exc_info:
            self.found[f"TRACEBACK: {record.getMessage()}: {record.exc_info[1]!r}"] += 1


@contextmanager
def quiet() -> Iterator[Tracebacks]:
    """Nothing is printed; tracebacks are counted."""
    logger, handler = logging.getLogger("freewheel"), Tracebacks()
    before = logger.propagate, logger.handlers[:]
    logger.handlers, logger.propagate = [handler], False
    try:
        yield handler
    finally:
        logger.propagate, logger.handlers = before


def resident() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzz(count: int, seed: int) -> tuple[dict[str, Counter[str]], int]:
    """So many frames of all kinds: how they ended, and by how many bytes this process has grown."""
    rng = random.Random(seed)
    found: dict[str, Counter[str]] = {}
    grown = 0
    with quiet() as tracebacks:
        corpora = {name: traffic(name) for name in STRATEGIES}
        every = [said for corpus in corpora.values() for said in corpus]
        found["strangers"] = asyncio.run(strangers(count // 5, rng))
        found["the line"] = asyncio.run(the_line(count // 5, every, rng))
        left = count - 2 * (count // 5)
        for k, (name, corpus) in enumerate(corpora.items()):
            victim = Victim(name)
            share = left // (len(corpora) - k)
            left -= share
            warm = share // 5
            one = found[f"members, {name}"] = victim.agent.call(victim.attack(warm, corpus + every, rng))
            before = resident()
            one += victim.agent.call(victim.attack(share - warm, corpus + every, rng))
            grown = max(grown, resident() - before)
            one["WEIGHTS CHANGED"] += not victim.close()
        found["the log"] = tracebacks.found
    return found, grown


def bad(found: dict[str, Counter[str]]) -> Counter[str]:
    """What must not happen."""
    return Counter({how: n for one in found.values() for how, n in one.items() if n and how not in EXPECTED})


def main() -> int:
    """Fuzz and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    found, grown = fuzz(given.frames, given.seed)
    for who, one in found.items():
        print(f"  {who}: " + ", ".join(f"{n:,} {how}" for how, n in one.most_common() if n))
    wrong = bad(found)
    for how, n in wrong.items():
        print(f"  {n:,} × {how}", file=sys.stderr)
    print(
        f"  {given.frames:,} frames in {time.monotonic() - begin:.0f} s: {sum(wrong.values())} crashed or "
        f"applied, {grown / MB:.0f} MB more memory"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
