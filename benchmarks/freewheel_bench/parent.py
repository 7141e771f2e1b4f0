"""A worker's line to the benchmark that started it, and what it was asked to do."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any


class Parent:
    """Lines of JSON both ways. Make it first, before anything prints: that then goes to standard error."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # Not sys.stdin: a daemon thread inside a buffered reader would upset the interpreter's end.
        rest = b""
        while chunk := os.read(0, 4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._words.put(json.loads(line))
        os._exit(0)  # the benchmark has hung up

    def say(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def hear(self) -> dict[str, Any]:
        return self._words.get()


def job() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(sys.argv[1])
    return read
