"""How much of a pass each worker gets: shares by speed, kept for stragglers that are about to ask.

Leases last about a second and shrink towards the end of a pass (guided self-scheduling), so fast workers take
more and all end together. Where steps are shorter than a question and its answer, or a pass is very short,
whoever asks first would take everything. So every worker has a fair share of the pass, by its rate. One that
has had its share may take what is left, except what others who have not had theirs are about to ask for.
They are waited for some tenths of a second, never for as long as they compute.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.data.batches import size
from freewheel.data.ledger import Ledger

LEASE_S = 1.0  # how long a lease should last
FIRST = 4  # batches in the first lease of a worker whose rate nobody knows yet
ASKERS = 16  # how many workers may ask in that time; with more, leases last longer
BRIEF_S = 0.02  # work for this time is not split into several leases
FASTEST = 200.0  # steps a second; faster counts as this, since asking takes longer than such a step
SOON_S = 0.05  # a share is kept for a worker that is due to ask within this time
LATE_S, FIRST_S = 0.25, 1.0  # how overdue it may be (FIRST_S: of unknown rate), else others get its share


@dataclass(slots=True)
class Asker:
    """What a worker last said of itself."""

    rate: float = 0.0  # samples a second; 0: not known
    batch: int = 0
    number: int = -1  # the pass it is in
    due_s: float = 0.0  # when it should ask again, by its rate and what it holds
    absent: bool = False  # whether it was waited for in vain


class Shares:
    """What a dealer knows of the workers' speeds in one set of data."""

    def __init__(self) -> None:
        self.askers: defaultdict[int, Asker] = defaultdict(Asker)
        self._newest, self._began_s = -1, 0.0  # the last pass that somebody asked for, and when it first did

    def heard(self, rank: int, number: int, wants: bool, rate: float, batch: int, now_s: float) -> None:
        """A worker asks, or says that a pass has ended for it."""
        absent = self.askers[rank].absent and not wants
        self.askers[rank] = Asker(rate, batch, number if wants else number + 1, now_s, absent)
        if wants and number > self._newest:
            self._newest, self._began_s = number, now_s

    def grant(self, ledger: Ledger, rank: int, number: int, members: Sequence[int], now_s: float) -> int:
        """How many samples a worker gets of a pass; 0: it is to ask again soon."""
        rate, batch = self.askers[rank].rate, self.askers[rank].batch
        # Shares are by speed; a worker of unknown rate counts as an average one.
        askers = {one: self.askers[one] for one in members}
        known = {one: min(asker.rate, FASTEST * asker.batch) for one, asker in askers.items() if asker.rate}
        usual = sum(known.values()) / len(known) if known else 1.0
        total = sum(known.values()) + usual * (len(members) - len(known))
        parts = {one: known.get(one, usual) / total for one in members}
        free, one = size(ledger.free(number)), ledger.open(number)
        share = free * parts[rank]
        most = min(self.aim(rank, len(members)), max(share / 2, min(share, rate * BRIEF_S)))
        if one is None or not free:
            return max(batch, int(most))
        had = Counter[int]()  # what each has finished or holds, as far as is known
        holds = [(who, size(spans)) for who, spans in one.held.items()]
        for (peer, _), count in (*one.counts.items(), *holds):
            had[peer] += count
        left = {peer: ledger.length * part - had[peer] for peer, part in parts.items()}
        others = {peer: many for peer, many in left.items() if peer != rank}
        kept = (self._kept(peer, number, many, not had[peer], batch, now_s) for peer, many in others.items())
        room = free - sum(kept)
        if left[rank] >= batch or not had[rank]:  # two who are within their shares never wait for each other,
            room = max(room, int(left[rank]), batch)  # nor two whose shares are less than a batch
        return max(batch, int(min(most, room))) if room >= min(batch, free) else 0

    def aim(self, rank: int, workers: int) -> float:
        """How many samples last LEASE_S."""
        asker = self.askers[rank]
        return asker.rate * LEASE_S * max(1.0, workers / ASKERS) or FIRST * asker.batch

    def _kept(self, peer: int, number: int, left: float, first: bool, batch: int, now_s: float) -> int:
        """How many samples are kept for a worker that is about to ask for them; one batch for its first."""
        asker = self.askers[peer]
        late_s = now_s - max(self._began_s, asker.due_s)
        if asker.absent or asker.number > number or late_s < -SOON_S:  # it works on what it has
            return 0
        if late_s > (LATE_S if asker.rate else FIRST_S):
            asker.absent = True
            return 0
        batch = asker.batch or batch
        if asker.rate:
            left = min(left, asker.rate * LATE_S)
        return max(int(left) // batch, int(first)) * batch
