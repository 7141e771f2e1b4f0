"""`freewheel report`: from folders of runs to a page or markdown."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import freewheel as fw
import made
from freewheel.cli.main import main
from freewheel.numbers import number, share
from freewheel.records.run import Run
from freewheel.show.bounds import bounds
from freewheel.show.rates import result_of
from pages import Page, figures_of

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`*_\"'&"


def report(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["freewheel", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.fixture
def page_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*folders: Path) -> Page:
        out = tmp_path / "out" / "report.html"
        assert report(monkeypatch, *folders, "-o", out) == 0
        return Page(out.read_text(encoding="utf-8"))

    return make


@pytest.fixture
def markdown_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def make(*folders: Path) -> str:
        assert report(monkeypatch, *folders, "--markdown") == 0
        return capsys.readouterr().out

    return make


def tables(markdown: str) -> list[list[list[str]]]:
    """The tables of a markdown text, as a reader of GitHub's dialect sees them."""
    found: list[list[list[str]]] = [[]]
    for line in markdown.splitlines():
        if not line.startswith("|"):
            found.append([])
            continue
        cells = re.split(r"(?<!\\)\|", line)
        assert cells[0] == cells[-1] == ""
        found[-1].append([cell.strip() for cell in cells[1:-1]])
    return [table for table in found if table]


# -- numbers ------------------------------------------------------------------------------------


def test_the_page_has_the_figures_of_the_result(tmp_path: Path, page_of: Any) -> None:
    folder = made.run(tmp_path / "r", workers=4, samples=40)
    result, page = result_of(Run(folder)), page_of(folder)
    row = page.row("adpsgd")
    assert row["seconds"] == number(result.virtual_s) == "19.5"
    assert row["steps/s"] == number(result.steps_per_s)
    assert row["of\xa0ideal"] == share(result.ideal_share) == "97.0 %"
    assert row["idle"] == share(result.idle_share)
    assert row["stale max"] == number(result.staleness_max)
    assert row["discrepancy"] == number(result.discrepancy_max)
    assert row["kB/step"] == number(result.bytes_per_step / 1e3)
    assert row["loss"] == number(result.loss)
    assert row["accuracy"] == share(result.accuracy)
    measured = bounds(result)
    assert [r[1:5] for r in page.rows if len(r) == 7][1:] == [
        [
            bound.name,
            f"{number(bound.measured)} {bound.unit}",
            f"{bound.kind} {number(bound.bound)} {bound.unit}",
            number(bound.share),
        ]
        for bound in measured
    ]


def test_the_markdown_has_the_same_tables_as_the_page(tmp_path: Path, page_of: Any, markdown_of: Any) -> None:
    made.run(tmp_path / "runs" / "a")
    made.run(tmp_path / "runs" / "b", strategy="nodelay_free")
    page, said = page_of(tmp_path / "runs"), markdown_of(tmp_path / "runs")
    in_page = {tuple(cell.replace("\xa0", " ") for cell in row) for row in page.rows}
    for table in tables(said):
        for row in [table[0], *table[2:]]:
            plain = tuple(re.sub(r"\*\*|\\(?=\W)", "", cell) for cell in row)
            if plain != ("setting", "value"):
                assert plain in in_page


def test_a_report_plays_its_runs_and_does_without_where_there_is_nothing_to_play(page_of, tmp_path) -> None:
    for strategy in ("allreduce", "adpsgd"):
        fw.simulate(strategy, "quadratic", workers=2, steps=10, folder=tmp_path / strategy)
    assert page_of(tmp_path / "allreduce", tmp_path / "adpsgd").tags.count("iframe") == 1
    (tmp_path / "adpsgd" / "timeline-0.jsonl").unlink()
    (tmp_path / "adpsgd" / "timeline-1.jsonl").unlink()
    assert "iframe" not in page_of(tmp_path / "adpsgd").tags


@pytest.mark.parametrize(
    ("strategy", "compute", "least"),
    [
        ("nodelay", fw.Compute(slow={0: 3}), 3),
        ("allreduce", fw.Compute(), 3),  # the time of its ring is bounded by the messages that were sent
        ("adpsgd", fw.Compute(kind="lognormal"), 1),
    ],
)
def test_a_simulated_folder_gives_what_the_simulation_returned(
    strategy: str, compute: fw.Compute, least: int, tmp_path: Path
) -> None:
    result = fw.simulate(strategy, "quadratic", workers=4, steps=40, compute=compute, folder=tmp_path / "r")
    read = result_of(Run(tmp_path / "r"))
    same = ("strategy", "workers", "seed", "worker_steps", "loss", "target", "staleness_max")
    assert {key: getattr(read, key) for key in same} == {key: getattr(result, key) for key in same}
    for key in ("virtual_s", "steps_per_s", "ideal_share", "idle_share", "staleness_mean", "bytes_per_step"):
        assert getattr(read, key) == pytest.approx(getattr(result, key), rel=1e-6), key
    assert read.curve == result.curve
    theirs, ours = bounds(result), bounds(read)
    assert len(ours) >= least
    assert [(bound.name, bound.source, bound.holds) for bound in ours] == [
        (bound.name, bound.source, bound.holds) for bound in theirs
    ]
    assert [bound.bound for bound in ours] == pytest.approx([bound.bound for bound in theirs])


# -- what is shown ------------------------------------------------------------------------------


def test_a_page_says_what_was_run_by_whom_and_what_happened(tmp_path: Path, page_of: Any) -> None:
    page = page_of(made.run(tmp_path / "r", workers=4, samples=40, seed=17))
    assert "Freewheel: train.py on 4 workers" in page.said
    assert "freewheel run -n 4 train.py" in page.said
    assert "Worker 3 died at 2 s. Worker 3 joined at 3 s." in page.said
    assert ["2.00", "died", "3", "0, 1, 2", "died 3"] in page.rows
    settings = {row[0]: row[1] for row in page.rows if len(row) == 2}
    assert settings["command"] == "freewheel run -n 4 train.py"
    assert (settings["torch"], settings["python"], settings["seed"]) == ("2.13.0", "3.12.0", "17")
    workers = [row for row in page.rows if row[0] in "0123" and row[1] == "finished"]
    assert [row[2] for row in workers] == ["390", "195", "130", "390"]
    figures = figures_of(page)
    assert {"graph-0", "loss-time", "loss-samples", "accuracy-time", "accuracy-samples"} <= set(figures)
    assert {"throughput", "blocked", "staleness", "consensus", "faults"} <= set(figures)
    assert all(figure["data"] for figure in figures.values())


def test_every_life_of_a_worker_has_a_row(tmp_path: Path, page_of: Any) -> None:
    folder = made.run(tmp_path / "r", workers=2, samples=10, ended=False)
    late = made.sample(1, 6, 2, life=2, time=1009.0, last=True)
    made.append(folder / "worker-1.jsonl", late)
    rows = {row[0]: row[1:3] for row in page_of(folder).rows}
    assert rows["1"] == ["dead", "45"]
    assert rows["1, life 2"] == ["finished", "60"]


def test_runs_stand_side_by_side_under_names_of_their_own(tmp_path: Path, page_of: Any) -> None:
    for name in ("monday", "tuesday"):
        made.run(tmp_path / "runs" / name)
    made.run(tmp_path / "runs" / "wide", workers=8)
    made.run(tmp_path / "other", strategy="dasgd")
    page = page_of(tmp_path / "runs", tmp_path / "other")
    names = [row[0] for row in page.rows[1:5]]
    assert names == [
        "adpsgd:workers=4 (monday)", "adpsgd:workers=4 (tuesday)", "adpsgd:workers=8", "dasgd",
    ]  # fmt: skip
    assert "The runs differ in workers; all settings are below." in page.said
    assert [name for name in figures_of(page) if name.startswith("graph-")] == [
        f"graph-{place}" for place in range(4)
    ]


def test_a_live_run_is_reported_as_of_now(tmp_path: Path, page_of: Any, markdown_of: Any) -> None:
    now = time.time()
    folder = tmp_path / "r"
    for at in range(4):
        made.append(folder / "worker-0.jsonl", made.sample(0, 1 + at, 1, time=now - 4 + at))
    (folder / "run.json").write_text(json.dumps(made.about(workers=1, started=now - 5)))
    day = time.strftime("%Y-%m-%d", time.gmtime(now))
    for said in (page_of(folder).said, markdown_of(folder)):
        assert f"Still running, as of {day}" in said
    made.append(folder / "worker-0.jsonl", made.sample(0, 5, 1, time=now, last=True))
    assert "Still running" not in markdown_of(folder)


def test_a_run_without_loss_and_evaluations_is_reported(tmp_path: Path, page_of: Any) -> None:
    for at in range(4):
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, at, 1, loss=None))
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=1)))
    page = page_of(tmp_path)
    assert "loss" not in page.row("adpsgd")
    assert "loss-time" not in figures_of(page)


# -- what comes from outside ----------------------------------------------------------------------


def hostile(folder: Path) -> Path:
    settings = {**made.about()["settings"], "strategy": {EVIL: EVIL}, "staleness": EVIL}
    settings["scenario"] = {EVIL: [EVIL]}
    made.run(folder, name=EVIL, command=EVIL, strategy=EVIL, settings=settings, torch=EVIL)
    made.append(folder / "events-0.jsonl", made.event(1004.0, EVIL, 1, EVIL, text=EVIL))
    return folder


def test_a_page_escapes_whatever_a_folder_says_and_loads_nothing(tmp_path: Path, page_of: Any) -> None:
    page = page_of(hostile(tmp_path / EVIL.replace("/", "")), made.run(tmp_path / "tame"))
    assert len(page.scripts) == 3  # plotly, the figures, and the page's own
    assert "<" not in page.scripts[1]
    assert not any("alert" in script for script in (page.scripts[0], page.scripts[2]))
    assert "img" not in page.tags
    assert page.remote == []
    assert page.depth == []
    assert page.said.count(EVIL) >= 8
    data = json.dumps(figures_of(page))  # plotly reads HTML in its texts
    assert "<script" not in data
    assert "<img" not in data
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text


def test_markdown_escapes_whatever_a_folder_says(tmp_path: Path, markdown_of: Any) -> None:
    said = markdown_of(hostile(tmp_path / "r"))
    for table in tables(said):
        assert len({len(row) for row in table}) == 1
    outside = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", said)  # between fences everything is text
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)`", outside)
    fence = re.search(r"(?m)^(`{3,})$", said)
    assert fence is not None
    assert len(fence.group(1)) > max(map(len, re.findall("`+", EVIL)))


@pytest.mark.parametrize(
    "own",
    [
        {"compute": "a100", "links": "infiniband", "steps": "10k", "faults": 3},
        {"compute": {"gpu": "a100"}, "links": {"kind": "ib"}, "faults": "none"},
        {"compute_ms": "about 5", "slow": {"3": "a lot"}},
        {"compute_ms": 5, "slow": [3]},
    ],
)
def test_a_script_may_call_its_settings_what_it_likes(
    tmp_path: Path, markdown_of: Any, own: dict[str, Any]
) -> None:
    settings = made.about()["settings"] | {"scenario": own}
    said = markdown_of(made.run(tmp_path / "r", settings=settings))
    for name in own:
        assert f"scenario.{name}" in said


def test_markdown_is_tables_with_aligned_pipes(tmp_path: Path, markdown_of: Any) -> None:
    said = markdown_of(made.run(tmp_path / "r"))
    blocks = re.findall(r"(?:^\|.*\n)+", said, flags=re.M)
    assert len(blocks) == 5
    for block in blocks:
        places = [[at for at, sign in enumerate(line) if sign == "|"] for line in block.splitlines()]
        assert all(one == places[0] for one in places)
    assert said.startswith("# Freewheel: train.py on 4 workers\n\n")


def test_all_workers_are_in_the_tables(tmp_path: Path, page_of: Any, markdown_of: Any) -> None:
    folder = made.run(tmp_path / "r", workers=64, samples=30)
    page, said = page_of(folder), markdown_of(folder)
    assert len([row for row in page.rows if row[0].isdigit() and row[1] == "finished"]) == 64
    assert said.count("| finished |") == 64
    assert (tmp_path / "out" / "report.html").stat().st_size < 8e6


# -- bad input ------------------------------------------------------------------------------------


def starting(folder: Path) -> None:
    made.append(folder / "events-launcher.jsonl", made.event(1.0, "restarted", 0, "launcher"))


def torn(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(made.about()))
    (folder / "worker-0.jsonl").write_text(json.dumps(made.sample(0, 4)))  # a line without its end


@pytest.mark.parametrize("form", [[], ["--markdown"]])
@pytest.mark.parametrize(
    ("prepare", "more", "says"),
    [
        (lambda folder: None, [], "does not exist"),
        (lambda folder: folder.mkdir(), [], "is no run"),
        (lambda folder: made.run(folder, format=2, freewheel="9.9"), [], "written by freewheel 9.9"),
        (lambda folder: made.run(folder, workers=0), [], "must be at least 1, not 0"),
        (starting, [], "still starting"),
        (torn, [], "still starting"),
        (made.run, ["-o", "{run}"], "it is a folder"),
        (made.run, ["-o", "{run}/run.json/report.html"], "cannot write"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    prepare: Any,
    more: list[str],
    says: str,
    form: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    prepare(folder)
    assert report(monkeypatch, folder, *(one.format(run=folder) for one in more), *form) == 2
    out, errors = capsys.readouterr()
    assert says in errors
    assert errors.count("\n") == 1
    assert not out
    assert not (tmp_path / "report.html").exists()


def test_a_half_written_last_line_is_not_read_yet(tmp_path: Path, markdown_of: Any) -> None:
    folder = made.run(tmp_path / "r", workers=1, samples=5)
    before = markdown_of(folder)
    with (folder / "worker-0.jsonl").open("a") as file:
        file.write(json.dumps(made.sample(0, 99, 1))[:200])
    assert markdown_of(folder) == before


def test_damaged_lines_and_runs_that_tell_nothing_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = made.run(tmp_path / "runs" / "a")
    with (whole / "worker-0.jsonl").open("a") as file:
        file.write("\x00\x00\n")
    starting(tmp_path / "runs" / "b")
    assert report(monkeypatch, tmp_path / "runs", "-o", tmp_path / "r.html") == 0
    out, errors = capsys.readouterr()
    assert "1 damaged line left out" in errors
    assert "left out: " in errors
    assert "still starting" in errors
    assert errors.count("\n") == 2
    assert out == f"Report: {tmp_path / 'r.html'}\n"


def test_where_no_run_of_a_set_can_be_reported_that_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        starting(tmp_path / "runs" / name)
    assert report(monkeypatch, tmp_path / "runs") == 2
    assert "none of these runs" in capsys.readouterr().err


def test_the_page_goes_to_report_html_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made.run(Path("r"))
    assert report(monkeypatch, "r") == 0
    assert Path("report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert report(monkeypatch, "r", "--markdown", "-o", "new/report.md") == 0
    assert Path("new/report.md").read_text(encoding="utf-8").startswith("# Freewheel")
