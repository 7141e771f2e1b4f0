"""How much of a pass each worker gets: shares by speed, and nobody's is eaten while it is on its way.

Leases last about a second and shrink towards the end of a pass (guided self-scheduling), so fast workers take
more and all end together. That needs steps that are longer than a question and its answer. Where they are
shorter, or a pass is over before a worker has come to it, whoever asks first would take everything. So every
worker has a fair share of the pass, by its rate; who has had its own may go on with what is left, but for
what those are about to ask for who have not had theirs. They are waited for some tenths of a second, never
for as long as they compute.
"""

from __future__ import annotations

from collections import defaultdict
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
class Asker:
    """What a worker last said of itself; at first it has said nothing."""

    rate: float = 0.0
    """Samples a second; 0: not known."""
    batch: int = 0
    number: int = -1
    """The pass it is in."""
    at_s: float = 0.0
    due_s: float = 0.0
    """When it should ask again, by its rate and what it holds."""
    absent: bool = False
    """Whether it was waited for in vain."""


@dataclass(slots=True)
class Shares:
    """What a dealer knows of the workers' speeds in one set of data."""

    askers: defaultdict[int, Asker] = field(default_factory=lambda: defaultdict(Asker))
    began: dict[int, float] = field(default_factory=dict)
    """When somebody first asked for samples of each pass."""

    def heard(self, rank: int, number: int, wants: bool, rate: float, batch: int, now_s: float) -> None:
        """A worker asks, or says that a pass has ended for it."""
        absent = self.askers[rank].absent and not wants
        self.askers[rank] = Asker(rate, batch, number if wants else number + 1, now_s, now_s, absent)
        if wants:
            self.began.setdefault(number, now_s)
            while len(self.began) > LATELY:
                del self.began[min(self.began)]

    def dealt(self, rank: int, held: int, now_s: float) -> None:
        """A worker now holds so many samples."""
        asker = self.askers[rank]
        asker.due_s = now_s + (held / asker.rate if asker.rate else 0.0)

    def grant(self, ledger: Ledger, rank: int, number: int, members: Sequence[int], now_s: float) -> int:
        """How many samples a worker gets of a pass; 0: it is to ask again soon."""
        rate, batch = self.askers[rank].rate, self.askers[rank].batch
        weights = self._weights(members)
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
        asker = self.askers[rank]
        return asker.rate * LEASE_S * max(1.0, workers / ASKERS) or FIRST * asker.batch

    def _weights(self, members: Sequence[int]) -> dict[int, float]:
        """How fast the workers are; one whose rate is not known yet is as fast as the others."""
        askers = {one: self.askers[one] for one in members}
        known = {
            one: min(asker.rate / asker.batch, FASTEST) * asker.batch
            for one, asker in askers.items()
            if asker.rate
        }
        usual = sum(known.values()) / len(known) if known else 1.0
        return {one: known.get(one, usual) for one in members}

    def _kept(self, peer: int, number: int, share: float, had: int, batch: int, now_s: float) -> int:
        """How many samples are kept for a worker that is about to ask for them."""
        asker = self.askers[peer]
        if asker.absent or asker.number > number:
            return 0
        begins = asker.at_s if asker.number == number else self.began.get(number, now_s)
        expected = max(begins, asker.due_s)
        if expected - now_s > SOON_S:
            return 0  # it works on what it has
        if now_s - expected > (LATE_S if asker.rate else FIRST_S):
            asker.absent = True
            return 0
        batch = asker.batch or batch
        left = share - had
        if asker.rate:
            left = min(left, asker.rate * LATE_S)
        return max(int(left) // batch, int(not had)) * batch
