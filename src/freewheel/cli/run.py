"""``freewheel run``: a training script as several workers."""

from __future__ import annotations

import contextlib
import getpass
import importlib.machinery
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from freewheel.cli.options import command_line
from freewheel.cli.tracebacks import Tracebacks
from freewheel.errors import ConfigError, at_least
from freewheel.fabric.secret import of_text
from freewheel.runtime.launch.launcher import join as add_workers
from freewheel.runtime.launch.launcher import known_secret, launch
from freewheel.runtime.membership.place import HIDES

RAY_ALONE = ("address", "gpus", "cpus")
NOT_RAY = ("bind", "tls", "secret", "master", "tensorboard", "hide_ranks")
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def run(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT", help="What to run; the rest is the script's.")
    ],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers on this host.")],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    restarts: Annotated[int, typer.Option(help="How often each worker that dies is started again.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where records go; default: runs/DATE_TIME.", show_default=False)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="The address workers listen on; default: loopback.")
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(help="Keys, as freewheel keys makes them: encrypt, admit members only.")
    ] = None,
    secret: Annotated[
        Path | None,
        typer.Option(help="A file with the run's secret; default: a new one."),
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="HOST:PORT of this host, where others join; default: loopback.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write the records here for TensorBoard, too (an extra).")
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--max", help="How many workers there may be at once; others come with freewheel join."),
    ] = None,
    hide_ranks: Annotated[
        bool,
        typer.Option("--hide-ranks", help="Let the script not see RANK and the like: Accelerate starts DDP."),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="As actors of a Ray cluster, up to --max of them (an extra).")
    ] = False,
    address: Annotated[
        str | None, typer.Option(help="With --ray: the cluster's; default: Ray's own.")
    ] = None,
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs of each worker.")] = 0,
    cpus: Annotated[float, typer.Option(help="With --ray: CPUs of each worker.")] = 1,
) -> None:
    """Run a training script as several workers, on this host or on a Ray cluster."""
    _check_options(context, ray)
    program = _module(command) if module else _script(command)
    if ray:
        _on_ray(command, module, workers, most, restarts, folder, address, cpus, gpus)
        return
    new = None
    if folder is None:
        folder = _new_folder()
        new = folder
    output = Tracebacks(Prefixed())
    try:
        code = launch(
            program,
            workers,
            output=output,
            tick=output.tick,
            restarts=restarts,
            folder=folder,
            bind=bind,
            tls=tls,
            secret=secret,
            master=master,
            tensorboard=tensorboard,
            most=most,
            env={HIDES: "1"} if hide_ranks else None,
            typed=command_line(),
        )
        output.end()
    except ConfigError:
        _remove(new)
        raise
    except BrokenPipeError:  # whoever read our output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    _exit(code)


def _check_options(context: typer.Context, ray: bool) -> None:
    """Refuse options that would do nothing."""
    for name in NOT_RAY if ray else RAY_ALONE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            does = "does nothing with --ray" if ray else "does nothing without --ray"
            raise ConfigError(f"{option} {does}: leave {option} out{'' if ray else ', or give --ray, too'}.")


def _remove(new: Path | None) -> None:
    """Leave nothing behind of a run that never was."""
    with contextlib.suppress(OSError):
        if new is not None:
            new.rmdir()
            new.parent.rmdir()


def _on_ray(
    command: list[str],
    module: bool,
    workers: int,
    most: int | None,
    restarts: int,
    folder: Path | None,
    address: str | None,
    cpus: float,
    gpus: float,
) -> None:
    at_least("workers", workers, 1)
    at_least("max", most, workers)
    at_least("restarts", restarts, 0)
    from freewheel.ray import run as run_on_ray  # an extra, and slow to import
    from freewheel.ray.cluster import connect

    connect(address)
    new = None if folder is not None else _new_folder()
    folder = folder or new
    print(f"Watch: freewheel watch {folder}", flush=True)
    words = ["-m", *command] if module else command
    try:
        run_on_ray(words, workers, most, restarts=restarts, folder=folder, cpus=cpus, gpus=gpus)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED[0]) from None
    except ConfigError:
        _remove(new)
        raise


def join(
    master: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the run can be met.")],
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT", help="After --: what to run; the rest is the script's.")
    ],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers come.")] = 1,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    secret: Annotated[
        Path | None,
        typer.Option(help="The file with the run's secret; default: that of the keys, or it is asked for."),
    ] = None,
    restarts: Annotated[int, typer.Option(help="How often each worker that dies is started again.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where records go; default: the run's.", show_default=False)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="The address workers listen on; default: the run's.")
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(help="Keys of the run; default: where the run has them.")
    ] = None,
    wait_s: Annotated[float, typer.Option(help="How long to wait for the run.")] = 60.0,
) -> None:
    """Add workers to a run that goes on; it must have been started with --max."""
    program = _module(command) if module else _script(command)
    output = Tracebacks(Prefixed())
    code = add_workers(
        master,
        program,
        workers,
        secret=known_secret(secret, tls) or _ask(),
        output=output,
        tick=output.tick,
        restarts=restarts,
        folder=folder,
        bind=bind,
        tls=tls,
        wait_s=wait_s,
    )
    output.end()
    _exit(code)


def _ask() -> bytes:
    """The secret, typed by somebody who sees nothing of it."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "a run lets in who has its secret: give --secret the file whose name it printed, or the run's "
            "keys by --tls."
        )
    return of_text(getpass.getpass("The run's secret: "), "what was typed")


def _exit(code: int) -> None:
    if code in INTERRUPTED:
        # All workers are gone; taking torch apart in an orderly way lasts longer than Ctrl-C may.
        sys.stdout.flush()
        os._exit(code)
    raise typer.Exit(code)


class Prefixed:
    """Prints whole lines with the worker's rank before them, in a colour of its own on a terminal."""

    def __call__(self, rank: int | None, text: str, error: bool) -> None:
        """Print one line where the worker printed it: stdout or stderr."""
        stream = sys.stderr if error else sys.stdout
        label = "freewheel:" if rank is None else f"[{rank}]"
        if stream.isatty() and "NO_COLOR" not in os.environ:
            colour = 1 if rank is None else 31 + (rank + 1) % 6
            label = f"\x1b[{colour}m{label}\x1b[0m"
        encoding = stream.encoding or "utf-8"
        line = f"{label} {text}\n".encode(encoding, "backslashreplace").decode(encoding)
        stream.write(line)
        stream.flush()


def _script(command: list[str]) -> list[str]:
    script = Path(command[0])
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise ConfigError(f"{command[0]!r} is a folder without __main__.py; name a Python file.")
    if not script.exists():
        hint = " For a module write -m before it." if script.suffix != ".py" else ""
        raise ConfigError(f"there is no script {command[0]!r}: looked for {script.absolute()}.{hint}")
    return [sys.executable, *command]


def _module(command: list[str]) -> list[str]:
    top = command[0].partition(".")[0]
    if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise ConfigError(
            f"there is no module {command[0]!r}: looked in {Path.cwd()} and where Python keeps packages."
        )
    return [sys.executable, "-m", *command]


def _new_folder() -> Path:
    """A name nobody has: two runs of the same second get two folders."""
    stamp = Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder, number = stamp, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = stamp.with_name(f"{stamp.name}_{number}")
        except OSError as error:
            raise ConfigError(
                f"cannot make {str(folder)!r}: {error.strerror}. Give --folder one that can be written to."
            ) from None
        else:
            return folder
