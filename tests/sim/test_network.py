"""The link model: what a message costs, and who waits for whom at a port."""

from __future__ import annotations

import asyncio

import pytest
import torch

import freewheel as fw
import lab
from freewheel.fabric import collectives
from freewheel.records.counters import Counters
from freewheel.sim.clock import Trace, VirtualLoop
from freewheel.sim.fabric import HEADER_BYTES, Wire
from freewheel.sim.links import Network

SIZE = 10_000
MESSAGE_S = (SIZE * 4 + HEADER_BYTES) / 1e6  # at 8 Mbit/s
VECTOR = torch.ones(SIZE)


def wire(workers: int, **links) -> Wire:
    links = fw.Links(**({"mbit": 8.0, "latency_ms": 5.0} | links))
    wire = Wire(VirtualLoop(), Network(links, workers), Trace(), workers, value_bytes=4)
    for rank in range(workers):
        wire.attach(rank)
    return wire


def play(wire: Wire, *coroutines) -> list[float]:
    """Run coroutines at once; return when each one ended."""
    ended = [0.0] * len(coroutines)

    async def timed(at, coroutine):
        await coroutine
        ended[at] = wire.loop.time()

    async def main():
        await asyncio.gather(*(timed(at, coroutine) for at, coroutine in enumerate(coroutines)))

    lab.play(wire.loop, main())
    return ended


async def send(wire, source, target, tag=("x",), vector=VECTOR):
    await wire.ends[source].send(target, tag, vector)


async def receive(wire, source, target, tag=("x",)):
    return await wire.ends[target].receive(tag, source)


def test_a_transfer_costs_latency_and_bytes_over_bandwidth():
    w = wire(2)
    left, arrived = play(w, send(w, 0, 1), receive(w, 0, 1))
    assert left == pytest.approx(MESSAGE_S)
    assert arrived == pytest.approx(MESSAGE_S + 0.005)
    assert w.ends[0].counters.bytes_out == SIZE * 4 + HEADER_BYTES


def test_both_directions_of_a_link_are_independent():
    w = wire(2)
    ends = play(w, send(w, 0, 1), send(w, 1, 0), receive(w, 0, 1), receive(w, 1, 0))
    assert ends[2] == ends[3] == pytest.approx(MESSAGE_S + 0.005)


def test_a_port_serves_first_come_first_served():
    w = wire(4)
    sends = [send(w, source, 0) for source in (1, 2, 3)]
    arrived = play(w, *sends, *(receive(w, source, 0) for source in (1, 2, 3)))[3:]
    assert arrived == pytest.approx([MESSAGE_S * k + 0.005 for k in (1, 2, 3)])
    assert w.network.into[0].free_at == arrived[2]


def test_a_fair_port_passes_all_its_messages_at_once():
    w = wire(4, fair=True)

    async def late():
        await asyncio.sleep(MESSAGE_S)
        await send(w, 3, 0)

    sends = [send(w, 1, 0), send(w, 2, 0), late()]
    *left, first, second, third = play(w, *sends, *(receive(w, source, 0) for source in (1, 2, 3)))
    # Half of the first two has passed when the third comes; then each gets a third of the port.
    assert left == pytest.approx([2.5 * MESSAGE_S, 2.5 * MESSAGE_S, 3 * MESSAGE_S])
    assert [first, second, third] == pytest.approx([at + 0.005 for at in left])


def test_a_fair_port_lets_short_messages_slip_in_and_keeps_those_of_a_connection_in_order():
    w = wire(3, fair=True)
    ends = w.ends

    async def out():
        ends[1].post(0, ("x",), VECTOR)
        ends[1].post(0, ("x",), None)

    _, arrived, long, behind = play(
        w, out(), receive(w, 2, 0, ("y",)), receive(w, 1, 0), send(w, 2, 0, ("y",), None)
    )
    assert arrived == pytest.approx(HEADER_BYTES / 1e6 + 0.005)
    assert long == pytest.approx(MESSAGE_S + 0.005)
    assert behind == pytest.approx(HEADER_BYTES / 1e6)
    (second,) = play(w, receive(w, 1, 0))
    assert second == pytest.approx(MESSAGE_S + HEADER_BYTES / 1e6 + 0.005)


def test_what_has_passed_a_fair_port_before_it_was_throttled_stays_passed():
    w = wire(3, fair=True)

    async def late():
        await asyncio.sleep(0.5 * MESSAGE_S)
        w.network.throttle(0, 10)
        await asyncio.sleep(0.1 * MESSAGE_S)
        await send(w, 2, 0)

    first, second, *_ = play(w, send(w, 1, 0), late(), receive(w, 1, 0), receive(w, 2, 0))
    # The new speed counts from when the second message comes: 0.4 of the first one is left then.
    assert first == pytest.approx((0.6 + 0.4 * 2 * 10) * MESSAGE_S)
    assert second == pytest.approx(first + 0.6 * 10 * MESSAGE_S)


def test_with_fair_ports_the_slowest_port_of_the_path_counts():
    w = wire(4, fair=True, backbone_mbit=4.0, slow={2: 10})
    arrived = play(w, send(w, 0, 1), send(w, 2, 3), receive(w, 0, 1), receive(w, 2, 3))[2:]
    assert arrived == pytest.approx([4 * MESSAGE_S + 0.005, 10 * MESSAGE_S + 0.005])


def test_a_full_receiver_is_felt_by_the_sender_of_a_long_message():
    w = wire(3)
    left = play(w, send(w, 1, 0), send(w, 2, 0), receive(w, 1, 0), receive(w, 2, 0))
    assert left[0] == pytest.approx(MESSAGE_S)
    assert left[1] == pytest.approx(2 * MESSAGE_S)  # its own port was free after one


def test_a_short_message_leaves_at_once():
    w = wire(2)
    left, arrived = play(w, send(w, 0, 1, vector=None), receive(w, 0, 1))
    assert left == pytest.approx(HEADER_BYTES / 1e6)
    assert arrived == pytest.approx(left + 0.005)


def test_a_slow_worker_s_link_is_slow_both_ways_and_only_its_own():
    w = wire(3, slow={1: 10})
    arrived = play(w, send(w, 0, 1), send(w, 0, 2), receive(w, 0, 1), receive(w, 0, 2))[2:]
    assert arrived[0] == pytest.approx(10 * MESSAGE_S + 0.005)
    assert arrived[1] == pytest.approx(2 * MESSAGE_S + 0.005)  # behind the other in the sender's port only


def test_the_way_out_may_be_slower_than_the_way_in():
    w = wire(3, out_mbit=0.8)
    ends = play(w, send(w, 1, 0), send(w, 2, 0), receive(w, 1, 0), receive(w, 2, 0))
    assert ends[2] == pytest.approx(10 * MESSAGE_S + 0.005)
    assert ends[3] == pytest.approx(10 * MESSAGE_S + 0.005, rel=0.11)  # the way in is shared and fast


def test_a_backbone_is_shared_by_all():
    w = wire(4, backbone_mbit=8.0)
    arrived = play(w, send(w, 0, 1), send(w, 2, 3), receive(w, 0, 1), receive(w, 2, 3))[2:]
    assert sorted(arrived) == pytest.approx([MESSAGE_S + 0.005, 2 * MESSAGE_S + 0.005])


def test_workers_of_one_node_use_neither_their_links_nor_the_backbone():
    w = wire(4, backbone_mbit=8.0, workers_per_node=2, node_mbit=8000.0, node_latency_ms=0.0)
    (arrived,) = play(w, send(w, 0, 1), receive(w, 0, 1))[1:]
    assert arrived == pytest.approx(MESSAGE_S / 1000)
    assert w.network.out[0].free_at == 0.0


def test_messages_of_one_sender_and_tag_stay_in_order():
    w = wire(2)

    async def out():
        for k in range(5):
            w.ends[0].post(1, ("x",), VECTOR if k % 2 else None, note=(k,))

    async def into():
        return [(await w.ends[1].receive(("x",), 0)).note[0] for _ in range(5)]

    async def main():
        await out()
        return await into()

    assert lab.play(w.loop, main()) == [0, 1, 2, 3, 4]


def test_talking_to_oneself_costs_nothing():
    w = wire(1)
    assert play(w, send(w, 0, 0), receive(w, 0, 0)) == [0.0, 0.0]
    assert w.ends[0].counters == Counters()


# -- what is built on top --


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_ring_sum(n):
    w = wire(n)
    vectors = [torch.arange(23.0) * (rank + 1) for rank in range(n)]
    sums = [None] * n

    async def take_part(rank):
        sums[rank] = await w.ends[rank].reduce(("s",), vectors[rank], dict.fromkeys(range(n), 1.0))

    play(w, *(take_part(rank) for rank in range(n)))
    for total in sums:
        torch.testing.assert_close(total, torch.arange(23.0) * (n * (n + 1) / 2))
        assert torch.equal(total, sums[0])  # the same to the last bit everywhere
    assert torch.equal(vectors[0], torch.arange(23.0))


def test_a_ring_costs_what_rings_cost():
    n, w = 4, wire(4)
    play(w, *(w.ends[rank].reduce(("s",), VECTOR, dict.fromkeys(range(n), 1.0)) for rank in range(n)))
    assert w.loop.time() == pytest.approx(2 * (n - 1) * (SIZE * 4 / n / 1e6 + 0.005), rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("root", [0, "last"])
def test_broadcast_and_gather(n, root):
    w = wire(n)
    root = n - 1 if root == "last" else root
    got, notes = {}, {}

    async def take_part(rank):
        vector = VECTOR * 3 if rank == root else None
        got[rank] = (await collectives.broadcast(w.ends[rank], range(n), root, vector, ("b",))).payload
        notes[rank] = await collectives.gather(w.ends[rank], range(n), (float(rank), -1.0), ("g",))

    play(w, *(take_part(rank) for rank in range(n)))
    assert all(torch.equal(got[rank], VECTOR * 3) for rank in range(n))
    assert all(notes[rank] == {r: (float(r), -1.0) for r in range(n)} for rank in range(n))


# -- peers come and go --


def test_who_waits_for_a_peer_is_told_when_it_crashes():
    w = wire(3)
    w.loop.call_at(1.0, w.crash, 1)

    async def main():
        with pytest.raises(fw.PeerLost, match=r"worker 1 is gone \(crashed\)"):
            await w.ends[0].receive(("x",), 1)
        assert w.loop.time() == pytest.approx(1.005)
        assert w.ends[0].members == (0, 2)
        with pytest.raises(fw.PeerLost):
            w.ends[0].send(1, ("x",), VECTOR)
        w.ends[0].post(1, ("x",))
        assert w.ends[0].counters.messages_dropped == 1
        with pytest.raises(fw.PeerLost):
            await w.ends[2].receive(("x",), among=(0, 1))

    lab.play(w.loop, main())


def test_a_message_sent_to_a_worker_that_just_died_vanishes():
    """Between a crash and its notice peers still send; it must neither arrive nor break the simulator."""
    w = wire(2)
    w.crash(1)
    w.ends[0].post(1, ("x",), VECTOR)
    w.loop.run_until_idle()
    assert w.ends[0].members == (0,)


def test_a_message_from_an_earlier_life_never_arrives():
    w = wire(2)
    w.ends[1].post(0, ("x",), VECTOR)
    w.loop.call_at(0.001, w.crash, 1)
    w.loop.call_at(0.002, w.attach, 1)
    w.loop.run_until_idle()
    assert w.ends[0].members == (0, 1)
    assert not w.ends[0]._boxes


def test_a_quick_restart_still_breaks_what_waited_for_the_earlier_life():
    """A worker that is back before its crash was noticed: whoever waited for its old self must hear of it."""
    w = wire(2)
    w.loop.call_at(1.0, w.crash, 1)
    w.loop.call_at(1.001, w.attach, 1)

    async def main():
        with pytest.raises(fw.PeerLost):
            await w.ends[0].receive(("x",), 1)
        assert w.ends[0].members == (0, 1)

    lab.play(w.loop, main())


def test_a_cut_link_loses_messages_and_is_noticed_after_a_silence():
    w = wire(2)
    w.cut_link(0, 1)
    w.ends[0].post(1, ("x",), VECTOR)

    async def main():
        with pytest.raises(fw.PeerLost, match="cut"):
            await w.ends[1].receive(("x",), 0)
        assert w.loop.time() == pytest.approx(w.silence_s)
        w.heal_link(0, 1)
        assert w.ends[1].members == (0, 1)
        w.ends[0].post(1, ("y",), VECTOR)
        await w.ends[1].receive(("y",), 0)

    lab.play(w.loop, main())
