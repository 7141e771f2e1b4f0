"""Chromium without a window, driven over a pipe by its own protocol: nothing to install but the browser."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DEADLINE_S = 30.0
# The browser reads commands from its descriptor 3 and writes answers to 4.
START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); " \
        "os.execv(sys.argv[3], sys.argv[3:])"  # fmt: skip


def program() -> str | None:
    """Where the browser is; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser; `page` gives pages that know nothing of each other."""

    def __init__(self) -> None:
        path = program()
        assert path is not None, f"no browser: looked for {', '.join(NAMES)}"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = [
            "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run", "--mute-audio",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={self._profile.name}",
        ]  # fmt: skip
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        (to_read, self._to), (from_, from_write) = os.pipe(), os.pipe()
        # Above the two numbers they are going to have, or one could overwrite the other.
        theirs = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (to_read, from_write)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, theirs), path, *flags, "about:blank"],
            pass_fds=theirs, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for number in (to_read, from_write, *theirs):
            os.close(number)
        self.pid = self._process.pid
        self._numbers = itertools.count(1)
        self._told = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """What each page has told, by its session."""
        self._reader = threading.Thread(target=self._read, args=(from_,), daemon=True)
        self._reader.start()

    def _read(self, number: int) -> None:
        with os.fdopen(number, "rb") as pipe:
            rest = b""
            while piece := os.read(pipe.fileno(), 1 << 16):
                *whole, rest = (rest + piece).split(b"\0")
                for text in whole:
                    message = json.loads(text)
                    with self._told:
                        if "id" in message:
                            self._answers[message["id"]] = message
                        else:
                            self.events[message.get("sessionId", "")].append(message)
                        self._told.notify_all()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask the browser for something, and wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        with self._told:
            assert self._told.wait_for(lambda: number in self._answers, DEADLINE_S), f"no answer to {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def page(self, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new page."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.look(width, height, dark)
        return page

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(DEADLINE_S)
        os.close(self._to)
        self._reader.join(DEADLINE_S)
        self._profile.cleanup()


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask something of this page."""
        return self._browser.call(method, self._session, **params)

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """How large the window is, and which colours are wished for."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=phone)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address: str) -> None:
        """Go there, and wait until it is there."""
        told = self.call("Page.navigate", url=address)
        assert "errorText" not in told, told
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until an expression is true, and give its value."""
        end_s = time.monotonic() + deadline_s
        while not (value := self.run(script)):
            assert time.monotonic() < end_s, f"still not: {script}"
            # The page lives on its own time; the next frame is the soonest it can have changed.
            self.run("new Promise((then) => setTimeout(then, 20))")
        return value

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [e["params"] for e in list(self._browser.events[self._session]) if e["method"] == method]

    @property
    def requests(self) -> list[str]:
        """All addresses this page has asked for."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    @property
    def problems(self) -> list[str]:
        """Errors and warnings in the console."""
        said = [e["exceptionDetails"]["text"] for e in self._events("Runtime.exceptionThrown")]
        said += [
            str(event["args"])
            for event in self._events("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        entries = [event["entry"] for event in self._events("Log.entryAdded")]
        return said + [entry["text"] for entry in entries if entry["level"] in ("error", "warning")]

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what can be seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Forget the page and all it knew."""
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
