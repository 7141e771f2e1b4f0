"""The benchmarks: what they count, what they write, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import forked
from freewheel.cli.main import main
from freewheel.errors import ConfigError, RunStopped
from freewheel_bench import contestants, footprint, namespaces, rates, soak
from freewheel_bench.cli import app
from freewheel_bench.contestants import ALONE, DDP
from freewheel_bench.figure import Figure
from freewheel_bench.laws import Law
from freewheel_bench.network import used_share
from freewheel_bench.rates import Load, Pace, Span, measure, share_of_alone
from freewheel_bench.straggler import figures
from freewheel_bench.workers import OURS, Place, Workers

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", OURS, prepend=os.pathsep)


def bench(*arguments):
    return CliRunner().invoke(app, arguments)


def program(monkeypatch, folder, name, text):
    """A module that worker processes can run."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return name


# -- what is counted --


def test_a_step_over_the_end_counts_by_its_share(monkeypatch):
    clock = [100.0]

    def step():
        clock[0] += 0.4

    monkeypatch.setattr(contestants.time, "monotonic", lambda: clock[0])
    assert contestants.count_steps(step, begin=100.0, end=101.0) == pytest.approx(2.5)


def test_the_gradient_costs_nothing_and_is_the_whole_model():
    model = contestants.Weights(2.1)
    assert sum(p.numel() for p in model.parameters()) == 525_000
    model().backward()
    for layer in model.layers:
        assert layer.weight.grad.data_ptr() == layer.gradient.data_ptr()


def pace(steps, done=0, blocked_s=0.0):
    """What two workers come to of which each did this in 10 s."""
    before = {"exchanges": {"done": 5}, "blocked_share": 0.5, "elapsed_s": 10.0}
    blocked_share = (5.0 + blocked_s) / 20.0
    after = {"exchanges": {"done": 5 + done}, "blocked_share": blocked_share, "elapsed_s": 20.0}
    spent = {"overslept_s": 0.1, "stepping_s": 0.6, "cpu_s": 0.5}
    worker = {"steps": steps, "process_cpu_s": 1.0, "before": before, "after": after, **spent}
    return Pace(10.0, [worker, worker], [])


def test_a_share_is_of_the_same_round_and_the_median_counts():
    paces = {
        ALONE: [pace(200.0), pace(100.0), pace(50.0)],
        "adpsgd": [pace(190.0), pace(90.0), pace(50.0)],
        DDP: [pace(20.0), pace(10.0), pace(1.0)],
    }
    assert share_of_alone(paces, "adpsgd") == pytest.approx(0.95)
    (figure,) = figures("straggler", Load(), ["adpsgd"], Span(), paces)
    written = figure.as_json()
    assert list(written)[:5] == ["name", "of", "freewheel", "ddp", "ratio"]
    assert written["ratio"] == pytest.approx(9.5)
    assert written["alone_steps_per_s"] == pytest.approx(20.0)
    assert json.loads(json.dumps(written)) == json.loads(json.dumps(figure.as_json()))


def test_what_the_workers_counted_in_the_window():
    one = pace(20.0, done=30, blocked_s=0.5)
    assert one.total("exchanges", "done") == 60
    assert one.total("merges", "done") == 0
    assert one.blocked_share == pytest.approx(0.05)
    assert one.waiting_share == pytest.approx(0.02)
    assert one.steps_per_s == pytest.approx(4.0)


def test_a_link_of_100_mbit_that_carried_125_mb_in_10_s_was_full():
    assert used_share(125_000_000, link_mbit=100.0, seconds=10.0) == pytest.approx(1.0)


def test_legs_take_turns_there_and_back_and_progress_grows(monkeypatch):
    ran, seen = [], []

    def run_contestant(contestant, load, seconds, show, places, meter):
        ran.append(contestant)
        show(0.5)
        return pace(10.0)

    monkeypatch.setattr(rates, "run_contestant", run_contestant)
    paces = measure(Load(), ["adpsgd"], Span(rounds=2), lambda what, done: seen.append((what, done)))
    assert ran == [ALONE, "adpsgd", DDP, DDP, "adpsgd", ALONE]
    assert {contestant: len(of) for contestant, of in paces.items()} == {ALONE: 2, "adpsgd": 2, DDP: 2}
    assert [what for what, _ in seen] == ran
    assert [done for _, done in seen] == pytest.approx([(k + 0.5) / 6 for k in range(6)])


# -- processes --


def test_a_worker_that_fails_is_named_and_says_why(monkeypatch, tmp_path):
    text = """
        import os
        from freewheel_bench.parent import Parent
        parent = Parent()
        print("on the way")
        parent.say(ready=True)
        if os.environ["RANK"] == "1":
            raise KeyError("the reason")
        parent.hear()
    """
    module = program(monkeypatch, tmp_path, "fails", text)
    with Workers(module, {"contestant": "adpsgd"}, [Place()] * 2) as workers:
        with pytest.raises(
            RunStopped, match=r"fails adpsgd: worker 1 ended with exit code 1: .*the reason"
        ) as left:
            workers.collect("result", DEADLINE_S)
        waiting = workers.present[0]
        assert waiting.process.poll() is None
    assert "Traceback" in left.value.__notes__[0]
    assert "on the way" in left.value.__notes__[0]
    assert waiting.process.poll() == -signal.SIGKILL


def test_workers_hear_and_say(monkeypatch, tmp_path):
    text = """
        import os
        from freewheel_bench.parent import Parent, job
        parent = Parent()
        parent.say(ready=job()["number"])
        heard = parent.hear()
        parent.say(result=[heard["begin"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])])
    """
    module = program(monkeypatch, tmp_path, "talks", text)
    with Workers(module, {"number": 7}, [Place()] * 2) as workers:
        assert workers.collect("ready", DEADLINE_S) == [7, 7]
        workers.tell(begin=1.5)
        assert workers.collect("result", DEADLINE_S) == [[1.5, 0, 2], [1.5, 1, 2]]
        workers.finish(DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_do_not_outlive_the_benchmark(monkeypatch, tmp_path, number):
    worker = """
        import socket
        from freewheel_bench.parent import Parent, job
        parent = Parent()
        line = socket.create_connection(("127.0.0.1", job()["port"]))
        line.sendall(b"x")
        parent.hear()
    """
    program(monkeypatch, tmp_path, "waits", worker)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        code = (
            "from freewheel_bench.workers import Place, Workers\n"
            f"with Workers('waits', {{'port': {server.getsockname()[1]}}}, [Place()] * 2) as w:\n"
            "    w.collect('never', 600)\n"
        )
        benchmark = forked.start("-c", code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [server.accept()[0] for _ in range(2)]
        for line in lines:
            line.settimeout(DEADLINE_S)
            assert line.recv(1) == b"x"
        benchmark.send_signal(number)
        benchmark.wait(DEADLINE_S)
        for line in lines:
            assert line.recv(1) == b""  # its process is gone
            line.close()


# -- network namespaces --

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root and iproute2",
)


def standing(network):
    """What is left of a network."""
    shown = subprocess.run(
        "ip netns list; ip -brief link", shell=True, capture_output=True, text=True, check=True
    )
    return [line for line in shown.stdout.splitlines() if network.bridge[2:] in line]


@pytest.fixture
def network():
    made = namespaces.Network(2, link_mbit=100.0)
    try:
        with made:
            pass
    except ConfigError as error:
        pytest.skip(f"no network namespaces here: {error}")
    return made


@needs_root
def test_a_network_stands_and_leaves_nothing(network):
    with network:
        assert len(standing(network)) == 2 + 1 + 2
        place = network.places[1]
        shown = subprocess.run(
            [*place.command, "tc", "qdisc", "show", "dev", place.interface], capture_output=True, text=True
        )
        assert "tbf" in shown.stdout
        assert "100Mbit" in shown.stdout
        assert len(network.bytes_moved()) == 4
    assert standing(network) == []


@needs_root
def test_a_network_that_cannot_be_finished_leaves_nothing(network, monkeypatch):
    monkeypatch.setattr(network, "_bucket", lambda: ["root", "no-such-queue"])
    with pytest.raises(ConfigError, match="cannot make a network to measure on: 'tc qdisc add"), network:
        pass
    assert standing(network) == []


@needs_root
def test_bytes_are_counted_where_they_go(network):
    code = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(bytes(1000), ('10.83.0.2', 9))"
    with network:
        before = network.bytes_moved()
        subprocess.run([*network.places[0].command, sys.executable, "-c", code], check=True)
        moved = [after - at for after, at in zip(network.bytes_moved(), before, strict=True)]
    assert moved[0] >= 1000  # sent by worker 0
    assert moved[3] >= 1000  # received by worker 1
    assert moved[2] < 1000


@needs_root
def test_a_network_goes_when_the_benchmark_is_told_to_end(network):
    code = (
        "import sys\n"
        "from freewheel_bench.namespaces import Network\n"
        "network = Network(2, 100.0)\n"
        "with network:\n"
        "    print(network.bridge, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    told = forked.start("-c", code, stdin=forked.PIPE, stderr=2)
    network.bridge = told.stdout.readline().strip()
    assert standing(network)
    told.send_signal(signal.SIGTERM)
    told.communicate(timeout=DEADLINE_S)
    assert told.returncode == 128 + signal.SIGTERM
    assert standing(network) == []


def test_without_root_or_tools_the_network_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(ConfigError, match=r"needs iproute2 and there is no tc\. Install iproute2"):
        namespaces.check_possible()
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs root .* runs as user 1000\. Run it with sudo"):
        namespaces.check_possible()


# -- the command line --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["straggler", "--workers", "1"], "--workers must be at least 2, not 1"),
        (["straggler", "--slow", "9:5"], "--slow: worker 9 does not exist; there are workers 0 to 3"),
        (["straggler", "--slow", "fast"], "cannot read --slow 'fast': write RANK:FACTOR"),
        (["straggler", "--slow", "0:ten"], "cannot read --slow '0:ten': write RANK:FACTOR"),
        (["straggler", "--slow", "0:0"], "a factor must be in 0.01 to 1000, not 0"),
        (["straggler", "--slow", "0:2", "--slow", "0:3"], "--slow is given twice for worker 0"),
        (["straggler", "--strategy", "adspgd"], "Did you mean 'adpsgd'?"),
        (["straggler", "--model-mb", "nan"], "--model-mb must be at least 0.001, not nan"),
        (["straggler", "--seconds", "0"], "--seconds must be at least 0.1"),
        (["straggler", "--rounds", "0"], "--rounds must be at least 1"),
        (["straggler", "--wire", "fp8"], "--wire must be fp32 or bf16, not 'fp8'"),
        (["straggler", "--json", "/"], "it is a folder"),
        (["swap", "--mb", "1,big"], "cannot read --mb: 'big' is not a number"),
        (["swap", "--mb", ","], "--mb names no size"),
        (["swap", "--mb", "0"], "--mb must be at least 0.001"),
        (["overhead", "--device", "tpu"], "--device must be auto, cpu or cuda, not 'tpu'"),
        (["overhead", "--slices", "1"], "--slices must be at least 3"),
    ],
)
def test_a_mistake_is_named_before_anything_runs(arguments, message, monkeypatch):
    def started(*_, **__):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(Workers, "__enter__", started)
    result = bench(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_help_names_defaults_and_what_an_option_is_about(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert "default: 0:10." in bench("straggler", "--help").output
    assert "Checkpoints" not in bench("soak", "--help").output


def test_without_the_package_the_command_says_what_to_install():
    words = ["freewheel", "bench", "straggler", "--quick", "--help"]
    code = f"import sys; sys.modules['freewheel_bench'] = None; sys.argv = {words}\n"
    code += "import freewheel_start; freewheel_start.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "freewheel: freewheel bench needs freewheel-bench, which is not installed here. Install it from "
        "Freewheel's repository: pip install ./benchmarks."
    ]


def test_a_soak_that_breaks_a_law_says_which_and_ends_with_code_1(monkeypatch, capsys):
    figures = {"between_faults_s": 1.0, "samples": 10, "passes": 1, "seconds": 2.0, "accuracy": 0.5}
    law = Law("members", False, "at least 7", "8")
    monkeypatch.setattr(soak, "soak", lambda asked, *_: soak.Report(asked, [law], {"kill": 2}, figures))
    monkeypatch.setattr(sys, "argv", ["freewheel", "bench", "soak", "--kind", "kill", "--faults", "2"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["members", "at", "least", "7", "8", "BROKEN"]
    assert shown[2].startswith("Faults: 2 of kill, one in 1.00 s. 10 samples in 1 passes")


def test_the_straggler_s_table_and_file(monkeypatch, tmp_path):
    asked = {}

    def run_contestant(contestant, load, seconds, show, places, meter):
        asked["load"], asked["seconds"] = load, seconds
        return pace({ALONE: 100.0, DDP: 20.0}.get(contestant, 97.0), done=97, blocked_s=0.01)

    monkeypatch.setattr(rates, "run_contestant", run_contestant)
    out = tmp_path / "out.json"
    result = bench("straggler", "--slow", "1:5", "--model-mb", "10", "--json", str(out))
    assert result.exception is None
    assert asked["load"] == Load(4, 10.0, 50.0, {1: 5.0}, "fp32")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[1][:6] == ["adpsgd", "97.0", "%", "20.0", "%", "4.85"]
    assert rows[2][0] == "nodelay_free"
    written = json.loads(out.read_text())
    assert [(one["name"], one["of"]) for one in written] == [
        ("straggler", "adpsgd"),
        ("straggler", "nodelay_free"),
    ]
    assert written[0]["freewheel"] == pytest.approx(0.97)
    assert written[0]["ddp"] == pytest.approx(0.2)
    assert written[0]["ratio"] == pytest.approx(4.85)
    assert written[0]["blocked_share"] == pytest.approx(0.001)
    assert written[0]["exchanges_per_step"] == pytest.approx(1.0)
    assert len(written[0]["rounds"]["alone"]) == 3
    equal = bench("straggler", "--slow", "none", "--quick", "--json", str(out))
    assert equal.exception is None
    assert asked["load"].slow == {}
    assert asked["seconds"] == 1.0
    assert json.loads(out.read_text())[0]["name"] == "equal"


def test_other_figures_have_their_opponent_s_name():
    figure = Figure("swap", "45 MB", 30.0, "gloo", 72.0, 2.4, "ms", {"mb": 45})
    assert list(figure.as_json()) == ["name", "of", "freewheel", "gloo", "ratio", "unit", "mb"]


@pytest.mark.slow
def test_a_straggler_beside_real_workers(tmp_path):
    out = tmp_path / "straggler.json"
    small = ["--workers", "2", "--model-mb", "0.1", "--compute-ms", "20", "--slow", "1:3", "--quick"]
    result = bench("straggler", *small, "--strategy", "adpsgd", "--json", str(out))
    assert result.exception is None, result.exception
    (written,) = json.loads(out.read_text())
    assert written["exchanges_per_step"] > 0
    assert written["failed"] == 0
    assert 0 <= written["blocked_share"] < 1
    steps = {contestant: of[0]["steps"] for contestant, of in written["rounds"].items()}
    assert steps["adpsgd"][1] < steps["adpsgd"][0]
    assert steps["alone"][1] < steps["alone"][0]
    assert abs(steps["ddp"][0] - steps["ddp"][1]) < 2  # it waits for the slow one


def test_the_overhead_is_measured_beside_the_plain_loop_and_the_noise(tmp_path):
    out = tmp_path / "overhead.json"
    result = bench("overhead", "--device", "cpu", "--quick", "--json", str(out))
    assert result.exception is None, result.exception
    (written,) = json.loads(out.read_text())
    assert written["name"] == "overhead"
    assert written["of"] == "cpu"
    assert {len(written["step_ms"][who]) for who in ("plain", "attached", "plain again")} == {3}
    assert written["overhead_percent"] == pytest.approx(100 * (written["ratio"] - 1))


def test_swapping_small_vectors_for_real(tmp_path):
    out = tmp_path / "swap.json"
    result = bench("swap", "--mb", "0.2", "--quick", "--json", str(out))
    assert result.exception is None, result.exception
    written = json.loads(out.read_text())
    assert [one["name"] for one in written] == ["swap", "exchange", "swap over TCP", "exchange over TCP"]
    assert {one["of"] for one in written} == {"0.2 MB"}
    for one in written:
        assert one["ratio"] == pytest.approx(one["gloo"] / one["freewheel"])
        assert one["freewheel_cpu_ms"] > 0
    assert "swap 0.2 MB" in result.stdout


def test_what_is_left_behind_is_ours_and_not_a_number_that_returned(monkeypatch):
    monkeypatch.setenv("FREEWHEEL_BENCH", "")
    ours = footprint.mark()
    started = [subprocess.Popen(["sleep", "60"], start_new_session=True, env=env) for env in (None, {})]
    lives = [SimpleNamespace(process=process) for process in started]
    try:
        while not Path(f"/proc/{started[0].pid}/environ").read_bytes():
            time.sleep(0.001)  # a program that has just begun may have no environment yet
        found = footprint.left_behind(lives, footprint.shared_memory(), ours)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert found == [f"process {started[0].pid}"]
    assert footprint.left_behind(lives, footprint.shared_memory(), ours) == []
