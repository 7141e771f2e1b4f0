"""Who reaches whom, as each tells who leads: of two that are apart only one goes on with the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from freewheel.fabric.base import Fabric, Note, Tag

GRACE_S = 0.5
"""How long workers may differ about who is there before it is believed."""


class Reach:
    """What one worker has heard of whom the others reach, and what it has told them."""

    def __init__(self, fabric: Fabric, tag: Tag) -> None:
        self.fabric, self._tag = fabric, tag
        self.sees, self.told = fabric.by_peer(), fabric.by_peer()
        """Whom each reaches; what each was told last."""
        self._apart_since: dict[tuple[int, int], float] = {}

    def tell(self, lead: int, news: Note) -> None:
        """Tell the leader what this worker sees, when that has changed; greet who is new."""
        for peer in self.fabric.others:
            if peer not in self.told or (peer == lead and self.told[peer] != news):
                self.told[peer] = news
                self.fabric.post(peer, self._tag, note=news)

    def choose(
        self, among: Sequence[int], together: Sequence[int] = (), look: Callable[[], None] = lambda: None
    ) -> tuple[int, ...]:
        """Whom to call: of two that cannot reach each other only one.

        Where both are `together` now, one of them may be lost, and this worker about to notice it: they get a
        moment, and `look` is called after it.
        """
        chosen, loop = list(among), asyncio.get_running_loop()
        now_s = loop.time()
        apart = {
            (min(p, q), max(p, q)) for p in chosen for q in set(chosen).difference(self.sees.get(p, among))
        }
        self._apart_since = {pair: self._apart_since.get(pair, now_s) for pair in apart}
        for pair, since_s in self._apart_since.items():
            if set(pair) <= set(together) and now_s < since_s + GRACE_S:
                apart.discard(pair)
                if since_s == now_s:
                    loop.call_later(GRACE_S, look)
        while apart:
            count = Counter(peer for pair in apart for peer in pair if peer != self.fabric.rank)
            out = max(count, key=lambda peer: (count[peer], peer))
            chosen.remove(out)
            apart = {pair for pair in apart if out not in pair}
        return tuple(chosen)
