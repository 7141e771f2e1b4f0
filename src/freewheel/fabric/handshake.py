"""The handshake: two workers prove that they are of one run, say who they are, and find shared windows.

    caller                       callee
      a challenge     -------->             a random number, and which protocol this is
                      <--------  another one
      proof           -------->             that it has the run's key, made of both numbers
                      <--------  proof      of the same; from here on every frame is sealed
      hello           <------->  hello      version, model, wire format, place; and, for a peer of the same
                                            host, a small window of each kind
      sees            <------->  sees       which of the other's windows could be opened and read: the best
                                            kind that both see is used

Without the key a caller learns only which protocol is spoken here. Of connections that have proved nothing
yet only the newest few are kept, and not for long.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from freewheel.errors import PeerLost
from freewheel.fabric import frames
from freewheel.fabric.base import Note, Spawn, Tag
from freewheel.fabric.frames import BadFrame, Crossed, Frame, Kind
from freewheel.fabric.notes import pack, read_all, whole
from freewheel.fabric.secret import Seals, derive
from freewheel.fabric.transport import Transport, dial, listen, open_transport
from freewheel.fabric.windows import KINDS, STREAM, Windows, is_locator
from freewheel.records.counters import Counters

GREETING_S = 10.0  # how long a handshake may take
DIAL_S = 1.0  # how long a call may take: after a partition a new one gets through sooner
REFUSED, EARLIER = "it refused this worker", "it is an earlier life of worker"
OTHER_KEYS = "its keys are not of this worker's set"
STRANGER = "it has not this run's secret"
AGAIN_S = 1.0  # between two tries to take a connection where no handle is left
UNPROVEN = 64  # connections that have proved nothing yet: when more come, the oldest is closed
PAUSE_S = 0.005  # between two connections that come in: training comes first
COMPLAINTS, COMPLAINTS_S = 100, 60.0  # lines of the log about refused connections, in so many seconds
BROKEN = (OSError, EOFError, BadFrame)  # how a handshake may fail; time-outs and bad keys are OSErrors
BEGINNING, CHALLENGE = struct.Struct("!4sB"), struct.Struct("!4sB32s")

log = logging.getLogger("freewheel")


@dataclass(frozen=True)
class Identity:
    """What two workers must agree on before they talk."""

    key: bytes  # derived from the run's secret and number (runtime/membership/rendezvous.py); never sent
    rank: int
    world_size: int
    incarnation: int
    version: str
    model: str  # a digest of the model's parameters: names, shapes, types
    longest: int  # the length of the longest vector of the run
    wire: str = "fp32"  # what a strategy's vectors travel as
    place: str = ""  # where this process runs, for finding those that can share memory; empty: nobody can

    @property
    def run(self) -> bytes:
        """A name of the run, from which the key cannot be found."""
        return derive(self.key, "name")[:16]

    def mark(self, rank: int) -> bytes:
        """What lies in a worker's small windows."""
        return self.run + rank.to_bytes(4, "big")

    def frame(
        self, kind: Kind, tag: Tag = (), note: Note = (), dtype: torch.dtype | None = None, numel: int = 0
    ) -> bytes:
        return frames.pack(kind, self.rank, self.incarnation, tag, note, dtype, numel)

    def hello(self, offers: Sequence[Note] = ()) -> bytes:
        tag = ("hello", self.version, self.model, self.place if offers else "", self.wire)
        return self.frame(Kind.HELLO, tag, pack([list(one) for one in offers]))

    def check(self, frame: Frame, tag: Tag, peer: int | None = None) -> None:
        """BadFrame unless this is the hello of a worker (`peer`) that fits this one."""
        if frame.kind is Kind.REFUSE:
            raise BadFrame(f"{REFUSED}: {tag[0] if tag else 'it did not say why'}")
        if frame.kind is not Kind.HELLO or len(tag) != 5 or tag[0] != "hello":
            raise BadFrame("it did not say hello")
        if tag[1] != self.version:
            raise BadFrame(f"it runs freewheel {tag[1]}, this worker {self.version}: install one version")
        if tag[2] != self.model:
            raise BadFrame("its model has other parameters")
        if tag[4] != self.wire:
            raise BadFrame(
                f"it sends vectors as {tag[4]}, this worker as {self.wire}: give all the same wire"
            )
        if frame.sender == self.rank or frame.sender >= self.world_size:
            raise BadFrame(f"it says to be worker {frame.sender} of {self.world_size}")
        if peer is not None and frame.sender != peer:
            raise BadFrame(f"it is worker {frame.sender}, not {peer}")


@dataclass
class Line:
    """A connection over which both have proved that they have the key: all frames are sealed."""

    transport: Transport
    ours: Seals  # of what is sent
    theirs: Seals  # of what comes
    me: Identity
    counters: Counters
    address: str
    called: bool  # whether it was this worker that called
    peer: int = -1
    incarnation: int = 0
    kind: str = STREAM  # how vectors travel: through windows of the device or the host, or as bytes
    pid: int = 0  # the peer's process, where windows are shared

    def sealed(self, head: bytes) -> bytes:
        """A frame with its seal: it must leave next."""
        return head + self.ours.next(head)

    async def write(self, head: bytes) -> None:
        await self.transport.write(self.sealed(head))

    async def read(self) -> tuple[Frame, Tag, Note]:
        """The next frame, but for its vector."""
        head = await take(self.transport, frames.HEADER.size)
        frame = frames.parse(head, self.me.longest)
        rest = await take(self.transport, frame.rest)
        self.counters.bytes_in += len(head) + len(rest)
        return (frame, *frames.parse_rest(frame, rest, self.theirs))


async def prove(transport: Transport, key: bytes, caller: bool) -> tuple[Seals, Seals]:
    """Both sides prove that they have the key; the seals of what is sent and of what comes."""
    mine = secrets.token_bytes(32)
    challenge = CHALLENGE.pack(frames.MAGIC, frames.PROTOCOL, mine)
    if caller:
        await transport.write(challenge)
    magic, protocol = BEGINNING.unpack(await take(transport, BEGINNING.size))
    frames.check_protocol(magic, protocol)
    theirs = await take(transport, len(mine))
    both = (mine, theirs) if caller else (theirs, mine)
    calls, answers = (derive(key, side, *both) for side in ("caller", "callee"))
    await transport.write(calls if caller else challenge)
    try:
        given = await take(transport, len(calls))
    except EOFError:
        if caller:
            raise BadFrame("it does not take this worker for one of its run: give both one secret") from None
        raise
    if not hmac.compare_digest(given, answers if caller else calls):
        raise BadFrame(STRANGER)
    if not caller:
        await transport.write(answers)
    of_caller, of_callee = (Seals(derive(key, f"{side} speaks", *both)) for side in ("caller", "callee"))
    return (of_caller, of_callee) if caller else (of_callee, of_caller)


async def take(transport: Transport, size: int) -> bytes:
    data = bytearray(size)
    await transport.read(memoryview(data))
    return bytes(data)


@dataclass(eq=False)
class Listener:
    """Opens connections in both directions; `admit` gets those of others that have said who they are."""

    me: Identity
    counters: Counters
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None
    windows: Windows
    check: Callable[[Frame], None]
    admit: Callable[[Line], None]
    spawn: Spawn
    unshared: set[int] = field(default_factory=set)  # windows were tried with them, and then did not open
    _unproven: dict[asyncio.Task[None], None] = field(default_factory=dict)  # the oldest first
    _complained_s: float = -math.inf
    _complaints: int = 0

    def open(self, host: str, port: int = 0) -> int:
        self.listener = listener = listen(host, port)
        self.spawn(self._accept(listener)).add_done_callback(lambda _: listener.close())
        return int(listener.getsockname()[1])

    async def call(self, peer: int, host: str, port: int) -> Line:
        try:
            async with asyncio.timeout(DIAL_S):
                sock = await dial(host, port)
            return await self._greet(sock, f"{host}:{port}", peer)
        except BROKEN as error:
            raise PeerLost(peer, f"{host}:{port}: {words(error)}") from error

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # no file handle is left, for one; the caller tries again
                log.warning("cannot take a connection: %s", words(error))
                await asyncio.sleep(AGAIN_S)
                continue
            while len(self._unproven) >= UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            greeting = self.spawn(self._let_in(sock, f"{address[0]}:{address[1]}"))
            self._unproven[greeting] = None
            greeting.add_done_callback(functools.partial(self._proven, sock))
            await asyncio.sleep(PAUSE_S)

    def _proven(self, sock: socket.socket, greeting: asyncio.Task[None]) -> None:
        self._unproven.pop(greeting, None)
        if greeting.cancelled():  # before it began it cannot close the socket itself
            sock.close()

    async def _let_in(self, sock: socket.socket, address: str) -> None:
        try:
            self.admit(await self._greet(sock, address))
        except BROKEN as error:
            now_s = asyncio.get_running_loop().time()
            if now_s - self._complained_s > COMPLAINTS_S:
                self._complained_s, self._complaints = now_s, 0
            self._complaints += 1
            harmless = isinstance(error, Crossed | ConnectionError | EOFError)  # the other has hung up
            if harmless or self._complaints <= COMPLAINTS:
                level = logging.DEBUG if harmless else logging.WARNING
                log.log(level, "refused a connection from %s: %s", address, words(error))

    async def _greet(self, sock: socket.socket, address: str, peer: int | None = None) -> Line:
        """Shake hands with `peer`, or with whoever has called."""
        opened: Transport | socket.socket = sock
        calls = peer is not None
        try:
            async with asyncio.timeout(GREETING_S):  # keys take their time
                opened = transport = await open_transport(sock, self.tls and self.tls[calls], not calls)
                seals = await prove(transport, self.me.key, calls)
                line = Line(transport, *seals, self.me, self.counters, address, calls)
                if peer is not None:
                    line.peer = peer
                    await self._hello(line)
                else:
                    self._unproven.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                try:
                    frame, tag, note = await line.read()
                    self.me.check(frame, tag, peer)
                    if not calls:
                        self.check(frame)
                except BadFrame as error:
                    if not calls:
                        with contextlib.suppress(OSError):
                            await line.write(self.me.frame(Kind.REFUSE, (str(error)[:200],)))
                    raise
                line.peer, line.incarnation = frame.sender, frame.incarnation
                if not calls:
                    await self._hello(line)
                await self._compare(line, tag, note)
                return line
        except BaseException:
            opened.close()
            raise

    def _near(self, line: Line) -> bool:
        """Whether this worker would share memory with a peer: not if that has failed before."""
        return bool(self.me.place) and line.transport.local and line.peer not in self.unshared

    async def _hello(self, line: Line) -> None:
        offers = self.windows.offer(self.me.mark(self.me.rank)) if self._near(line) else ()
        await line.write(self.me.hello(offers))

    async def _compare(self, line: Line, tag: Tag, note: Note) -> None:
        """Try the windows the peer offers, tell it which open, and hear the same; the best kind is used."""
        seen: list[str] = []
        try:
            offers = [tuple(one) for one in read_all([[int]], whole(note))]
        except ValueError:
            offers = [()]
        if not all(map(is_locator, offers)):
            raise BadFrame("it offers what is no window")
        near = tag[3] == self.me.place and self._near(line)
        if near:
            seen = await asyncio.to_thread(self.windows.tried, offers, self.me.mark(line.peer))
        await line.write(self.me.frame(Kind.SEES, ("sees", *seen)))
        frame, sees, _ = await line.read()
        if frame.kind is not Kind.SEES or frame.sender != line.peer or not set(sees[1:]) <= set(KINDS):
            raise BadFrame("it did not say what it sees")
        both = [kind for kind in KINDS if kind in seen and kind in sees[1:]]
        if both:
            line.kind, line.pid = both[-1], int(offers[0][2])
        for kind in {KINDS[int(one[0])] for one in offers} & self.windows.kinds - set(both):
            if near and self.me.rank < line.peer:
                text = "workers %d and %d share no %s window: vectors between them travel by %s"
                log.warning(text, self.me.rank, line.peer, kind, line.kind)


def words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"{OTHER_KEYS} ({getattr(error, 'verify_message', '') or error.reason})"
    return str(error) or type(error).__name__
