"""Facts about this host as plain values, which `rules.py` judges."""

import asyncio
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packaging.requirements import Requirement

from freewheel.errors import ConfigError, first_line
from freewheel.fabric.windows import Cuda as CudaLibrary
from freewheel.fabric.windows import HostWindow
from freewheel.runtime.doctor.bandwidth import LinkFigure, loopback, measuring
from freewheel.runtime.membership.hosts import listen

QUOTA = Path("/sys/fs/cgroup/cpu.max")
SHARED = Path("/dev/shm")
FIREWALLD = Path("/run/firewalld")
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Cuda:
    """What torch says of CUDA, and whether the system has a driver."""

    built: str | None = None  # the version of CUDA this torch was built for; None: built without
    driver: bool = False
    devices: tuple[str, ...] = ()
    problem: str | None = None  # why what is there cannot be used, in torch's words


@dataclass(frozen=True)
class Facts:
    """One host, seen from one process on it; a `…_problem` says why something cannot be done."""

    python: str = "3.11.0"
    torch: str = "2.8.0"
    torch_range: str = ">=2.8,<2.14"
    cores: int = 4
    omp: str | None = None
    cuda: Cuda = Cuda()
    bind: str = "127.0.0.1"
    bind_problem: str | None = None
    port: int | None = None
    port_problem: str | None = None
    firewalls: tuple[str, ...] = ()
    open_files: int = 1 << 20
    window_problem: str | None = None
    sharing_problem: str | None = None  # why a peer cannot open a window of the host or of the first GPU
    shared_free_mb: float = 16_000.0
    memory_free_mb: float = 16_000.0
    folder: str = "runs"
    folder_problem: str | None = None
    disk_free_mb: float = 100_000.0
    # By host, what was measured, or why it could not be.
    links: Mapping[str, LinkFigure | str] = field(default_factory=dict)


def gather(
    hosts: list[tuple[str, int]],
    *,
    bind: str = "127.0.0.1",
    port: int | None = None,
    folder: Path = Path("runs"),
    mb: float = 64.0,
    tls: Path | None = None,
) -> Facts:
    """Look at this host, and measure the links to others, or else loopback."""
    if platform.system() != "Linux":
        raise ConfigError(f"Freewheel runs on Linux, not on {platform.system()}: use a Linux host, or WSL.")
    needed = map(Requirement, importlib.metadata.requires("freewheel") or ())
    memory = _search("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    home = folder.absolute()
    nearest = next(one for one in (home, *home.parents) if one.exists())
    cuda, files = _cuda(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # The scheduler's cores, or fewer where a container's quota allows only so many.
    cores, limit = len(os.sched_getaffinity(0)), _search(QUOTA, r"\A(\d+) (\d+)")
    # What can be seen without being root; there may be others.
    firewalls = {"ufw": _search("/etc/ufw/ufw.conf", "^ENABLED=yes"), "firewalld": FIREWALLD.exists()}
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_range=next(str(one.specifier) for one in needed if one.name == "torch"),
        cores=max(1, min(cores, int(limit[1]) // int(limit[2]))) if limit else cores,
        omp=os.environ.get("OMP_NUM_THREADS"),
        cuda=cuda,
        bind=bind,
        bind_problem=_problem(lambda: listen(bind, 0, "bind").close()),
        port=port,
        port_problem=None if port is None else _problem(lambda: listen(bind, port, "bind").close()),
        firewalls=tuple(name for name, on in firewalls.items() if on),
        open_files=1 << 30 if files == resource.RLIM_INFINITY else files,
        window_problem=_problem(lambda: HostWindow.make(mmap.PAGESIZE)),
        sharing_problem=_problem(lambda: _share(bool(cuda.devices))),
        shared_free_mb=shutil.disk_usage(SHARED).free / 1e6 if SHARED.is_dir() else 0.0,
        memory_free_mb=int(memory[1]) * 1024 / 1e6 if memory else Facts.memory_free_mb,
        folder=str(folder),
        # Asking the system for permission is not enough: root has it on a disk that is read-only.
        folder_problem=_problem(lambda: tempfile.TemporaryFile(dir=nearest).close(), f"{nearest}: "),
        disk_free_mb=shutil.disk_usage(nearest).free / 1e6,
        links=_links(hosts, mb, tls),
    )


def _links(hosts: list[tuple[str, int]], mb: float, tls: Path | None) -> dict[str, LinkFigure | str]:
    found: dict[str, LinkFigure | str] = {} if hosts else {LOOPBACK: asyncio.run(loopback(mb, tls))}
    for host, port in hosts:
        try:
            found[f"{host}:{port}"] = asyncio.run(measuring(host, port, mb, tls))
        except ConfigError as error:
            found[f"{host}:{port}"] = str(error)
    return found


def _cuda() -> Cuda:
    built, devices, problem = torch.version.cuda, list[str](), None
    try:
        for index in range(torch.cuda.device_count() if built else 0):
            torch.ones(8, device=f"cuda:{index}").sum().item()
            devices.append(torch.cuda.get_device_name(index))
    except (RuntimeError, AssertionError) as error:  # torch raises both
        problem = first_line(error, 300)
    return Cuda(built, Path("/proc/driver/nvidia/version").exists(), tuple(devices), problem)


def _problem(of: Callable[[], object], where: str = "") -> str | None:
    """Why something cannot be done here; None: it can."""
    try:
        of()
    except (OSError, RuntimeError, ConfigError) as error:
        return where + (getattr(error, "strerror", None) or str(error))
    return None


def _search(path: str | Path, pattern: str) -> re.Match[str] | None:
    """Search a file; None also where it is missing or hidden, as in some containers."""
    try:
        return re.search(pattern, Path(path).read_text(), flags=re.M | re.I)
    except OSError:
        return None


def _share(cuda: bool) -> None:
    """Make a window of the host and open it as a peer does; with `cuda` make one of the first GPU."""
    window = HostWindow.make(mmap.PAGESIZE)
    HostWindow.open(os.getpid(), mmap.PAGESIZE, window.fd)
    if cuda:
        library = CudaLibrary()
        address = library.malloc(mmap.PAGESIZE)
        library.handle(address)
        library.free(address)
