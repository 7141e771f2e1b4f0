"""What strangers, broken peers and members that lie can do to a run: cost it one line of the log.

Workers 0 and 1 of three train, with the optimizer frozen and all weights 1, so that anything applied shows.
Worker 2 is the test: raw sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import freewheel as fw
from crew import places
from freewheel import strategies
from freewheel.fabric import frames, handshake, secret, tcp, windows
from freewheel.fabric.frames import BadFrame, Frame, Kind, pack
from freewheel.fabric.handshake import Identity
from freewheel.runtime.membership.place import Place
from freewheel.runtime.membership.rendezvous import Rendezvous
from freewheel.runtime.worker.settings import Settings

pytestmark = pytest.mark.integration

SIZE = 1000
BEYOND = 5 * SIZE
"""Longer than any vector of the run."""
HALF = 512
"""What worker 0 combines for both."""
DEADLINE_S = 30.0
HEADER = frames.HEADER.size


class Run:
    """Workers 0 and 1 of three, training until `end`."""

    def __init__(self, tls: Path | None = None) -> None:
        self.over = threading.Event()
        self.workers: dict[int, fw.Worker] = {}
        self.errors: list[BaseException] = []
        self.began = threading.Barrier(3)
        self.tls = tls
        first, second, third = places(3)
        self.threads = [threading.Thread(target=self.train, args=(p,), daemon=True) for p in (first, second)]
        for thread in self.threads:
            thread.start()
        played = Rendezvous(third, DEADLINE_S)
        played.options()
        played.leave("it is played by the test")
        self.began.wait(DEADLINE_S)

    def train(self, place: Place) -> None:
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        worker = fw.Worker(model, optimizer, strategies.resolve("adpsgd"), Settings(tls=self.tls), place)
        model.weight.grad = torch.full_like(model.weight, 1.0 + place.rank)
        try:
            with worker:
                self.workers[place.rank] = worker
                self.began.wait(DEADLINE_S)
                while not self.over.is_set():
                    time.sleep(1e-3)  # this is the computing
                    optimizer.step()
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    @property
    def me(self) -> Identity:
        """Who the test may claim to be: a good member, rank 2, on another machine."""
        return replace(self.workers[0]._agent.me, rank=2, place="")

    def call(self) -> socket.socket:
        """A connection to worker 0."""
        sock = socket.create_connection(
            self.workers[0]._agent.fabric._listener.listener.getsockname(), DEADLINE_S
        )
        sock.settimeout(DEADLINE_S)
        return sock

    def prove(self, me: Identity | None = None) -> Client:
        """A connection to worker 0 over which both have proved that they know the secret."""
        client = Client(self.call(), me or self.me)
        client.prove()
        return client

    def join(self, me: Identity | None = None) -> Client:
        """The same, over which both have said hello."""
        client = self.prove(me)
        client.greet()
        self.until(lambda: 2 in self.members())
        return client

    def members(self) -> tuple[int, ...]:
        return self.workers[0]._agent.fabric.members

    def exchanges(self) -> int:
        """How many exchanges worker 1 has completed; the other side was worker 0."""
        return self.workers[1].metrics()["exchanges"]["done"]

    def until(self, true: Callable[[], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < end_s, "it does not happen"
            assert not self.errors, self.errors
            time.sleep(1e-3)

    def check(self) -> None:
        """The two still exchange, and their weights are what they were."""
        before = self.exchanges()
        self.until(lambda: self.exchanges() >= before + 3)
        for worker in self.workers.values():
            assert bool((asyncio.run(worker._replica.snapshot()) == 1).all())

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self.threads)
        assert not self.errors
        for worker in self.workers.values():
            assert bool((worker.consensus().weight == 1).all())


class Client:
    """A worker's end of a connection, made of a plain socket."""

    def __init__(self, sock: socket.socket, me: Identity) -> None:
        self.sock, self.me = sock, me

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def challenge(self, protocol: int = frames.PROTOCOL) -> bytes:
        """Begin; both random numbers."""
        mine = bytes(range(32))
        self.sock.sendall(handshake.CHALLENGE.pack(frames.MAGIC, protocol, mine))
        return mine + exactly(self.sock, handshake.CHALLENGE.size)[-32:]

    def prove(self) -> None:
        both = self.challenge()
        parts = both[:32], both[32:]
        self.sock.sendall(secret.derive(self.me.key, "caller", *parts))
        assert exactly(self.sock, 32) == secret.derive(self.me.key, "callee", *parts)
        sides = ("caller speaks", "callee speaks")
        self.ours, self.theirs = (secret.Seals(secret.derive(self.me.key, side, *parts)) for side in sides)

    def greet(self) -> None:
        self.send(self.me.hello())
        self.send(self.me.frame(Kind.SEES, ("sees",)))
        frame, tag = self.read()[:2]
        assert (frame.kind, tag[0]) == (Kind.HELLO, "hello")
        assert self.read()[0].kind is Kind.SEES

    def sealed(self, head: bytes) -> bytes:
        return head + self.ours.next(head)

    def send(self, head: bytes, vector: bytes = b"") -> None:
        self.sock.sendall(self.sealed(head) + vector)

    def read(self) -> tuple[Frame, Any, Any]:
        """The next frame, with its vector read over."""
        frame = frames.parse(exactly(self.sock, HEADER), self.me.longest)
        tag, note = frames.parse_rest(frame, exactly(self.sock, frame.rest), self.theirs)
        if frame.dtype is not None:
            exactly(self.sock, frame.numel * frame.dtype.itemsize)
        return frame, tag, note

    def close(self) -> None:
        self.sock.close()


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        if not got:
            raise EOFError
        data += got
    return data


def wait_for_close(sock: socket.socket) -> None:
    """Read until the other side has closed."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


class Lines(logging.Handler):
    """What the logger "freewheel" says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def lines(caplog) -> Iterator[Lines]:
    """All of it: of one that hangs up nobody is warned."""
    handler, log = Lines(), logging.getLogger("freewheel")
    log.addHandler(handler)
    with caplog.at_level(logging.DEBUG, "freewheel"):
        yield handler
    log.removeHandler(handler)


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Who says nothing is soon sent away."""
    monkeypatch.setattr(handshake, "GREETING_S", 0.5)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "COMPLAINTS", 10_000)  # each test counts its lines
        patch.setattr(tcp, "PINGS", 20)
        one = Run()
        yield one
        one.end()


def refused(run: Run, lines: Lines, sock: socket.socket, words: str) -> None:
    """Worker 0 closes the connection, says so in one line, and goes on."""
    address = "{}:{}".format(*sock.getsockname())
    wait_for_close(sock)
    sock.close()
    run.until(lambda: bool(lines.texts))
    run.check()
    assert len(lines.texts) == 1, lines.texts
    (text,) = lines.texts
    assert "\n" not in text
    assert address in text
    assert words in text


# -- strangers --


def header(run: Run, **changes: Any) -> bytes:
    """The header of worker 2's hello, but for what is changed; followed by its tag."""
    hello = run.me.hello()
    names = ("magic", "protocol", "kind", "dtype", "tag_bytes", "notes", "sender", "incarnation", "numel")
    fields = dict(zip(names, frames.HEADER.unpack(hello[:HEADER]), strict=True))
    return frames.HEADER.pack(*{**fields, **changes}.values()) + hello[HEADER:]


STRANGERS: dict[str, tuple[bytes, str]] = {
    "random bytes": (random.Random(1).randbytes(5000), "does not speak Freewheel's protocol"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: here\r\n" + b"\r\n" * 20, "does not speak"),
    "another protocol": (handshake.CHALLENGE.pack(frames.MAGIC, 9, bytes(32)), "it speaks protocol 9"),
    "no proof": (handshake.CHALLENGE.pack(frames.MAGIC, frames.PROTOCOL, bytes(32)) + bytes(32), "secret"),
    "our own challenge": (
        handshake.CHALLENGE.pack(frames.MAGIC, frames.PROTOCOL, bytes(32)) * 3,
        handshake.STRANGER,
    ),
}
NEWCOMERS: dict[str, tuple[Callable[[Run], bytes], str]] = {
    "another version": (lambda run: replace(run.me, version="9.9").hello(), "it runs freewheel 9.9"),
    "another model": (lambda run: replace(run.me, model="0").hello(), "its model has other parameters"),
    "our own rank": (lambda run: replace(run.me, rank=0).hello(), "it says to be worker 0 of 3"),
    "a rank too far": (lambda run: replace(run.me, rank=3).hello(), "it says to be worker 3 of 3"),
    "an unknown kind": (lambda run: header(run, kind=17), "a frame of unknown kind 17"),
    "an unknown type": (lambda run: header(run, dtype=17), "numbers of unknown type 17"),
    "beyond the model": (
        lambda run: header(run, dtype=1, numel=BEYOND),
        f"a vector of {BEYOND} numbers, where the longest of this run has 10",
    ),
    "an endless vector": (lambda run: header(run, dtype=1, numel=2**64 - 1), "a vector of"),
    "an endless tag": (lambda run: header(run, tag_bytes=65535), "a tag of 65535 bytes"),
    "an endless note": (lambda run: header(run, notes=65535), "a note of 65535 numbers"),
    "no JSON": (lambda run: header(run)[:HEADER] + b"x" * (len(run.me.hello()) - HEADER), "is not JSON"),
    "no hello": (lambda run: pack(Kind.MESSAGE, 2, 1, ("call",), (1.0,)), "did not say hello"),
    "a refusal": (lambda run: pack(Kind.REFUSE, 2, 1, ("go",)), "refused this worker: go"),
    "a forged line": (
        lambda run: pack(Kind.HELLO, 2, 1, ("hello", "1\nERROR", "m")),
        "characters that cannot be printed",
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused(who, run, lines):
    says, words = STRANGERS[who]
    sock = run.call()
    sock.sendall(says)
    refused(run, lines, sock, words)
    assert 2 not in run.members()


def test_a_stranger_learns_nothing_but_that_somebody_is_there(run, lines):
    """He has the protocol and no secret: what he gets is a random number, and then nothing."""
    heard = []
    for key in (bytes(32), b""):
        with Client(run.call(), replace(run.me, key=key)) as client:
            both = client.challenge()
            heard.append(both[32:])
            client.sock.sendall(secret.derive(key, "caller", both[:32], both[32:]))
            assert client.sock.recv(1) == b""
    assert heard[0] != heard[1]
    run.until(lambda: len(lines.texts) == 2)
    run.check()


def test_what_was_said_on_one_connection_is_worth_nothing_on_another(run, lines):
    """A proof and a greeting that were good, byte for byte once more; and frames of an earlier connection."""
    first = Client(run.call(), run.me)
    both = first.challenge()
    good = secret.derive(run.me.key, "caller", both[:32], both[32:])
    again = Client(run.call(), run.me)
    again.challenge()
    again.sock.sendall(good)
    refused(run, lines, again.sock, handshake.STRANGER)
    lines.texts.clear()
    first.close()
    run.until(lambda: bool(lines.texts))  # it had hung up
    lines.texts.clear()
    with run.join() as old, run.join() as client:
        client.sock.sendall(old.sealed(message(run.me, ("x",))[0]))
        refused(run, lines, client.sock, "not the next one of this connection")


@pytest.mark.parametrize("order", ["twice", "swapped", "one left out"])
def test_frames_come_once_and_in_their_order(order, run, lines):
    """Whoever sits on the line and has not the secret can repeat what he hears, move it, or hold it back."""
    with run.join() as client:
        one, two = (client.sealed(message(run.me, ("x", k))[0]) for k in range(2))
        client.sock.sendall({"twice": one + one, "swapped": two + one, "one left out": two}[order])
        refused(run, lines, client.sock, "not the next one of this connection")


@pytest.mark.parametrize("who", NEWCOMERS)
def test_who_has_the_secret_and_does_not_fit_is_refused(who, run, lines):
    says, words = NEWCOMERS[who]
    client = run.prove()
    client.send(says(run))
    refused(run, lines, client.sock, words)
    assert 2 not in run.members()


@pytest.mark.parametrize("who", ["another version", "another model", "a rank too far"])
def test_who_is_refused_is_told_why(who, run, lines):
    says, words = NEWCOMERS[who]
    with run.prove() as client:
        client.send(says(run))
        frame, tag, _ = client.read()
        assert frame.kind is Kind.REFUSE
        assert words in tag[0]
    run.until(lambda: bool(lines.texts))  # it is told first and noted then


NEARLY = b"FWHL" + bytes([frames.PROTOCOL]) + bytes(31)


@pytest.mark.parametrize("data", [b"", b"FWHL", NEARLY], ids=["nothing", "a word", "nearly"])
def test_one_that_hangs_up_at_once(data, run, lines):
    sock = run.call()
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    refused(run, lines, sock, "the connection was closed")


@pytest.mark.parametrize("data", [b"", b"FWHL"], ids=["nothing", "a word"])
def test_one_that_says_nothing(data, run, lines, hasty):
    sock = run.call()
    sock.sendall(data)
    refused(run, lines, sock, "no answer in time")


def test_one_that_never_comes_to_an_end(run, lines, hasty):
    """A greeting whose note trickles in a byte at a time."""
    client = run.prove()
    sock = client.sock
    sock.sendall(header(run, notes=frames.NOTES))
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.02):
                sock.sendall(b"\0")

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    refused(run, lines, sock, "no answer in time")
    ended.set()
    thread.join(DEADLINE_S)


def test_a_crowd_of_strangers(run, lines, hasty, monkeypatch):
    crowd = [run.call() for _ in range(50)]
    for k, sock in enumerate(crowd):
        with contextlib.suppress(OSError):
            sock.sendall(random.Random(k).randbytes(k))
    run.check()
    for sock in crowd:
        wait_for_close(sock)
        sock.close()
    run.until(lambda: len(lines.texts) == 50)
    run.check()
    monkeypatch.undo()
    run.join().close()


def test_one_that_says_why_it_goes_is_heard_though_the_line_is_broken_too(run, lines, monkeypatch):
    """Writing to it fails at the moment at which its last words are read."""
    client, fabric, noticed = run.join(), run.workers[0]._agent.fabric, []
    sock = client.sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    monkeypatch.setattr(fabric, "notice", lambda what, peer, why: noticed.append((what, peer, why)))

    def leave() -> None:
        """In one go of worker 0's loop."""
        fabric._connections[2].send(Kind.PING)
        client.send(pack(Kind.BYE, 2, run.me.incarnation, ("by zero",)))
        sock.close()

    run.workers[0]._agent.loop.call_soon_threadsafe(leave)
    run.until(lambda: bool(noticed))
    assert noticed == [("left", 2, "by zero")]
    run.check()


def test_a_connection_that_takes_the_place_of_another_is_no_loss(run, monkeypatch):
    old, fabric, noticed = run.join(), run.workers[0]._agent.fabric, []
    run.until(lambda: 2 in fabric._connections)
    monkeypatch.setattr(fabric, "notice", lambda what, peer, why: noticed.append((what, peer)))
    monkeypatch.setattr(fabric, "silence_s", 60.0)  # it gives no signs of life
    epoch, first = fabric.epoch(2), fabric._connections[2]
    sock = run.join()
    run.until(lambda: fabric._connections.get(2) not in (first, None))
    assert fabric.epoch(2) > epoch  # what was under way is void
    assert noticed == []
    old.close()
    sock.close()
    run.until(lambda: bool(noticed))
    assert noticed == [("died", 2)]
    run.check()  # not before: worker 0 may have called it, and waits for its answer


# -- members that lie --


def message(me: Identity, tag: Any, values: Any = None, dtype: torch.dtype = torch.float32, **changes: Any):
    """A message up to its seal, and its vector."""
    vector = None if values is None else torch.as_tensor(values, dtype=dtype)
    head = pack(
        Kind.MESSAGE,
        changes.get("sender", 2),
        me.incarnation,
        tag,
        changes.get("note", ()),
        None if vector is None else dtype,
        changes.get("numel", 0 if vector is None else vector.numel()),
    )
    return head, b"" if vector is None else vector.view(torch.uint8).numpy().tobytes()


def bad_tag(me: Identity) -> tuple[bytes, bytes]:
    good = message(me, ("abcd",))[0]
    return good[:HEADER] + b"{" * (len(good) - HEADER), b""


def bad_kind(me: Identity) -> tuple[bytes, bytes]:
    good = bytearray(message(me, ("abcd",))[0])
    good[5] = 77
    return bytes(good), b""


def near(me: Identity, *where: float) -> tuple[bytes, bytes]:
    """A message whose vector lies in a window: kind, number, process, bytes, handle."""
    return pack(Kind.NEAR, 2, me.incarnation, ("x",), (*where, len(where))), b""


LIARS: dict[str, tuple[Callable[[Identity], tuple[bytes, bytes]], str]] = {
    "NaN": (lambda me: message(me, ("x",), [1.0] * 9 + [math.nan]), "not finite"),
    "infinity": (lambda me: message(me, ("x",), [-math.inf] + [1.0] * 9), "not finite"),
    "both infinities": (lambda me: message(me, ("x",), [-math.inf, math.inf]), "not finite"),
    "too long": (
        lambda me: message(me, ("x",), [1.0], numel=BEYOND),
        f"a vector of {BEYOND} numbers",
    ),
    "another type": (lambda me: message(me, ("x",), [1.0], torch.bfloat16), "give all the same wire"),
    "another sender": (lambda me: message(me, ("x",), sender=1), "it is worker 2 and says to be worker 1"),
    "hello again": (lambda me: (me.hello(), b""), "hello twice"),
    "random bytes": (lambda me: (random.Random(2).randbytes(4000), b""), "does not speak"),
    "no JSON": (bad_tag, "a tag that is not JSON"),
    "an unknown kind": (bad_kind, "unknown kind 77"),
    "a call without a number": (lambda me: message(me, ("call",)), "a note of 0 numbers with 'call'"),
    "a call with half a number": (lambda me: message(me, ("call",), note=(0.5,)), "not whole with 'call'"),
    "a call without end": (lambda me: message(me, ("call",), note=(math.inf,)), "not whole with 'call'"),
    "a question for nothing": (lambda me: message(me, ("run", "model")), "a note of 0 numbers"),
    "a copy of nothing": (lambda me: message(me, ("run", "model"), note=(1, 2, 3)), "a note of 3 numbers"),
    "an end of no kind": (lambda me: message(me, ("run", "end"), note=(9, 9)), "what makes no sense"),
    "an end without those who end": (
        lambda me: message(me, ("run", "end", "call"), note=(0, 1, 7)),
        "members that cannot be",
    ),
    "a window on another machine": (lambda me: near(me, 1, 7, 1, 40, 3), "a window this worker cannot see"),
}


WINDOWS: dict[str, tuple[tuple[float, ...], str]] = {
    "that is a file": ((1, 7, os.getpid(), 40, 1), "its window cannot be opened"),
    "on a device there is not": ((2, 7, 1, 40, *[9] * 64), "its window cannot be opened"),
    "beyond the model": ((1, 7, 1, 4 * BEYOND, 3), "the longest vector has 10"),
    "of no number": ((1, math.nan, 1, 40, 3), "a window this worker cannot see"),
    "below zero": ((1, 7, 1, 40, -3), "a window this worker cannot see"),
    "half said": ((1, 7), "a window this worker cannot see"),
    "of another process": ((1, 7, os.getpid(), 40, 3), "a window this worker cannot see"),
}


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_that_could_be_cut_off_under_a_reader_is_no_window(seals, run, lines):
    """Who truncates what another has mapped ends it by SIGBUS."""
    handle = os.memfd_create("freewheel", os.MFD_ALLOW_SEALING)
    fabric = run.workers[0]._agent.fabric
    try:
        os.ftruncate(handle, 40)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
        with run.join() as client:
            fabric._connections[2].kind, fabric._connections[2].pid = "host", os.getpid()
            client.send(*near(run.me, 1, 2**52, os.getpid(), 40, handle))
            refused(run, lines, client.sock, "is not sealed")
    finally:
        os.close(handle)
        fabric._listener.unshared.discard(2)


def test_a_window_that_is_open_already_has_the_size_it_had(run, lines):
    window, fabric = windows.HostWindow.make(80), run.workers[0]._agent.fabric
    kind, number, pid, _, handle = window.locator
    with run.join() as client:
        fabric._connections[2].kind, fabric._connections[2].pid = "host", pid
        client.send(*near(run.me, kind, number, pid, 40, handle))
        refused(run, lines, client.sock, "it has another size")
    fabric._listener.unshared.discard(2)


@pytest.mark.parametrize("which", WINDOWS)
def test_members_that_show_windows_there_are_not(which, run, lines):
    """As a member on the same machine."""
    where, words = WINDOWS[which]
    fabric = run.workers[0]._agent.fabric
    with run.join() as client:
        fabric._connections[2].kind = "host"
        fabric._connections[2].pid = 1 if which == "of another process" else where[2] if where[2:] else 0
        client.send(*near(run.me, *where))
        refused(run, lines, client.sock, words)
    run.until(lambda: 2 not in run.members())
    fabric._listener.unshared.discard(2)


def test_a_member_whose_process_has_ended_is_lost_and_not_refused(run, lines):
    """It may have shown a window in its last moment: that is no lie."""
    with run.join() as client:
        link = run.workers[0]._agent.fabric._connections[2]
        link.kind, link.pid = "host", 2**22 + 1
        client.send(*near(run.me, 1, 7, link.pid, 40, 3))
        wait_for_close(client.sock)
        client.sock.close()
    run.until(lambda: 2 not in run.members())
    run.check()
    assert not lines.texts
    assert 2 not in run.workers[0]._agent.fabric._listener.unshared


@pytest.mark.parametrize("what", LIARS)
def test_members_that_send_what_does_not_belong_here(what, run, lines):
    says, words = LIARS[what]
    with run.join() as client:
        client.send(*says(run.me))
        refused(run, lines, client.sock, words)
    run.until(lambda: 2 not in run.members())


def test_a_member_that_floods_is_cut_off_and_its_memory_is_free(run, lines, monkeypatch):
    fabric = run.workers[0]._agent.fabric
    monkeypatch.setattr(fabric, "_most_unread", 100_000)
    with run.join() as client:
        with contextlib.suppress(OSError):
            for k in range(500):
                client.send(*message(run.me, ("x", k), [1.0] * 100))
        refused(run, lines, client.sock, "more than anybody reads")
    run.until(lambda: 2 not in run.members())
    assert 2 not in fabric._unread
    assert not [tag for tag in fabric._boxes if tag[0] == "x"]


def test_the_log_is_not_filled_by_who_keeps_knocking(run, lines, monkeypatch):
    listener = run.workers[0]._agent.fabric._listener
    monkeypatch.setattr(listener, "_complained_s", -math.inf)
    monkeypatch.setattr(handshake, "COMPLAINTS", 5)
    for _ in range(30):
        with run.call() as sock:
            sock.sendall(b"x" * 40)
            wait_for_close(sock)
    run.until(lambda: listener._complaints == 30)
    assert len(lines.texts) == 5
    monkeypatch.setattr(handshake, "COMPLAINTS_S", 0.0)
    with run.call() as sock:
        sock.sendall(b"x" * 40)
        wait_for_close(sock)
    run.until(lambda: len(lines.texts) == 6)


def test_strangers_are_not_kept_while_others_come(run, lines, monkeypatch):
    """Of those who say nothing the oldest are closed: a worker still gets in."""
    monkeypatch.setattr(handshake, "GREETING_S", 60.0)
    monkeypatch.setattr(handshake, "UNPROVEN", 8)
    crowd = [run.call() for _ in range(40)]
    with run.join():
        for sock in crowd[:30]:
            wait_for_close(sock)
    assert len(run.workers[0]._agent.fabric._listener._unproven) <= 8
    for sock in crowd:
        sock.close()
    run.check()


def begin_exchange(run: Run, client: Client) -> tuple[str | int, ...]:
    """Call worker 0, or be called by it, until both have said yes; returns the exchange's tag."""
    for serial in range(1000):
        mine = ("exchange", 2, serial)
        client.send(*message(run.me, ("call",), note=(float(serial),)))
        while True:
            frame, tag, note = client.read()
            if frame.kind is Kind.MESSAGE and tag == ("call",):
                theirs = ("exchange", 0, int(note[0]))
                client.send(*message(run.me, theirs, note=(1.0,)))
                return theirs
            if tag == mine and note == (1.0,):
                return mine
            if tag == mine:
                break  # busy
    raise AssertionError("worker 0 is always busy")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, HALF - 1])
def test_numbers_that_are_none_in_an_exchange_are_not_applied(at, value, run, lines):
    values = [5.0] * HALF
    values[at] = value
    with run.join() as client:
        tag = begin_exchange(run, client)
        client.send(*message(run.me, tag, values))
        refused(run, lines, client.sock, "it sent numbers that are not finite")


def test_a_vector_of_another_length_in_an_exchange(run, lines):
    with run.join() as client:
        tag = begin_exchange(run, client)
        frame = None
        while frame is None or frame.dtype is None:  # its own snapshot: the exchange has begun
            frame = client.read()[0]
        client.send(*message(run.me, tag, note=(1.0,)))
        client.send(*message(run.me, tag, [5.0] * (HALF - 1)))
        refused(run, lines, client.sock, f"it sent {HALF - 1} numbers where {HALF} are awaited")


def test_a_member_that_leaves_in_the_middle_of_an_exchange(run, lines):
    sock = run.join()
    tag = begin_exchange(run, sock)
    head, vector = message(run.me, tag, [5.0] * HALF)
    sock.send(head, vector[:500])
    sock.close()
    run.until(lambda: 2 not in run.members())
    run.check()
    assert lines.texts == []  # a peer that is lost is no offence


def test_a_member_that_falls_silent_in_the_middle_of_an_exchange(run, lines):
    fabric = run.workers[0]._agent.fabric
    sock = run.join()
    tag = begin_exchange(run, sock)
    head, vector = message(run.me, tag, [5.0] * HALF)
    sock.send(head, vector[:500])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "silence_s", 0.5)
        run.until(lambda: 2 not in run.members())
    run.check()
    sock.close()


def test_an_earlier_life_is_refused(run, lines):
    with run.join(replace(run.me, incarnation=7)) as now:
        client = run.prove()
        sock = client.sock
        client.send(replace(run.me, incarnation=6).hello())
        address = "{}:{}".format(*sock.getsockname())
        wait_for_close(sock)
        sock.close()
        run.until(lambda: bool(lines.texts))
        assert lines.texts == [f"refused a connection from {address}: it is an earlier life of worker 2"]
        assert 2 in run.members()
        with run.join(replace(run.me, incarnation=8)):  # a later one takes its place
            wait_for_close(now.sock)
    run.until(lambda: 2 not in run.members())
    run.check()


# -- with keys --


def test_strangers_without_keys(tmp_path, lines):
    pytest.importorskip("cryptography")
    from freewheel.runtime.launch import keys

    keys.make(tmp_path / "ours")
    keys.make(tmp_path / "theirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "GREETING_S", 0.5)
        run = Run(tls=tmp_path / "ours")
        crowd = []
        for k in range(12):
            sock = run.call()
            crowd.append("{}:{}".format(*sock.getsockname()))
            if k % 3 == 1:
                sock.sendall(random.Random(k).randbytes(2000))
            elif k % 3 == 2:
                _, stranger = keys.contexts(tmp_path / "theirs")
                stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
                with contextlib.suppress(OSError):
                    sock = stranger.wrap_socket(sock)
                    sock.sendall(run.me.hello())
            wait_for_close(sock)
            sock.close()
        run.check()
        # Handles of closed connections are used again: those who belong here must still get in.
        _, member = keys.contexts(tmp_path / "ours")
        for _ in range(3):
            with Client(member.wrap_socket(run.call(), server_hostname="freewheel"), run.me) as client:
                client.prove()
                client.greet()
                run.until(lambda: 2 in run.members())
            run.until(lambda: 2 not in run.members())
        run.check()
        run.end()
    for address in crowd:
        assert sum(address in text for text in lines.texts) == 1, lines.texts
    assert sum("refused" in text for text in lines.texts) == len(crowd)


def test_the_client_of_this_test_speaks_the_protocol():
    """Else being refused would prove nothing."""
    me = Identity(bytes(16), 2, 3, 1, "test", "m", SIZE)
    head, vector = message(me, ("x",), [1.0, 2.0])
    frame = frames.parse(head[:HEADER], SIZE)
    assert (frame.sender, frame.numel, frame.dtype) == (2, 2, torch.float32)
    assert struct.unpack("=2f", vector) == (1.0, 2.0)
    with pytest.raises(BadFrame):
        frames.parse(bad_kind(me)[0][:HEADER], SIZE)
