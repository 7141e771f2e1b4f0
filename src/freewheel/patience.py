"""How long a worker waits at its boundary for an exchange that it begins there.

An exchange beside the steps counts a step late. If a worker waits a moment at its boundary, its last update
is averaged before it computes the next gradient. It hardly ever tries where waiting is mostly in vain, as
exchanges are long beside a step. It may stop once the learning rate has fallen: a late update costs most
where updates are large.
"""

import asyncio
from typing import Any

MOMENT = 2.0  # of a step, with momentum, which carries on what was averaged late
SELDOM, AGAIN = 512, 3  # where waiting is mostly in vain, a worker tries in 3 of 512 steps
ENOUGH = 0.5  # the mean share of its patience that a worker may use up before waiting counts as in vain


class Patience:
    """How much of a step a worker waits at most; 0: it never waits.

    If `given` is None: MOMENT with momentum, in runs of more than `few` workers. It waits no more once less
    than `low` of the highest learning rate is left.
    """

    def __init__(self, given: float | None, momentum: float = 0.0, few: int = 0, low: float = 0.5) -> None:
        self.most = (MOMENT if momentum else 0.0) if given is None else given
        self.few, self.low = few if given is None else 0, low
        self.under_way: asyncio.Task[Any] | None = None  # the last exchange; training may have gone on
        self._used = 0.0  # the share of the patience that waits took, a running mean

    def waits(self, workers: int) -> bool:
        """Whether to wait at all in a run of so many."""
        return self.most > 0 and workers > self.few

    def tries(self, step: int, rate_left: float = 1.0) -> bool:
        """Whether to wait after this step, with this share of the highest learning rate."""
        under_way = self.under_way is not None and not self.under_way.done()
        if self.most == 0 or under_way or rate_left < self.low:
            return False
        return self._used < ENOUGH or step % SELDOM < AGAIN

    def learn(self, used: float) -> None:
        """Note the share of the patience that a wait took; 1: it was in vain."""
        self._used += 0.1 * (used - self._used)
