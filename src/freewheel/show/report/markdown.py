"""The report as markdown, for a README or an issue: tables and words, no HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from freewheel.show.report.content import Section
from freewheel.show.rows import printable
from freewheel.show.tables import Table

ROWS = 32
"""A longer table of workers or events is cut: people read this in a browser they scroll in."""


def text(sections: Sequence[Section], title: str, command: str) -> str:
    """The whole report, ending with a newline."""
    return "\n\n".join(part for part in _parts(sections, title, command) if part) + "\n"


def _parts(sections: Sequence[Section], title: str, command: str) -> Iterator[str]:
    yield f"# {plain(title)}"
    for section in sections:
        if section.kind == "figures":
            continue
        if section.kind == "see" and command:
            fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
            yield f"{fence}\n{command}\n{fence}"
        of_each = section.kind in ("each", "settings")
        if section.title and not of_each:
            yield f"## {plain(section.title)}"
        yield from map(plain, section.said)
        for shown in section.tables:
            if of_each and shown.rows:
                yield f"## {plain(section.title)}: {plain(shown.name)}"
            most = ROWS if section.kind == "each" else len(shown.rows)
            yield table(shown.cut(most)) if shown.rows else ""
            if len(shown.rows) > most:
                yield f"… and {len(shown.rows) - most:,} more; the page has all of them."
        yield plain(section.note)


def table(shown: Table) -> str:
    """A table whose pipes stand below each other; the best figures are bold."""
    marked = [
        [f"**{plain(cell)}**" if (place, at) in shown.marks else plain(cell) for at, cell in enumerate(row)]
        for place, row in enumerate(shown.rows)
    ]
    lines = [[plain(head) for head in shown.heads], *marked]
    widths = [max(3, *(len(line[at]) for line in lines)) for at in range(len(shown.heads))]
    sides = [str.ljust if at in shown.left else str.rjust for at in range(len(widths))]
    rule = ["-" * width if at in shown.left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    padded = [
        [side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


def plain(said: str) -> str:
    """Text that markdown leaves as it is: on one line, with nothing that means anything to it."""
    said = " ".join(printable(said).split())
    said = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", said)
    return re.sub(r"(?<!\w)_|_(?!\w)|^(?=[#+-])", lambda found: f"\\{found.group()}", said)
