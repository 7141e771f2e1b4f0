"""Numbers as people read them: in commands, plans, figures, pages and records, one way for all."""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "–"


def short(value: float | None, digits: int = 3) -> str:
    """A few significant digits, whole where there are more; no exponent but for what is nearly nothing."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    text = f"{value:.{digits}g}"
    # 999.6 has three digits and is rounded to four.
    return f"{value:,.0f}" if "e" in text or abs(value) >= 10**digits else text


def number(value: float | None) -> str:
    """For a table: always three significant digits, whole numbers as they are, powers of ten spelled out."""
    if value is None:
        return UNKNOWN
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if abs(value) >= 1e9 or 0 < abs(value) < 1e-4:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits} × 10{str(int(power)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def column(values: Sequence[float | None], digits: int = 2) -> list[str]:
    """A column of numbers with the same decimals, so many that the greatest has a few digits."""
    # The last of several is their total, which is greater and needs no decimals of its own.
    usual = [abs(one) for one in values[:-1] or values if one is not None and abs(one) < 1e6]
    before = len(f"{max(usual, default=0.0):.0f}")
    after = max(0, digits + 1 - before)  # from 10 on a digit fewer after the point, from 100 on another
    cells = []
    for value in values:
        if value is None or not math.isfinite(value):
            cells.append(UNKNOWN)
        elif value != 0 and (abs(value) >= 1e6 or abs(value) < 0.5 * 10**-after):
            cells.append(f"{value:.1e}")
        else:
            cells.append(f"{value:,.{after}f}")
    return cells


def given(value: float) -> str:
    """A number as somebody gave it: up to six digits, whole where there are more."""
    text = f"{value:,g}"
    return f"{value:,.0f}" if "e" in text and abs(value) >= 1 else text


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent; what was measured a little above the whole is the whole."""
    return UNKNOWN if value is None else f"{100 * min(1.0, value):.{digits}f} %"


def speed(mbit: float) -> str:
    """What a link carries."""
    return f"{short(mbit / 1000)} Gbit/s" if mbit >= 1000 else f"{short(mbit)} Mbit/s"


def count(many: int, what: str) -> str:
    """1 worker, 2 workers."""
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Words with commas and an "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
