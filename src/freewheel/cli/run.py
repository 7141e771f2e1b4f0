"""``freewheel run`` and ``freewheel join``: a training script as several workers."""

import contextlib
import getpass
import importlib.machinery
import os
import re
import signal
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import typer

import freewheel
from freewheel.cli.options import argument, command_line, option
from freewheel.errors import ConfigError, at_least
from freewheel.runtime.launch.processes import Output

BEGIN = ("Traceback (most recent call last):", '  File "')  # the second: a script that cannot be read
PREFIX = "freewheel.errors."
FRAME = re.compile(r'  File "([^"]*)", line (\d+), in ')
NOT_THE_SCRIPT = ("<", *map(sysconfig.get_path, ("stdlib", "purelib")), str(Path(freewheel.__file__).parent))
HELD_S = 2.0  # how long a traceback is held, unless its worker ends before: the worker may go on


class Tracebacks:
    """Holds back each worker's traceback until it is whole, then gives it to `show`; equal ones only once."""

    def __init__(self, show: Output) -> None:
        self._show = show
        self._held: dict[int, tuple[float, list[str]]] = {}  # since when, and the lines
        self._seen: dict[str, int] = {}  # the worker whose traceback was shown, by kind

    def __call__(self, rank: int | None, text: str, error: bool) -> None:
        if rank is not None and error and (rank in self._held or text.startswith(BEGIN)):
            self._held.setdefault(rank, (time.monotonic(), []))[1].append(text)
            return
        for one in list(self._held):
            if rank is None and text.startswith(f"worker {one} ended "):  # it will print nothing more
                self._let_go(one)
        self._show(rank, text, error)

    def tick(self, held_s: float = HELD_S) -> None:
        """Show what has been held for this long; 0 shows all that is left."""
        for rank, (since_s, _) in list(self._held.items()):
            if time.monotonic() >= since_s + held_s:
                self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        _, lines = self._held.pop(rank)
        kind = re.sub(r"\d+", "#", "\n".join(lines))  # ranks, ports and times differ
        lines = _explained(lines)
        if kind in self._seen:  # named by the first line after the frames of the last traceback
            begin = max((at for at, line in enumerate(lines) if line.startswith(BEGIN)), default=-1)
            error = next((line for line in lines[begin + 1 :] if line[:1] not in ("", " ")), lines[-1])
            error = textwrap.shorten(error, 100, placeholder=" …")
            lines = [f"the same error as worker {self._seen[kind]}: {error}"]
        self._seen.setdefault(kind, rank)
        for line in lines:
            self._show(rank, line, True)


def _explained(lines: list[str]) -> list[str]:
    """An error of Freewheel's own: its message and the line of the script. Of any other error all lines."""
    said = next((at for at, line in enumerate(lines) if line.startswith(PREFIX)), None)
    if said is None or lines.count(BEGIN[0]) > 1:  # its cause may say more
        return lines
    frames = [frame for frame in map(FRAME.match, lines[:said]) if frame]
    script = [frame for frame in frames if not frame[1].startswith(NOT_THE_SCRIPT)]
    where = "".join(f" ({frame[1]}, line {frame[2]})" for frame in script[-1:])
    return [lines[said].removeprefix(PREFIX) + where, *lines[said + 1 :]]


RAY_ALONE = ("address", "gpus", "cpus")
NOT_RAY = ("bind", "tls", "secret", "master", "tensorboard", "hide_ranks")
MODULE = option(False, "SCRIPT is a module, as in python -m.", "-m")
RESTARTS = option(0, "How often each worker that dies is started again.")


def run(
    context: typer.Context,
    command: list[str] = argument(..., "What to run; the rest is the script's.", metavar="SCRIPT"),
    workers: int = option(..., "How many workers on this host.", "-n", "--workers"),
    module: bool = MODULE,
    restarts: int = RESTARTS,
    folder: Path | None = option(None, "Where records go; default: runs/DATE_TIME."),
    tensorboard: Path | None = option(None, "Write the records here for TensorBoard, too (an extra)."),
    hide_ranks: bool = option(
        False, "Let the script not see RANK and the like: Accelerate starts DDP.", "--hide-ranks"
    ),
    most: int | None = option(
        None, "How many workers there may be at once; others come with freewheel join.", "--max"
    ),
    bind: str | None = option(None, "The address workers listen on; default: loopback."),
    master: str | None = option(None, "Where others join, on this host; default: loopback."),
    tls: Path | None = option(None, "Keys, as freewheel keys makes them: encrypt, admit members only."),
    secret: Path | None = option(None, "A file with the run's secret; default: a new one."),
    ray: bool = option(False, "As actors of a Ray cluster, up to --max (an extra).", "--ray"),
    address: str | None = option(None, "The cluster's; default: Ray's own."),
    gpus: float = option(0, "GPUs of each worker."),
    cpus: float = option(1, "CPUs of each worker."),
) -> None:
    """Run a training script as several workers, on this host or on a Ray cluster."""
    for name in NOT_RAY if ray else RAY_ALONE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            how = f"does nothing {'with' if ray else 'without'} --ray"
            raise ConfigError(f"--{name.replace('_', '-')} {how}: leave one of them out.")
    program = python(command, module)
    at_least("workers", workers, 1)
    at_least("max", most, workers)
    at_least("restarts", restarts, 0)
    if ray:
        from freewheel.ray import run as run_on_ray  # an extra, and slow to import
        from freewheel.ray.book import connect

        connect(address)
        with _records(folder) as place:
            print(f"Watch: freewheel watch {place}", flush=True)
            run_on_ray(program[1:], workers, most, restarts=restarts, folder=place, cpus=cpus, gpus=gpus)
        return
    from freewheel.runtime.launch.launcher import launch
    from freewheel.runtime.membership.entries import Options
    from freewheel.runtime.membership.place import HIDES

    output = Tracebacks(prefixed)
    with _records(folder) as place:
        code = launch(
            program,
            workers,
            output=output,
            tick=output.tick,
            options=Options("", place, bind, tls, command_line(), True, tensorboard, most=most or 0),
            restarts=restarts,
            secret=secret,
            master=master,
            env={HIDES: "1"} if hide_ranks else None,
        )
    _exit(output, code)


def join(
    at: str = argument(..., "Where the run can be met.", metavar="HOST:PORT"),
    command: list[str] = argument(..., "After --: what to run; the rest is the script's.", metavar="SCRIPT"),
    workers: int = option(1, "How many workers come.", "-n", "--workers"),
    module: bool = MODULE,
    restarts: int = RESTARTS,
    secret: Path | None = option(
        None, "The file with the run's secret; default: that of the keys, or it is asked for."
    ),
    folder: Path | None = option(None, "Where records go; default: the run's."),
    bind: str | None = option(None, "The address workers listen on; default: the run's."),
    tls: Path | None = option(None, "Keys of the run; default: where the run has them."),
    wait_s: float = option(60.0, "How long to wait for the run."),
) -> None:
    """Add workers to a run that goes on; it must have been started with --max."""
    from freewheel.fabric.secret import of_text
    from freewheel.runtime.launch.launcher import join as add_workers
    from freewheel.runtime.launch.launcher import known_secret
    from freewheel.runtime.membership.entries import Options

    program, output = python(command, module), Tracebacks(prefixed)
    known = known_secret(secret, tls)
    if not known and not sys.stdin.isatty():
        raise ConfigError(
            "a run lets in who has its secret: give --secret the file whose name it printed, or the run's "
            "keys by --tls."
        )
    known = known or of_text(getpass.getpass("The run's secret: "), "what was typed")
    code = add_workers(
        at,
        program,
        workers,
        secret=known,
        output=output,
        tick=output.tick,
        here=Options(folder=folder, bind=bind, tls=tls),
        restarts=restarts,
        wait_s=wait_s,
    )
    _exit(output, code)


def python(command: list[str], module: bool) -> list[str]:
    """The command that runs a script or module, which must exist."""
    if module:
        top = command[0].partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise ConfigError(f"there is no module {command[0]!r} in {Path.cwd()}, nor installed.")
        return [sys.executable, "-m", *command]
    script = Path(command[0])
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise ConfigError(f"{command[0]!r} is a folder without __main__.py; name a Python file.")
    if not script.exists():
        where = f"looked for {script.absolute()}. For a module write -m before it."
        raise ConfigError(f"there is no script {command[0]!r}: {where}")
    return [sys.executable, *command]


def prefixed(rank: int | None, text: str, error: bool) -> None:
    """Print a line on the stream its worker used, behind the rank; in colour on a terminal."""
    stream = sys.stderr if error else sys.stdout
    label = "freewheel:" if rank is None else f"[{rank}]"
    if stream.isatty() and "NO_COLOR" not in os.environ:
        colour = 1 if rank is None else 31 + (rank + 1) % 6
        label = f"\x1b[{colour}m{label}\x1b[0m"
    encoding = stream.encoding or "utf-8"
    stream.write(f"{label} {text}\n".encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _exit(output: Tracebacks, code: int) -> None:
    output.tick(0.0)
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        # All workers are gone, and unloading torch takes longer than Ctrl-C may.
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


@contextlib.contextmanager
def _records(named: Path | None) -> Iterator[Path]:
    """The named folder, or a new one that is removed again if no run came of it."""
    folder = named or _new_folder()
    try:
        yield folder
    except ConfigError:
        if named is None:
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        raise


def _new_folder(number: int = 1) -> Path:
    folder = Path("runs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}{f'_{number}' if number > 1 else ''}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return _new_folder(number + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot make {str(folder)!r}: {error.strerror}. Give --folder one that can be written to."
        ) from None
    return folder
