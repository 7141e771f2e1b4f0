"""The doctor, as a person meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest

import forked
from freewheel.cli.main import main
from freewheel.errors import ConfigError
from freewheel.runtime.doctor import bandwidth
from freewheel.runtime.membership.place import parse_address


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path):
    """Run the command in this process; its exit code, output and complaints."""

    def run(*arguments):
        given = ["freewheel", "doctor", "--mb", "0.1", "--folder", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return run


def test_one_host_serves_and_another_measures(doctor):
    serving = forked.start(*forked.FREEWHEEL, "doctor", "--serve", "--port", "0")
    try:
        address = re.search(r"freewheel doctor (127\.0\.0\.1:\d+)", serving.stdout.readline())[1]
        code, out, err = doctor(address, "-n", "1", "--json")
        assert "another host measures" in serving.stdout.readline()
    finally:
        serving.send_signal(signal.SIGINT)
        _, complaints = serving.communicate(timeout=60)
    assert serving.returncode == 130
    assert "Traceback" not in complaints
    assert not err
    found = json.loads(out)
    assert (code, found["usable"]) == (0, True)
    assert found["links"][address]["mbit_out"] > 0
    assert set(found["findings"][0]) == {"what", "value", "state", "advice"}


def test_a_ready_host_is_shown_plainly_in_80_columns(doctor):
    code, out, _ = doctor("-n", "1")
    assert code == 0
    assert "Ready to run" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for what in ("python", "torch", "cuda", "cores", "listening", "loopback", "open files", "disk"):
        assert re.search(rf"^(ok|warning) +{what} ", out, flags=re.M), what


def test_a_problem_is_exit_code_1_and_says_what_to_do(doctor):
    code, out, _ = doctor("-n", "1", "--bind", "192.0.2.1")
    assert code == 1
    assert re.search(r"^problem +listening +not on 192\.0\.2\.1 *$", out, flags=re.M)
    assert "that `ip address` lists" in " ".join(out.split())
    assert out.rstrip().splitlines()[-1].startswith("Not ready: 1 problem, ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["host:"], "write HOST:PORT"),
        (["host:99999"], "write HOST:PORT"),
        (["--serve", "host"], "--serve stands alone"),
        (["-n", "0"], "workers must be at least 1"),
        (["--mb", "0"], "mb must be above 0"),
        (["--model-mb", "-1"], "model-mb must be at least 0"),
        (["--tls", "nowhere"], "is not a set of keys"),
    ],
)
def test_mistakes_are_one_line(arguments, why, doctor):
    code, out, err = doctor(*arguments)
    assert code == 2
    assert not out
    assert why in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.2", ("10.0.0.2", bandwidth.PORT)),
        ("node-2:4000", ("node-2", 4000)),
        ("fe80::1", ("fe80::1", bandwidth.PORT)),
        ("[fe80::1]", ("fe80::1", bandwidth.PORT)),
        ("[fe80::1]:4000", ("fe80::1", 4000)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text, "the host", bandwidth.PORT) == expected


def test_an_empty_address_is_refused():
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address("", "the host", bandwidth.PORT)


def test_without_a_terminal_nothing_turns():
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forked.run(*forked.FREEWHEEL, "doctor", "-n", "1", "--mb", "0.1", timeout=100, env=one_thread)
    assert done.returncode == 0, done.stdout
    assert not done.stderr


def test_a_folder_that_not_even_root_can_write_to_is_a_problem(doctor):
    code, out, _ = doctor("-n", "1", "--folder", "/proc/records")
    assert code == 1
    assert "/proc: " in out
