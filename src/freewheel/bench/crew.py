"""Processes of a benchmark of faults: each can be killed and started again, and so can their store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from freewheel.bench.processes import Place, free_port
from freewheel.errors import RunStopped
from freewheel.runtime.rendezvous import STORE_S, reach

LOOK_S = 0.02
STORE = (
    "import sys, time\n"
    "from freewheel.runtime.hosts import host_store\n"
    "store = host_store(sys.argv[1], 1)\n"
    "print('up', flush=True)\n"
    "sys.stdin.read()\n"
)


@dataclass(frozen=True)
class Step:
    """When a worker had made a step, and how often it had been merged with others by then."""

    time: float
    merged: float
    members: int


@dataclass
class Life:
    """One process of a worker, and what it has said."""

    process: subprocess.Popen[str]
    errors: IO[str]
    said: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def listen(self) -> None:
        """Note what it says until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # it was killed in the middle of a line
                words = json.loads(line)
                if "step" in words:
                    self.steps.append(Step(words["step"], words["merged"], words["members"]))
                else:
                    self.said |= words

    def end(self) -> None:
        """Kill it and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Crew:
    """The workers of one run and their store, as a context; leaving it kills all of them."""

    def __init__(self, module: str, asked: Mapping[str, Any], places: Sequence[Place]) -> None:
        self._module, self._asked, self._places = module, asked, places
        self._port = free_port()
        self._lives: dict[int, list[Life]] = {rank: [] for rank in range(len(places))}
        self._killed: set[int] = set()
        self._store: subprocess.Popen[str] | None = None

    def __enter__(self) -> Crew:
        self.start_store()
        return self

    def __exit__(self, *_: object) -> None:
        for lives in self._lives.values():
            for life in lives:
                life.end()
                life.errors.close()
        self.end_store()

    @property
    def _address(self) -> str:
        return self._places[0].address

    def start_store(self) -> None:
        """Start the store, always on the same port."""
        command = [*self._places[0].command, sys.executable, "-c", STORE, f"{self._address}:{self._port}"]
        self._store = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._store.stdout is not None
        if self._store.stdout.readline() != "up\n":
            raise RunStopped("the store of the benchmark did not start.")

    def end_store(self) -> None:
        """Kill the store."""
        if self._store is not None:
            os.killpg(self._store.pid, signal.SIGKILL)
            self._store.wait()
            for pipe in (self._store.stdin, self._store.stdout):
                assert pipe is not None
                pipe.close()
            self._store = None

    def start(self, rank: int) -> Life:
        """Start a worker, for the first time or again."""
        place = self._places[rank]
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_WORLD_SIZE": str(len(self._places)),
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        asked = json.dumps({**self._asked, "address": place.address})
        process = subprocess.Popen(
            [*place.command, sys.executable, "-m", self._module, asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        life = Life(process, errors)
        self._lives[rank].append(life)
        self._killed.discard(rank)
        threading.Thread(target=life.listen, daemon=True).start()
        return life

    def kill(self, rank: int) -> None:
        """SIGKILL, without a word."""
        self._killed.add(rank)
        self._lives[rank][-1].end()

    def steps(self, rank: int) -> list[Step]:
        """The steps of a worker's present life."""
        return list(self._lives[rank][-1].steps)

    def sleep(self, seconds: float, show: Callable[[float], None] = lambda share: None) -> None:
        """Let them work for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._check()
            show(1 - left / seconds)
            time.sleep(min(left, 0.1))

    def until(self, what: str, true: Callable[[], bool], within_s: float) -> None:
        """Wait until something is so."""
        end = time.monotonic() + within_s
        while not true():
            self._check()
            if time.monotonic() > end:
                raise RunStopped(f"waited {within_s:g} s in vain for {what}; is the machine overloaded?")
            time.sleep(LOOK_S)

    def all_registered(self) -> bool:
        """Whether the store has everybody's address."""
        ranks = range(len(self._places))
        with contextlib.suppress(OSError, RuntimeError):
            store = reach(self._address, self._port, STORE_S)
            return all(store.check([f"freewheel/0/0/address/{rank}"]) for rank in ranks)
        return False

    def _check(self) -> None:
        """Raise if a worker has ended that was not killed."""
        for rank, lives in self._lives.items():
            if lives and rank not in self._killed and (code := lives[-1].process.poll()) is not None:
                lives[-1].errors.seek(0)
                text = lives[-1].errors.read().strip()
                error = RunStopped(f"worker {rank} ended with exit code {code}: {text.splitlines()[-1:]}")
                error.add_note(text)
                raise error
