"""Measuring the link to another host: figures that make sense, and strangers who get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

import pytest

from freewheel.errors import ConfigError
from freewheel.runtime.doctor import bandwidth
from freewheel.runtime.doctor.bandwidth import measuring, serving
from freewheel.runtime.launch import keys

DEADLINE_S = 20.0


def test_a_link_is_measured_by_one_after_the_other():
    said = []

    async def twice():
        async with serving(port=0, say=said.append) as port:
            return await asyncio.gather(*(measuring("127.0.0.1", port, mb) for mb in (2, 0.01)))

    for found in asyncio.run(twice()):
        assert 0 < found.latency_ms < 1000
        assert found.mbit_out > 0.1
        assert found.mbit_in > 0.1
        assert abs(found.clock_skew_ms) < 1000  # it is the same clock
    assert said == ["another host measures its link to this one"] * 2


def test_the_skew_is_that_of_the_other_clock(monkeypatch):
    class Ahead:
        def pack(self, now_s):
            return struct.pack("!d", now_s + 90)

        size, unpack = bandwidth.CLOCK.size, staticmethod(bandwidth.CLOCK.unpack)

    monkeypatch.setattr(bandwidth, "CLOCK", Ahead())
    assert asyncio.run(bandwidth.loopback(0.01)).clock_skew_ms == pytest.approx(90_000, abs=5_000)


def test_a_slow_link_is_not_kept_busy_for_long():
    sizes = []

    async def transfer(size):
        sizes.append(size)
        return 0.001 + 8e-6 * size / 2.0, 0.0  # a round trip of 1 ms, 2 Mbit/s

    assert asyncio.run(bandwidth._grow(transfer, 64_000_000, 0.001)) == pytest.approx(2.0)
    assert sum(sizes) < 600_000


def test_a_fast_link_is_measured_with_all_it_may_use():
    sizes = []

    async def transfer(size):
        sizes.append(size)
        return 1e-9 * size, 0.0

    assert asyncio.run(bandwidth._grow(transfer, 10_000_000, 0.0)) == pytest.approx(8000)
    assert sizes[-1] == 10_000_000
    assert sum(sizes) < 20_000_000


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64)], ids=["http", "zeros"])
def test_strangers_get_nothing_and_others_are_served(greeting):
    async def visit():
        async with serving(port=0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(greeting)
            with contextlib.suppress(ConnectionError):
                assert len(await asyncio.wait_for(reader.read(), DEADLINE_S)) < 64  # no more than a challenge
            writer.close()
            return await measuring("127.0.0.1", port, 0.01)

    assert asyncio.run(visit()).mbit_out > 0


async def asked(port, sent, wanted):
    """What the server answers to a question of somebody who has proved to be a member."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        async with bandwidth._met(sock, None, DEADLINE_S, calls=True) as transport:
            await transport.write(bandwidth.ASK.pack(sent, wanted))
            await transport.read(memoryview(bytearray(1)))


@pytest.mark.parametrize(("sent", "wanted"), [(2**50, 0), (0, 2**50)])
def test_what_is_not_offered_is_not_given(sent, wanted):
    async def ask():
        async with serving(port=0) as port:
            with pytest.raises((EOFError, ConnectionError)):
                await asyncio.wait_for(asked(port, sent, wanted), DEADLINE_S)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"SSH-2.0-OpenSSH_9.6 and more\r\n" * 2, "speak"), (b"", "cannot measure")],
)
def test_what_answers_there_is_named(answer, why):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once():
            end, _ = listener.accept()
            with end:
                end.sendall(answer)
                end.recv(64)

        thread = threading.Thread(target=once)
        thread.start()
        with pytest.raises(ConfigError, match=why):
            asyncio.run(measuring("127.0.0.1", listener.getsockname()[1], 0.01))
        thread.join(DEADLINE_S)


def test_a_transfer_that_takes_too_long_ends(monkeypatch):
    monkeypatch.setattr(bandwidth, "MEASURE_S", 0.05)
    with pytest.raises(ConfigError, match="too long"):
        asyncio.run(bandwidth.loopback(1000))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mb": 0}, "mb must be above 0"),
        ({"mb": 1e9}, "at most 1024"),
        ({"mb": float("nan")}, "mb must be"),
    ],
)
def test_bad_values_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        asyncio.run(measuring(**{"host": "127.0.0.1", "port": 1, "mb": 1} | given))


def test_keys_let_members_measure_and_nobody_else(tmp_path):
    for name in ("ours", "theirs"):
        keys.make(tmp_path / name)

    async def visits():
        async with serving(port=0, tls=tmp_path / "ours") as port:
            for tls in (None, tmp_path / "theirs"):
                with pytest.raises(ConfigError, match="the same keys, or none"):
                    await measuring("127.0.0.1", port, 0.1, tls=tls)
            return await measuring("127.0.0.1", port, 0.1, tls=tmp_path / "ours")

    assert asyncio.run(visits()).mbit_out > 0


def test_a_visitor_that_stays_too_long_makes_room(monkeypatch):
    monkeypatch.setattr(bandwidth, "GREETING_S", 0.2)
    monkeypatch.setattr(bandwidth, "VISIT_S", 0.2)

    async def linger():
        async with serving(port=0) as port:
            stays = asyncio.create_task(asked(port, 1000, 0))  # and sends nothing
            with socket.create_connection(("127.0.0.1", port)):  # says nothing
                found = await measuring("127.0.0.1", port, 0.01)
            with pytest.raises((EOFError, ConnectionError)):
                await stays
            return found

    assert asyncio.run(linger()).mbit_out > 0
