from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import made as folders
from freewheel.errors import ConfigError
from freewheel.numbers import number
from freewheel.records.files import write_whole
from freewheel.records.result import Result, Sample
from freewheel.records.run import Run
from freewheel.show import report
from pages import Page, figures_of

LEARNING = ["loss-time", "loss-samples", "accuracy-time", "accuracy-samples"]
SCENARIO: dict[str, Any] = {
    "workers": 4,
    "steps": 100,
    "compute": {"ms": 10.0, "kind": "constant", "spread": 0.3, "slow": {}, "pauses": (), "trace": ()},
    "links": {
        "mbit": 1000.0,
        "latency_ms": 0.2,
        "slow": {},
        "backbone_mbit": None,
        "workers_per_node": 1,
        "node_mbit": 1e5,
        "node_latency_ms": 0.01,
    },
    "faults": (),
    "seed": 7,
    "gradients": True,
}


def made(strategy: str, settings: dict[str, Any] | None = None, **figures: Any) -> Result:
    scenario = {**SCENARIO, **figures.pop("scenario", {})}
    result = Result(
        strategy=strategy,
        workers=4,
        seed=7,
        virtual_s=1.25,
        worker_steps=400,
        steps_per_s=320.0,
        ideal_share=0.8,
        idle_share=0.2,
        staleness_mean=1.5,
        staleness_max=3.0,
        discrepancy_max=0.25,
        bytes_per_step=12_345.0,
        loss=0.125,
        accuracy=0.91,
        trace_sha256="c0ffee" * 10,
        target=0.9,
        target_s=0.75,
        curve=(
            Sample(0.25, 80, 2.0, 0.4, 0.2, 0.01),
            Sample(0.75, 240, 0.5, 0.9, 0.0, 0.0),
            Sample(1.25, 400, 0.125, 0.91, 0.25, 0.02),
        ),
        by_worker=({"gradient_norm_max": 3.0, "bytes_out": 100, "messages_out": 1},),
        settings={
            "strategy": settings or {},
            "scenario": scenario,
            "lr": 0.1,
            "momentum": 0.0,
            "model_bytes": 4_000_000,
            "waits_for": "all",
            "staleness": "own gradients",
        },
    )
    return dataclasses.replace(result, **figures)


def untrained(strategy: str) -> Result:
    curve = (Sample(0.5, 200, None, None, 0.0, 0.0), Sample(1.25, 400, None, None, 0.0, 0.0))
    timing = {"scenario": {"gradients": False}, "curve": curve, "target": None, "target_s": None}
    return made(strategy, loss=None, accuracy=None, discrepancy_max=0.0, **timing)


def page_of(
    results: Sequence[Result],
    title: str = "A title",
    command: str = "freewheel simulate",
    runs: Sequence[Run] = (),
) -> Page:
    return Page(report.html(results, runs, title=title, command=command))


def recorded(folder: Path, results: Sequence[Result]) -> list[Run]:
    """The folders a simulator would have written for these results."""
    for place, result in enumerate(results):
        home = folder / str(place)
        for sample in result.curve:
            one = {**dataclasses.asdict(sample), "samples": 32 * sample.worker_steps}
            folders.append(home / "evaluations.jsonl", {"time": one.pop("virtual_s"), **one})
        for rank in range(result.workers):
            for at in range(4):
                changes = {"time": at * result.virtual_s / 3, "loss": result.loss, "last": at == 3}
                sample = folders.sample(rank, at, result.workers, **changes)
                folders.append(home / f"worker-{rank}.jsonl", sample)
        keys = ("strategy", "workers", "seed", "settings", "target")
        about = folders.about(clock="virtual", **{key: getattr(result, key) for key in keys})
        (home / "run.json").write_text(json.dumps(about))
    return [Run(folder / str(place)) for place in range(len(results))]


# -- the page ------------------------------------------------------------------------------------


def test_a_page_has_its_parts_in_order() -> None:
    page = page_of(
        [made("allreduce"), made("adpsgd")], title="One slow worker", command="freewheel simulate -n 4"
    )
    parts = [
        "One slow worker",
        "4 workers, 400 steps in all, seed 7; all settings are below.",
        "freewheel simulate -n 4",
        "What you see",
        "Figures of all runs",
        "Speed against the ideal",
        "Measured against theory",
        "Settings and records",
    ]
    places = [page.said.find(part) for part in parts]
    assert places == sorted(places)
    assert places[0] >= 0
    assert "c0ffee" * 10 in page.said
    assert page.depth == []


def test_a_page_asks_for_nothing_from_anywhere() -> None:
    text = report.html([made("allreduce")], title="t", command="c")
    page = Page(text)
    assert page.remote == []
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & set(page.tags)
    assert "url(" not in re.findall(r"<style>(.*?)</style>", text, re.DOTALL)[0]
    assert "default-src 'none'" in text
    own = page.scripts[-1]
    assert not re.search(r"https?:", own)
    # Plotly's toolbar has a button that uploads the figure unless it is told not to.
    assert "showSendToCloud: false" in own
    assert "displaylogo: false" in own


def test_plotly_is_inlined_once() -> None:
    from plotly.offline import get_plotlyjs

    text = report.html([made("allreduce"), made("adpsgd")], title="t", command="c")
    assert text.count(get_plotlyjs()[:2000]) == 1
    assert len(text) < len(get_plotlyjs()) + 60_000


def test_what_comes_from_outside_is_escaped() -> None:
    evil = "</script><script>alert(1)</script>\"'&"
    scenario = {"faults": ({"kind": evil, "rank": 0, "at_s": 1.0, "peer": None, "factor": 1.0},)}
    result = made(evil, {"topology": evil, evil: evil}, trace_sha256=evil, scenario=scenario)
    result.settings.update(waits_for=evil, staleness=evil)
    page = page_of([result, made("adpsgd")], title=evil, command=evil)
    assert len(page.scripts) == 3  # plotly, the figures, and the page's own
    assert not any("alert" in script for script in (page.scripts[0], page.scripts[2]))
    assert "<" not in page.scripts[1]
    assert page.said.count(evil) >= 8
    assert page.depth == []
    # Plotly reads HTML in its texts, so there it must be escaped once more.
    data = json.dumps(figures_of(page))
    assert "<script" not in data
    assert "&lt;script&gt;" in data


# -- figures -------------------------------------------------------------------------------------


def test_all_figures_are_there_and_show_every_run(tmp_path: Path) -> None:
    results = [made("allreduce"), made("adpsgd"), made("none")]
    figures = figures_of(page_of(results, runs=recorded(tmp_path, results)))
    graphs = ["graph-0", "graph-1", "graph-2"]
    assert list(figures) == ["speed", *LEARNING, "throughput", "blocked", "staleness", "consensus", *graphs]
    for name in ("speed", *LEARNING, "throughput", "staleness", "consensus"):
        traces = figures[name]["data"]
        assert {trace["legendgroup"] for trace in traces} == {"0", "1", "2"}, name
        assert all(trace["x"] and len(trace["x"]) == len(trace["y"]) for trace in traces), name
    accuracy = figures["accuracy-time"]
    assert accuracy["data"][0]["x"] == [0.25, 0.75, 1.25]
    assert accuracy["data"][0]["y"] == [0.4, 0.9, 0.91]
    assert accuracy["layout"]["shapes"][0]["y0"] == 0.9
    assert figures["speed"]["data"][0]["x"] == [pytest.approx(400.0)]  # the ideal, behind the bar
    assert figures["speed"]["data"][1]["x"] == [320.0]


def test_a_run_of_its_own_has_a_graph_and_no_race(tmp_path: Path) -> None:
    results = [made("adpsgd")]
    page = page_of(results, runs=recorded(tmp_path, results))
    figures = figures_of(page)
    assert list(figures) == [*LEARNING, "throughput", "blocked", "staleness", "consensus", "graph-0"]
    assert "adpsgd makes 320 worker-steps per second, 80.0 % of the ideal; its workers are idle" in page.said


def test_many_runs_have_no_graphs(tmp_path: Path) -> None:
    results = [made(f"strategy{k}") for k in range(7)]
    figures = figures_of(page_of(results, runs=recorded(tmp_path, results)))
    assert not [name for name in figures if name.startswith("graph")]


def test_bars_are_sorted_with_the_best_on_top() -> None:
    rates = [("a", 100.0), ("b", 300.0), ("c", 200.0)]
    figures = figures_of(page_of([made(name, steps_per_s=rate) for name, rate in rates]))
    assert [trace["y"] for trace in figures["speed"]["data"][1::2]] == [["a"], ["c"], ["b"]]  # from below


def test_fifteen_runs_look_different_and_the_same_in_every_figure(tmp_path: Path) -> None:
    results = [made(f"strategy{k}") for k in range(15)]
    text = report.html(results, recorded(tmp_path, results), title="t", command="c")
    figures = figures_of(Page(text))
    traces = figures["accuracy-time"]["data"]
    looks = {t["legendgroup"]: (t["line"]["color"], t["line"]["dash"]) for t in traces}
    assert len(set(looks.values())) == 15
    for trace in figures["speed"]["data"][1::2]:
        assert trace["marker"]["color"] == looks[trace["legendgroup"]][0]
    chips = re.findall(r'data-run="(\d+)"', text)
    assert chips == list(looks)


def test_timing_alone_leaves_figures_out(tmp_path: Path) -> None:
    results = [untrained("allreduce"), untrained("adpsgd")]
    page = page_of(results, runs=recorded(tmp_path, results))
    assert not set(LEARNING) & set(figures_of(page))
    assert not {"loss", "discrepancy"} & set(page.row("allreduce"))


def test_a_task_without_accuracy_leaves_figures_out(tmp_path: Path) -> None:
    curve = tuple(dataclasses.replace(s, accuracy=None) for s in made("a").curve)
    results = [made("allreduce", accuracy=None, target=None, target_s=None, curve=curve)]
    page = page_of(results, runs=recorded(tmp_path, results))
    assert "loss-time" in figures_of(page)
    assert not {"accuracy-time", "accuracy-samples"} & set(figures_of(page))


# -- tables and words ----------------------------------------------------------------------------


def test_the_table_has_all_figures_to_read() -> None:
    page = page_of([made("adpsgd", bytes_per_step=1_234_567.0, loss=0.000123456, discrepancy_max=1.23e-7)])
    assert page.row("adpsgd") == {
        "strategy": "adpsgd",
        "waits for": "all",
        "clock": "virtual",
        "s to 90.0 %": "0.750",
        "seconds": "1.25",
        "steps/s": "320",
        "of\xa0ideal": "80.0 %",
        "idle": "20.0 %",
        "kB/step": "1,235",
        "stale mean": "1.50",
        "stale max": "3",
        "discrepancy": "1.23e-07",
        "lr": "0.1",
        "loss": "0.000123",
        "accuracy": "91.0 %",
        "trace": "c0ffeec0ff",
    }


def test_the_best_of_each_column_is_marked() -> None:
    runs = [made("a", steps_per_s=100.0), made("b", steps_per_s=300.0), made("c", steps_per_s=300.0)]
    text = report.html(runs, title="t", command="c")
    assert re.findall(r'<td class=" best">(.*?)</td>', text) == ["300", "300"]  # elsewhere all are equal


def test_virtual_and_real_seconds_are_not_ranked() -> None:
    real = made("b", steps_per_s=300.0, loss=0.1, by_worker=({"rank": 0, "steps": 400},))
    real.settings["clock"] = "wall"
    for write in (report.html, report.markdown):
        text = write([made("a", steps_per_s=100.0), real], title="t", command="c")
        assert ' best"' not in text
        assert write is report.html or "**" not in text
        assert "they are not ranked" in text
        assert "worker-steps per second" not in text
        assert "% accuracy" not in text
        assert "Speed against the ideal" not in text
    page = page_of([made("a"), real])
    assert [page.row(name)["clock"] for name in "ab"] == ["virtual", "wall"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1, "1"),
        (1.0, "1"),
        (-2.5, "-2.50"),
        (0.1, "0.100"),
        (12.345, "12.3"),
        (123.45, "123"),
        (1234567.8, "1,234,568"),
        (0.00099, "0.000990"),
        (9.65e-10, "9.65e-10"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_can_be_read(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_first_to_the_target_is_named_and_compared() -> None:
    runs = [
        made("allreduce", target_s=1.2, steps_per_s=100.0, idle_share=0.75),
        made("adpsgd", target_s=0.3),
        made("dasgd", target_s=None),
    ]
    said = page_of(runs).said
    assert (
        "adpsgd reaches 90 % accuracy first, after 0.300 s, 4 times sooner than allreduce "
        "(1.20 s); never: dasgd." in said
    )
    assert "adpsgd makes 320 worker-steps per second, 80.0 % of the ideal" in said
    assert "allreduce makes 100 worker-steps per second" in said
    assert "idle for 75.0 % of the time." in said
    assert "No run reaches 90 % accuracy" in page_of([made("adpsgd", target_s=None)]).said
    assert "target" not in page_of([made("adpsgd", target=None, target_s=None)]).said.split("Settings")[0]


def test_ddp_is_the_reference_where_it_was_run_and_its_last_accuracy_the_target() -> None:
    def run(strategy: str, *points: tuple[float, int, float], **figures: Any) -> Result:
        curve = tuple(Sample(at, steps, 1.0, accuracy, 0.0, 0.0) for at, steps, accuracy in points)
        return made(strategy, target=None, target_s=None, curve=curve, **figures)

    runs = [
        run("allreduce", (0.0, 0, 0.1), (3.0, 400, 0.9), steps_per_s=100.0),
        run("ddp", (0.0, 0, 0.1), (4.0, 400, 0.9), steps_per_s=80.0),
        run("adpsgd", (0.0, 0, 0.1), (1.0, 400, 0.91)),
    ]
    said = page_of(runs).said
    assert "adpsgd reaches 89.5 % accuracy first, after 1 s, 4 times sooner than ddp (4 s)." in said
    assert "ddp makes 80 worker-steps per second" in said


def test_runs_of_one_strategy_are_told_apart() -> None:
    four, eight = made("sasgd", {"interval": 4, "scale": None}), made("sasgd", {"interval": 8, "scale": None})
    page = page_of([four, eight, eight, made("adpsgd")])
    names = {trace["name"] for trace in figures_of(page)["speed"]["data"]}
    assert names == {"sasgd:interval=4", "sasgd:interval=8 (1)", "sasgd:interval=8 (2)", "adpsgd"}


def test_runs_of_different_scenarios_are_told_apart() -> None:
    slow = {"compute": {**SCENARIO["compute"], "slow": {0: 5.0}}}
    page = page_of([made("adpsgd"), made("adpsgd", scenario=slow)])
    names = {trace["name"] for trace in figures_of(page)["speed"]["data"]}
    assert names == {"adpsgd:compute.slow=–", "adpsgd:compute.slow.0=5.0"}
    assert "The runs differ in compute.slow, compute.slow.0; all settings are below." in page.said


def test_runs_that_differ_in_much_are_numbered_and_their_clocks_named() -> None:
    real = made(
        "adpsgd", scenario={f"option{k}": k for k in range(9)}, by_worker=({"rank": 0, "steps": 400},)
    )
    real.settings["clock"] = "wall"
    page = page_of([made("adpsgd"), real])
    assert [page.row(f"adpsgd ({number})")["clock"] for number in (1, 2)] == ["virtual", "wall"]
    assert "The runs differ in option0, option1, " in page.said


def test_theory_is_compared_and_a_broken_bound_is_named_in_words() -> None:
    good = made("nodelay", {"tau": 8}, staleness_max=8.0)
    page = page_of([good])
    assert "3 of 3 bounds hold" in page.said
    assert ["nodelay", "largest staleness", "8 steps", "at most 8 steps", "1", "✓ yes"] in [
        row[:6] for row in page.rows
    ]
    assert "✗" not in page.said
    page = page_of([dataclasses.replace(good, staleness_max=10.0), made("dpsgd")])
    assert "2 of 3 bounds hold" in page.said
    assert ["nodelay", "largest staleness", "10 steps", "at most 8 steps", "1.25", "✗ no"] in [
        row[:6] for row in page.rows
    ]
    assert "0 of 0 bounds" in page_of([made("dpsgd")]).said


# -- the file ------------------------------------------------------------------------------------


def test_a_report_is_written_into_folders_that_are_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first" / "report.html"
    write_whole(path, report.html([made("adpsgd")], title="t", command="c"))
    assert path.read_text(encoding="utf-8") == report.html([made("adpsgd")], title="t", command="c")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["html", "write", "replace"])
def test_a_report_that_fails_leaves_the_old_one_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    class Full(io.StringIO):
        write = fail

    def half(path: Path, *_: Any, **__: Any) -> Any:
        path.touch()
        return Full()

    if broken == "html":
        monkeypatch.setattr(report, "document", fail)
    elif broken == "write":
        monkeypatch.setattr(Path, "open", half)
    else:
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((ConfigError, OSError), match="No space left"):
        write_whole(path, report.html([made("adpsgd")], title="t", command="c"))
    monkeypatch.undo()
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "file" / "report.html"))):
        write_whole(tmp_path / "file" / "report.html", report.html([made("adpsgd")], title="t", command="c"))
    with pytest.raises(ConfigError, match="Is a directory"):
        write_whole(tmp_path, report.html([made("adpsgd")], title="t", command="c"))


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, report.html([made("adpsgd")], title="t", command="c"))
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")


def test_what_is_no_file_is_written_to_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(report, "html", lambda *_, **__: "a page that fits into a pipe")
    write_whole(pipe, report.html([made("adpsgd")], title="t", command="c"))
    assert os.read(reader, 100) == b"a page that fits into a pipe"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()
