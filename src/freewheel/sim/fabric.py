"""The virtual fabric: messages through the ports of a modelled network, in virtual time."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from freewheel.fabric import collectives
from freewheel.fabric.base import Each, Fabric, Message, Note, Tag, Weights
from freewheel.records.counters import Counters
from freewheel.sim.clock import Callback, VirtualLoop
from freewheel.sim.links import PACKET_BYTES, Network, Port
from freewheel.sim.sharing import Fair
from freewheel.sim.trace import Trace

HEADER_BYTES = 64


class Wire:
    """What all virtual fabrics of a run share: the network, who lives, which links are cut."""

    def __init__(
        self, loop: VirtualLoop, network: Network, trace: Trace, workers: int, value_bytes: float
    ) -> None:
        self.loop, self.network, self.trace = loop, network, trace
        self.workers = workers
        self.value_bytes = value_bytes
        """What one number of a vector weighs on the wire; lets a small vector stand for a large model."""
        self.ends: dict[int, VirtualFabric] = {}
        self.life = [0] * workers
        """How often each worker has been started."""
        self.cut: dict[frozenset[int], Callback] = {}
        """Links that are cut, each with the timer that lets its ends notice."""
        self.everybody = tuple(range(workers)), frozenset(range(workers))
        """The members of the beginning."""
        self.silence_s = 2.0
        """How long a cut link stays unnoticed; a broken connection is noticed at once."""
        self.latency_s = network.latency_s
        self._fair: dict[Port, Fair] = {}
        self.totals: weakref.WeakValueDictionary[Tag, Total] = weakref.WeakValueDictionary()
        """Of the reductions under way."""

    def fair(self, port: Port) -> Fair:
        """A port as one that all messages share."""
        return self._fair.setdefault(port, Fair(self.loop, port))

    def unsent_bytes(self) -> float:
        """What was to be sent and has not left its sender yet."""
        now, network = self.loop.time(), self.network
        ports = (*network.out, *network.local_out)
        held = sum(max(0.0, port.free_at - now) * port.bytes_per_s for port in ports)
        return held + sum(end.queued_bytes() for end in self.ends.values())

    def attach(self, rank: int) -> VirtualFabric:
        """Let a worker begin a life: it reaches, and is reached by, all others that live."""
        self.life[rank] += 1
        end = VirtualFabric(self, rank)
        others = tuple(self.ends)
        self.ends[rank] = end
        if self.life[rank] == 1:  # all begin together, and share what they know of each other
            end.members, end._reach = self.everybody
            return end
        for peer in others:
            self.ends[peer].lose(rank, "restarted")  # some may not have noticed yet that it was gone
            if frozenset((rank, peer)) not in self.cut:
                self.meet(rank, peer)
        return end

    def meet(self, a: int, b: int) -> None:
        """Let two workers know of each other."""
        for one, other in ((a, b), (b, a)):
            if one in self.ends and other in self.ends:
                self.ends[one].gain(other)

    def part(self, a: int, b: int, why: str, what: str = "cut") -> None:
        """Let two workers know that they have lost each other."""
        for one, other in ((a, b), (b, a)):
            if one in self.ends:
                self.ends[one].lose(other, why, what)

    def crash(self, rank: int, why: str = "crashed", what: str = "died") -> None:
        """End a worker's life: what it had under way is lost; peers see the connection break."""
        del self.ends[rank]
        for peer in tuple(self.ends):
            self.loop.call_later(self.latency_s, self._notice_crash, rank, peer, self.life[rank], why, what)

    def _notice_crash(self, rank: int, peer: int, life: int, why: str, what: str) -> None:
        if self.life[rank] == life and peer in self.ends:  # not if it has come back meanwhile
            self.ends[peer].lose(rank, why, what)

    def cut_link(self, a: int, b: int) -> None:
        """Lose all messages between two workers from now on; they notice after a while of silence."""
        link = frozenset((a, b))
        if link in self.cut:
            self.cut[link].cancel()
        self.cut[link] = self.loop.call_later(self.silence_s, self.part, a, b, "its link is cut")

    def heal_link(self, a: int, b: int) -> None:
        """Let two workers reach each other again, over a new connection: what was lost stays lost."""
        if (timer := self.cut.pop(frozenset((a, b)), None)) is not None:
            timer.cancel()
            self.part(a, b, "its link was cut")
            self.meet(a, b)


class Total:
    """The sum of the vectors that members of a reduction have brought, added once for all of them."""

    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}

    @cached_property
    def sum(self) -> Tensor:
        """In the order of the ranks."""
        return torch.stack([part for _, part in sorted(self.parts.items())]).sum(0)


@dataclass(slots=True)
class Flight:
    """A message under way."""

    message: Message
    peer: int
    size: int
    target: VirtualFabric | None
    """The receiver's end in the life it is meant for; None: it was dead, which nobody had noticed."""
    epoch: int
    """The sender's epoch of the receiver when it was sent."""
    last_byte: float
    """When its last byte leaves the sender, as far as the ports reached so far let it."""
    left: asyncio.Future[None] | None
    ports: int = 0
    """How many ports it is still passing, where they are shared."""


class VirtualFabric(Fabric):
    """One worker's end of the virtual network, for one life."""

    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(rank)
        self.wire, self.world_size, self.life = wire, wire.workers, wire.life[rank]
        self.counters = Counters()
        self._departed: dict[int, float] = {}
        """When the last message to each peer leaves this worker's port."""
        self._landing: dict[int, float] = {}
        """When it has landed."""
        self._queues: dict[int, deque[Flight]] = {}
        """Where ports are shared: what is to go to each peer, in order; the first one is under way."""

    @property
    def silence_s(self) -> float:  # type: ignore[override]
        """How long after a cut the two ends notice it."""
        return self.wire.silence_s

    def send(
        self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()
    ) -> asyncio.Future[None]:
        """Begin to send; the future is done when the last byte has left.

        A message that fits into the latency's worth of bandwidth leaves at once. A longer one leaves no
        faster than the receiver's port takes it in: that is TCP's flow control.
        """
        self.need(peer)
        left: asyncio.Future[None] = self.wire.loop.create_future()
        self._transmit(peer, tag, vector, note, left)
        if peer != self.rank:
            self.leaving(peer, left)
        return left

    def post(self, peer: int, tag: Tag, vector: Tensor | None = None, note: Note = ()) -> None:
        """Send without waiting; a message to a peer that is gone is dropped and counted."""
        if not self.reaches(peer):
            self.counters.messages_dropped += 1
            return
        self._transmit(peer, tag, vector, note, None)

    async def reduce(self, tag: Tag, vector: Tensor, weights: Weights, part: float = 0.0) -> Tensor:
        """A ring of all members; see Fabric.reduce.

        What travels has the length of the pieces and takes their time. Who has been all the way round has
        heard of all members, so the sum is there: adding it up hop by hop takes n² small operations.
        """
        total, weight = self.wire.totals.setdefault(tag, Total()), weights[self.rank]
        total.parts[self.rank] = vector.clone() if weight == 1 else vector * weight
        for at in range(0, vector.numel(), collectives.CHUNK):
            await collectives.ring(self, tuple(weights), vector[at : at + collectives.CHUNK], tag)
        if not part:
            return total.sum.clone()
        return (total.sum - vector).mul_(part)

    async def land(self, peer: int, tag: Tag, numel: int, each: Each | Tensor) -> None:
        """See `reduce`: only when it lands matters."""
        await self.receive(tag, peer)

    def queued_bytes(self) -> int:
        """Where ports are shared: what has not passed them."""
        return sum(flight.size for queue in self._queues.values() for flight in queue)

    # -- through the ports --

    def _transmit(
        self, peer: int, tag: Tag, vector: Tensor | None, note: Note, left: asyncio.Future[None] | None
    ) -> None:
        wire, loop = self.wire, self.wire.loop
        message = Message(self.rank, tag, vector, note)
        if peer == self.rank:  # a worker that talks to itself (the server's own training) uses no network
            loop.call_soon(self.deliver, message)
            if left is not None:
                left.set_result(None)
            return
        size = HEADER_BYTES + 8 * len(note)
        if vector is not None:
            size += round(vector.numel() * wire.value_bytes)
        self.counters.bytes_out += size
        self.counters.messages_out += 1
        now = loop.time()
        wire.trace.add((now, "send", self.rank, peer, tag, size))
        flight = Flight(message, peer, size, wire.ends.get(peer), self.epoch(peer), now, left)
        if wire.network.links.fair:
            queue = self._queues.setdefault(peer, deque())
            queue.append(flight)
            if len(queue) == 1:
                self._share(flight)
            return
        out, backbone, _, latency_s = wire.network.path(self.rank, peer)
        start, end = out.take(now, now, size)
        before = self._departed.get(peer, 0.0)
        if start < before:  # short, and behind a long one of its own connection
            start, end = before, before + end - start
        self._departed[peer] = flight.last_byte = end
        if backbone is None:
            loop.call_at(start + latency_s, self._arrive, flight)
        else:
            loop.call_at(start, self._cross, flight)
        if left is not None:
            loop.call_at(end, self._left, flight)

    def _cross(self, flight: Flight) -> None:
        """The first byte has reached the backbone."""
        _, backbone, _, latency_s = self.wire.network.path(self.rank, flight.peer)
        assert backbone is not None
        start, flight.last_byte = backbone.take(self.wire.loop.time(), flight.last_byte, flight.size)
        self.wire.loop.call_at(start + latency_s, self._arrive, flight)

    def _arrive(self, flight: Flight) -> None:
        """The first byte has reached the receiver's port."""
        wire = self.wire
        _, _, into, latency_s = wire.network.path(self.rank, flight.peer)
        _, done = into.take(wire.loop.time(), flight.last_byte + latency_s, flight.size)
        flight.last_byte = max(flight.last_byte, done - latency_s)
        # Short messages slip past long ones of other connections, but not past those of their own.
        done = max(done, self._landing.get(flight.peer, 0.0))
        self._landing[flight.peer] = done
        wire.loop.call_at(done, self._land, flight)

    def _left(self, flight: Flight) -> None:
        """The last byte would have left by now; it has, unless a later port takes it in more slowly."""
        assert flight.left is not None
        if flight.left.done():
            return
        if flight.last_byte > self.wire.loop.time():
            self.wire.loop.call_at(flight.last_byte, self._left, flight)
        else:
            flight.left.set_result(None)

    # -- the same where ports are shared --

    def _share(self, flight: Flight) -> None:
        """Pass all ports of the path at once, beside what others send: the slowest of them counts."""
        wire = self.wire
        ports = [port for port in wire.network.path(self.rank, flight.peer)[:3] if port is not None]
        if flight.size <= PACKET_BYTES:  # it slips in between
            takes_s = max(flight.size / port.bytes_per_s for port in ports)
            wire.loop.call_at(wire.loop.time() + takes_s, self._through, flight)
            return
        flight.ports = len(ports)
        for port in ports:
            wire.fair(port).join(flight.size, partial(self._through, flight))

    def _through(self, flight: Flight) -> None:
        """A port has passed it; when all have, it lands, and the next one of its connection may go."""
        flight.ports -= 1
        if flight.ports > 0:
            return
        wire, queue = self.wire, self._queues[flight.peer]
        if flight.left is not None and not flight.left.done():
            flight.left.set_result(None)
        latency_s = wire.network.path(self.rank, flight.peer)[3]
        wire.loop.call_at(wire.loop.time() + latency_s, self._land, flight)
        queue.popleft()
        if queue:
            self._share(queue[0])

    def _land(self, flight: Flight) -> None:
        """The last byte has arrived: hand over, unless either side's life ended or the link was cut."""
        wire, message, peer = self.wire, flight.message, flight.peer
        alive = wire.ends.get(self.rank) is self and wire.ends.get(peer) is flight.target
        same = self.epoch(peer) == flight.epoch and frozenset((self.rank, peer)) not in wire.cut
        if not alive or not same or flight.target is None:
            return
        wire.trace.add((wire.loop.time(), "land", self.rank, peer, message.tag))
        flight.target.counters.bytes_in += flight.size
        flight.target.deliver(message)
