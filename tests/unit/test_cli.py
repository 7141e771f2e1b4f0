"""The command line, as a person meets it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest

from freewheel.cli.main import GROUPS, main
from freewheel.cli.train import _chosen
from freewheel.records.result import JSON_KEYS
from freewheel.strategies import ALL

SMALL = ["--task", "quadratic", "--workers", "3", "--steps", "10"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def freewheel(*arguments, cwd="."):
    """Run a command in this process: importing torch for each would take most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["freewheel", *arguments]),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return Done(ended.value.code or 0, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("adpsgd,allreduce --lr 0.1", False),
        ("asgd,allreduce", True),
        ("asgd --lr 0.1", True),
        ("asgd:raw=true --lr 0.1", False),
    ],
)
def test_rates_that_are_not_the_one_that_was_asked_for_are_shown(words, shown):
    done = freewheel("simulate", "--strategy", *words.split(), "--workers", "3", "--steps", "3")
    assert ("lr" in done.stdout.splitlines()[0].split()) is shown


def test_simulate_prints_a_table_and_writes_json_and_report(tmp_path):
    out, report = tmp_path / "out.json", tmp_path / "new" / "report.html"
    files = ["--json", str(out), "--report", str(report)]
    done = freewheel("simulate", "--strategy", "adpsgd,allreduce", *SMALL, "--slow", "0:10", "--wide", *files)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    results = json.loads(out.read_text())
    assert [r["strategy"] for r in results] == ["adpsgd", "allreduce"]
    assert all(list(r) == [*JSON_KEYS, "settings", "lr", "versus"] for r in results)
    assert [r["versus"]["over"] for r in results] == ["allreduce"] * 2
    assert results[1]["versus"]["equal_samples"] == results[1]["loss"]
    assert results[0]["worker_steps"] == 30
    assert results[0]["accuracy"] is None
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "strategy"
    assert any(line.startswith("adpsgd ") and "nobody" in line for line in lines)
    assert "…" not in done.stdout
    for result in results:
        assert result["trace_sha256"][:10] in done.stdout
    assert str(report) in done.stdout
    assert "<html" in report.read_text()


def test_a_trace_is_json_lines_or_perfettos_by_its_name(tmp_path):
    lines, perfetto = tmp_path / "t.jsonl", tmp_path / "t.perfetto.json"
    for path in (lines, perfetto):
        done = freewheel("simulate", *SMALL, "--trace", str(path))
        assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    steps = [one for one in told if one["event"] == "step"]
    found = json.loads(perfetto.read_text())["traceEvents"]
    assert len(steps) == sum(one["ph"] == "X" and one["name"] == "gradient" for one in found)


def test_what_faults_cost_is_said():
    done = freewheel("simulate", *SMALL, "--fault", "crash:1@0.05", "--fault", "crash:2@9")
    assert done.returncode == 0, done.stderr
    assert "1 faults never happened" in done.stdout


def test_the_same_command_gives_the_same_json(tmp_path):
    texts = []
    for name in ("a", "b"):
        freewheel(
            "simulate",
            "--strategy",
            "dasgd",
            *SMALL,
            "--compute",
            "exponential",
            "--json",
            str(tmp_path / name),
        )
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]


def test_all_is_every_strategy_also_beside_others():
    everything = _chosen("all")
    assert everything == ["ddp", *ALL]
    assert _chosen("adpsgd:topology=ring,all") == ["adpsgd:topology=ring", *everything]
    assert _chosen("ddp,all") == everything
    assert "train takes one strategy, not 'all'" in freewheel("train", "--strategy", "all").stderr


def test_strategies_lists_all():
    from freewheel.strategies import ALL

    done = freewheel("strategies")
    assert done.returncode == 0
    assert set(ALL) <= {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert "Lian" in done.stdout


def test_help_and_version():
    said = freewheel("--help").stdout
    for group, commands in GROUPS.items():
        assert f"─ {group} ─" in said
        for name, (_, summary) in commands.items():  # whole, in 80 columns
            assert re.search(rf"^│ {name} +{re.escape(summary)} +│$", said, re.MULTILINE), name
    assert freewheel("--version").stdout.startswith("freewheel 0.")
    assert "--link-mbit" in freewheel("simulate", "--help").stdout
    assert "Missing option" in freewheel("run", "train.py").stderr
    assert not freewheel().stderr.strip()  # the help on stdout says it all


def test_help_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from freewheel.cli.main import GROUPS, load, app\n"
        "import typer\n"
        "typer.main.get_command(app)(['--help'], standalone_mode=False)\n"
        "for name in (one for of in GROUPS.values() for one in of if one not in ('bench', 'strategies')):\n"
        "    load(name)(['--help'], prog_name=name, standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_tables_have_six_columns_unless_all_are_wanted():
    few, wide = (
        freewheel("simulate", "--strategy", "adpsgd,allreduce", *SMALL, *more).stdout.splitlines()[0]
        for more in ([], ["--wide"])
    )
    assert 4 <= len(re.split(r"  +", few.strip())) <= 6 < len(re.split(r"  +", wide.strip()))


@pytest.mark.parametrize("command", ["simulate", "train", "compare", "plan"])
def test_the_first_help_screen_is_short_and_the_whole_one_complete(command):
    few, all_of_them = (
        set(re.findall(r"^│[ *]+(--[\w-]+)", freewheel(command, how).stdout, re.MULTILINE))
        for how in ("--help", "--help-all")
    )
    assert 5 < len(few) <= 16
    assert few < all_of_them
    assert {"--seed", "--slow"} <= all_of_them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "adspgd"], "unknown strategy 'adspgd'. Did you mean 'adpsgd'?"),
        (["--task", "mnist"], "unknown task 'mnist'"),
        (["--topology", "rign"], "unknown topology 'rign'. Did you mean 'ring'?"),
        (["--topology", "edges:list=0-1/2-3", "--workers", "4"], "{0, 1}, {2, 3}"),
        (["--strategy", "none", "--topology", "ring"], "none of the chosen strategies has one"),
        (["--workers", "0"], "workers must be at least 1, not 0"),
        (["--slow", "9:5", "--workers", "4"], "slow: there is no worker 9"),
        (["--slow", "fast"], "cannot read --slow 'fast': write RANK:FACTOR, as in 0:5"),
        (["--link-mbit", "0"], "the link bandwidth in Mbit/s must be above 0"),
        (["--link-mbit=-5"], "the link bandwidth in Mbit/s must be above 0"),
        (["--strategy", "sasgd:interval=0"], "interval T must be at least 1"),
        (["--strategy", "nodelay:tau=3"], "tau must be even"),
        (["--fault", "crash"], "cannot read the fault 'crash'"),
        (["--json", "t", "--trace", "t"], "must be different files"),
        (["--strategy", "adpsgd,none", "--trace", "t"], "--trace takes the events of one strategy"),
        (["--trace", "t.perfetto.json", "--workers", "65"], "Perfetto's format is for at most 64"),
        (["--json", "/"], "it is a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    done = freewheel("simulate", *arguments, "--report", "report.html", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "none,adpsgd", "--lr", "100"], "diverged: worker"),
        (["--strategy", "none,asgd", "--fault", "crash:0@0.05"], "asgd stopped at"),
    ],
)
def test_a_run_that_cannot_go_on_leaves_nothing_half_written(arguments, message, tmp_path):
    arguments = [*arguments, "--task", "quadratic", "--workers", "3", "--steps", "500", "--json", "out.json"]
    done = freewheel("simulate", *arguments, "--report", "report.html", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_keep_going_shows_those_that_could(tmp_path):
    done = freewheel(
        "simulate", "--strategy", "asgd,adpsgd", *SMALL, "--fault", "crash:0@0.05", "--keep-going",
        "--json", "out.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "asgd stopped at" in done.stderr
    assert [r["strategy"] for r in json.loads((tmp_path / "out.json").read_text())] == ["adpsgd"]


def test_records_are_not_overwritten_unless_that_is_meant(tmp_path):
    once = ["simulate", *SMALL, "--folder", "run"]
    assert freewheel(*once, cwd=tmp_path).returncode == 0
    before = (tmp_path / "run" / "run.json").read_text()
    for strategies in ("adpsgd", "adpsgd,none"):
        refused = freewheel(*once, "--strategy", strategies, cwd=tmp_path)
        assert refused.returncode == 2
        assert "'run' holds the records of a run" in refused.stderr
        assert "--force" in refused.stderr
    assert (tmp_path / "run" / "run.json").read_text() == before
    assert freewheel(*once, "--strategy", "none", "--force", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["strategy"] == "none"
    for command in ("train", "compare"):
        refused = freewheel(command, "--folder", "run", cwd=tmp_path)
        assert "'run' holds the records of a run" in refused.stderr


def test_ctrl_c_while_torch_is_imported_is_quiet(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\nx = 1\n" * 9)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", "import freewheel_start; freewheel_start.main()", "strategies"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("words", [["--workers", "4"], ["--lr", "1", "--slow=1:2"], ["-m"]])
def test_options_of_plan_behind_the_script_are_refused(words, tmp_path):
    (tmp_path / "t.py").write_text("")
    before = ["plan", "--workers", "2", "--measure"]
    done = freewheel(*before, "t.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert f"{words[-1] if '--lr' in words else words[0]} stands behind the script 't.py'" in done.stderr
    assert done.stderr.count("\n") == 1
    # What is the script's own is said to be.
    assert "there is no script 'u.py'" in freewheel(*before, "--", "u.py", *words, cwd=tmp_path).stderr


def test_a_plan_says_what_is_missing():
    assert "give either --workers or --scale" in freewheel("plan", "--model-mb", "1").stderr


def test_a_plan_for_other_numbers_of_workers_than_it_scales_over_is_refused():
    done = freewheel("plan", "--workers", "8", "--scale", "4,16", "--model-mb", "1", "--compute-ms", "9")
    assert "give either --workers or --scale" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume goes on from a checkpoint: give --checkpoint PATH"),
        (["--every", "5"], "--every is about checkpoints: give --checkpoint PATH"),
        (["--checkpoint", "saved", "--every", "0"], "every must be at least 1, not 0"),
        (["--checkpoint", "saved", "--strategy", "ddp"], "ddp writes no checkpoints here"),
    ],
)
def test_train_says_what_is_wrong_with_checkpoints(arguments, message, tmp_path):
    done = freewheel("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_train_tells_its_workers_of_checkpoints(tmp_path):
    with mock.patch("freewheel.cli.train.train_all", side_effect=KeyboardInterrupt) as train_all:
        freewheel("train", "--checkpoint", "saved", "--every", "7", "--resume", cwd=tmp_path)
    (job,) = train_all.call_args.args[0]
    assert (job.checkpoint, job.every, job.resume) == (str(tmp_path / "saved"), 7, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "h:1"], "--address does nothing without --ray"),
        (["--gpus", "1"], "--gpus does nothing without --ray"),
        (["--ray", "--bind", "127.0.0.1"], "--bind does nothing with --ray: leave one of them out."),
        (["--ray", "--hide-ranks"], "--hide-ranks does nothing with --ray"),
        (["--ray", "--max", "2"], "max must be at least 3, not 2"),
        (["--ray", "-n", "0"], "workers must be at least 1, not 0"),
        (["--ray", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_a_run_that_is_refused_says_and_leaves_nothing(arguments, message, tmp_path):
    if "127.0.0.1:1" in arguments:
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    done = freewheel("run", "-n", "3", *arguments, __file__, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())
