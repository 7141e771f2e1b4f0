"""Numbers as people read them, in commands, plans, figures and records: one way for all."""

from __future__ import annotations


def short(value: float | None, digits: int = 3) -> str:
    """A few significant digits, whole where there are more; no exponent but for what is nearly nothing."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    text = f"{value:.{digits}g}"
    # 999.6 has three digits and is rounded to four.
    return f"{value:,.0f}" if "e" in text or abs(value) >= 10**digits else text


def given(value: float) -> str:
    """A number as somebody gave it: up to six digits, whole where there are more."""
    text = f"{value:,g}"
    return f"{value:,.0f}" if "e" in text and abs(value) >= 1 else text


def share(value: float | None) -> str:
    """A share in per cent; what was measured a little above the whole is the whole."""
    return "–" if value is None else f"{100 * min(1.0, value):.1f}%"


def speed(mbit: float) -> str:
    """What a link carries."""
    return f"{short(mbit / 1000)} Gbit/s" if mbit >= 1000 else f"{short(mbit)} Mbit/s"
