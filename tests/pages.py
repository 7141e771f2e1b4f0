"""Reading a report's page, as tests do."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a test wants to know of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.remote: list[str] = []
        self.tags: list[str] = []
        self.said = ""
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.depth: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag != "meta":
            self.depth.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
                self.remote.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        inside = self.depth[-1] if self.depth else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside != "style":
            self.said += data.replace("\xa0%", " %")
            if self.rows and self.rows[-1] and {"td", "th"} & set(self.depth):
                self.rows[-1][-1] += data

    def row(self, first: str) -> dict[str, str]:
        """The row of the figures of all runs that begins with this name, by its heads."""
        heads = next(row for row in self.rows if "steps/s" in row)
        return dict(zip(heads, next(row for row in self.rows if row[0] == first), strict=True))


def figures_of(page: Page) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(page.scripts[1])
    assert list(figures) == [name.removeprefix("figure-") for name in page.ids if name != "figure-data"]
    return figures
