"""Measuring the way to another host: figures that make sense, and strangers who get nothing."""

from __future__ import annotations

import queue
import socket
import threading
import time

import pytest

from freewheel.errors import ConfigError
from freewheel.runtime.doctor import bandwidth
from freewheel.runtime.doctor.bandwidth import measure, serve
from freewheel.runtime.launch import keys

DEADLINE_S = 20.0


class Said(queue.Queue):
    """What a server says, to wait for."""

    __call__ = queue.Queue.put

    def next(self):
        return self.get(timeout=DEADLINE_S)


def stranger(port, *parts):
    """Send bytes, and collect all that comes until the other side hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as end:
        for part in parts:
            end.sendall(part)
        end.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := end.recv(1 << 16):
                answer += part
        except ConnectionResetError:
            pass
    return answer


def test_a_link_is_measured():
    said = Said()
    with serve("127.0.0.1", 0, say=said) as server:
        found = measure("127.0.0.1", server.port, 2)
        assert "127.0.0.1 measured" in said.next()
        measure("127.0.0.1", server.port, 0.01)  # another visitor, less than the first transfer
    assert 0 < found.latency_ms < 1000
    assert found.mbit_out > 1
    assert found.mbit_in > 1
    assert abs(found.clock_skew_ms) < 1000  # it is the same clock


def test_the_skew_is_that_of_the_other_clock(monkeypatch):
    real, ahead_ns = time.time_ns, 90_000_000_000
    turns = iter([real, lambda: real() + ahead_ns] * bandwidth.PINGS)  # asked by us, then by the server
    monkeypatch.setattr(bandwidth.time, "time_ns", lambda: next(turns, real)())
    with serve("127.0.0.1", 0) as server:
        assert measure("127.0.0.1", server.port, 0.01).clock_skew_ms == pytest.approx(90_000, abs=5_000)


def test_a_slow_link_is_not_kept_busy_for_long():
    sizes = []

    def transfer(size):
        sizes.append(size)
        return 0.001 + 8e-6 * size / 2.0  # a round trip of 1 ms, 2 Mbit/s

    assert bandwidth._grow(transfer, 64_000_000, 0.001) == pytest.approx(2.0)
    assert sum(sizes) < 600_000


def test_a_fast_link_is_measured_with_all_it_may_use():
    sizes = []
    assert bandwidth._grow(lambda size: sizes.append(size) or 1e-9 * size, 10_000_000, 0.0) == pytest.approx(
        8000
    )
    assert sizes[-1] == 10_000_000
    assert sum(sizes) < 20_000_000


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), bandwidth.GREETING.pack(bandwidth.MAGIC, 9, b"0.1.0")],
    ids=["http", "zeros", "another version"],
)
def test_strangers_are_turned_away(greeting):
    said = Said()
    with serve("127.0.0.1", 0, say=said) as server:
        answer = stranger(server.port, greeting)
        assert answer in (b"", bandwidth._greeting())  # the greeting and no more
        assert "turned 127.0.0.1 away" in said.next()
        assert measure("127.0.0.1", server.port, 0.01).mbit_out > 0  # and others are served


@pytest.mark.parametrize("request_", [(b"x", 0), (bandwidth.GIVE, 1 << 62), (bandwidth.TAKE, 1 << 62)])
def test_what_is_not_offered_is_not_given(request_):
    said = Said()
    with serve("127.0.0.1", 0, say=said) as server:
        answer = stranger(server.port, bandwidth._greeting(), bandwidth.REQUEST.pack(*request_))
    assert answer in (b"", bandwidth._greeting())
    assert "not offered" in said.next()


def test_more_visitors_than_there_is_room_for_are_sent_away():
    with serve("127.0.0.1", 0) as server:
        ends = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(bandwidth.MOST_VISITORS)]
        for end in ends:
            end.settimeout(DEADLINE_S)
            assert end.recv(1)  # it is being served
        with pytest.raises(ConfigError, match="cannot measure"):
            measure("127.0.0.1", server.port, 0.01)
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6 hello, stranger\r\n", "does not speak this protocol"),
        (bandwidth.GREETING.pack(bandwidth.MAGIC, bandwidth.VERSION, b"9.9.9"), "runs freewheel 9.9.9"),
        (b"", "hung up"),
    ],
)
def test_what_answers_there_is_named(answer, why):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def once():
            end, _ = listener.accept()
            with end:
                end.sendall(answer)
                end.recv(64)

        thread = threading.Thread(target=once)
        thread.start()
        with pytest.raises(ConfigError, match=why):
            measure("127.0.0.1", port, 0.01)
        thread.join(DEADLINE_S)


def test_a_transfer_that_takes_too_long_ends():
    with serve("127.0.0.1", 0) as server, pytest.raises(ConfigError, match=r"too long|timed out"):
        measure("127.0.0.1", server.port, 1000, timeout_s=0.05)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mb": 0}, "mb must be above 0"),
        ({"mb": 1e9}, "at most 1024"),
        ({"mb": float("nan")}, "mb must be"),
        ({"port": 70000}, "port must be"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_bad_values_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        measure(**{"host": "127.0.0.1", "port": 1, "mb": 1} | given)


def test_keys_let_members_measure_and_nobody_else(tmp_path):
    for name in ("ours", "theirs"):
        keys.make(tmp_path / name)
    with serve("127.0.0.1", 0, tls=tmp_path / "ours") as server:
        assert measure("127.0.0.1", server.port, 0.1, tls=tmp_path / "ours").mbit_out > 0
        for tls in (None, tmp_path / "theirs"):
            with pytest.raises(ConfigError, match="the same keys, or none"):
                measure("127.0.0.1", server.port, 0.1, tls=tls)


def test_where_no_thread_can_be_started_a_visitor_is_sent_away_and_the_next_is_served(monkeypatch):
    said, start, refused = Said(), threading.Thread.start, []

    def fail_once(thread):
        if thread.name == "freewheel-links" or refused:
            return start(thread)
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bandwidth, "MOST_VISITORS", 1)
    with serve("127.0.0.1", 0, say=said) as server:
        monkeypatch.setattr(threading.Thread, "start", fail_once)
        assert stranger(server.port, b"") == b""
        assert "can't start new thread" in said.next()
        assert measure("127.0.0.1", server.port, 0.01).mbit_out > 0


def test_a_server_without_a_thread_says_so_and_holds_no_port(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(ConfigError, match="can't start new thread"):
            serve("127.0.0.1", port)
    serve("127.0.0.1", port).close()
