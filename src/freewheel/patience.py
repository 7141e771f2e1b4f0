"""How long a worker waits at its boundary for an exchange it begins there, so that it counts without delay.

What a worker exchanges beside its steps counts a step late. If it waits a moment at its boundary, its last
update is averaged before the next gradient is computed. That needs an exchange that is short beside a step;
where waiting is mostly in vain, a worker hardly ever tries. Nor does it wait once the learning rate has
fallen: a late update costs most where updates are large.
"""

import asyncio
from typing import Any

MOMENT = 2.0  # of workers whose optimizer has momentum, which carries on what was averaged late
SELDOM, AGAIN = 512, 3  # where waiting is mostly in vain, of so many steps a worker tries in so many
ENOUGH = 0.5  # the share of its patience a worker may use up on average before waiting counts as in vain


class Patience:
    """A worker's patience: the share of a step that it waits at most; 0: it never waits.

    As somebody says; if None, the usual one where there is momentum, for more than a few workers. It ends
    where less than so much (`low`) of the learning rate is left.
    """

    def __init__(self, given: float | None, momentum: float = 0.0, few: int = 0, low: float = 0.5) -> None:
        self.most = (MOMENT if momentum else 0.0) if given is None else given
        self.few, self.low = few if given is None else 0, low
        self.under_way: asyncio.Task[Any] | None = None  # what is or was waited for; it may go on beside
        self._used = 0.0  # which share of it the waits took, a running mean

    def waits(self, workers: int) -> bool:
        """Whether so many wait at all."""
        return self.most > 0 and workers > self.few

    def tries(self, step: int, rate_left: float = 1.0) -> bool:
        """Whether to wait after so many steps, the last with so much of the highest learning rate."""
        under_way = self.under_way is not None and not self.under_way.done()
        if self.most == 0 or under_way or rate_left < self.low:
            return False
        return self._used < ENOUGH or step % SELDOM < AGAIN

    def learn(self, used: float) -> None:
        """Which share of it a wait took: 1 if it was in vain."""
        self._used += 0.1 * (used - self._used)
