"""Worker processes of a benchmark: started together, heard through pipes, gone when the benchmark is.

A worker is `python -m MODULE JSON`. It talks to the process that started it in lines of JSON on its standard
output; whatever else it prints goes to its standard error, which is shown when it fails. The one word it
hears, on its standard input, is when to begin and to end: all processes of a machine share the monotonic
clock, so a window of time is the same for all of them, whatever network lies between. When its standard
input closes, the benchmark is over or dead, and the worker ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from freewheel.errors import RunStopped

Tick = Callable[[], None]
"""Called a few times a second while a benchmark waits."""

TICK_S = 0.1


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its address, the interface that has it, and the network namespace of both."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """What runs a command there."""
        return () if self.namespace is None else ("ip", "netns", "exec", self.namespace)


class Processes:
    """A context of worker processes, one for each place; leaving it ends those still running."""

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        places: Sequence[Place],
        port: int,
        tick: Tick = lambda: None,
    ) -> None:
        self.what = f"{module.rpartition('.')[2]} {job.get('leg', '')}".strip()
        self._command = [sys.executable, "-m", module, json.dumps(job)]
        self._places, self._port, self._tick = places, port, tick
        self._running: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._readers: list[threading.Thread] = []
        self._heard: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()

    def __enter__(self) -> Processes:
        try:
            for rank, place in enumerate(self._places):
                self._start(rank, place)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            # Each has a session of its own, so this reaches whatever it has started too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._running:
            process.wait()
        for reader in self._readers:
            reader.join()
        for process in self._running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for file in self._errors:
            file.close()

    def _start(self, rank: int, place: Place) -> None:
        dropped = ("TORCHELASTIC_", "GLOO_", "GROUP_", "ROLE_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(len(self._places)),
            "MASTER_ADDR": self._places[0].address,
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": place.interface,
            "OMP_NUM_THREADS": "1",
        }
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._errors.append(errors)
        process = subprocess.Popen(
            [*place.command, *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends its workers
        )
        self._running.append(process)
        reader = threading.Thread(target=self._listen, args=(rank, process.stdout), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _listen(self, rank: int, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._heard.put((rank, json.loads(line)))
        self._heard.put((rank, None))

    def collect(
        self, word: str, within_s: float, heard: Callable[[dict[str, Any]], None] = lambda message: None
    ) -> list[Any]:
        """Wait until every worker has said this word; return what each said with it, by rank.

        What they say besides goes to `heard`.
        """
        deadline = time.monotonic() + within_s
        said: dict[int, Any] = {}
        while len(said) < len(self._running):
            rank, message = self._next(deadline, f"{word!r} from all workers")
            if message is not None and word in message:
                said[rank] = message[word]
            elif message is not None:
                heard(message)
            elif rank not in said:
                self._failed(rank)
        return [said[rank] for rank in sorted(said)]

    def tell(self, **message: Any) -> None:
        """Say something to all workers."""
        for rank, process in enumerate(self._running):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._failed(rank)

    def wait_until(self, moment: float) -> None:
        """Sleep until a moment of the monotonic clock."""
        while (left := moment - time.monotonic()) > 0:
            self._tick()
            time.sleep(min(left, TICK_S))

    def finish(self, within_s: float) -> None:
        """Wait until all workers have ended well."""
        deadline = time.monotonic() + within_s
        for rank, process in enumerate(self._running):
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise RunStopped(
                        f"{self.what}: worker {rank} has not ended {within_s:g} s after its result."
                    )
                self._tick()
                time.sleep(0.02)
            if process.returncode != 0:
                self._failed(rank)

    def _next(self, deadline: float, what: str) -> tuple[int, dict[str, Any] | None]:
        while True:
            self._tick()
            with contextlib.suppress(queue.Empty):
                return self._heard.get(timeout=TICK_S)
            if time.monotonic() > deadline:
                raise RunStopped(f"{self.what}: waited in vain for {what}; is the machine overloaded?")

    def _failed(self, rank: int) -> None:
        code = self._running[rank].wait()
        self._errors[rank].seek(0)
        text = self._errors[rank].read().strip()
        last = text.splitlines()[-1] if text else "it said nothing"
        error = RunStopped(f"{self.what}: worker {rank} ended with exit code {code}: {last}")
        if text:
            error.add_note(text)
        raise error


@dataclass
class Parent:
    """A worker's line to the process that started it. Make it first, before anything prints."""

    _words: queue.SimpleQueue[dict[str, Any]] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
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
        """Send one message."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def hear(self) -> dict[str, Any]:
        """Wait for the next message."""
        return self._words.get()


def job() -> dict[str, Any]:
    """What a worker has been asked to do."""
    read: dict[str, Any] = json.loads(sys.argv[1])
    return read


def free_port() -> int:
    """A port nobody listens on at this moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
