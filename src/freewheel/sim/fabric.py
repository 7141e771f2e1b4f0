"""The virtual fabric: messages through the ports of a modelled network, in virtual time."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from freewheel.fabric import collectives
from freewheel.fabric.base import Each, Fabric, Left, Message, Note, Tag, Weights
from freewheel.records.counters import Counters
from freewheel.sim.clock import Callback, Trace, VirtualLoop
from freewheel.sim.links import PACKET_BYTES, Fair, Network, Port

HEADER_BYTES = 64


class Wire:
    """What all fabrics of a run share: the network, who is alive, which links are cut."""

    def __init__(
        self, loop: VirtualLoop, network: Network, trace: Trace, workers: int, value_bytes: float
    ) -> None:
        self.loop, self.network, self.trace, self.workers = loop, network, trace, workers
        self.value_bytes = value_bytes  # of a number: a small vector may stand for a large model
        self.ends: dict[int, VirtualFabric] = {}
        self.life = [0] * workers  # how often each worker has been started
        self.cut: dict[frozenset[int], Callback] = {}  # each with the timer that lets its ends notice
        self.everybody = tuple(range(workers)), frozenset(range(workers))  # the first members; shared
        self.silence_s = 2.0  # how long a cut link stays unnoticed; a crash is noticed at once
        self.totals: weakref.WeakValueDictionary[Tag, Total] = weakref.WeakValueDictionary()

    def unsent_bytes(self) -> float:
        """Counted as sent, and still with its sender."""
        now, network = self.loop.time(), self.network
        ports = (*network.out, *network.local_out)
        held = sum(max(0.0, port.free_at - now) * port.bytes_per_s for port in ports)
        queues = (queue for end in self.ends.values() for queue in end.queues.values())
        return held + sum(flight.size for queue in queues for flight in queue)

    def attach(self, rank: int) -> VirtualFabric:
        """Begin a life of a worker, connected with all that are alive and in reach."""
        self.life[rank] += 1
        end = VirtualFabric(self, rank)
        others = tuple(self.ends)
        self.ends[rank] = end
        if self.life[rank] == 1:  # all begin together
            end.members, end._reach = self.everybody
            return end
        for peer in others:
            self.ends[peer].lose(rank, "restarted")  # it may not have noticed yet
            if frozenset((rank, peer)) not in self.cut:
                self._meet(rank, peer)
        return end

    def _meet(self, a: int, b: int) -> None:
        for one, other in ((a, b), (b, a)):
            if one in self.ends and other in self.ends:
                self.ends[one].gain(other)

    def _part(self, a: int, b: int, why: str) -> None:
        for one, other in ((a, b), (b, a)):
            if one in self.ends:
                self.ends[one].lose(other, why, "cut")

    def crash(self, rank: int, why: str = "crashed", what: str = "died") -> None:
        """End a worker's life: its messages under way are lost; peers see the connection break."""
        life = self.life[rank]
        del self.ends[rank]

        def notice(peer: int) -> None:
            if self.life[rank] == life and peer in self.ends:  # not if it has come back meanwhile
                self.ends[peer].lose(rank, why, what)

        for peer in self.ends:
            self.loop.call_later(self.network.latency_s, notice, peer)

    def cut_link(self, a: int, b: int) -> None:
        """Lose all messages between two workers from now on; they notice after `silence_s`."""
        link = frozenset((a, b))
        if link in self.cut:
            self.cut[link].cancel()
        self.cut[link] = self.loop.call_later(self.silence_s, self._part, a, b, "its link is cut")

    def heal_link(self, a: int, b: int) -> None:
        """Let two workers reach each other over a new connection: what was lost stays lost."""
        if (timer := self.cut.pop(frozenset((a, b)), None)) is not None:
            timer.cancel()
            self._part(a, b, "its link was cut")
            self._meet(a, b)


class Total(dict[int, Tensor]):
    """The vectors of a reduction's members, and their sum in the order of ranks, added once for all."""

    @cached_property
    def sum(self) -> Tensor:
        return torch.stack([self[rank] for rank in sorted(self)]).sum(0)


@dataclass(slots=True)
class Flight:
    """A message under way."""

    message: Message
    peer: int
    size: int
    target: VirtualFabric | None  # the receiver's end in the life it is meant for; None: it was dead
    epoch: int  # of the sender's connection to the receiver
    last_byte: float  # when it leaves the sender, by the ports the message has reached so far
    left: Left | None
    ports: int = 0  # how many fair ports it is still passing


class VirtualFabric(Fabric):
    """A worker's end of the network, for one life."""

    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(rank)
        self.wire, self.world_size, self.life = wire, wire.workers, wire.life[rank]
        self.counters = Counters()
        self._departed: dict[int, float] = {}  # when the last message to each peer leaves this worker's port
        self._landing: dict[int, float] = {}  # when it has landed
        # Where ports are fair: what is to go to each peer, in order; the first one is under way.
        self.queues: dict[int, deque[Flight]] = {}

    @property
    def silence_s(self) -> float:  # type: ignore[override]
        return self.wire.silence_s

    def send(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> Left:
        """Begin to send; the future is done when the last byte has left.

        A message longer than the link's bandwidth times its latency leaves no faster than the receiver's port
        takes it in: that is TCP's flow control.
        """
        self.need(peer)
        left: Left = self.wire.loop.create_future()
        self._transmit(peer, tag, vector, note, left)
        if peer != self.rank:
            self.leaving(peer, left)
        return left

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        if self.reaches(peer):
            self._transmit(peer, tag, vector, note, None)
        else:
            self.counters.messages_dropped += 1

    async def reduce(self, tag: Tag, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """A ring of all members; see Fabric.reduce.

        Messages have the pieces' length and take their time, but nobody adds up what is in them: after the
        whole ring a member has heard of all others, so it takes the sum of all, instead of n² small sums.
        """
        total, weight = self.wire.totals.setdefault(tag, Total()), weights[self.rank]
        total[self.rank] = vector.clone() if weight == 1 else vector * weight
        for at in range(0, vector.numel(), collectives.CHUNK):
            await collectives.ring(self, tuple(weights), vector[at : at + collectives.CHUNK], tag)
        return (total.sum - vector).mul_(part) if part else total.sum.clone()

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        """Only the time matters: see `reduce`."""
        await self.receive(tag, peer)

    # -- through the ports --

    def _transmit(self, peer: int, tag: Tag, vector: Tensor | None, note: Note, left: Left | None) -> None:
        wire, loop = self.wire, self.wire.loop
        message = Message(self.rank, tag, vector, note)
        if peer == self.rank:  # a worker that talks to itself (the server's own training) uses no network
            loop.call_soon(self.deliver, message)
            if left is not None:
                left.set_result(None)
            return
        values = 0 if vector is None else vector.numel()
        size = HEADER_BYTES + 8 * len(note) + round(values * wire.value_bytes)
        self.counters.bytes_out += size
        self.counters.messages_out += 1
        now = loop.time()
        wire.trace.add((now, "send", self.rank, peer, tag, size))
        flight = Flight(message, peer, size, wire.ends.get(peer), self.epoch(peer), now, left)
        if wire.network.links.fair:
            queue = self.queues.setdefault(peer, deque())
            queue.append(flight)
            if len(queue) == 1:
                self._share(flight)
            return
        out, backbone, into, latency_s = wire.network.path(self.rank, peer)
        start, end = out.take(now, now, size)
        before = self._departed.get(peer, 0.0)
        if start < before:  # short, and behind a long one of its own connection
            start, end = before, before + end - start
        self._departed[peer] = flight.last_byte = end
        if backbone is None:
            loop.call_at(start + latency_s, self._arrive, flight, into, latency_s)
        else:
            loop.call_at(start, self._cross, flight, backbone, into, latency_s)
        if left is not None:
            loop.call_at(end, self._left, flight)

    def _cross(self, flight: Flight, backbone: Port, into: Port, latency_s: float) -> None:
        """The first byte has reached the backbone."""
        start, flight.last_byte = backbone.take(self.wire.loop.time(), flight.last_byte, flight.size)
        self.wire.loop.call_at(start + latency_s, self._arrive, flight, into, latency_s)

    def _arrive(self, flight: Flight, into: Port, latency_s: float) -> None:
        """The first byte has reached the receiver's port."""
        _, done = into.take(self.wire.loop.time(), flight.last_byte + latency_s, flight.size)
        flight.last_byte = max(flight.last_byte, done - latency_s)
        # Messages of one connection stay in order, although short ones slip past long ones at a port.
        self._landing[flight.peer] = done = max(done, self._landing.get(flight.peer, 0.0))
        self.wire.loop.call_at(done, self._land, flight)

    def _left(self, flight: Flight) -> None:
        """The last byte has left, unless a later port takes it in more slowly."""
        left, loop = flight.left, self.wire.loop
        if left is None or left.done():
            return
        if flight.last_byte > loop.time():
            loop.call_at(flight.last_byte, self._left, flight)
        else:
            left.set_result(None)

    def _share(self, flight: Flight) -> None:
        """Pass all ports of the path at once; the slowest of them counts."""
        loop, path = self.wire.loop, self.wire.network.path(self.rank, flight.peer)
        ports = [port for port in path if isinstance(port, Fair)]
        if flight.size <= PACKET_BYTES:  # it slips in between
            loop.call_later(max(flight.size / port.bytes_per_s for port in ports), self._through, flight)
            return
        flight.ports = len(ports)
        for port in ports:
            port.join(loop, flight.size, partial(self._through, flight))

    def _through(self, flight: Flight) -> None:
        """A fair port has passed it; after all have, it lands, and the next of its connection begins."""
        flight.ports -= 1
        if flight.ports > 0:
            return
        wire, queue = self.wire, self.queues[flight.peer]
        if flight.left is not None and not flight.left.done():
            flight.left.set_result(None)
        wire.loop.call_later(wire.network.path(self.rank, flight.peer)[3], self._land, flight)
        queue.popleft()
        if queue:
            self._share(queue[0])

    def _land(self, flight: Flight) -> None:
        """Hand it over, unless the life of either side has ended or the link was cut."""
        wire, message, peer = self.wire, flight.message, flight.peer
        alive = wire.ends.get(self.rank) is self and wire.ends.get(peer) is flight.target
        same = self.epoch(peer) == flight.epoch and frozenset((self.rank, peer)) not in wire.cut
        if alive and same and flight.target is not None:
            wire.trace.add((wire.loop.time(), "land", self.rank, peer, message.tag))
            flight.target.counters.bytes_in += flight.size
            flight.target.deliver(message)
