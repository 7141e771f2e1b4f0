"""The dashboard over HTTP: on this machine only, read-only, and only for whoever has the token.

Requests are refused before anything else is done with them if they have another method, another host's name
(a page of another site may have its name point to 127.0.0.1) or another token. No path of a request is used
as a path of a file: the five things served have names, and runs have numbers.
"""

import hmac
import json
import secrets
import socketserver
import sys
import traceback
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from freewheel.errors import ConfigError
from freewheel.show.dashboard.board import Board
from freewheel.show.figures import TOOLS

PORT = 8765
HOST = "127.0.0.1"
IDLE_S = 30.0  # a connection that says nothing for so long is closed
HEADERS = {
    # Plotly writes styles into the page, so these are allowed there; scripts are ours alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Dashboard(socketserver.ThreadingTCPServer):
    """Serves a board; `address` has the token in it. HTTPServer would ask the name service who we are."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, board: Board, port: int | None = None) -> None:
        self.board = board
        self.token = secrets.token_urlsafe(24)
        # Everything that is served but the data: name, kind, contents.
        here, report = resources.files(__package__), resources.files("freewheel.show.report")
        css = report.joinpath("page.css").read_bytes() + here.joinpath("page.css").read_bytes()
        script = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
        self.files = {
            "": ("text/html", here.joinpath("page.html").read_bytes()),
            "page.css": ("text/css", css),
            "page.js": ("text/javascript", TOOLS.read_bytes() + here.joinpath("page.js").read_bytes()),
            "plotly.js": ("text/javascript", bare(script)),
        }
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {port}.")
        try:
            super().__init__((HOST, PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise ConfigError(
                    f"port {port} cannot be used: {error.strerror}. Give another --port, or none for a free "
                    "one."
                ) from None
            super().__init__((HOST, 0), _Handler)  # the usual one is taken: any other will do
        self.server_port = int(self.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def bare(script: bytes) -> bytes:
    """Plotly's script without its module wrapper, for which browsers would parse it twice.

    A script that is wrapped in another way stays as it is.
    """
    licence, begin = script.find(b"*/") + 2, script.find(b'"use strict";var Plotly=')
    end = script.rfind(b"return Plotly;")
    return script[:licence] + b"\n" + script[begin:end] if 0 < begin < end else script


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "freewheel", ""  # nobody needs to know more
    timeout = IDLE_S
    server: Dashboard

    def parse_request(self) -> bool:
        """Refuses bad requests here, before anything else is done with them."""
        if not super().parse_request():
            return False
        names = [[f"{host}:{self.server.server_port}"] for host in (HOST, "localhost")]
        given = self.path.split("/", 2)
        known = len(given) == 3 and hmac.compare_digest(given[1].encode(), self.server.token.encode())
        if self.command != "GET":
            self._refuse(405, "only GET is allowed here: the dashboard reads, and changes nothing")
        elif self.headers.get_all("Host") not in names:
            self._refuse(421, f"this is {names[0][0]}: open the address that was printed")
        elif not known:
            self._refuse(403, "the token is missing or wrong: open the whole address that was printed")
        else:
            return True
        return False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = url.path.split("/", 2)[2]
        if name == "data":
            return self._data(url.query)
        if name not in self.server.files:
            return self._refuse(404, "there is no such page")
        kind, contents = self.server.files[name]
        keep = "private, max-age=86400" if name == "plotly.js" else "no-store"
        return self._answer(200, f"{kind}; charset=utf-8", contents, keep)

    def _data(self, query: str) -> None:
        try:
            asked = parse_qs(query, max_num_fields=4)
            numbers = [int(number) for number in asked.get("runs", [""])[0].split(",") if number]
            since = int(asked["since"][0]) if "since" in asked else None
        except ValueError:
            return self._refuse(400, "runs and since must be numbers, as in data?runs=0,2&since=17.")
        try:
            told = self.server.board.answer(numbers, since)
            text = json.dumps(told, separators=(",", ":"), allow_nan=False)
        except ConfigError as error:
            return self._refuse(400, str(error))
        except Exception:  # a bug of ours: the terminal shows it, and the server goes on
            traceback.print_exc()
            return self._refuse(500, "the dashboard made a mistake; its terminal says which")
        return self._answer(200, "application/json", text.encode())

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True
        self._answer(status, "text/plain; charset=utf-8", f"freewheel: {why}\n".encode())

    def _answer(self, status: int, kind: str, contents: bytes, keep: str = "no-store") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Cache-Control": keep}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(contents)))
        if status == 405:
            self.send_header("Allow", "GET")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(contents)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The server's own complaints about malformed requests."""
        self._refuse(code, message or explain or "this is no request")

    def log_message(self, *_: Any) -> None:
        """Log nothing: requests contain the token."""
