"""A plan as tables for the terminal, no wider than 80 columns unless there is more room."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from freewheel.numbers import share, short
from freewheel.planning.choice import CEILING, name
from freewheel.planning.forecast import Forecast

BARS = " ▁▂▃▄▅▆▇█"


def speeds(forecasts: Sequence[Forecast]) -> Table:
    """What each strategy reaches."""
    table = _table("strategy", "useful/s", "steps/s", "of ideal", "idle", "MB/step")
    for one in forecasts:
        table.add_row(
            one.strategy,
            "–" if name(one) == CEILING else short(one.useful_steps_per_s, 4),
            short(one.steps_per_s, 4),
            share(one.ideal_share),
            share(one.idle_share),
            short(one.bytes_per_step / 1e6),
        )
    return table


def costs(forecasts: Sequence[Forecast]) -> Table:
    """What its steps are worth, and why."""
    table = _table("strategy", "stale", "discrep.", "needs")
    table.add_column("cost in convergence", overflow="fold")
    for one in forecasts:
        ceiling = name(one) == CEILING
        apart = short(one.discrepancy, 2) + ("↑" if one.grows else " ")
        needs = "–" if ceiling else f"×{one.steps_needed:.2f}"
        table.add_row(name(one), short(one.staleness_mean), apart, needs, one.why)
    return table


def growth(grown: dict[int, list[Forecast]]) -> Table:
    """Useful steps as a share of the ideal, for each number of workers, and a line of blocks."""
    table = _table("strategy", *(f"{size}" for size in grown), "")
    last = max(grown)
    order = [name(one) for one in grown[last]]
    order += [name(one) for found in grown.values() for one in found if name(one) not in order]
    for strategy in dict.fromkeys(order):
        shares = [useful_share(found, strategy) for found in grown.values()]
        blocks = "".join(" " if part is None else BARS[max(1, round(8 * part))] for part in shares)
        table.add_row(strategy, *(share(part) for part in shares), blocks)
    return table


def useful_share(found: Sequence[Forecast], strategy: str) -> float | None:
    """Useful steps over the ideal rate; of no communication, all steps."""
    one = next((one for one in found if name(one) == strategy), None)
    if one is None:
        return None
    return one.ideal_share / (1.0 if strategy == CEILING else one.steps_needed)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
