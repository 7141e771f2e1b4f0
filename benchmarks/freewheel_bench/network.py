"""Narrow links: how much of their own speed do workers keep, and how much of the links do they use?

Each worker runs in a network namespace behind a bridge, with a token bucket both ways (`namespaces.py`). The
used share of a link is the bytes it carried in the window, over what it could have carried.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from freewheel.errors import at_least
from freewheel_bench.contestants import DDP
from freewheel_bench.figure import Figure
from freewheel_bench.namespaces import Network
from freewheel_bench.rates import Load, Pace, Progress, Span, measure
from freewheel_bench.straggler import figures


def network(
    load: Load,
    link_mbit: float,
    strategies: Sequence[str],
    span: Span,
    progress: Progress,
    hosts: int | None = None,
) -> list[Figure]:
    """Measure all contestants on a network of namespaces, one for each host; one figure for each strategy."""
    count = hosts or load.workers
    at_least("--hosts", count, 1)
    with Network(count, link_mbit) as built:
        places = [built.places[rank * count // load.workers] for rank in range(load.workers)]
        paces = measure(load, strategies, span, progress, places, built.bytes_moved)

    def sent_mb(of: str) -> float:
        """What a host sends for each merge or exchange of one of its workers."""
        done = [sum(pace.total(kind, "done") for kind in ("exchanges", "merges")) for pace in paces[of]]
        sent = [sum(pace.metered[::2]) / count / 1e6 for pace in paces[of]]
        return statistics.median(
            mb / (n / load.workers) if n else 0.0 for mb, n in zip(sent, done, strict=True)
        )

    def used(pace: Pace) -> list[float]:
        return [used_share(count, link_mbit, span.seconds) for count in pace.metered]

    def mean_used(contestant: str) -> float:
        return statistics.median(statistics.fmean(used(pace)) for pace in paces[contestant])

    found = []
    for figure in figures("network", load, strategies, span, paces):
        links = {
            "link_mbit": link_mbit,
            "sent_mb_per_merge": sent_mb(figure.of),
            "freewheel_link_used": mean_used(figure.of),
            "ddp_link_used": mean_used(DDP),
            "freewheel_link_used_least": min(min(used(pace)) for pace in paces[figure.of]),
            "link_used_by_round": {of: [used(pace) for pace in paces[of]] for of in (figure.of, DDP)},
        }
        found.append(replace(figure, raw={**links, **figure.raw}))
    return found


def used_share(moved_bytes: int, link_mbit: float, seconds: float) -> float:
    return 8 * moved_bytes / (link_mbit * 1e6 * seconds)
