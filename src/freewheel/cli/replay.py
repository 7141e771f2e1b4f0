"""``freewheel replay``: a page that plays one run, or several on one clock."""

from __future__ import annotations

from pathlib import Path

from freewheel.cli.options import RUNS, option
from freewheel.errors import ConfigError
from freewheel.records.files import check_writable, write_whole
from freewheel.records.find_run import all_runs
from freewheel.records.run import Run
from freewheel.show.replay import MOST, as_perfetto, html, title_of, two


def replay(
    folders: list[Path] = RUNS,
    out: Path = option(Path("replay.html"), "Where to write.", "--output", "-o"),
    perfetto: Path | None = option(None, "Instead of a page, write a trace for ui.perfetto.dev here."),
) -> None:
    """Write a page that plays runs: who computes, who waits, who meets whom, and what they have learned."""
    out = perfetto or out
    check_writable(out)
    runs = [Run(one) for one in all_runs(folders)]
    if perfetto is not None:
        write_whole(out, as_perfetto(runs))
        print(f"Trace, open it at ui.perfetto.dev: {out.resolve()}")
        return
    if len(folders) == 1 and len(runs) > 2:
        runs = two(runs)
    if len(runs) > MOST:
        raise ConfigError(f"a replay shows at most {MOST} runs, not {len(runs)}; name some of them.")
    write_whole(out, html(runs, title_of(runs)))
    print(f"Replay: {out.resolve()}")
