"""What several workers make of their vectors: over any mixture of windows and streams, all get the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from freewheel.errors import PeerLost
from freewheel.fabric import together, windows
from freewheel.fabric.base import RUNTIME, Message, Pull
from freewheel.fabric.handshake import Identity
from freewheel.fabric.notes import pack
from freewheel.fabric.tcp import TcpFabric
from freewheel.fabric.transfers import LONG, shares
from freewheel.records.counters import Counters

DEADLINE_S = 30.0
SIZE = 3 * LONG + 77


@contextlib.asynccontextmanager
async def crew(
    count: int, near: Callable[[int, int], bool], **settings: Any
) -> AsyncIterator[list[TcpFabric]]:
    """Fabrics of one process; `near` says which pairs share windows, as workers of one host do."""
    fabrics = [
        TcpFabric(
            Identity(bytes(16), rank, count, 1, "test", "m", SIZE, place=windows.place()),
            Counters(),
            **settings,
        )
        for rank in range(count)
    ]
    for fabric in fabrics:
        fabric._listener.unshared.update(peer for peer in range(count) if not near(fabric.rank, peer))
    async with asyncio.timeout(DEADLINE_S):
        ports = [fabric.open("127.0.0.1") for fabric in fabrics]
        for fabric in fabrics:
            for peer in range(fabric.rank):
                await fabric.connect(peer, "127.0.0.1", ports[peer])
        while any(len(fabric.members) < count for fabric in fabrics):
            await asyncio.sleep(0.001)
        yield fabrics
    for fabric in fabrics:
        await fabric.close()


HOSTS = {
    "one host": lambda a, b: True,
    "all apart": lambda a, b: False,
    "two and two": lambda a, b: a // 2 == b // 2,
    "three and one": lambda a, b: (a == 3) == (b == 3),
    "no clique": lambda a, b: abs(a - b) == 1,
}


@pytest.mark.parametrize("part", [0.0, 0.7])
@pytest.mark.parametrize("place", ["in windows", "elsewhere"])
@pytest.mark.parametrize("size", [5, LONG + 5, SIZE])
@pytest.mark.parametrize("hosts", HOSTS)
def test_all_get_the_weighted_sum(hosts, size, place, part):
    async def main() -> None:
        async with crew(4, HOSTS[hosts]) as fabrics:
            given = [torch.randn(size, generator=torch.Generator().manual_seed(k)) for k in range(4)]
            weights = [0.1, 0.2, 0.3, 0.4]
            vectors = [
                fabric.windows.make(size, torch.float32).copy_(one) if place == "in windows" else one.clone()
                for fabric, one in zip(fabrics, given, strict=True)
            ]
            for turn in range(2):
                total = sum(weight * vector.clone() for weight, vector in zip(weights, vectors, strict=True))
                before = [vector.clone() for vector in vectors]
                results = await asyncio.gather(
                    *(
                        fabric.reduce(("t", turn), vector, dict(enumerate(weights)), part)
                        for fabric, vector in zip(fabrics, vectors, strict=True)
                    )
                )
                for result, own in zip(results, before, strict=True):
                    wanted = part * (total - own) if part else total
                    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)

    asyncio.run(main())


def test_between_hosts_each_byte_goes_once_and_not_once_for_each_worker():
    """Two hosts with two workers each: a ring of two for each half, so each host sends one vector."""

    async def main() -> None:
        async with crew(4, HOSTS["two and two"]) as fabrics:
            vectors = [fabric.windows.make(SIZE, torch.float32).fill_(1.0) for fabric in fabrics]
            sent = [0] * 4
            for fabric in fabrics:
                write = fabric.transfers.write

                async def count(transport: Any, vector: Any, wire: Any, fabric=fabric, write=write) -> None:
                    sent[fabric.rank] += vector.nbytes
                    await write(transport, vector, wire)

                fabric.transfers.write = count  # type: ignore[method-assign]
            await asyncio.gather(
                *(
                    fabric.reduce(("t",), vector, dict.fromkeys(range(4), 1.0))
                    for fabric, vector in zip(fabrics, vectors, strict=True)
                )
            )
            assert all(bool((vector == 4).all()) for vector in vectors)
            for host in (sent[:2], sent[2:]):
                assert sum(host) == pytest.approx(4 * SIZE, rel=0.01)

    asyncio.run(main())


@pytest.mark.parametrize("near", [True, False], ids=["windows", "stream"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 77, SIZE])
def test_two_that_swap_move_as_far_in_opposite_directions(near, wire, size):
    async def main() -> None:
        async with crew(2, lambda a, b: near, wire=wire) as fabrics:
            given = [torch.randn(size) for _ in range(2)]
            vectors = [
                fabric.windows.make(size, torch.float32).copy_(one)
                for fabric, one in zip(fabrics, given, strict=True)
            ]
            told: list[int] = []
            moved = await asyncio.gather(
                *(
                    fabric.swap(1 - k, ("exchange", 0, 1), vectors[k], Pull(0.5), lambda k=k: told.append(k))
                    for k, fabric in enumerate(fabrics)
                )
            )
            assert sorted(told) == [0, 1]
            assert torch.equal(moved[0], -moved[1])  # to the bit, whatever the wire has rounded
            close = {"rtol": 0, "atol": 0.03} if wire and not near else {}
            torch.testing.assert_close(moved[0], (given[1] - given[0]) / 2, **close)

    asyncio.run(main())


def test_equal_replicas_do_not_move_though_the_wire_rounds():
    async def main() -> None:
        async with crew(2, lambda a, b: False, wire=torch.bfloat16) as fabrics:
            same = torch.randn(SIZE)
            moved = await asyncio.gather(
                *(
                    fabric.swap(1 - k, ("exchange", 0, 1), same.clone(), Pull(0.5), lambda: None)
                    for k, fabric in enumerate(fabrics)
                )
            )
            assert not moved[0].any()

    asyncio.run(main())


@pytest.mark.parametrize("size", [100, SIZE])
def test_messages_with_vectors_go_through_windows_in_order_and_leave_nothing(size):
    async def main() -> None:
        async with crew(2, lambda a, b: True) as (one, two):
            for k in range(5):
                one.post(1, ("x",), torch.full((size,), float(k)), (k, 7.5))
            for k in range(5):
                message = await two.receive(("x",), 0)
                assert message.note == (k, 7.5)
                assert bool((message.payload == k).all())
            while not one.quiet():
                await asyncio.sleep(0.001)
            assert len(one.windows._by_address) <= 2 + 5  # borrowed ones are used again
            await one.send(1, ("y",), torch.ones(size))
            assert bool((await two.receive(("y",), 0)).payload.all())

    asyncio.run(main())


def test_windows_that_cannot_be_opened_are_told_of_once_and_streams_take_their_place(monkeypatch, caplog):
    def refuse(*_: Any) -> None:
        raise OSError("not permitted")

    monkeypatch.setattr(windows.Windows, "open", refuse)

    async def main() -> None:
        async with crew(2, lambda a, b: True) as fabrics:
            assert [fabric.kinds() for fabric in fabrics] == [{1: "stream"}, {0: "stream"}]
            vectors = [torch.full((SIZE,), float(k)) for k in range(2)]
            await asyncio.gather(
                *(f.reduce(("t",), v, {0: 1.0, 1: 1.0}) for f, v in zip(fabrics, vectors, strict=True))
            )
            assert bool((vectors[0] == 1).all())

    with caplog.at_level(logging.WARNING, "freewheel"):
        asyncio.run(main())
    assert [text for text in caplog.messages if "share no host window" in text] == [
        "workers 0 and 1 share no host window: vectors between them travel by stream"
    ]


@pytest.mark.parametrize("when", ["ready", "done"])
def test_a_member_that_is_lost_in_a_reduction_ends_it_for_all_who_need_it(when, monkeypatch):
    async def main() -> None:
        async with crew(3, lambda a, b: True) as fabrics:
            lost = fabrics[2]
            post = lost.post

            def cut(peer: int, tag: Any, *more: Any, **settings: Any) -> None:
                if tag[-1] == when:
                    raise ConnectionError("this worker dies here")
                post(peer, tag, *more, **settings)

            monkeypatch.setattr(lost, "post", cut)

            async def part(fabric: TcpFabric) -> None:
                vector = fabric.windows.make(SIZE, torch.float32).fill_(1.0)
                try:
                    await fabric.reduce(("t",), vector, dict.fromkeys(range(3), 1.0))
                except ConnectionError:
                    await fabric.close("dead")
                    raise

            first = asyncio.ensure_future(part(fabrics[0]))
            second = asyncio.ensure_future(part(fabrics[1]))
            with pytest.raises(ConnectionError):
                await part(lost)
            with pytest.raises(PeerLost):
                await first
            if when == "done":
                with pytest.raises(PeerLost):
                    await second
            second.cancel()  # the view is over: who leads tells those who wait for it
            await asyncio.gather(second, return_exceptions=True)

    asyncio.run(main())


def test_a_message_that_is_cancelled_is_not_waited_for_at_the_end():
    async def main() -> None:
        async with crew(2, lambda a, b: False) as (one, two):
            block = one.send(1, ("x",), torch.ones(SIZE))
            other = one.send(1, ("x",), torch.ones(SIZE))
            other.cancel()
            await block
            await two.receive(("x",), 0)
            while not one.quiet():
                await asyncio.sleep(0.001)
            assert one.traffic()[0] == two.traffic()[1] == 1

    asyncio.run(main())


@pytest.mark.parametrize(("numel", "count"), [(1000, 2), (1000, 3), (5, 4), (64, 64), (1 << 20, 7), (0, 2)])
def test_shares_cover_a_vector_once(numel, count):
    parts = shares(numel, count)
    assert len(parts) == count
    assert [k for part in parts for k in range(numel)[part]] == list(range(numel))
    assert all(part.start % 64 == 0 or part.start == numel for part in parts)


def test_groups_are_cliques_of_one_kind():
    notes = {
        0: (1.0, 1, 1, 1, 9.0),
        1: (1.0, 2, 0, 2, 1, 8.0),
        2: (1.0, 1, 1, 1, 7.0),
        3: (0.0, 0, 0),
    }
    ready = {rank: together._read_ready(Message(rank, ("x",), None, note)) for rank, note in notes.items()}
    groups = together._cliques(ready)
    assert groups == [[(0, [9.0]), (1, [8.0])], [(2, [7.0])], [(3, [])]]
    assert together._read_groups(Message(0, ("x",), None, pack(groups)), range(4)) == groups


@pytest.mark.parametrize(
    "note",
    [
        (),
        (1.0,),
        (1.0, 1.0, 0),
        (1.0, 2.0, 0, 0),
        (1.0, 2.0, 0, 0, 0, 0),
        (1.0, 2.0, 0, 0, 7, 0),
        (1.0, 2.0, 0, 0, 1, 0, 5),
        (2.0, 2.0, 0, 0, 1, 0, 0),
        (1.0, 2.0, 0, -1),
        (-1.0,),
        (1.0, -1.0),
        (1e300,),
    ],
)
def test_groups_that_cannot_be_cost_the_sender_its_connection(note):
    offences = []
    with pytest.raises(PeerLost):
        together._read_groups(Message(0, ("x",), None, note, offences.append), (0, 1))
    assert len(offences) == 1


@pytest.mark.parametrize(
    "note",
    [
        (),
        (1.0,),
        (9.0, 0, 0),
        (-1.0, 0, 0),
        (1.0, 5, 0),
        (1.0, 0, -1),
        (1.0, -1, 0),
        (0.5, 0, 0),
        (1.0, 0, 0, 0),
    ],
)
def test_a_member_that_is_ready_with_nonsense_is_cut_off(note):
    offences = []
    with pytest.raises(PeerLost):
        together._read_ready(Message(0, ("x",), None, note, offences.append))
    assert len(offences) == 1


def test_what_the_runtime_sends_once_leaves_no_window_of_a_host_mapped():
    async def main() -> None:
        async with crew(2, lambda a, b: True) as fabrics:
            left = fabrics[0].send(1, (RUNTIME, "weights"), torch.ones(SIZE))
            assert bool(((await fabrics[1].receive((RUNTIME, "weights"), 0)).payload == 1).all())
            await left
            assert fabrics[0].windows.nbytes() == 0
            assert not fabrics[1].windows._peers

    asyncio.run(main())
