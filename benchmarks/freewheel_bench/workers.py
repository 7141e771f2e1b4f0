"""Worker processes of a benchmark: started, heard through pipes, killed, started again, gone when it is.

A worker is `python -m MODULE JSON`, or the same forked off a process that has imported it (`forked.py`). It
talks to the benchmark in lines of JSON on its standard output; whatever else it prints goes to its standard
error, which is shown when it fails. The one word it hears, on its standard input, is when to begin and to
end: all processes of a machine share the monotonic clock, so a window of time is the same for all of them,
whatever network lies between. When its standard input closes, the benchmark is over or dead, and the worker
ends. `Run` adds a store that can be killed and started again, as the one a launcher hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from freewheel.errors import RunStopped
from freewheel.fabric import secret
from freewheel.runtime.membership.hosts import STORE_S, reach
from freewheel.runtime.membership.place import LAUNCHED
from freewheel_bench.forked import Forked, import_before

START_S = 120.0  # importing torch in several processes on a busy machine takes its time
LOOK_S = 0.02
STORE = "freewheel_bench.store_worker"
OURS = str(Path(__file__).parents[1])

Show = Callable[[float], None]  # takes the share of something that is done, a few times a second


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its address, the interface that has it, and the network namespace of both."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str | None = None

    @property
    def command(self) -> tuple[str, ...]:
        return () if self.namespace is None else ("ip", "netns", "exec", self.namespace)


class Step(NamedTuple):
    """When a worker had made a step, how often it had been merged with others by then, and what it knew."""

    time: float
    merged: float
    members: int
    progress: float = 0.0
    again: int = 0


@dataclass
class Life:
    """One process of a worker, and what it has said."""

    process: subprocess.Popen[str] | Forked
    errors: IO[str]
    keep: int | None = None  # how many of the newest steps are kept; of the others, their times are
    said: dict[str, Any] = field(default_factory=dict)
    killed: bool = False

    def __post_init__(self) -> None:
        self.times = array("d")
        self.steps: deque[Step] = deque(maxlen=self.keep)
        self._reader = threading.Thread(target=self._listen, daemon=True)

    def listen(self) -> Self:
        self._reader.start()
        return self

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # it was killed in the middle of a line
                    words = json.loads(line)
                    if "step" in words:
                        self.stepped(Step(words.pop("step"), **words))
                    else:
                        self.said |= words

    def stepped(self, step: Step) -> None:
        self.steps.append(step)
        self.times.append(step.time)

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def strike(self) -> None:
        """SIGKILL, without a word, to it and whatever it has started."""
        self.killed = self.killed or self.process.poll() is None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it has ended, or leads no group yet

    def bury(self) -> None:
        """Wait until it is gone, and let go of its pipes."""
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.errors.close()

    @property
    def over(self) -> bool:
        """It has ended, and all it said has been heard."""
        return self.process.poll() is not None and not self._reader.is_alive()

    def failure(self) -> str | None:
        """What it wrote before it ended with an error, if it did."""
        if self.killed or self.process.poll() in (None, 0):
            return None
        self.errors.seek(0)
        return self.errors.read().strip()


class Workers:
    """A context of worker processes, one for each place; leaving it kills those still running."""

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        places: Sequence[Place],
        *,
        forked: bool = False,
        keep: int | None = None,
    ) -> None:
        self.what = f"{module.rpartition('.')[2]} {job.get('contestant', '')}".strip()
        self.lives: list[list[Life]] = [[] for _ in places]  # the processes that each worker has had
        self.environment: dict[str, str] = {}
        self.port = free_port()
        self._module, self._job, self._places, self._forked, self._keep = module, job, places, forked, keep

    def __enter__(self) -> Self:
        try:
            for rank in range(len(self._places)):
                self.start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        present = [lives[-1] for lives in self.lives if lives]
        for life in present:
            life.strike()
        for life in present:
            life.bury()

    @property
    def present(self) -> list[Life]:
        return [lives[-1] for lives in self.lives]

    def start(self, rank: int) -> Life:
        place, world = self._places[rank], str(len(self._places))
        asked = json.dumps({**self._job, "address": place.address, "life": len(self.lives[rank])})
        dropped = ("TORCHELASTIC_", "GLOO_", "GROUP_", "ROLE_")
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(dropped)},
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), OURS))),
            "RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": self._places[0].address,
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": place.interface,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **self.environment,
        }
        errors = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115
        process: subprocess.Popen[str] | Forked
        if self._forked:
            process = Forked(self._module, asked, place.namespace, environment, Path(errors.name))
        else:
            process = subprocess.Popen(
                [*place.command, sys.executable, "-m", self._module, asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends its workers
            )
        life = Life(process, errors, self._keep).listen()
        self.lives[rank].append(life)
        return life

    def kill(self, rank: int) -> None:
        self.lives[rank][-1].strike()
        self.lives[rank][-1].bury()

    def tell(self, **message: Any) -> None:
        for life in self.present:
            life.tell(message)

    def collect(self, word: str, within_s: float, show: Show = lambda share: None) -> list[Any]:
        """Wait until every worker has said this word; return what each said with it, by rank.

        What the first one says of its progress is shown on the way.
        """

        def said() -> bool:
            show(self.present[0].said.get("progress", 0.0))
            for rank, life in enumerate(self.present):
                if word not in life.said:
                    if life.over and word not in life.said:
                        self._fail(rank, life.failure() or "")
                    return False
            return True

        self.until(f"{word!r} from all workers", said, within_s)
        return [life.said[word] for life in self.present]

    def finish(self, within_s: float) -> None:
        self.until("the workers to end", lambda: all(life.over for life in self.present), within_s)
        self.check()

    def sleep(self, seconds: float, show: Show = lambda share: None) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            show(1 - left / seconds)
            time.sleep(min(left, 0.1))

    def until(self, what: str, true: Callable[[], bool], within_s: float) -> None:
        end = time.monotonic() + within_s
        while not true():
            self.check()
            if time.monotonic() > end:
                raise RunStopped(
                    f"{self.what}: waited {within_s:g} s in vain for {what}; is the machine overloaded?"
                )
            time.sleep(LOOK_S)

    def check(self) -> None:
        for rank, lives in enumerate(self.lives):
            text = lives[-1].failure() if lives else None
            if text is not None:
                self._fail(rank, text)

    def _fail(self, rank: int, text: str) -> None:
        last = text.splitlines()[-1] if text else "it said nothing"
        code = self.lives[rank][-1].process.poll()
        error = RunStopped(f"{self.what}: worker {rank} ended with exit code {code}: {last}")
        if text:
            error.add_note(text)
        raise error


class Run(Workers):
    """Workers that meet at a store, as under a launcher; the store can be killed, too."""

    def __init__(self, module: str, job: Mapping[str, Any], places: Sequence[Place], **settings: Any) -> None:
        super().__init__(module, job, places, **settings)
        if self._forked:
            import_before([module, STORE])
        self._address = f"{places[0].address}:{self.port}"
        self.environment = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHED: self._address,
            secret.SECRET: secret.make().hex(),
        }
        self.store: Workers | None = None

    def __enter__(self) -> Self:
        self.start_store(json.dumps({"run": secrets.token_hex(16), "workers": len(self._places)}))
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.end_store()

    def start_store(self, options: str = "") -> None:
        """Start the store, always on the same port: with the run's options, as a launcher does, or empty."""
        asked = {"at": self._address, "options": options}
        self.store = Workers(STORE, asked, self._places[:1], forked=self._forked)
        self.store.environment = self.environment
        try:
            self.store.__enter__()
            self.store.collect("up", START_S)
        except BaseException:
            self.end_store()
            raise

    def end_store(self) -> None:
        if self.store is not None:
            self.store.__exit__()
            self.store = None

    def all_registered(self) -> bool:
        host, ranks = self._places[0].address, range(len(self._places))
        with (
            contextlib.suppress(OSError, RuntimeError),
            contextlib.closing(reach(host, self.port, STORE_S)) as store,
        ):
            return all(store.check([f"freewheel/0/0/address/{rank}"]) for rank in ranks)
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
