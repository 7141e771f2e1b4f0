"""The planner: in virtual time, so that every figure is the same everywhere."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import freewheel as fw
from freewheel.cli.main import load
from freewheel.planning import forecast as one_forecast
from freewheel.planning import plan, words
from freewheel.planning.forecast import Forecast, forecast, shorter
from freewheel.planning.measure import Stopwatch, measure_links, measure_script
from freewheel.planning.setting import Setting
from freewheel.runtime.doctor import bandwidth
from freewheel.strategies import ALL, resolve

ROOT = Path(__file__).parents[2]
FEW = ["allreduce", "sasgd", "nodelay_free", "adpsgd", "none"]


def planned(*strategies, what_if=False, **settings):
    return plan.make(Setting(**settings), strategies or FEW, what_if=what_if)


def by_name(found):
    return {one.name: one for one in found.forecasts}


# -- what is recommended --


def test_with_a_straggler_somebody_who_waits_for_nobody_wins():
    found = planned(workers=8, model_mb=10, compute_ms=100, slow={3: 10})
    assert found.recommended.waits_for == "nobody"
    assert by_name(found)["allreduce"].ideal_share < 0.2 < 0.95 < found.recommended.ideal_share


def test_equal_workers_on_a_fast_network_need_nothing_but_allreduce():
    found = planned(workers=4, model_mb=1, compute_ms=300, link_mbit=10_000)
    assert found.recommended.strategy == "allreduce"
    assert "DDP does the same" in words.recommendation(found, ["train.py"])[0]


def test_on_a_slow_network_every_step_of_allreduce_costs_dearly():
    found = planned(workers=4, model_mb=100, compute_ms=100, link_mbit=100)
    assert found.recommended.waits_for == "nobody"
    assert found.recommended.useful_steps_per_s > 20 * by_name(found)["allreduce"].useful_steps_per_s


def test_no_communication_is_the_ceiling_and_never_the_choice():
    found = planned(workers=4, model_mb=100, compute_ms=100, link_mbit=100)
    assert found.forecasts[-1].strategy == "none"
    assert found.recommended.strategy != "none"
    assert max(one.steps_per_s for one in found.forecasts) <= 1.05 * found.forecasts[-1].steps_per_s


def test_among_those_that_are_alike_the_one_that_asks_least_is_taken():
    one = forecast("adpsgd", Setting(2, 1, 10), steps=4)
    alike = [
        dataclasses.replace(one, strategy="fast", keeps_mean=False, useful_steps_per_s=103.0),
        dataclasses.replace(one, strategy="waits", waits_for="all", useful_steps_per_s=102.0),
        dataclasses.replace(one, strategy="heavy", bytes_per_step=9e9, useful_steps_per_s=101.0),
        dataclasses.replace(one, strategy="right", useful_steps_per_s=100.0),
        dataclasses.replace(one, strategy="exact", discrepancy=0.0, useful_steps_per_s=90.0),
    ]
    assert plan.best(alike).strategy == "right"
    assert [f.strategy for f in plan.ranked(alike)] == ["fast", "waits", "heavy", "right", "exact"]


def test_the_same_seed_gives_the_same_plan():
    once, again = (planned("adpsgd", workers=4, model_mb=1, compute_ms=10, jitter=0.3) for _ in range(2))
    assert once == again


# -- what steps are worth --


def test_synchronous_steps_cost_nothing():
    one = forecast("allreduce", Setting(4, 1, 10))
    assert (one.drift, one.discrepancy) == (0.0, 0.0)
    assert one.lag == pytest.approx(0.0, abs=1e-5)
    assert (one.noise, one.steps_needed) == pytest.approx((1.0, 1.0))


def test_rarer_merges_drift_further_and_cost_more():
    setting = Setting(8, 1, 10)
    often, rarely = (forecast(f"sasgd:interval={t}", setting, steps=64) for t in (4, 32))
    assert rarely.drift > 2 * often.drift
    assert rarely.steps_needed > often.steps_needed > 1
    # Updates of length 1 in random directions: t of them carry a worker √t far.
    assert rarely.discrepancy == pytest.approx((2 * 31) ** 0.5, rel=0.25)
    assert rarely.steps_per_s >= often.steps_per_s


def test_updates_that_arrive_late_are_lag_and_not_drift():
    one = forecast("dasgd:interval=16:form=sum", Setting(4, 1, 10), steps=96)
    assert one.lag > 4
    assert one.steps_needed > 1.4
    assert forecast("adpsgd", Setting(4, 1, 10), steps=96).lag == pytest.approx(0, abs=0.2)


def test_who_follows_a_leader_averages_less_noise():
    assert forecast("leader", Setting(4, 1, 10), steps=48).noise > 1.2


def test_workers_that_never_talk_drift_apart_for_good():
    assert forecast("none", Setting(4, 1, 10), steps=60).grows
    assert not forecast("adpsgd", Setting(4, 1, 10), steps=60).grows


def test_sensitivity_scales_what_drift_costs():
    assert one_forecast.steps_needed(8, 2.0, 0.0, 1.0, 10.0) - 1 == pytest.approx(
        10 * (one_forecast.steps_needed(8, 2.0, 0.0, 1.0, 1.0) - 1)
    )


def test_every_strategy_says_what_it_costs_in_convergence_beside_its_figures():
    assert all("convergence" in vars(strategy) for strategy in ALL.values())
    assert all(len(strategy.convergence) <= 75 for strategy in ALL.values())


# -- what is simulated --


def suited(setting, *asked):
    return one_forecast.candidates(asked, setting)[0]


def test_settings_follow_from_the_machines():
    fast, slow = Setting(4, 1, 100, link_mbit=10_000), Setting(4, 200, 100, link_mbit=1000)
    tau, interval = r"nodelay:tau=(\d+)", r"sasgd:interval=(\d+)"
    for pattern in (tau, interval):
        numbers = [int(re.search(pattern, " ".join(suited(one))).group(1)) for one in (fast, slow)]
        assert numbers[0] < numbers[1]
    nodes = suited(Setting(8, 1, 100, workers_per_node=4))
    assert "hierarchical_sasgd:nodes=2" in nodes
    assert suited(fast, "sasgd:interval=3", "sasgd")[0] == "sasgd:interval=3"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("workers", [4, 64, 1024])
def test_a_simulated_run_is_whole_intervals_and_not_endless(name, workers):
    setting = Setting(workers, 100, 120)
    strategy = resolve(next(spec for spec in suited(setting) if spec.partition(":")[0] == name))
    small = shorter(strategy, setting)
    steps = one_forecast.steps_shown(strategy, small)
    assert 2 <= steps <= 700
    assert steps % one_forecast.steps_between(strategy) == 0
    if strategy.reduces:
        assert small.workers <= 64


@pytest.mark.parametrize("name", ["allreduce", "sasgd:interval=2", "nodelay_free"])
def test_a_shorter_ring_takes_as_long(name, monkeypatch):
    setting = Setting(24, 10, 50, slow={20: 2.0})
    whole = forecast(name, setting, steps=12)
    monkeypatch.setattr("freewheel.planning.forecast.MOST", 12)
    short = forecast(name, setting, steps=12)
    assert short.steps_per_s == pytest.approx(whole.steps_per_s, rel=0.03)
    assert short.ideal_share == pytest.approx(whole.ideal_share, rel=0.03)


def test_those_who_talk_to_a_server_share_its_port():
    """All three send at once, are through at once, and are answered at once: one way of the link is idle."""
    setting = Setting(4, 100, 10, link_mbit=800, latency_ms=0, message_ms=0)  # a model takes a second
    found = forecast("asgd", setting)
    own_per_s, each_per_s = 100, 1 / (3 + 3 + 0.01)
    assert found.steps_per_s == pytest.approx(own_per_s + 3 * each_per_s, rel=0.01)


@pytest.mark.parametrize("name", ["dasgd", "nodelay_free", "adpsgd", "asgd"])
def test_no_plan_sends_more_than_its_links_carry(name):
    setting = Setting(4, 100, 20, link_mbit=1000)
    found = forecast(name, setting)
    sent_mbit = found.bytes_per_step * found.steps_per_s / setting.workers * 8e-6
    assert 0.1 * setting.link_mbit < sent_mbit < 1.001 * setting.link_mbit


def test_scale_forecasts_every_number_of_workers():
    seen = []
    grown = plan.scale(
        Setting(4, 10, 50), [2, 8], ["allreduce", "adpsgd"], progress=lambda what, share: seen.append(share)
    )
    assert list(grown) == [2, 8]
    shares = [by_size[0].ideal_share for by_size in grown.values()]
    allreduce = [next(f for f in found if f.strategy == "allreduce") for found in grown.values()]
    assert allreduce[0].ideal_share > allreduce[1].ideal_share
    assert all(share > 0.9 for share in shares)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)


# -- what is said --


def test_what_would_change_it_names_the_change_and_the_winner():
    found = plan.make(Setting(4, 1, 300, link_mbit=10_000), ["allreduce", "adpsgd"])
    said = {one.change: one for one in found.what_if}
    slow = said["one worker 5 times slower"]
    assert (slow.strategy, slow.changes) == ("adpsgd", True)
    assert not said["links of 100 Gbit/s"].changes
    lines = words.what_would_change(found)
    assert any(line.startswith("With one worker 5 times slower: adpsgd (") for line in lines)
    assert any("still allreduce" in line for line in lines)


@pytest.mark.parametrize("more", [{}, {"workers_per_node": 4}, {"workers_per_node": 2}])
def test_the_recommended_command_and_strategy_can_be_used(more):
    found = planned("adpsgd", "sasgd:interval=4", workers=4, model_mb=1, compute_ms=10, slow={0: 9}, **more)
    said = words.recommendation(found, ["train.py", "--lr", "0.1"])
    line = next(text.strip() for text in said if text.startswith("    freewheel run"))
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("freewheel", "run")
    run = load("run")
    context = run.make_context("run", arguments)
    assert context.params["command"] == ["train.py", "--lr", "0.1"]
    assert context.params["workers"] == 4
    strategy = re.search(r'"(.+)"', found.attach_line).group(1)
    resolve(strategy).check(4)


def test_a_plan_is_plain_data_under_documented_keys():
    found = fw.plan(2, 1, 10, strategies=["adpsgd"], slow={1: 2}, memory_gb=1)
    plain = json.loads(json.dumps(found.as_json()))
    assert set(plain["strategies"][0]) == {field.name for field in dataclasses.fields(Forecast)}
    documented = (ROOT / "docs" / "PLAN.md").read_text()
    keys = [*plain, *plain["strategies"][0], *plain["setting"], *plain["what_if"][0]]
    for key in [*keys, "measured", "links", "scale"]:
        assert f"`{key}`" in documented, key


# -- mistakes --


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"workers": 1}, "one trains alone"),
        ({"workers": 5000}, "at most 1024 workers"),
        ({"slow": {9: 5}}, "slow: there is no worker 9"),
        ({"slow_link": {4: 5}}, "slow link: there is no worker 4"),
        ({"model_mb": 0}, "the model's size in MB must be above 0"),
        ({"compute_ms": float("nan")}, "the compute time must be above 0"),
        ({"link_mbit": -1}, "the link bandwidth in Mbit/s must be above 0"),
        ({"jitter": -0.1}, "the jitter is a share of the step time, as 0.1; it must not be -0.1"),
        ({"jitter": 10}, "it must not be 10"),
        ({"latency_ms": -1}, "the latency must be 0 or more and finite, not -1"),
        ({"message_ms": -1}, "the message's own time must be 0 or more and finite, not -1"),
        ({"sensitivity": 0}, "sensitivity must be above 0"),
        ({"workers_per_node": 3}, "cannot be split into machines of 3"),
        ({"model_mb": 900, "memory_gb": 1}, "needs at least 1.8 GB"),
        ({"model_mb": 400, "memory_gb": 1}, "no strategy fits into 1 GB"),
        ({"model_mb": 400, "memory_gb": 1}, "400 MB needs at least 1.6 GB"),
    ],
)
def test_an_impossible_plan_is_refused(settings, message):
    given = {"workers": 4, "model_mb": 10.0, "compute_ms": 10.0, **settings}
    with pytest.raises(fw.ConfigError, match=re.escape(message)):
        plan.make(Setting(**given), ["adpsgd", "none"])


def test_strategies_that_need_too_much_memory_are_left_out_and_named():
    found = planned("allreduce", "adpsgd", workers=2, model_mb=300, compute_ms=10, memory_gb=1)
    assert set(by_name(found)) == {"allreduce"}
    assert found.left_out == {"adpsgd": "needs more than 1 GB"}


def mistake(capsys, *arguments):
    """What the command says to a wrong line."""
    from freewheel.cli.main import main

    sys.argv = ["freewheel", "plan", *arguments]
    with pytest.raises(SystemExit) as left:
        main()
    heard = capsys.readouterr()
    assert left.value.code == 2
    assert not heard.out
    assert heard.err.count("\n") == 1
    return heard.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0", "--model-mb", "1", "--compute-ms", "1"], "workers must be at least 1, not 0"),
        (
            ["--workers", "4", "--model-mb", "1", "--compute-ms", "1", "--slow", "7:5"],
            "slow: there is no worker 7",
        ),
        (["--workers", "4", "--model-mb", "1", "--compute-ms", "1", "--slow", "x"], "write RANK:FACTOR"),
        (["--model-mb", "1", "--compute-ms", "1"], "give either --workers or --scale"),
        (["--workers", "4"], "--model-mb is missing: give it, or let it be measured"),
        (["--workers", "4", "--model-mb", "1"], "--compute-ms is missing"),
        (["--workers", "4", "--measure"], "--measure needs a script"),
        (["--workers", "4", "--measure", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["--workers", "4", "--measure", "-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["--workers", "4", "--measure", "."], "is a folder without __main__.py"),
        (["--scale", "4,x"], "cannot read --scale '4,x'"),
        (["--scale", ""], "cannot read --scale ''"),
        (["--scale", "1,4"], "2 or more, as in 4,16,64"),
        (["--workers", "4", "--report", "a.html"], "give --scale"),
        (["--workers", "4", "--steps", "1"], "--steps must be at least 2"),
        (["--workers", "4", "--strategy", "adspgd"], "Did you mean 'adpsgd'?"),
        (["--workers", "4", "--strategy", "none"], "name at least one strategy that communicates"),
        (["--workers", "4", "--model-mb", "5000", "--memory-gb", "4"], "needs at least 10 GB"),
        (["--workers", "4", "--model-mb", "1", "--compute-ms", "1", "--hosts", ":x"], "cannot read the host"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert message in mistake(capsys, *arguments)


# -- measuring --

LOOP = """
import pathlib, sys, torch
model, other = torch.nn.Linear(100, 50), torch.nn.Linear(2, 2)
optimizer, small = torch.optim.AdamW(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
print("given", sys.argv[1:])
for _ in range(int(sys.argv[1])):
    for one, by in ((model, optimizer), (other, small)):
        by.zero_grad()
        one(torch.ones(4, one.in_features)).sum().backward()
        by.step()
pathlib.Path(__file__).with_name("ended").touch()
"""


def test_measure_runs_a_few_steps_of_the_script_and_fills_in_the_numbers(tmp_path, capsys, monkeypatch):
    from freewheel.cli.main import main

    (tmp_path / "train.py").write_text(LOOP)
    monkeypatch.chdir(tmp_path)
    line = "plan --workers 2 --strategy allreduce,adpsgd --json out.json --measure train.py 100000"
    monkeypatch.setattr(sys, "argv", ["freewheel", *line.split()])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)
    heard = capsys.readouterr()
    assert not heard.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["measured"]["model_mb"] == pytest.approx(5050 * 4 / 1e6)
    assert found["measured"]["optimizer_mb"] == pytest.approx(2 * 5050 * 4 / 1e6, rel=0.01)
    assert found["setting"]["compute_ms"] == found["measured"]["compute_ms"] > 0
    assert found["run"].endswith(" train.py 100000")
    assert "Measured: 30 steps alone on cpu" in heard.out
    assert not (tmp_path / "ended").exists()  # it was ended, not waited for


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            LOOP.replace("sys.argv[1]", "4"),
            "before it could be timed: it ended after 4 steps of its optimizer",
        ),
        (
            "raise RuntimeError('my own mistake')",
            "exit code 1 before it could be timed: RuntimeError: my own",
        ),
    ],
)
def test_a_script_that_cannot_be_timed_says_why(text, message, tmp_path):
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(fw.FreewheelError, match=message) as raised:
        measure_script([str(tmp_path / "train.py")])
    assert "\n" not in str(raised.value)


def test_the_command_prints_a_plan_that_fits_eighty_columns(capsys, monkeypatch):
    from rich.console import Console

    from freewheel.cli import plan as command
    from freewheel.cli.main import main

    monkeypatch.setattr(command, "output", lambda: Console(width=80))
    line = (
        "plan --workers 4 --model-mb 10 --compute-ms 50 --slow 3:5 --strategy allreduce,adpsgd,none train.py"
    )
    monkeypatch.setattr(sys, "argv", ["freewheel", *line.split()])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith("4 workers on 4 machines")
    assert all(len(text.rstrip()) <= 80 for text in lines if not text.startswith("    freewheel"))
    for part in ("useful/s", "needs", "Use adpsgd.", "What would change it:", "what PyTorch's DDP does"):
        assert part in said
    order = [text.split()[0] for text in lines if text.startswith(("allreduce ", "adpsgd ", "none "))][:3]
    assert order == ["adpsgd", "allreduce", "none"]


def test_scale_draws_a_table_and_a_page(tmp_path, capsys, monkeypatch):
    from freewheel.cli.main import main

    page, out = tmp_path / "scale.html", tmp_path / "scale.json"
    line = "plan --model-mb 10 --compute-ms 50 --strategy allreduce,adpsgd --scale 2,8"
    monkeypatch.setattr(sys, "argv", ["freewheel", *line.split(), "--report", str(page), "--json", str(out)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert re.search(r"^strategy +2 +8", said, flags=re.M)
    assert set(json.loads(out.read_text())["scale"]) == {"2", "8"}
    text = page.read_text()
    data = json.loads(re.search(r'id="figure-data">(.*?)</script>', text).group(1))
    assert len(data) == 6
    assert data["0"]["data"][0]["x"] == [2, 8]
    assert all(value > 0 for value in data["0"]["data"][0]["y"])
    assert "://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_links_to_hosts_are_measured_and_the_slowest_counts():
    async def measured():
        async with bandwidth.serving(port=0) as port:
            return await asyncio.to_thread(measure_links, [f"127.0.0.1:{port}"])

    found = asyncio.run(measured())
    (link,) = found.values()
    assert link.mbit_out > 0
    assert link.latency_ms > 0


def test_evaluations_between_steps_are_neither_the_step_nor_its_jitter():
    def timed(took_s):
        watch = Stopwatch(100)
        parameter = torch.nn.Parameter(torch.zeros(4))
        watch.optimizer = torch.optim.SGD([parameter], lr=0.1)
        watch.moments = [sum(took_s[:k]) for k in range(len(took_s) + 1)]
        return watch.found()

    plain = [0.5, 0.2, 0.1, *([0.010, 0.011, 0.009, 0.010] * 5)]
    found = timed(plain)
    assert found.compute_ms == pytest.approx(10.0)
    evaluated = [one * 40 if k % 4 == 0 else one for k, one in enumerate(plain)]  # after every fourth step
    again = timed(evaluated)
    assert again.compute_ms == pytest.approx(10.0, rel=0.11)
    assert 0 < again.jitter < 0.15
    assert 0 < found.jitter < 0.15
