"""How good is the way to another host? Its latency, what it carries both ways, and what its clock says.

One host serves, another measures: ``serve("10.0.0.1", 29600)`` there, ``measure("10.0.0.1", 29600)`` here.
Plain sockets, the kind workers use too; with keys the same mutual TLS. Both ends bound what a stranger can
cost them: a greeting within seconds, so many bytes a request, so many seconds a visit, so many visitors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import socket
import ssl
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.runtime.launch.keys import contexts
from freewheel.runtime.membership.hosts import listen

PORT = 29600
GREETING = struct.Struct("!8sH16s")  # magic, version of this protocol, version of Freewheel
MAGIC, VERSION = b"fw-links", 1
REQUEST = struct.Struct("!cQ")  # what, and how many bytes
ANSWER = struct.Struct("!q")  # the server's clock, in ns
PING, TAKE, GIVE = b"p", b"t", b"g"
PIECE = bytes(1 << 18)
PINGS = 21
FIRST_BYTES = 1 << 16  # of the first transfer; each next one has four times as many
LONG_ENOUGH_S = 0.5  # a transfer that took so long has measured the link
MOST_MB = 1024
MOST_VISITORS = 8
VISIT_S = 120.0  # of one visitor, at most
SILENT_S = 10.0  # without a byte, at most


@dataclass(frozen=True)
class LinkFigure:
    """What was measured between this host and another."""

    latency_ms: float
    """One way: half of the median round trip of a short message."""
    mbit_out: float
    """From here to there, Mbit/s."""
    mbit_in: float
    """From there to here, Mbit/s."""
    clock_skew_ms: float
    """How far that host's clock is ahead of ours, known to about the latency."""


class Server:
    """Answers those who measure, until it is closed; a with-block closes it."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext | None, say: Callable[[str], None]
    ) -> None:
        self._listener, self._tls, self._say = listener, tls, say
        self.host, self.port = listener.getsockname()[:2]
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(MOST_VISITORS)
        listener.settimeout(0.2)  # closing is noticed within it
        self._thread = threading.Thread(target=self._accept, name="freewheel-links", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            listener.close()
            raise ConfigError(f"cannot serve: {error}. End other processes, or raise ulimit -u.") from None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more visitors; those who are here are cut off at their next request."""
        self._closed.set()
        self._thread.join()
        self._listener.close()

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        while not self._closed.wait(1.0):
            pass

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # out of handles, say: others may still be served
                self._say(f"cannot take a visitor: {error.strerror or error}")
                self._closed.wait(0.2)
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._visit, args=(connection, address[0]), daemon=True).start()
            except RuntimeError as error:  # the system gives no more threads: who is here may stay
                connection.close()
                self._room.release()
                self._say(f"cannot take a visitor: {error}")

    def _visit(self, connection: socket.socket, visitor: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(SILENT_S)
            end = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
            with contextlib.closing(end):
                self._answer(end)
            self._say(f"{visitor} measured its link to this host")
        except (OSError, ValueError) as error:
            self._say(f"turned {visitor} away: {_why(error)}")
        finally:
            connection.close()
            self._room.release()

    def _answer(self, end: socket.socket) -> None:
        until_s = time.monotonic() + VISIT_S
        end.sendall(_greeting())
        _greeted(end, until_s)
        while (asked := _take(end, REQUEST.size, until_s, may_end=True)) and not self._closed.is_set():
            what, size = REQUEST.unpack(asked)
            if what not in (PING, TAKE, GIVE) or size > MOST_MB * 10**6:
                raise ValueError("it asked for what is not offered")
            if what == TAKE:
                _swallow(end, size, until_s)
            if what == GIVE:
                for length in _pieces(size):
                    _in_time(until_s)
                    end.sendall(memoryview(PIECE)[:length])
            else:
                end.sendall(ANSWER.pack(time.time_ns()))


def serve(
    bind: str = "127.0.0.1",
    port: int = PORT,
    tls: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Server:
    """Let others measure the way to this host; port 0 takes a free one, and `.port` says which.

    With ``tls``, a folder with keys, only those who hold the same keys are answered.
    """
    context = contexts(tls)[0] if tls else None
    return Server(listen(bind, port, "bind"), context, say)


def measure(
    host: str, port: int = PORT, mb: float = 64, tls: Path | None = None, timeout_s: float = 30.0
) -> LinkFigure:
    """Measure the way to a host that serves; at most so many megabytes each way, and so many seconds.

    Transfers begin small and grow until one lasts long enough, so a slow link is not kept busy for long.
    """
    if not 0 < mb <= MOST_MB:
        raise ConfigError(f"mb must be above 0 and at most {MOST_MB}, not {mb:g}.")
    if not 0 < timeout_s <= VISIT_S:
        raise ConfigError(f"timeout_s must be above 0 and at most {VISIT_S:g}, not {timeout_s:g}.")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port must be above 0 and below {1 << 16}, not {port}.")
    context = contexts(tls)[1] if tls else None
    until_s = time.monotonic() + timeout_s
    try:
        with contextlib.ExitStack() as ends:
            end = ends.enter_context(socket.create_connection((host, port), timeout=min(SILENT_S, timeout_s)))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(min(SILENT_S, timeout_s))
            if context:
                end = ends.enter_context(context.wrap_socket(end))
            end.sendall(_greeting())
            _greeted(end, until_s)
            return _figure(end, round(mb * 10**6), until_s)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot measure the link to {host}:{port}: {_why(error)}. Start `freewheel doctor --serve` "
            "there (the same keys, or none, on both) and let its port be reached from here."
        ) from None


def _figure(end: socket.socket, most_bytes: int, until_s: float) -> LinkFigure:
    trips = [_ping(end, until_s) for _ in range(PINGS)]
    shortest_s, skew_s = min(trips)  # the shortest trip left the least room for error
    return LinkFigure(
        latency_ms=1000 * statistics.median(trip_s for trip_s, _ in trips) / 2,
        mbit_out=_grow(lambda size: _send(end, size, until_s), most_bytes, shortest_s),
        mbit_in=_grow(lambda size: _fetch(end, size, until_s), most_bytes, shortest_s),
        clock_skew_ms=1000 * skew_s,
    )


def _grow(transfer: Callable[[int], float], most_bytes: int, trip_s: float) -> float:
    """Mbit/s of the last transfer, without the round trip that each one costs."""
    size = min(FIRST_BYTES, most_bytes)
    while True:
        took_s = transfer(size)
        if took_s >= LONG_ENOUGH_S or size == most_bytes:
            return 8e-6 * size / max(took_s - trip_s, took_s / 2)
        size = min(4 * size, most_bytes)


def _ping(end: socket.socket, until_s: float) -> tuple[float, float]:
    """Seconds of a round trip, and how far the other clock is ahead."""
    sent_ns, begun_s = time.time_ns(), time.perf_counter()
    end.sendall(REQUEST.pack(PING, 0))
    (theirs_ns,) = ANSWER.unpack(_take(end, ANSWER.size, until_s))
    trip_s = time.perf_counter() - begun_s
    return trip_s, (theirs_ns - sent_ns) / 1e9 - trip_s / 2


def _send(end: socket.socket, size: int, until_s: float) -> float:
    begun_s = time.perf_counter()
    end.sendall(REQUEST.pack(TAKE, size))
    for length in _pieces(size):
        _in_time(until_s)
        end.sendall(memoryview(PIECE)[:length])
    _take(end, ANSWER.size, until_s)
    return time.perf_counter() - begun_s


def _fetch(end: socket.socket, size: int, until_s: float) -> float:
    begun_s = time.perf_counter()
    end.sendall(REQUEST.pack(GIVE, size))
    _swallow(end, size, until_s)
    return time.perf_counter() - begun_s


def _pieces(size: int) -> Iterator[int]:
    for begin in range(math.ceil(size / len(PIECE))):
        yield min(len(PIECE), size - begin * len(PIECE))


def _greeting() -> bytes:
    return GREETING.pack(MAGIC, VERSION, importlib.metadata.version("freewheel").encode())


def _greeted(end: socket.socket, until_s: float) -> None:
    found, ours = _take(end, GREETING.size, until_s), _greeting()
    magic, version, release = GREETING.unpack(found)
    if magic != MAGIC:
        raise ValueError("it does not speak this protocol")
    if found != ours:  # nor could their workers talk to ours
        theirs = f"freewheel {release.rstrip(bytes(1)).decode('ascii', 'replace')} (protocol {version})"
        mine = f"freewheel {GREETING.unpack(ours)[2].rstrip(bytes(1)).decode()} (protocol {VERSION})"
        raise ValueError(f"it runs {theirs}, this host {mine}: install one version")


def _take(end: socket.socket, size: int, until_s: float, may_end: bool = False) -> bytes:
    """So many bytes; none, where the other side may end and did."""
    found = b""
    while len(found) < size:
        _in_time(until_s)
        part = end.recv(size - len(found))
        if not part:
            if may_end and not found:
                return b""
            raise ValueError("it hung up")
        found += part
    return found


def _swallow(end: socket.socket, size: int, until_s: float) -> None:
    space = memoryview(bytearray(len(PIECE)))
    while size:
        _in_time(until_s)
        taken = end.recv_into(space, min(size, len(space)))
        if not taken:
            raise ValueError("it hung up")
        size -= taken


def _in_time(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TimeoutError("it took too long")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    return getattr(error, "strerror", None) or str(error)
