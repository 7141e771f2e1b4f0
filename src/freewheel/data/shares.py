"""How much of a pass each worker gets: shares by speed, and nobody's is eaten while it is on its way.

Leases last about a second and shrink towards the end of a pass (guided self-scheduling), so fast workers take
more and all end together. That needs steps that are longer than a question and its answer. Where they are
shorter, or a pass is over before a worker has come to it, whoever asks first would take everything. So every
worker has a fair share of the pass, by its rate; who has had its own may go on with what is left, but for
what those are about to ask for who have not had theirs. They are waited for some tenths of a second, never
for as long as they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freewheel.data.ledger import Ledger
from freewheel.data.spans import size

LEASE_S = 1.0
"""How long a lease should last."""
FIRST = 4
"""Batches in the first lease of a worker whose rate nobody knows yet."""
ASKERS = 16
"""How many workers may ask in that time; where there are more, leases last longer."""
BRIEF_S = 0.02
"""What is done in this time need not be dealt in several leases."""
FASTEST = 200.0
"""Steps a second beyond which a worker's speed does not count: they are shorter than asking for them."""
SOON_S = 0.05
"""Who should ask within this time is waited for."""
LATE_S = 0.25
"""And for so long beyond it; then no more, until it has asked."""
LATELY = 16
"""Of how many passes it is known when they began."""
FIRST_S = 1.0
"""The same for a worker whose rate nobody knows yet: a first step may take long."""


@dataclass(slots=True)
class Asked:
    """What a worker last said."""

    number: int
    """The pass it is in."""
    at_s: float
    due_s: float
    """When it should ask again, by its rate and what it holds."""


@dataclass(slots=True)
class Shares:
    """What a dealer knows of the workers' speeds in one set of data."""

    rates: dict[int, float] = field(default_factory=dict)
    """Samples a second."""
    sizes: dict[int, int] = field(default_factory=dict)
    asked: dict[int, Asked] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    """When somebody first asked for samples of each pass."""
    absent: set[int] = field(default_factory=set)
    """Who was waited for in vain."""

    def heard(self, rank: int, number: int, wants: bool, rate: float, batch: int, now_s: float) -> None:
        """A worker asks, or says that a pass has ended for it."""
        self.rates[rank], self.sizes[rank] = rate, batch
        self.asked[rank] = Asked(number if wants else number + 1, now_s, now_s)
        if wants:
            self.absent.discard(rank)
            self.began.setdefault(number, now_s)
            while len(self.began) > LATELY:
                del self.began[min(self.began)]

    def dealt(self, rank: int, held: int, now_s: float) -> None:
        """A worker now holds so many samples."""
        rate = self.rates[rank]
        self.asked[rank].due_s = now_s + (held / rate if rate else 0.0)

    def grant(self, ledger: Ledger, rank: int, number: int, members: Sequence[int], now_s: float) -> int:
        """How many samples a worker gets of a pass; 0: it is to ask again soon."""
        rate, batch = self.rates[rank], self.sizes[rank]
        weights = self._weights(rank, members)
        total = sum(weights.values())
        free = size(ledger.free(number))
        share = free * weights[rank] / total
        most = min(self.aim(rank, len(members)), max(share / 2, min(share, rate * BRIEF_S)))
        one = ledger.open(number)
        if one is None or not free:
            return max(batch, int(most))
        had = one.had()
        own = ledger.length * weights[rank] / total - had[rank]
        kept = sum(
            self._kept(peer, number, ledger.length * weights[peer] / total, had[peer], batch, now_s)
            for peer in members
            if peer != rank
        )
        room = free - kept
        if own >= batch or not had[rank]:  # two who are within their shares never wait for each other,
            room = max(room, int(own), batch)  # nor two whose shares are less than a batch
        if room < min(batch, free):
            return 0
        return max(batch, int(min(most, room)))

    def aim(self, rank: int, workers: int) -> float:
        """How many samples last a while."""
        return self.rates[rank] * LEASE_S * max(1.0, workers / ASKERS) or FIRST * self.sizes[rank]

    def _weights(self, rank: int, members: Sequence[int]) -> dict[int, float]:
        """How fast the workers are; one whose rate is not known yet is as fast as the others."""
        known = {
            one: min(self.rates[one] / self.sizes[one], FASTEST) * self.sizes[one]
            for one in members
            if self.rates.get(one)
        }
        usual = sum(known.values()) / len(known) if known else 1.0
        return {one: known.get(one, usual) for one in members}

    def _kept(self, peer: int, number: int, share: float, had: int, batch: int, now_s: float) -> int:
        """How many samples are kept for a worker that is about to ask for them."""
        asked, rate = self.asked.get(peer), self.rates.get(peer, 0.0)
        if peer in self.absent or (asked is not None and asked.number > number):
            return 0
        here = asked is not None and asked.number == number
        expected = asked.at_s if here and asked is not None else self.began.get(number, now_s)
        if asked is not None:
            expected = max(expected, asked.due_s)
        if expected - now_s > SOON_S:
            return 0  # it works on what it has
        if now_s - expected > (LATE_S if rate else FIRST_S):
            self.absent.add(peer)
            return 0
        batch = self.sizes.get(peer, batch)
        left = share - had
        if rate:
            left = min(left, rate * LATE_S)
        return max(int(left) // batch, int(not had)) * batch
