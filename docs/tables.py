"""Write what can be computed into the strategies' pages: ``python docs/tables.py``.

Figures come from timing-only simulations, which give the same numbers everywhere; a test checks that the
pages say what this would write.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import freewheel as fw
from freewheel.strategies import ALL

PAGES = Path(__file__).parent / "strategies"
CASES = {
    "all equal, 1 Gbit/s": {},
    "one of them 5× slower": {"compute": fw.Compute(ms=50, slow={0: 5})},
    "all equal, 100 Mbit/s": {"links": fw.Links(mbit=100)},
}
PART = re.compile(r"(<!-- begin (\w+), by docs/tables.py -->\n).*?(<!-- end -->)", flags=re.S)


@cache
def results(name: str) -> tuple[fw.Result, ...]:
    """One result for each case."""
    usual = {"workers": 8, "steps": 32, "compute": fw.Compute(ms=50), "model_mb": 10, "gradients": False}
    return tuple(fw.simulate(name, "quadratic", **(usual | case)) for case in CASES.values())


def costs(name: str) -> str:
    """What one strategy costs in each case."""
    rows = [
        "| 8 workers, 10 MB, 50 ms a gradient | of the ideal rate | idle | sent a step | staleness |",
        "|---|---|---|---|---|",
    ]
    for case, result in zip(CASES, results(name), strict=True):
        figures = (
            percent(result.ideal_share),
            percent(result.idle_share),
            megabytes(result),
            f"{result.staleness_mean:.1f}",
        )
        rows.append(f"| {case} | {' | '.join(figures)} |")
    return "\n".join(rows) + "\n"


def facts(name: str) -> str:
    """A figure by docs/figures.py, and what a strategy's class says of it."""
    strategy = ALL[name]
    share = strategy().rate_share(8)
    rate = (
        "that of one worker"
        if share == 1
        else "that of one worker; each steps with 1/n of it, for updates add up"
    )
    rows = {
        "in a script": f'`fw.attach(model, optimizer, "{name}")` or `fw.{strategy.__name__}(…)`',
        "a step waits for": strategy.waits_for,
        "keeps the mean of all replicas": "yes" if strategy.keeps_mean else "no",
        "learning rate": rate,
        "staleness counts": strategy.staleness,
        "from": strategy.reference,
    }
    figure = f"![{name}: six workers, one of them five times slower](../pictures/strategies/{name}.svg)"
    lines = [figure, "", "| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]
    return "\n".join(lines) + "\n"


def overview() -> str:
    """All strategies beside each other."""
    heads = ["strategy", "what it does", "a step waits for", *CASES]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, strategy in ALL.items():
        shares = [percent(result.ideal_share) for result in results(name)]
        what = strategy.summary().removesuffix(".")
        cells = [f"[`{name}`]({name}.md)", what, strategy.waits_for, *shares]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def percent(share: float) -> str:
    """As the other pages write it."""
    return f"{100 * share:.0f} %"


def megabytes(result: fw.Result) -> str:
    """What a worker sends for each step."""
    return f"{result.bytes_per_step / 1e6:.1f} MB"


def filled(path: Path) -> str:
    """A page with its computed parts."""
    parts = {"costs": lambda: costs(path.stem), "facts": lambda: facts(path.stem), "overview": overview}
    return PART.sub(lambda found: f"{found[1]}\n{parts[found[2]]()}\n{found[3]}", path.read_text())


if __name__ == "__main__":
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page))
