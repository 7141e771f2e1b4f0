"""Numbers as people read them: in commands, plans, figures, pages and records, one way for all."""

import math
from collections.abc import Sequence

UNKNOWN = "–"


def short(value: float | None, digits: int = 3) -> str:
    """A few significant digits, more for large whole numbers; an exponent only for nearly nothing."""
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
    """For a table: three significant digits, whole numbers in full."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def column(values: Sequence[float | None], digits: int = 2) -> list[str]:
    """All with as many decimals as the greatest needs; what is not 0 is never shown as 0."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    after = max(0, digits + 1 - len(f"{max(map(abs, known), default=0.0):.0f}"))

    def cell(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{value:.1e}" if 0 < abs(value) < 0.5 * 10**-after else f"{value:,.{after}f}"

    return list(map(cell, values))


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent; what was measured a little above the whole is the whole."""
    return UNKNOWN if value is None else f"{100 * min(1.0, value):.{digits}f} %"


def speed(mbit: float) -> str:
    return f"{short(mbit / 1000)} Gbit/s" if mbit >= 1000 else f"{short(mbit)} Mbit/s"


def count(many: int, what: str) -> str:
    return f"{many:,} {what}{'' if many == 1 else 's'}"
