"""The dashboard over HTTP: what it tells, and whom it turns away."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import made
from freewheel.errors import ConfigError
from freewheel.show.dashboard import Board, Dashboard, bare
from freewheel.show.dashboard import board as board_module

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def serving(folder):
    server = Dashboard(Board(folder), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made.run(folder / "a", workers=2, started=1000.0)
    made.run(folder / "b", workers=3, started=2000.0, strategy="dasgd")
    made.run(folder / "c", format=9, freewheel="9.9")
    with serving(folder) as server:
        yield server


def get(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for value in [host] if host is None or isinstance(host, str) else host:
            connection.putheader("Host", value or f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def data(server, query=""):
    status, _, text = get(server, f"/{server.token}/data{query}")
    assert status == 200, text
    return json.loads(text)


# -- who is let in --


def test_the_page_and_all_it_needs_come_from_here(server):
    status, headers, page = get(server, f"/{server.token}/")
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    for name in ("page.css", "page.js", "plotly.js"):
        assert name in page
        assert get(server, f"/{server.token}/{name}")[0] == 200


def test_the_script_is_served_without_its_wrapping_where_that_is_known(server):
    inside = b'"use strict";var Plotly=(()=>{return 1})();window.Plotly = Plotly;\n'
    wrapped = b"/** licence */\n(function(factory) {factory()}(() => {\n" + inside + b"return Plotly;\n}));"
    assert bare(wrapped) == b"/** licence */\n" + inside
    assert bare(b"/** licence */ otherwise()") == b"/** licence */ otherwise()"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/data",
        "/plotly.js",
        "/wrong/",
        "/wrong/data",
        "//",
        "/%00/",
        "/{half}/",
        "/{token}x/",
        "/{token}",
    ],
)
def test_nothing_is_told_without_the_token(server, path):
    path = path.format(token=server.token, half=server.token[:-1])
    status, _, text = get(server, path)
    assert status == 403
    assert server.token not in text
    assert "address that was printed" in text


def test_every_dashboard_has_a_token_of_its_own(server, tmp_path):
    with serving(made.run(tmp_path)) as other:
        assert other.token != server.token
        assert len(other.token) >= 32
        assert get(other, f"/{server.token}/")[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "WHATEVER"])
def test_only_get_is_allowed(server, method):
    status, headers, _ = get(server, f"/{server.token}/data", method)
    assert status == 405
    assert headers["Allow"] == "GET"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "[::1]:{port}",
    ],
)
def test_another_hosts_name_is_refused(server, host):
    host = host.format(port=server.server_port)
    assert get(server, f"/{server.token}/", host=host)[0] == 421
    both = [f"127.0.0.1:{server.server_port}", host]
    assert get(server, f"/{server.token}/", host=both)[0] == 421


def test_text_of_records_is_text_and_never_markup(tmp_path, at_once):
    """Who may write into a run's folder may say what he likes: nothing of it becomes part of the page."""
    evil = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    made.run(tmp_path / "a", strategy=evil, name=evil)
    made.run(tmp_path / "b", strategy=evil, started=2000.0)
    made.append(tmp_path / "a" / "events-0.jsonl", made.event(1004.0, evil, 1, 0, text=evil))
    made.append(tmp_path / "a" / "worker-0.jsonl", made.sample(0, 21, state=evil))
    with serving(tmp_path) as server:
        shown = [data(server, f"?runs={k}")["document"]["figures"] for k in ("0", "0,1")]
    texts = ("title", "said", "empty")  # the page sets these as text
    figures = [figure for one in shown for figure in one.values()]
    drawn = json.dumps([{key: part for key, part in one.items() if key not in texts} for one in figures])
    assert "&lt;img" in drawn
    assert "<img" not in drawn  # plotly reads HTML
    assert "<script" not in drawn
    page = (Path(board_module.__file__).parent / "page.js").read_text()
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|new Function", page)


def test_localhost_is_us(server):
    assert get(server, f"/{server.token}/", host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    ["../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "run.json", "a/run.json", "board.py",
     "page.js/../server.py", "./page.js", "%2e%2e/", "page.js%00", "data/../page.js"],
)  # fmt: skip
def test_no_path_of_a_request_is_a_path_of_a_file(server, path):
    assert get(server, f"/{server.token}/{path}")[0] == 404


def test_what_is_no_request_is_refused_and_the_next_is_answered(server):
    for nonsense in (
        b"\x16\x03\x01\x02\x00\n\n",
        b"GET\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
            line.sendall(nonsense)
            with contextlib.suppress(ConnectionError):  # it may hang up on us
                line.recv(1 << 16)
    assert get(server, f"/{server.token}/")[0] == 200


# -- what is told --


def test_the_newest_run_is_shown_unless_others_are_picked(server):
    told = data(server)["document"]
    assert [run["name"] for run in told["runs"]] == ["a", "b", "c"]
    assert told["picked"] == [1]
    assert [one["strategy"] for one in told["shown"]] == ["dasgd"]
    assert len(told["figures"]) == 10
    assert [row["cells"][0] for row in told["workers"]["rows"]] == ["0", "1", "2"]
    both = data(server, "?runs=0,1")["document"]
    assert [one["label"] for one in both["shown"]] == ["adpsgd", "dasgd"]
    assert len(both["workers"]["rows"]) == 5
    assert len({trace["legendgroup"] for trace in both["figures"]["loss-time"]["data"]}) == 2


def test_runs_of_one_command_open_as_a_comparison_and_many_as_a_list(tmp_path):
    for number in range(8):
        made.run(tmp_path / f"{number}-adpsgd", workers=2, samples=3)
    told = Board(tmp_path).answer((), None)["document"]
    assert told["picked"] == list(range(8))
    made.run(tmp_path / "8-ddp", workers=2, samples=3, strategy="ddp")
    told = Board(tmp_path).answer((), None)["document"]
    assert (told["picked"], told["shown"], told["figures"]) == ([], [], {})
    assert len(told["runs"]) == 9
    assert Board(tmp_path).answer((8,), None)["document"]["picked"] == [8]


def test_a_run_of_another_version_says_so_in_the_list_and_when_it_is_picked(server):
    told = data(server, "?runs=2")["document"]
    assert "freewheel 9.9" in told["notes"][0]
    assert "freewheel 9.9" in told["runs"][2]["error"]
    assert told["figures"] == {}


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("?runs=7", "there is no run 7"),
        ("?runs=-1", "there is no run -1"),
        ("?runs=-1,0", "there is no run -1"),
        ("?runs=../a", "must be numbers"),
        ("?runs=a", "must be numbers"),
        ("?since=x", "must be numbers"),
        ("?a=1&b=2&c=3&d=4&e=5", "must be numbers"),
        ("?runs=0,1,2,3,4,5,6,7,8", "at most 8"),
        ("?runs=" + "9" * 5000, "must be numbers"),
    ],
)
def test_a_pick_that_cannot_be_is_one_clear_line(server, query, says):
    status, _, text = get(server, f"/{server.token}/data{query}")
    assert status == 400
    assert says in text
    assert text.count("\n") == 1


@pytest.fixture
def at_once(monkeypatch):
    """Nothing is answered from memory."""
    monkeypatch.setattr(board_module, "SCAN_S", -1.0)


def test_only_what_is_new_is_sent(tmp_path, at_once, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1051.0)  # else what is told changes with the clock, too
    made.run(tmp_path / "r", workers=4, samples=100, ended=False)
    with serving(tmp_path) as server:
        first = data(server)
        again = data(server, f"?since={first['version']}")
        assert again == {"version": first["version"], "document": None}
        for rank in range(4):
            sample = made.sample(rank, 100, 4, 20.0 / (1 + rank % 3))
            made.append(tmp_path / "r" / f"worker-{rank}.jsonl", sample)
        new = data(server, f"?since={first['version']}")
        whole = data(server)["document"]
        assert new["version"] != first["version"]
        assert new["document"] == whole != first["document"]
        assert data(server, "?since=987654")["document"] == whole


def test_the_folder_is_only_read(tmp_path, at_once):
    made.run(tmp_path / "r")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "r").iterdir()}
    with serving(tmp_path) as server:
        data(server)
        data(server)
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "r").iterdir()
    } == before


def test_runs_that_come_later_are_found_and_keep_their_numbers(tmp_path, at_once):
    made.run(tmp_path / "m")
    with serving(tmp_path) as server:
        assert [run["name"] for run in data(server)["document"]["runs"]] == ["m"]
        made.run(tmp_path / "a", started=9000.0)
        told = data(server)["document"]
        assert [(run["number"], run["name"]) for run in told["runs"]] == [(0, "m"), (1, "a")]
        assert told["picked"] == [1]


def test_a_run_that_starts_and_then_is_deleted_says_so(tmp_path, at_once):
    folder = tmp_path / "r"
    made.append(folder / "events-launcher.jsonl", made.event(1000.0, "restarted", 0, "launcher"))
    with serving(tmp_path) as server:
        told = data(server)["document"]
        assert "r is starting" in told["notes"][0]
        made.run(folder)
        assert data(server)["document"]["notes"] == []
        assert data(server)["document"]["figures"]
        shutil.rmtree(folder)
        assert data(server)["document"]["notes"] == ["the folder of 'r' is gone."]


def test_a_run_that_was_deleted_is_not_listed_as_starting(tmp_path, at_once):
    made.run(tmp_path / "a")
    made.run(tmp_path / "b", started=2000.0)
    with serving(tmp_path) as server:
        assert [run["error"] for run in data(server)["document"]["runs"]] == ["", ""]
        shutil.rmtree(tmp_path / "a")
        assert [run["error"] for run in data(server)["document"]["runs"]] == [
            "the folder of 'a' is gone.",
            "",
        ]


def test_runs_of_two_clocks_are_said_to_be(tmp_path, at_once):
    made.run(tmp_path / "0-real")
    made.run(tmp_path / "1-simulated", clock="virtual")
    with serving(tmp_path) as server:
        told = data(server, "?runs=0,1")["document"]
        assert any("are simulated, in virtual seconds" in note for note in told["notes"])
        assert data(server, "?runs=0")["document"]["notes"] == []


def test_records_that_are_broken_in_the_middle_are_one_line(tmp_path, at_once):
    made.run(tmp_path / "r")
    with serving(tmp_path) as server:
        made.append(tmp_path / "r" / "worker-0.jsonl", {"some": "thing"})
        shown = data(server)["document"]
        assert shown["notes"] == ["r: 1 line of its records cannot be read: left out."]
        assert len(shown["workers"]["rows"]) == 4


def test_folders_that_cannot_be_shown_are_refused_before_anything_is_served(tmp_path):
    with pytest.raises(ConfigError, match="is no run"):
        Board(tmp_path)
    with pytest.raises(ConfigError, match=r"9\.9"):
        Board(made.run(tmp_path / "r", format=7, freewheel="9.9"))


def test_a_port_that_is_taken_is_named_and_without_one_another_is_found(tmp_path, server, monkeypatch):
    board = Board(made.run(tmp_path))
    with pytest.raises(ConfigError, match=f"port {server.server_port} cannot be used"):
        Dashboard(board, server.server_port)
    with pytest.raises(ConfigError, match="between 0 and 65535"):
        Dashboard(board, 70_000)
    monkeypatch.setattr("freewheel.show.dashboard.PORT", server.server_port)
    other = Dashboard(board)
    other.server_close()
    assert other.server_port != server.server_port


def test_the_command_says_where_and_ends_at_once_with_ctrl_c(tmp_path):
    made.run(tmp_path)
    code = "import sys; from freewheel.cli.main import main; main()"
    command = [sys.executable, "-c", code, "dashboard", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "http://127.0.0.1:" in said
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert errors == ""
