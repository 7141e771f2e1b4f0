"""A ring of fewer workers that takes as long: merges of hundreds of workers are not simulated hop by hop.

A ring of n workers is 2(n-1) hops, each with the latency and 1/n of the model; n of them at once make 2n(n-1)
messages. With fewer workers, a latency that is longer and a model that is a little larger, a ring takes as
long. What changes is small: of many workers whose steps vary, the slowest of all is a little slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freewheel.planning.setting import Setting
from freewheel.strategy import Strategy

MOST = 64
"""Workers of a ring that is simulated as it is."""


def shorter(strategy: Strategy, setting: Setting) -> Setting:
    """The same setting with fewer workers, where a strategy merges all of very many; else as it is."""
    n = setting.workers
    m = MOST - MOST % setting.workers_per_node
    if n <= MOST or m < 2 or not strategy.reduces:
        return setting
    hops = (n - 1) / (m - 1)
    return replace(
        setting,
        workers=m,
        model_mb=setting.model_mb * hops * m / n,
        latency_ms=setting.latency_ms * hops,
        message_ms=setting.message_ms * hops,
        slow=_slowest(setting.slow, m),
        slow_link=_slowest(setting.slow_link, m),
    )


def _slowest(given: Mapping[int, float], m: int) -> dict[int, float]:
    """The slow ones among the first m workers; a merge waits for the slowest, whoever it is."""
    kept = {rank: factor for rank, factor in given.items() if rank < m}
    beyond = sorted((factor for rank, factor in given.items() if rank >= m), reverse=True)
    free = [rank for rank in range(m) if rank not in kept]
    return kept | dict(zip(free[: m // 2], beyond, strict=False))
