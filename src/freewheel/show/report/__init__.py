"""A report: what runs measured, as one HTML file that needs no network and no other file, or as markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.numbers import UNKNOWN, count, number, share, short
from freewheel.records.counters import CAUSES
from freewheel.records.result import Result
from freewheel.records.run import Run
from freewheel.show import figures as charts
from freewheel.show import replay
from freewheel.show.bounds import bounds
from freewheel.show.figures import Figure, graph, page
from freewheel.show.rates import standing
from freewheel.show.rows import printable
from freewheel.show.shown import EVENTS, GRAVE, SVG_DASHES, Shown, differing, flatten, ranked, timed
from freewheel.show.tables import Column, Table, baseline_of, filled, race, results_table, unlike

MAX_GRAPHS = 6  # with more runs than this graphs are left out
NOTE = (
    "Coloured or bold: the best of a column. The ideal is of all workers for the whole time. Discrepancy is "
    "the largest distance between two replicas. Staleness is counted in each strategy’s own measure."
)
TOLD = 8  # events of one run that are told in words, at most
DIFFER = 6  # settings in which runs differ that are named, at most


@dataclass(frozen=True)
class Section:
    """A title, sentences and tables, the same on a page, which may fold the tables, and in markdown."""

    title: str
    said: Sequence[str]
    tables: Sequence[Table] = ()
    folded: bool = False


def content(runs: Sequence[Shown]) -> list[Section]:
    theory, compared = theory_table(runs)
    several = len(runs) > 1
    happened = [table for table in map(events_table, runs) if table.columns[0].cells]
    sections = [
        Section("What you see", findings(runs)),
        Section("Figures of all runs", [NOTE], [results_table(runs)]),
        Section("What happened", [], happened, several),
        Section("Workers", [], [workers_table(run) for run in runs], several),
        Section("Measured against theory", [theory], [compared] if compared.columns[0].cells else []),
        Section("Settings and records", [], [settings_table(runs)], several),
    ]
    return [one for one in sections if one.said or one.tables]


def markdown(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    shown = ranked(results, runs)
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", command)), default=0))
    parts = [f"# {plain(title)}", *map(plain, lead(shown)), f"{fence}\n{command}\n{fence}"]
    for section in content(shown):
        parts += [f"## {plain(section.title)}", *map(plain, section.said)]
        for one in section.tables:
            parts += [f"### {plain(one.name)}"] if section.folded else []
            parts.append(table(one))
    return "\n\n".join(parts) + "\n"


def table(shown: Table) -> str:
    """In markdown, with aligned pipes; the best figures are bold."""
    columns = []
    for one in shown.columns:
        cells = [f"**{plain(cell)}**" if at in one.best else plain(cell) for at, cell in enumerate(one.cells)]
        width = max(3, len(plain(one.head)), *map(len, cells))
        rule = "-" * width if one.words else "-" * (width - 1) + ":"
        side = str.ljust if one.words else str.rjust
        columns.append([side(cell, width) for cell in (plain(one.head), rule, *cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def plain(said: str) -> str:
    """Escaped for markdown, on one line."""
    said = " ".join(printable(said).split())
    said = re.sub(r"([\\`*\[\]<>|~&])", r"\\\1", said)
    return re.sub(r"(?<!\w)_|_(?!\w)|^(?=[#+-])", lambda found: f"\\{found.group()}", said)


def html(results: Sequence[Result], runs: Sequence[Run | None] = (), *, title: str, command: str) -> str:
    """`runs`: the records of the results, in the same order, where there are any."""
    shown = ranked(results, runs)
    figures = _figures(shown)
    see, table, *rest = content(shown)
    body = [
        _prose(lead(shown)),
        f'<pre class="command"><code>{escape(command)}</code></pre>',
        f'<section class="see">{_section(see)}</section>',
        _replay([run for run in runs if run is not None]),
        _section(table),
        places("Over time and side by side", shown, figures),
        *map(_section, rest),
    ]
    return document(title, "\n".join(body), figures)


def _replay(runs: Sequence[Run]) -> str:
    """A frame that plays the runs, of many the baseline and the fastest; empty without timelines."""
    chosen = replay.two(runs) if len(runs) > 2 else runs
    try:
        played = replay.html(chosen, replay.title_of(chosen)) if chosen else ""
    except ConfigError:
        return ""
    frame = f'<iframe title="Replay" loading="lazy" srcdoc="{escape(played)}"></iframe>'
    return f"<section><h2>Replay</h2>{frame}</section>" if played else ""


def document(title: str, body: str, figures: dict[str, Figure]) -> str:
    """A page that draws figures into the `places` of its body."""
    from plotly.offline import get_plotlyjs  # here: it is large

    drawn = {name: {key: figure[key] for key in ("data", "layout")} for name, figure in figures.items()}
    return page(__package__, drawn, title, body=body, plotly=get_plotlyjs())


def _figures(runs: Sequence[Shown]) -> dict[str, Figure]:
    figures = {"speed": charts.speed(runs)} if len(runs) > 1 and not unlike(runs) else {}
    if recorded := timed([run for run in runs if run.records is not None]):
        figures |= charts.figures(recorded)
        del figures["graph"]
        if len(recorded) <= MAX_GRAPHS:
            figures |= {f"graph-{run.place}": graph(run.run, run.label) for run in recorded}
    return {name: figure for name, figure in figures.items() if figure["data"]}


def _prose(said: Sequence[str]) -> str:
    return "".join(f"<p>{escape(one)}</p>" for one in said)


def _section(section: Section) -> str:
    tables = "".join(
        f"<details><summary>{escape(one.name)}</summary>{_table(one)}</details>"
        if section.folded
        else _table(one)
        for one in section.tables
    )
    return f"<h2>{escape(section.title)}</h2>{_prose(section.said)}{tables}"


def _table(table: Table) -> str:
    def cell(tag: str, at: int, text: str, row: int = -1) -> str:
        one = table.columns[at]
        kind = "l" * one.words + " best" * (row in one.best)
        return f'<{tag} class="{kind}">{escape(text)}</{tag}>'

    heads = "".join(cell("th", at, one.head) for at, one in enumerate(table.columns))
    rows = "".join(
        f"<tr>{''.join(cell('td' if at else 'th', at, text, row) for at, text in enumerate(cells))}</tr>"
        for row, cells in enumerate(zip(*(one.cells for one in table.columns), strict=True))
    )
    return f'<div class="scroll" tabindex="0"><table><tr>{heads}</tr>{rows}</table></div>'


def places(title: str, runs: Sequence[Shown], figures: dict[str, Figure]) -> str:
    boxes = "".join(
        f"<figure><figcaption><b>{escape(figure['title'])}</b><span>{escape(figure['said'])}</span></figcaption>"
        f'<div class="plot" id="figure-{name}" style="min-height:{figure["height"]}px"></div></figure>'
        for name, figure in figures.items()
    )
    chips = "".join(
        f'<button type="button" data-run="{run.place}" aria-pressed="true">'
        '<svg width="26" height="8" aria-hidden="true"><line x1="1" y1="4" x2="25" y2="4" stroke-width="3" '
        f'stroke="{run.colour}" stroke-dasharray="{SVG_DASHES[run.style]}"/></svg>'
        f"{escape(run.label)}</button>"
        for run in (runs if len(runs) > 1 else ())
    )
    hint = "Click: hide or show in all figures. Double-click: only this one, or all again."
    return (
        f'<section><h2>{title}</h2><div class="legend" title="{hint}">{chips}</div>'
        f'<div class="figures">{boxes}</div></section>'
        "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>"
    )


def recorded(folder: Path) -> Run | None:
    """The records of a run, if there are any: a full disk leaves none."""
    try:
        run = Run(folder)
    except ConfigError:
        return None
    return run if run.about and run.workers else None


def lead(runs: Sequence[Shown]) -> list[str]:
    """What was run, in what the runs differ, and which of them go on."""
    results = [run.result for run in runs]
    one = results[0]
    each = [flatten({"workers": of.workers, **of.settings.get("scenario", {})}) for of in results]
    if differ := differing(each):
        said = [f"The runs differ in {', '.join(differ[:DIFFER])}; all settings are below."]
    else:
        steps = count(one.worker_steps, "step")
        said = [f"{count(one.workers, 'worker')}, {steps} in all, seed {one.seed}; all settings are below."]
    if live := [run.label for run in runs if run.records is not None and run.run.live]:
        said.append(f"Still running, as of {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {', '.join(live)}.")
    return said


def findings(runs: Sequence[Shown]) -> list[str]:
    told = [(run.label, happened(run.run)) for run in runs if run.records is not None]
    happenings = [f"{label}: {words}" for label, words in told if words]
    if why := unlike(runs):
        return [why, *happenings]
    results = [run.result for run in runs]
    said = [race([run.label for run in runs], results)]
    chosen = [max(runs, key=lambda run: run.result.steps_per_s)]
    if (base := baseline_of(results)) is not None and runs[base] not in chosen:
        chosen.append(runs[base])
    said += [
        f"{run.label} makes {number(run.result.steps_per_s)} worker-steps per second, "
        f"{share(run.result.ideal_share)} of the ideal; its workers are idle for "
        f"{share(run.result.idle_share)} of the time."
        for run in chosen
    ]
    return [" ".join(filter(None, said)), *happenings]


def happened(run: Run) -> str:
    told: dict[str, None] = {}
    for event in run.events:
        what = event.link
        if not what and event.rank is not None and event.what in (*GRAVE, "resumed"):
            what = f"worker {event.rank} {EVENTS[event.what].words}"
        if what:
            told[f"{what[0].upper()}{what[1:]} at {short(max(0.0, event.time - run.began_s))} s."] = None
    more = [f"{len(told) - TOLD} more events are below."] if len(told) > TOLD else []
    return " ".join([*list(told)[:TOLD], *more])


def workers_table(run: Shown) -> Table:
    rows = [_life(run, life) for life in sorted(run.result.by_worker, key=lambda life: life.get("rank", 0))]
    columns = [Column(head, [row[head] for row in rows], head in ("worker", "state")) for head in rows[0]]
    return Table(run.label, filled(columns))


def _life(run: Shown, life: dict[str, Any]) -> dict[str, str]:
    alive_s, rank, which = life.get("elapsed_s"), life.get("rank"), life.get("life", 1)
    track = run.run.workers.get(rank) if run.records is not None and rank is not None else None
    state = UNKNOWN if track is None else run.run.state(track.rank) if which == track.life else "dead"

    def part(value: float | None) -> float | None:
        return value / alive_s if alive_s and value else None

    return {
        "worker": f"{UNKNOWN if rank is None else rank}{f', life {which}' if which > 1 else ''}",
        "state": state,
        "steps": number(life.get("steps")),
        "steps/s": number(part(life.get("steps"))),
        "computing": share(part(life.get("compute_s"))),
        **{f"waiting for {cause}": share(part((life.get("blocked_s") or {}).get(cause))) for cause in CAUSES},
        "staleness mean": number(life.get("staleness_mean")),
        "staleness max": number(life.get("staleness_max")),
        "discrepancy max": number(life.get("discrepancy_max") or None),
        **{what: number((life.get(what) or {}).get("done") or None) for what in ("exchanges", "merges")},
        "MB out": number(life.get("bytes_out", 0) / 1e6),
        "last loss": number(life.get("loss")),
    }


def events_table(run: Shown) -> Table:
    events = run.run.events if run.records is not None else []
    columns = {
        "at, s": [f"{max(0.0, event.time - run.began_s):,.2f}" for event in events],
        "what": [event.what for event in events],
        "worker": [", ".join(str(one) for one in (e.rank, e.peer) if one is not None) for e in events],
        "noticed by": [event.noticed_by() for event in events],
        "details": [event.text for event in events],
    }
    return Table(run.label, [Column(head, cells) for head, cells in columns.items()])


def theory_table(runs: Sequence[Shown]) -> tuple[str, Table]:
    found = [(run, bound) for run in runs for bound in bounds(run.result)]
    columns = {
        "strategy": [run.label for run, _ in found],
        "what": [bound.name for _, bound in found],
        "measured": [f"{number(bound.measured)} {bound.unit}".rstrip() for _, bound in found],
        "theory": [f"{bound.kind} {number(bound.bound)} {bound.unit}".rstrip() for _, bound in found],
        "measured / theory": [number(bound.share) for _, bound in found],
        "holds": ["✓ yes" if bound.holds else "✗ no" for _, bound in found],
        "source": [bound.source for _, bound in found],
    }
    words = ("strategy", "what", "holds", "source")
    said = f"{sum(bound.holds for _, bound in found)} of {len(found)} bounds hold; “about” means within 15 %."
    return said, Table("theory", [Column(head, cells, head in words) for head, cells in columns.items()])


def settings_table(runs: Sequence[Shown]) -> Table:
    each = []
    for run in runs:
        result, about = run.result, run.run.about if run.records is not None else {}
        found = {"workers": result.workers, "seed": result.seed, **about, "settings": result.settings}
        if run.records is not None:
            started = datetime.fromtimestamp(about.get("started", 0.0), UTC)
            found |= {"started": f"{started:%Y-%m-%d %H:%M} UTC", "state": standing(run.run)}
            found["folder"] = run.run.folder.resolve().name
        each.append((run.label, flatten(found | {"trace sha256": result.trace_sha256 or UNKNOWN})))
    keys = list(dict.fromkeys(key for _, one in each for key in one))
    columns = [Column(label, [one.get(key, UNKNOWN) for key in keys]) for label, one in each]
    return Table("settings", [Column("setting", keys), *columns])
