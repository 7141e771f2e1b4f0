"""Figures and series of runs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import made
from freewheel.records.run import Run
from freewheel.records.schema import MEASURED
from freewheel.show import figures as charts
from freewheel.show.figures import Edge, edges, graph
from freewheel.show.rates import blocked, series, staleness
from freewheel.show.shown import DISTANCES, shown
from freewheel.show.terminal import header


def read(folder, **how):
    return Run(made.run(folder, **how))


def test_series_add_up_all_workers(tmp_path):
    run = read(tmp_path, workers=3, samples=100)
    told = series(run)
    assert told.steps[-1] == run.total("steps")
    assert told.samples[-1] == run.total("samples")
    rates = [20.0, 10.0, 20.0 / 3]
    assert told.rate[-2] == pytest.approx(sum(rates), rel=0.05)
    known = np.isfinite(told.rate)
    assert known.sum() > 100
    assert told.rate[known] == pytest.approx(0.97 * told.ideal[known], rel=0.01)
    assert told.loss[-1] == pytest.approx(2.3 * math.exp(-99 / 300), rel=1e-3)


def test_a_worker_that_is_gone_has_no_say_in_the_loss_any_more(tmp_path):
    for number in range(100):
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 2, loss=1.0))
        if number < 20:
            made.append(tmp_path / "worker-1.jsonl", made.sample(1, number, 2, loss=3.0))
    told = series(Run(tmp_path))
    assert told.loss[10] == 2.0
    assert told.loss_most[10] == 3.0
    assert told.loss[-1] == 1.0
    assert told.rate[-1] == pytest.approx(20.0, rel=0.05)


def test_a_worker_that_was_away_did_not_step(tmp_path):
    for number in range(100):
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 2))
        if not 40 <= number < 70:
            life = {"life": 2, "steps": 10 * number - 650} if number >= 70 else {}
            made.append(tmp_path / "worker-1.jsonl", made.sample(1, number, 2, **life))
    told = series(Run(tmp_path))
    away = np.searchsorted(told.time_s, 30.0)
    assert told.rate[away] == pytest.approx(20.0)
    assert told.ideal[away] == pytest.approx(20.0 / 0.97)
    assert told.rate[away // 2] == pytest.approx(40.0)
    assert told.rate[-1] == pytest.approx(40.0)


def test_who_died_is_gone_and_the_others_are_as_fast_as_before(tmp_path):
    for number in range(60):
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 2))
        if number <= 20:
            made.append(tmp_path / "worker-1.jsonl", made.sample(1, number, 2))
    made.append(tmp_path / "events-0.jsonl", made.event(1010.2, "died", 1, 0))
    told = series(Run(tmp_path))
    before, after = np.searchsorted(told.time_s, [10.0, 10.7])
    assert told.rate[before] == pytest.approx(40.0)
    assert told.rate[after] == pytest.approx(20.0)
    assert told.ideal[after] == pytest.approx(20.0 / 0.97)
    first = np.flatnonzero(np.isfinite(told.rate))[0]
    assert told.time_s[first] <= 1.5
    assert told.rate[first] == pytest.approx(40.0)


def test_after_a_stall_nobody_is_faster_than_the_ideal(tmp_path):
    path = tmp_path / "worker-0.jsonl"
    for number in range(20):
        made.append(path, made.sample(0, number, 1))
    for number in range(44, 60):  # held up for 12 s, in a step that is counted when it ends
        stalled = {
            "steps": 10 * number - 240,
            "compute_s": 0.97 * (0.5 * number - (12.0 if number < 46 else 0.0)),
        }
        made.append(path, made.sample(0, number, 1, **stalled))
    told = series(Run(tmp_path))
    known = np.isfinite(told.rate)
    assert (told.rate[known] <= told.ideal[known] + 1e-9).all()


def test_the_throughput_of_a_short_run_is_drawn(tmp_path):
    for number in range(3):
        line = made.sample(
            0, number, 1, time=1000.0 + 0.3 * number, elapsed_s=0.3 * number, compute_s=0.29 * number
        )
        made.append(tmp_path / "worker-0.jsonl", line)
    assert np.isfinite(series(Run(tmp_path)).rate).any()


def test_who_met_whom_in_the_last_seconds_and_how_far_apart_they_were(tmp_path):
    for number in range(30):
        peers = {"1": [number, 0.5], "2": [7, 0.1]}  # 2 was met long ago
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 3, peers=peers))
        made.append(tmp_path / "worker-1.jsonl", made.sample(1, number, 3, peers={"0": [number, None]}))
        made.append(tmp_path / "worker-2.jsonl", made.sample(2, number, 3, peers={}))
    found, span_s = edges(Run(tmp_path))
    assert found == [Edge(0, 1, 10, 0.5)]
    assert span_s == 5.0


def test_the_last_seconds_of_a_short_simulation_are_short(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(clock="virtual", workers=2)))
    for number in range(100):
        peers = {"1": [number, 0.5]}
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 2, peers=peers, time=number / 100))
    found, span_s = edges(Run(tmp_path))
    assert found == [Edge(0, 1, 10, 0.5)]
    assert span_s == pytest.approx(0.1)


def test_where_merges_are_rare_all_of_the_run_is_looked_at(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(made.about(workers=2)))
    for rank in range(2):
        for number in range(1, 200):
            met = {str(1 - rank): [number // 90, None]}  # the last time long ago
            made.append(tmp_path / f"worker-{rank}.jsonl", made.sample(rank, number, 2, peers=met))
    (edge,), over_s = edges(Run(tmp_path))
    assert (edge.one, edge.other, edge.count) == (0, 1, 2)
    assert over_s == 99.5


def test_of_very_many_edges_the_farthest_of_each_worker_are_drawn(tmp_path):
    for rank in range(40):
        peers = {str(peer): [1, 1.0 if abs(peer - rank) == 20 else 0.1] for peer in range(40) if peer != rank}
        made.append(tmp_path / f"worker-{rank}.jsonl", made.sample(rank, 1, 40, peers=peers))
    run = Run(tmp_path)
    assert len(edges(run)[0]) == 780
    figure = graph(run)
    assert "780 pairs" in figure["said"]
    drawn = {t["line"]["color"]: t["x"].count(None) for t in figure["data"] if t["mode"] == "lines"}
    assert drawn[DISTANCES[-1]] == 20
    assert sum(drawn.values()) <= 80


def test_all_that_was_met_counts_while_a_run_is_young(tmp_path):
    run = read(tmp_path, workers=2, samples=3)
    found, span_s = edges(run)
    assert [(edge.one, edge.other) for edge in found] == [(0, 1)]
    assert span_s == 1.0


def test_shares_of_time_and_staleness(tmp_path):
    run = read(tmp_path, workers=2, samples=41)
    shares = blocked(list(run.workers.values()))
    assert shares == pytest.approx({"peers": 0.02, "data": 0.01, "checkpoint": 0.0})
    assert staleness(run) == {0: 150, 1: 300, 2: 150}


def test_of_a_resumed_run_curves_and_evaluations_count_steps_alike(tmp_path):
    samples = [made.sample(0, number, 1, resumed_at=1000, samples=0) for number in range(20)]
    made.append(tmp_path / "worker-0.jsonl", *samples)
    made.append(
        tmp_path / "evaluations-0.jsonl", {"time": 1005.0, "worker_steps": 1100, "loss": samples[10]["loss"]}
    )
    curve, dots = charts.curves(shown([Run(tmp_path)]), "loss", "samples")["data"]
    assert (curve["x"][0], curve["x"][-1]) == (1000, 1190)
    assert dots["x"] == [1100]


def test_what_an_earlier_life_counted_is_not_forgotten(tmp_path):
    lost = {"staleness_counts": {"0": 3}, "exchanges": {"done": 5, "half": 2}, "messages_dropped": 4}
    later = {"staleness_counts": {"0": 1, "2": 2}, "exchanges": {"done": 1, "half": 1}, "messages_dropped": 0}
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 10, 1, **lost))
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 20, 1, life=2, **later))
    run = Run(tmp_path)
    assert staleness(run) == {0: 4, 2: 2}
    said = header(run, 120)[1].plain
    assert "exchanges half: 3" in said
    assert "messages dropped: 4" in said


def points(figure):
    return [value for trace in figure["data"] for value in trace["y"] if value is not None]


@pytest.mark.parametrize("count", [1, 2])
def test_every_figure_of_a_run_has_something_to_show(tmp_path, count):
    runs = [read(tmp_path / str(n), workers=4, samples=60) for n in range(count)]
    figures = charts.figures(shown(runs))
    assert len(figures) == 10
    for name, figure in figures.items():
        assert points(figure), name
        assert figure["title"]
        assert figure["said"]
        assert len({len(trace["x"]) - len(trace["y"]) for trace in figure["data"]} - {0}) == 0, name
    json.dumps(figures, allow_nan=False)


def test_a_run_without_anything_to_draw(tmp_path):
    unknown = dict.fromkeys(("loss", "samples", "peers", "discrepancy", "staleness_counts"))
    made.append(tmp_path / "worker-0.jsonl", made.sample(0, 0, 1, **unknown))
    figures = charts.figures(shown([Run(tmp_path)]))
    for name in ("loss-time", "loss-samples", "accuracy-time", "staleness", "consensus", "faults"):
        assert not points(figures[name]), name
    json.dumps(figures, allow_nan=False)


def test_without_samples_the_axis_counts_worker_steps(tmp_path):
    for number in range(9):
        made.append(tmp_path / "worker-0.jsonl", made.sample(0, number, 1, samples=None))
    figures = charts.figures(shown([Run(tmp_path)]))
    assert figures["loss-samples"]["title"] == "Loss over worker-steps"
    assert figures["loss-samples"]["data"][-1]["x"][-1] == 80


def test_names_tell_runs_apart_and_what_they_say_cannot_be_markup(tmp_path):
    one, two = (read(tmp_path / name) for name in ("one", "two"))
    assert [each.label for each in shown([one, two])] == ["adpsgd (one)", "adpsgd (two)"]
    bad = read(tmp_path / "bad", strategy="<img src=x>")
    made.append(tmp_path / "bad" / "events-0.jsonl", made.event(1002.5, "<b>", 0, "<i>", text="<a href=x>"))
    bad.poll()
    text = json.dumps(charts.figures(shown([bad])))
    assert not [tag for tag in ("<img", "<a ", "<i>") if tag in text]


def test_a_death_and_a_return_are_one_span(tmp_path):
    figure = charts.faults(shown([read(tmp_path, workers=4)]))
    away, died, joined = figure["data"]
    assert away["x"] == [2.0, 3.0, None]
    assert away["y"][0] == "worker 3"
    assert (died["name"], died["x"], joined["name"], joined["x"]) == ("died", [2.0], "joined", [3.0])
    assert "noticed by 0, 1, 2" in died["text"][0]


def test_long_runs_count_minutes_and_hours(tmp_path):
    for hours, unit in ((0.1, "s"), (2, "min"), (9, "h")):
        folder = tmp_path / unit
        made.append(folder / "worker-0.jsonl", made.sample(0, 0), made.sample(0, int(7200 * hours)))
        figure = charts.throughput(shown([Run(folder)]))
        assert figure["layout"]["xaxis"]["title"]["text"] == f"time, {unit}"


def test_what_a_script_has_named_itself_is_drawn(tmp_path):
    made.append(
        tmp_path / "evaluations-0.jsonl",
        {"time": 1001.0, "samples": 64, "perplexity": 20.0, "no word": 1.0, "note": "text"},
        {"time": 1002.0, "samples": 128, "perplexity": 12.5},
    )
    run = read(tmp_path)
    own = [{name: of for name, of in one.items() if name not in MEASURED} for one in run.evaluations]
    assert list(filter(None, own)) == [
        {"perplexity": 20.0},
        {"perplexity": 12.5},
    ]
    figures = charts.figures(shown([run]))
    names = list(figures)
    assert names[1:7] == [
        f"{what}-{over}" for what in ("loss", "accuracy", "perplexity") for over in ("time", "samples")
    ]
    (curve,) = figures["perplexity-time"]["data"]
    assert (curve["x"], curve["y"]) == ([1.0, 2.0], [20.0, 12.5])
    assert figures["perplexity-samples"]["data"][0]["x"] == [64.0, 128.0]
    assert figures["perplexity-time"]["title"] == "Perplexity over time"


def test_who_is_slow_is_written_beside_its_node(tmp_path):
    run = read(tmp_path, workers=3, samples=20)  # 20, 10 and 20/3 steps a second
    (nodes,) = [trace for trace in graph(run)["data"] if trace["mode"] == "markers+text"]
    assert nodes["text"] == ["<b>0</b> 20/s", "<b>1</b> 10/s", "<b>2</b> 6.63/s"]


def test_the_colours_of_edges_mean_the_same_all_the_time(tmp_path):
    def scale(number):
        folder = tmp_path / str(number)
        for at in range(number):
            apart = 0.5 * 0.9**at
            sample = made.sample(0, at, 2, peers={"1": [at, apart]}, discrepancy_max=0.5)
            made.append(folder / "worker-0.jsonl", sample)
        bars = [t["marker"] for t in graph(Run(folder))["data"] if t.get("marker", {}).get("showscale")]
        return [(bar["cmin"], bar["cmax"]) for bar in bars]

    assert scale(5) == scale(40) == [(math.log10(0.5) - 2, math.log10(0.5))]


def test_deaths_and_returns_are_marked_on_loss_and_throughput(tmp_path):
    figures = charts.figures(shown([read(tmp_path)]))  # worker 3 died at 2 s and joined at 3 s
    for name in ("loss-time", "accuracy-time", "throughput"):
        marks = [one["x0"] for one in figures[name]["layout"]["shapes"] if one.get("yref") == "paper"]
        assert marks == [2.0, 3.0], name
    assert not figures["loss-samples"]["layout"]["shapes"]
    assert "AllReduce here: at most" in figures["throughput"]["said"]
