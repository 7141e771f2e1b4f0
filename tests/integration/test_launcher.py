"""The launcher with real processes: what workers are told, what is printed, who is left behind (nobody)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import socket
import sys

import pytest

import forked
from crew import free_port
from freewheel.cli.main import main
from freewheel.cli.run import prefixed
from freewheel.errors import ConfigError
from freewheel.records.run import Run, find_runs
from freewheel.runtime.launch import processes
from freewheel.runtime.launch.launcher import Captured, launch
from freewheel.runtime.membership.entries import Options
from freewheel.runtime.membership.hosts import host_store, reach_store

DEADLINE_S = 60


@pytest.fixture
def script(tmp_path):
    """Write a worker's program; gives the command that runs it."""

    def write(text: str, name: str = "worker.py") -> list[str]:
        path = tmp_path / name
        path.write_text("import os, signal, sys\nrank = int(os.environ['RANK'])\n" + text)
        return [sys.executable, "-S", str(path)]

    return write


class Gate:
    """Workers wait at it (a line of their program) until the test opens it, once for each."""

    def __init__(self, path) -> None:
        os.mkfifo(path)
        self.wait = f"os.read(os.open({str(path)!r}, os.O_RDONLY), 1)\n"
        self._handle = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._handle, b"!")

    def close(self) -> None:
        os.close(self._handle)


@pytest.fixture
def gate(tmp_path):
    with contextlib.closing(Gate(tmp_path / "gate")) as one:
        yield one


# What workers are told.

TELL = """
import json, torch.distributed as dist
told = {key: os.environ.get(key) for key in sys.argv[1:]}
from freewheel.fabric.secret import of_environment
from freewheel.runtime.membership.entries import Entries
store = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False)
told["options"] = json.loads(Entries(store, of_environment(os.environ)).get("freewheel/options"))
port = f"{int(told['MASTER_PORT']):04X}"
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
told["listening"] = [row[1] for row in rows if row[1].endswith(":" + port) and row[3] == "0A"]
print(json.dumps(told))
"""


def test_workers_are_told_who_they_are_and_what_the_options_are(script, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = script(TELL)
    command.remove("-S")  # torch is a package
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    names += ["TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "EXTRA"]
    output = Captured()
    folder = tmp_path / "new" / "run"
    options = Options(folder=folder, bind="127.0.0.1", typed="freewheel run …", console=True)
    code = launch([*command, *names], 2, output=output, options=options, env={"EXTRA": "yes"})
    assert code == 0, output.lines
    told = [json.loads(output.lines[rank][-1]) for rank in range(2)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in range(2):
        listening = told[rank].pop("listening")
        assert listening
        assert all(address.startswith("0100007F:") for address in listening), "not on loopback only"
        options = told[rank].pop("options")
        assert re.fullmatch("[0-9a-f]{32}", options.pop("run"))
        expected = {
            "folder": str(folder),
            "bind": "127.0.0.1",
            "console": True,
            "tensorboard": None,
            "tls": None,
        }
        assert options == {**expected, "tls": None, "workers": 2, "most": 2, "typed": "freewheel run …"}
        assert told[rank].pop("MASTER_PORT").isdecimal()
        assert told[rank] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            "EXTRA": "yes",
        }
    assert folder.is_dir()


def test_who_watches_at_once_sees_a_run_that_is_starting(script, tmp_path):
    found = []

    def output(rank: int | None, text: str, error: bool) -> None:
        if text.startswith("Watch: "):
            found.append(Run(find_runs(tmp_path / "records")[0]))

    assert launch(script(""), 1, output=output, options=Options(folder=tmp_path / "records")) == 0
    assert [(run.live, run.workers) for run in found] == [(True, {})]
    assert not list((tmp_path / "records").iterdir())  # it has ended, and there is nothing to tell


def test_threads_the_user_asked_for_stay(script, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    output = Captured()
    assert launch(script("print(os.environ['OMP_NUM_THREADS'])"), 1, output=output) == 0
    assert list(output.lines[0]) == ["7"]


# What is printed.


def test_lines_stay_whole_and_in_order_when_all_write_at_once(script):
    command = script("""
for number in range(300):
    for end, letter in ((1, "o"), (2, "e")):
        text = f"{letter}{rank}-{number} " + letter * 500 + "\\n"
        for start in range(0, len(text), 97):
            os.write(end, text[start:start + 97].encode())
os.write(1, b"the end")
""")
    seen: list[tuple[int | None, str, bool]] = []
    assert launch(command, 4, output=lambda *line: seen.append(line)) == 0
    for rank in range(4):
        for error, letter in ((False, "o"), (True, "e")):
            lines = [text for who, text, where in seen if who == rank and where is error]
            wanted = [f"{letter}{rank}-{number} " + letter * 500 for number in range(300)]
            assert lines == wanted + ([] if error else ["the end"])


def test_of_a_progress_bar_the_newest_state_is_shown(script, monkeypatch):
    bar = """
for percent in range(0, 101, 10):
    os.write(1, f"\\r{percent:3d}% done".encode())
os.write(1, b"\\r\\n")
os.write(1, b"windows\\r\\n\\nmore\\r100%\\r      \\r")
"""
    output = Captured()
    assert launch(script(bar), 1, output=output) == 0
    assert list(output.lines[0]) == ["100% done", "windows", "", "100%"]
    monkeypatch.setattr(processes, "PROGRESS_S", -1.0)
    output = Captured()
    slow = "import time\n"
    slow += "for percent in range(3):\n    os.write(1, f'\\r{percent}%'.encode())\n    time.sleep(0.2)\n"
    assert launch(script(slow), 1, output=output) == 0
    assert list(output.lines[0]) == ["0%", "1%", "2%"]  # before it ends, too


def test_output_that_is_no_text_does_no_harm(script):
    output = Captured()
    assert launch(script("os.write(1, b'\\xff\\xfe ok\\n')"), 1, output=output) == 0
    assert output.lines[0][-1].endswith(" ok")


def test_captured_output_goes_to_files_too(script, tmp_path):
    output = Captured(tmp_path, newest=1)
    assert launch(script("print('one')\nprint('two')\nsys.exit(rank)"), 2, output=output) == 1
    assert list(output.lines[1]) == ["two"]
    assert (tmp_path / "worker-1.log").read_text() == "one\ntwo\n"
    assert "worker 1 ended with exit code 1" in (tmp_path / "launcher.log").read_text()


@pytest.mark.parametrize(("terminal", "line"), [(True, "\x1b[34m[2]\x1b[0m ×\n"), (False, "[2] ×\n")])
def test_a_rank_has_a_colour_on_a_terminal_only(monkeypatch, terminal, line):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    prefixed(2, "×", False)
    assert stream.getvalue() == line


def test_tick_is_called_and_its_error_ends_the_run(script, gate):
    pids: list[int] = []

    class Enough(Exception):
        pass

    def tick() -> None:
        if len(pids) == 2:
            raise Enough

    def output(rank: int | None, text: str, error: bool) -> None:
        if rank is not None and text.isdecimal():
            pids.append(int(text))

    with pytest.raises(Enough):
        launch(script("print(os.getpid())\n" + gate.wait), 2, output=output, tick=tick)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# How it ends.


def test_the_first_failure_gives_the_exit_code_and_the_others_go_on(script, gate):
    command = script(
        f"if rank == 1: sys.exit(5)\n{gate.wait}print('went on')\nsys.exit(7 if rank == 0 else 0)"
    )
    output = Captured()

    def watch(rank: int | None, text: str, error: bool) -> None:
        output(rank, text, error)
        if text == "worker 1 ended with exit code 5; 2 of 3 go on":
            gate.open()
            gate.open()

    assert launch(command, 3, output=watch) == 5
    assert [list(output.lines[rank]) for rank in range(3)] == [["went on"], [], ["went on"]]
    assert "worker 0 ended with exit code 7" in output.lines[None][-1]


def test_a_signal_is_128_and_its_number(script):
    output = Captured()
    assert launch(script("os.kill(os.getpid(), signal.SIGKILL)"), 1, output=output) == 137
    assert output.lines[None][-1] == "worker 0 ended with signal 9 (Killed)"


STUBBORN = """
print("started", rank)
with open(sys.argv[1] + str(rank), "a") as file:
    file.write("x")
if rank == 1:
    if os.path.getsize(sys.argv[1] + "1") < 3:
        os.abort() if os.path.getsize(sys.argv[1] + "1") == 1 else sys.exit(3)
    os.write(os.open(sys.argv[2], os.O_WRONLY), b"!")
else:
    os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
"""


def test_a_worker_that_dies_is_started_again_and_the_others_do_not_notice(script, tmp_path, gate):
    command = [*script(STUBBORN), str(tmp_path / "starts"), str(tmp_path / "gate")]
    output = Captured()
    assert launch(command, 2, output=output, restarts=2) == 0
    assert list(output.lines[1]) == ["started 1"] * 3
    assert list(output.lines[0]) == ["started 0"]
    said = [line for line in output.lines[None] if "starts again" in line]
    assert [re.search(r"worker 1 .*\((\d of \d)\)", line).group(1) for line in said] == ["1 of 2", "2 of 2"]


def test_restarts_are_counted_for_each_worker_and_end(script):
    output = Captured()
    assert launch(script("print('started')\nsys.exit(4)"), 2, output=output, restarts=1) == 4
    assert [list(output.lines[rank]) for rank in range(2)] == [["started"] * 2] * 2


def test_children_end_with_their_worker(script, left_over):
    command = script("""
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print(child.pid)
""")
    output = Captured()
    assert launch(command, 1, output=output) == 0  # and does not wait for the child that holds the pipe
    left_over.append(int(output.lines[0][0]))
    assert gone(left_over[0])


# Nobody is left behind. A handle on a process becomes readable when it ends, whoever its parent is.

FAMILY = """
import subprocess
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print("family", os.getpid(), child.pid)
while True:
    signal.pause()
"""

POLITE = """
def bye(number, frame):
    print("bye", number)
    sys.exit(0)
signal.signal(signal.SIGINT, bye)
signal.signal(signal.SIGTERM, bye)
print("family", os.getpid())
while True:
    signal.pause()
"""


def gone(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(handle):
        return bool(select.select([handle], [], [], DEADLINE_S)[0])


@contextlib.contextmanager
def running(cwd, *arguments):
    """Start ``freewheel run``, end it with everything it may have left."""
    launcher = forked.start(*forked.FREEWHEEL, "run", *arguments, cwd=cwd, stderr=forked.STDOUT)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def families(launcher, workers: int) -> list[int]:
    """Wait until so many workers have told the pids of their families."""
    pids: list[int] = []
    seen: list[str] = []
    for _ in range(workers):
        told = None
        while told is None:
            seen.append(launcher.stdout.readline())
            assert seen[-1], f"the launcher ended early: {''.join(seen)}"
            told = re.search(r"\] family (.*)", seen[-1])
        pids += map(int, told.group(1).split())
    return pids


@pytest.fixture
def left_over():
    """Ends by pid what a failing test leaves behind."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everybody_also_children_that_will_not(
    script, tmp_path, number, code, left_over, monkeypatch
):
    monkeypatch.setenv("FREEWHEEL_LEAVE_S", "0.5")  # they use none of the time to leave
    script(FAMILY)
    with running(tmp_path, "-n", "2", "--restarts", "9", "worker.py") as launcher:
        left_over += families(launcher, 2)
        assert len(left_over) == 4
        launcher.send_signal(number)
        assert launcher.wait(DEADLINE_S) == code
        assert all(gone(pid) for pid in left_over)


def test_an_interrupt_reaches_the_workers_before_they_are_killed(script, tmp_path, left_over):
    script(POLITE)
    with running(tmp_path, "-n", "2", "worker.py") as launcher:
        left_over += families(launcher, 2)
        launcher.send_signal(signal.SIGINT)
        rest, _ = launcher.communicate(timeout=DEADLINE_S)
        assert launcher.returncode == 130
        assert sorted(rest.splitlines()) == [
            "[0] bye 2",
            "[1] bye 2",
            "freewheel: SIGINT: ending all workers",
        ]


def test_a_launcher_that_is_killed_takes_everybody_along(script, tmp_path, left_over):
    script(FAMILY)
    with running(tmp_path, "-n", "2", "worker.py") as launcher:
        left_over += families(launcher, 2)
        assert len(left_over) == 4
        launcher.kill()
        assert all(gone(pid) for pid in left_over)


# The command.


def test_run_prints_ranks_makes_a_folder_and_leaves_the_script_its_options(script, tmp_path):
    script("print(*sys.argv[1:])\nprint('oops', file=sys.stderr)\nsys.exit(3 * rank)")
    with running(tmp_path, "-n", "2", "worker.py", "-n", "7", "--restarts", "--help") as launcher:
        text, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 3
    (folder,) = (tmp_path / "runs").iterdir()
    lines = text.splitlines()
    assert lines[0].startswith("freewheel: workers: 2, ")
    assert lines[0].endswith(str(folder))
    for rank in range(2):
        assert f"[{rank}] -n 7 --restarts --help" in lines
        assert f"[{rank}] oops" in lines


def test_an_error_of_all_workers_is_shown_once_and_whole(script, tmp_path):
    script("import json\njson.loads('[' * (rank + 1))")
    with running(tmp_path, "-n", "3", "worker.py") as launcher:
        text, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 1
    lines = text.splitlines()
    (begin,) = (k for k, line in enumerate(lines) if "Traceback" in line)
    (end,) = (k for k, line in enumerate(lines) if re.match(r"\[\d] json\.decoder\.JSONDecodeError", line))
    assert len({line[:3] for line in lines[begin : end + 1]}) == 1, text
    assert len([line for line in lines if f"the same error as worker {lines[begin][1]}: json" in line]) == 2


def command_line(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["freewheel", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    captured = capsys.readouterr()
    return left.value.code, captured.out, captured.err


def test_run_m_runs_a_module_of_this_folder(script, tmp_path, monkeypatch, capsys):
    script("print(__name__, *sys.argv[1:])", name="training.py")
    monkeypatch.chdir(tmp_path)
    code, out, _ = command_line(monkeypatch, capsys, "run", "-n", "1", "-m", "training", "-m", "--lr", "1")
    assert (code, out) == (0, "[0] __main__ -m --lr 1\n")


def test_keys_makes_a_set_that_run_takes(script, tmp_path, monkeypatch, capsys):
    script("print('hello')")
    monkeypatch.chdir(tmp_path)
    code, out, _ = command_line(monkeypatch, capsys, "keys", "k", "--days", "2")
    assert not code
    assert "--tls k" in out
    code, out, _ = command_line(monkeypatch, capsys, "run", "-n", "1", "--tls", "k", "worker.py")
    assert (code, out) == (0, "[0] hello\n")
    (tmp_path / "k" / "worker.key").unlink()
    code, _, err = command_line(monkeypatch, capsys, "run", "-n", "1", "--tls", "k", "worker.py")
    assert code == 2
    assert "worker.key missing" in err
    assert "`freewheel keys DIR`" in err


WRONG = {
    "no such script": (["-n", "2", "nothing.py"], r"no script 'nothing.py': looked for /.*/nothing.py"),
    "a folder": (["-n", "2", "."], "folder without __main__.py"),
    "no such module": (["-n", "2", "-m", "no_module.at_all"], "no module 'no_module.at_all'"),
    "no workers": (["-n", "0", "worker.py"], "workers must be at least 1, not 0"),
    "no number of workers": (["worker.py"], "Missing option '-n'"),
    "unknown option": (["-n", "2", "--speed", "9", "worker.py"], "--speed"),
    "negative restarts": (["-n", "2", "--restarts", "-1", "worker.py"], "restarts must be at least 0"),
    "not our address": (["-n", "2", "--bind", "192.0.2.1", "worker.py"], "no address 192.0.2.1"),
    "no address": (["-n", "2", "--bind", "no.host.invalid", "worker.py"], "bind: cannot listen on"),
    "unreadable master": (["-n", "2", "--master", "here", "worker.py"], "cannot read master 'here'"),
    "master elsewhere": (["-n", "2", "--master", "192.0.2.1:9", "worker.py"], "no address 192.0.2.1"),
    "no keys": (["-n", "2", "--tls", "nowhere", "worker.py"], "ca.pem and worker.pem and worker.key missing"),
    "folder is a file": (["-n", "2", "--folder", "worker.py", "worker.py"], "cannot make the run folder"),
    "port in use": (["-n", "2", "--master", "127.0.0.1:{used}", "worker.py"], "port .* is in use"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_line_and_code_2(case, script, tmp_path, monkeypatch, capfd):
    arguments, said = WRONG[case]
    script("print('started')")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [argument.format(used=server.getsockname()[1]) for argument in arguments]
        code, out, err = command_line(monkeypatch, capfd, "run", *arguments)
    assert code == 2
    assert re.search(said, err), err
    assert err.startswith("freewheel: ")
    assert err.count("\n") == 1
    assert not out
    assert not (tmp_path / "runs").exists()


def test_who_waits_for_a_run_says_so_at_once():
    port, said, stores = free_port(), [], []

    def say(text: str) -> None:
        said.append(text)
        if not stores:  # the run comes up only when somebody has said that it is waited for
            stores.append(host_store(f"127.0.0.1:{port}")[0])
        else:
            stores[0].set("freewheel/options", "{}")

    reach_store(f"127.0.0.1:{port}", DEADLINE_S, say)
    where = rf"waiting up to \d+ s for a run at 127.0.0.1:{port}: "
    assert re.match(where + "Connection refused. Is it up, is this the address it printed", said[0])
    assert re.match(where + "there is no run there", said[1])
    assert len(said) == 2


def test_a_run_that_does_not_come_up_is_not_waited_for_for_ever():
    with pytest.raises(ConfigError, match=r"cannot reach .* within 0.3 s \(Connection refused\)"):
        reach_store(f"127.0.0.1:{free_port()}", 0.3, lambda text: None)


def test_a_port_where_nobody_answers_is_not_waited_for_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{where} is no rendezvous: no answer within"):
            reach_store(where, 1.5, lambda text: None)


def test_nobody_starts_before_others_can_be_told_the_secret(script, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(processes.Process, "start", lambda one: started.append(one.rank))
    (tmp_path / "run" / "secret").mkdir(parents=True)
    options = Options(folder=tmp_path / "run", most=2)
    with pytest.raises(OSError, match="secret"):
        launch(script(""), 1, output=Captured(), options=options)
    assert started == []


def test_a_program_that_cannot_start_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot start '/no/program'"):
        launch(["/no/program"], 2, output=Captured())
