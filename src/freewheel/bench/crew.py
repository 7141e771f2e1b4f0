"""Processes of a benchmark of faults: each can be killed and started again, and so can their store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from freewheel.bench.forks import Forked, import_before
from freewheel.bench.processes import Place, free_port
from freewheel.errors import RunStopped
from freewheel.fabric import secret
from freewheel.runtime.bounded import reach
from freewheel.runtime.place import LAUNCHED
from freewheel.runtime.rendezvous import STORE_S

LOOK_S = 0.02
START_S = 60.0
STORE = "freewheel.bench.store"


@dataclass(frozen=True)
class Step:
    """When a worker had made a step, how often it had been merged with others by then, and what it knew."""

    time: float
    merged: float
    members: int
    progress: float = 0.0
    again: int = 0


@dataclass
class Life:
    """One process, and what it has said."""

    process: subprocess.Popen[str] | Forked
    errors: IO[str]
    said: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    killed: bool = False

    def __post_init__(self) -> None:
        self.ear = threading.Thread(target=self.listen, daemon=True)

    def listen(self) -> None:
        """Note what it says until it ends."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # it was killed in the middle of a line
                    words = json.loads(line)
                    if "step" in words:
                        self.steps.append(Step(words.pop("step"), **words))
                    else:
                        self.said |= words

    def kill(self) -> None:
        """SIGKILL, without a word, to it and whatever it has started."""
        self.killed = self.process.poll() is None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it has ended, or leads no group yet
        self.process.wait()
        self.ear.join()
        if isinstance(self.process, subprocess.Popen) and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.errors.close()

    def failure(self) -> str | None:
        """What it wrote before it ended with an error, if it did."""
        if self.killed or self.process.poll() in (None, 0):
            return None
        self.errors.seek(0)
        return self.errors.read().strip()


class Crew:
    """The workers of one run and their store, as a context; leaving it kills all of them.

    `forked`: workers do not import anything when they are started (bench/forks.py).
    """

    def __init__(
        self, module: str, asked: Mapping[str, Any], places: Sequence[Place], forked: bool = False
    ) -> None:
        self._module, self._asked, self._places, self._forked = module, asked, places, forked
        if forked:
            import_before([module, STORE])
        self._port, self._secret = free_port(), secret.make()
        self.lives: dict[int, list[Life]] = {rank: [] for rank in range(len(places))}
        """The processes that each worker has had."""
        self._store: Life | None = None

    def __enter__(self) -> Crew:
        self.start_store(json.dumps({"run": secrets.token_hex(16), "workers": len(self._places)}))
        return self

    def __exit__(self, *_: object) -> None:
        for lives in self.lives.values():
            if lives:
                lives[-1].kill()
        self.end_store()

    @property
    def _address(self) -> str:
        return self._places[0].address

    def start_store(self, options: str = "") -> None:
        """Start the store, always on the same port: with the run's options, as a launcher does, or empty."""
        asked = {"at": f"{self._address}:{self._port}", "options": options}
        self._store = self._start(STORE, asked, self._places[0], {secret.SECRET: self._secret.hex()})
        store = self._store
        self.until("the store", lambda: "up" in store.said or store.process.poll() is not None, START_S)
        if "up" not in store.said:
            raise RunStopped(f"the store of the benchmark did not start: {store.failure()}")

    def end_store(self) -> None:
        """Kill the store."""
        if self._store is not None:
            self._store.kill()
            self._store = None

    def start(self, rank: int) -> Life:
        """Start a worker, for the first time or again."""
        place = self._places[rank]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._places)),
            "LOCAL_WORLD_SIZE": str(len(self._places)),
            "MASTER_ADDR": self._address,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHED: f"{self._address}:{self._port}",
            secret.SECRET: self._secret.hex(),
        }
        asked = {**self._asked, "address": place.address, "life": len(self.lives[rank])}
        life = self._start(self._module, asked, place, environment)
        self.lives[rank].append(life)
        return life

    def _start(
        self, module: str, asked: Mapping[str, Any], place: Place, environment: Mapping[str, str]
    ) -> Life:
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environment}
        errors = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115
        process: subprocess.Popen[str] | Forked
        if self._forked:
            process = Forked(module, json.dumps(asked), place, environment, Path(errors.name))
        else:
            process = subprocess.Popen(
                [*place.command, sys.executable, "-m", module, json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        life = Life(process, errors)
        life.ear.start()
        return life

    def kill(self, rank: int) -> None:
        """SIGKILL, without a word."""
        self.lives[rank][-1].kill()

    def steps(self, rank: int) -> list[Step]:
        """The steps of a worker's present life."""
        return list(self.lives[rank][-1].steps)

    def sleep(self, seconds: float, show: Callable[[float], None] = lambda share: None) -> None:
        """Let them work for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            show(1 - left / seconds)
            time.sleep(min(left, 0.1))

    def until(self, what: str, true: Callable[[], bool], within_s: float) -> None:
        """Wait until something is so."""
        end = time.monotonic() + within_s
        while not true():
            self.check()
            if time.monotonic() > end:
                raise RunStopped(f"waited {within_s:g} s in vain for {what}; is the machine overloaded?")
            time.sleep(LOOK_S)

    def all_registered(self) -> bool:
        """Whether the store has everybody's address."""
        ranks = range(len(self._places))
        with (
            contextlib.suppress(OSError, RuntimeError),
            contextlib.closing(reach(self._address, self._port, STORE_S)) as store,
        ):
            return all(store.check([f"freewheel/0/0/address/{rank}"]) for rank in ranks)
        return False

    def check(self) -> None:
        """Raise if a worker has ended with an error."""
        for rank, lives in self.lives.items():
            text = lives[-1].failure() if lives else None
            if text is not None:
                last = text.splitlines()[-1] if text else "it said nothing"
                code = lives[-1].process.poll()
                error = RunStopped(f"worker {rank} ended with exit code {code}: {last}")
                error.add_note(text)
                raise error
