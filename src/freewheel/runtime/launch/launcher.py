"""Start the workers of a run on this host, keep them together and end with the right exit code.

The launcher hosts the rendezvous store, writes the run's options into it and starts the workers as torchrun
does, with the run's secret (fabric/secret.py). A worker that dies is restarted under its rank; one that is
lost for good does not end the others. Each worker's process group ends with it, and all end with the
launcher, even if it is killed. One thread does everything, so that lines are never mixed.
"""

import contextlib
import os
import selectors
import shlex
import signal
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from freewheel.errors import ConfigError, at_least
from freewheel.fabric import secret as secrets
from freewheel.records.journal import Journal
from freewheel.runtime.launch import keys
from freewheel.runtime.launch.processes import Output, Process, ending_signals, keeper
from freewheel.runtime.membership.entries import OPTIONS, Entries, Options
from freewheel.runtime.membership.generation import STARTS
from freewheel.runtime.membership.hosts import claim, host_store, listen, reach_store
from freewheel.runtime.membership.place import HIDES, KEYS, LAUNCHED, hide
from freewheel.runtime.worker.leaving import patience

LOOK_S = 0.1  # between two looks at the workers, and two calls of tick
TELL_AGAIN_S = 2.0  # between two tries to tell the store who died
GRACE_S = 1.4  # between passing on Ctrl-C and killing; after SIGTERM the time to leave comes on top
CONSOLE = Options(console=True)
SECRET = "secret"  # the file in the run's folder for those who join; removed when the run has ended


class Captured:
    """Keeps the newest lines of each worker, ``lines[rank]``, and of the launcher, ``lines[None]``.

    With a folder, all lines go into files there, too.
    """

    def __init__(self, folder: Path | None = None, newest: int = 40) -> None:
        self.lines: defaultdict[int | None, deque[str]] = defaultdict(lambda: deque(maxlen=newest))
        self._folder = folder

    def __call__(self, rank: int | None, text: str, error: bool) -> None:
        self.lines[rank].append(text)
        if self._folder is not None:
            name = "launcher.log" if rank is None else f"worker-{rank}.log"
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def launch(
    command: Sequence[str],
    workers: int,
    *,
    output: Output,
    options: Options = CONSOLE,
    restarts: int = 0,
    secret: Path | None = None,
    master: str | None = None,
    env: Mapping[str, str] | None = None,
    tick: Callable[[], None] | None = None,
    events: Callable[[], Path] | None = None,
) -> int:
    """Run a command as so many workers on this host and return the exit code of the run.

    It is that of the first worker that failed for good (128 + its number for a signal), 0 without one,
    130 after Ctrl-C, 143 after SIGTERM, which lets all workers leave (runtime/worker/leaving.py).
    ``output`` gets every line, ``tick`` is called several times a second; if one of them raises, all workers
    are killed. ``secret`` is a file; else the secret is that of the keys or a new one. ``events`` returns the
    folder of the launcher's records, if it is not the run's.
    """
    _check(workers, restarts, options)
    given = known_secret(secret, options.tls)
    known = given or secrets.make()
    store, host, port = host_store(master)
    most = options.most or workers
    options = replace(options.whole(), run=uuid.uuid4().hex, workers=workers, most=most)
    base = Entries(store, known)
    base.set(OPTIONS, options.text)
    home = _make_folder(options.folder)
    told = _environment(workers, workers, f"{host}:{port}", known, options.tls, env or {})
    threads, folder = told["OMP_NUM_THREADS"], str(options.folder or "")
    output(None, f"workers: {workers}, OMP_NUM_THREADS: {threads}, records: {folder or 'none'}", True)
    with contextlib.ExitStack() as ends:  # what is opened here is closed, whatever happens, last things first
        how = "--tls KEYS" if options.tls and secret is None else "--secret FILE"
        if most > workers and given is None and folder:  # before anybody starts whom others are to join
            path = Path(folder) / SECRET
            secrets.write(path, known)
            ends.callback(path.unlink, missing_ok=True)
            how = f"--secret {shlex.quote(str(path))}"
        store_of_run = base.of_run(options.run)
        run = _Run(ends, output, restarts, store_of_run, events or home, command, range(workers), told)
        if folder:
            output(None, f"Watch: freewheel watch {shlex.quote(folder)}", True)
        if most > workers:
            join = f"freewheel join {host}:{port} {how} -- {shlex.join(command[1:])}"
            output(None, f"up to {most} workers: others come with {join}", True)
        return run.until_ended(tick)


def join(
    master: str,
    command: Sequence[str],
    workers: int = 1,
    *,
    secret: bytes,
    output: Output,
    here: Options,
    restarts: int = 0,
    wait_s: float = 60.0,
    tick: Callable[[], None] | None = None,
) -> int:
    """Let more workers take part in the run that meets at ``master``; the exit code is theirs.

    They get the run's options, but the folder, the address and the keys of ``here`` where it has them.
    """
    _check(workers, restarts, here)
    store, host, port = reach_store(master, wait_s, lambda text: output(None, text, True))
    base = Entries(store, secret)
    given = Options.read(base.get(OPTIONS))
    here, entries = here.whole(), base.of_run(given.run)
    folder, bind, tls = here.folder or given.folder, here.bind or given.bind, here.tls or given.tls
    options = replace(given, folder=folder, bind=bind, tls=tls)
    home = _make_folder(options.folder)
    with contextlib.ExitStack() as ends:
        ranks = claim(entries, workers, given.workers, given.most, ends)
        for rank in ranks:
            base.set(f"{OPTIONS}/worker/{rank}", options.text)
        who = f"worker{'s' * (workers > 1)} {', '.join(map(str, ranks))}"
        output(None, f"joining {master} as {who}, running: {shlex.join(command)}", True)
        told = _environment(given.most, workers, f"{host}:{port}", secret, options.tls, {})
        run = _Run(ends, output, restarts, entries, home, command, ranks, told, store.renew)
        return run.until_ended(tick)


def known_secret(secret: Path | None, tls: str | Path | None) -> bytes | None:
    """The secret of a file, named here or by the environment, or of keys; None: none was given."""
    if named := secret or os.environ.get(secrets.SECRET_FILE):
        return secrets.read(Path(named))
    return secrets.of_keys(Path(tls)) if tls is not None else None


def _environment(
    world_size: int, here: int, at: str, secret: bytes, tls: str | Path | None, more: Mapping[str, str]
) -> dict[str, str]:
    fair = max(1, len(os.sched_getaffinity(0)) // here)  # more threads than cores slow everybody down
    host, _, port = at.rpartition(":")
    return {"OMP_NUM_THREADS": str(fair), **os.environ, **more} | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # a store listens there already
        "PYTHONUNBUFFERED": "1",
        LAUNCHED: at,
        secrets.SECRET: secret.hex(),
        KEYS: str(tls or ""),
    }


class _Run:
    """The workers of this host from their start to the last one's end; with the stack all of them end."""

    def __init__(
        self,
        ends: contextlib.ExitStack,
        output: Output,
        restarts: int,
        store: Entries,
        events: Callable[[], Path] | None,  # the folder in whose records is what it notices
        command: Sequence[str],
        ranks: Sequence[int],
        told: Mapping[str, str],
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self._output, self._restarts, self._store = output, restarts, store
        self._renew, self._events, self._workers = renew, events, len(ranks)
        self._running: list[Process] = []
        self._failure = 0
        self._untold: dict[int, int] = {}  # starts of workers that died, which the store does not have yet
        self._tell_at_s = 0.0
        if events is not None:  # so that a viewer sees a run that is starting
            journal = Journal(events(), "launcher")
            journal.begin()
            ends.callback(journal.close)
        self._caught = ends.enter_context(ending_signals())
        tell = ends.enter_context(keeper())
        self._selector = ends.enter_context(selectors.DefaultSelector())
        for local, rank in enumerate(ranks):
            store.delete_key(f"{STARTS}/{rank}")  # an earlier worker of this place may have been given up
            own = {**told, "RANK": str(rank), "LOCAL_RANK": str(local)}
            if own.get(HIDES):
                hide(own)
            process = Process(rank, command, own, output, tell, self._selector)
            ends.callback(process.kill)  # if it has not ended before
            self._running.append(process)
        for process in self._running:
            process.start()

    def _note(self, what: str, rank: int, life: int, text: str) -> None:
        if self._events is not None:
            Journal(self._events(), "launcher").event(time.time(), what, rank, life, text)

    def until_ended(self, tick: Callable[[], None] | None) -> int:
        """Show output, restart workers that die, pass on signals, until none is left; the exit code."""
        kill_at_s, look_at_s = None, 0.0
        while self._running:
            for key, _ in self._selector.select(LOOK_S):
                if key.data.read() == b"":
                    key.data.finish()
            now_s = time.monotonic()
            if now_s < look_at_s:
                continue
            look_at_s = now_s + LOOK_S
            if self._caught:
                if kill_at_s is None:
                    notice = self._caught[0] == signal.SIGTERM
                    kill_at_s = now_s + GRACE_S + (patience() if notice else 0.0)
                    what = "all workers leave" if notice else "ending all workers"
                    self._output(None, f"{signal.Signals(self._caught[0]).name}: {what}", True)
                    self._signal(self._caught[0])
                if now_s >= kill_at_s or signal.SIGINT in self._caught[1:]:
                    self._signal(signal.SIGKILL)
            elif tick is not None:
                tick()
            if self._untold and now_s >= self._tell_at_s:
                self._tell()
            for process in list(self._running):
                code = process.ended()
                if code is not None:
                    self._ended(process, code)
        return 128 + self._caught[0] if self._caught else self._failure

    def _tell(self) -> None:
        """Enter into the store whether workers that died come back; try again later if it does not answer."""
        with contextlib.suppress(RuntimeError, OSError):
            self._renew()
            for rank, starts in list(self._untold.items()):
                self._store.set(f"{STARTS}/{rank}", str(starts))
                del self._untold[rank]
        self._tell_at_s = time.monotonic() + TELL_AGAIN_S

    def _signal(self, number: int) -> None:
        for process in self._running:
            process.signal(number)

    def _ended(self, process: Process, code: int) -> None:
        again = code != 0 and not self._caught and process.restarts < self._restarts
        if not again:
            self._running.remove(process)
        if self._caught:
            return
        self._untold[process.rank] = process.restarts + 2 if again else 0
        self._tell()
        if code == 0:
            return
        what = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
        life = process.restarts + 1
        self._note("died", process.rank, life, f"its process ended with {what}")
        if again:
            process.restarts += 1
            rest = f"; it starts again ({process.restarts} of {self._restarts})"
            process.start()
            self._note("restarted", process.rank, life + 1, "its process was started again")
        else:
            self._failure = self._failure or (code if code > 0 else 128 - code)
            rest = f"; {len(self._running)} of {self._workers} go on" if self._running else ""
        self._output(None, f"worker {process.rank} ended with {what}{rest}", True)


def _check(workers: int, restarts: int, options: Options) -> None:
    at_least("workers", workers, 1)
    at_least("restarts", restarts, 0)
    patience()  # refuses a bad setting now, not when workers are to leave
    if options.bind is not None:
        listen(options.bind, 0, "bind").close()
    if options.tls is not None:
        keys.contexts(Path(options.tls))


def _make_folder(folder: str | Path | None) -> Callable[[], Path] | None:
    if not folder:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run folder {str(folder)!r}: {error.strerror}. Give one that can be written to."
        ) from None
    return lambda: Path(folder)
