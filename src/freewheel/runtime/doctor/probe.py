"""What this host is like, as plain values: `rules.py` judges them, and a test can make them up."""

from __future__ import annotations

import asyncio
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from packaging.requirements import Requirement

from freewheel.errors import ConfigError, first_line
from freewheel.fabric.windows import Cuda as CudaLibrary
from freewheel.fabric.windows import DeviceWindow, HostWindow
from freewheel.runtime.doctor.bandwidth import LinkFigure, loopback, measure
from freewheel.runtime.membership.hosts import listen

QUOTA = Path("/sys/fs/cgroup/cpu.max")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED = Path("/dev/shm")
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Cuda:
    """What torch says of CUDA, and the system of a driver."""

    built: str | None = None
    """The version of CUDA this torch was built for; None: built without."""
    driver: bool = False
    """Whether the system has NVIDIA's driver."""
    devices: tuple[str, ...] = ()
    problem: str | None = None
    """Why what is there cannot be used, in torch's words."""


@dataclass(frozen=True)
class Facts:
    """One host, seen from one process on it."""

    python: tuple[int, ...] = (3, 11, 0)
    python_range: str = ">=3.11"
    torch: str = "2.8.0"
    torch_range: str = ">=2.8,<2.14"
    threads: int = 1
    cores: int = 4
    """Those this process may use, whatever the machine has."""
    omp: str | None = None
    """The environment's OMP_NUM_THREADS."""
    cuda: Cuda = Cuda()
    bind: str = "127.0.0.1"
    bind_problem: str | None = None
    port: int | None = None
    """The port that was asked about."""
    port_problem: str | None = None
    ports: tuple[int, int] = (32768, 60999)
    """From which the system chooses."""
    firewalls: tuple[str, ...] = ()
    """Those that seem to be on."""
    name_address: str | None = None
    """What this host's own name means here."""
    soft_files: int = 1 << 20
    hard_files: int = 1 << 20
    make_problem: str | None = None
    """Why no window can be made."""
    open_problem: str | None = None
    """Why a window cannot be opened by a peer."""
    device_problem: str | None = None
    """Why memory of the first CUDA device cannot be shared."""
    shared_free_mb: float | None = 16_000.0
    memory_free_mb: float | None = 16_000.0
    folder: str = "runs"
    folder_problem: str | None = None
    disk_free_mb: float = 100_000.0
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By extra, the packages it needs that are not installed."""
    links: Mapping[str, LinkFigure | str] = field(default_factory=dict)
    """By host, what was measured, or why it could not be."""


def gather(
    hosts: list[tuple[str, int]],
    *,
    bind: str = "127.0.0.1",
    port: int | None = None,
    folder: Path = Path("runs"),
    mb: float = 64.0,
    tls: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Facts:
    """Look at this host, and measure the links to the others; without others: loopback."""
    if platform.system() != "Linux":
        raise ConfigError(f"Freewheel runs on Linux, not on {platform.system()}: use a Linux host, or WSL.")
    progress("looking at torch and CUDA")
    python_range, torch_range, extras = _requirements()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    no_limit = 1 << 30
    ports = _said("/proc/sys/net/ipv4/ip_local_port_range", r"\A(\d+)\s+(\d+)")
    memory = _said("/proc/meminfo", r"^MemAvailable:\s+(\d+) kB")
    cuda, make_problem = _cuda(), _problem(lambda: HostWindow.make(mmap.PAGESIZE))
    progress("looking at ports, memory and disk")
    return Facts(
        python=tuple(sys.version_info[:3]),
        python_range=python_range,
        torch=torch.__version__,
        torch_range=torch_range,
        threads=torch.get_num_threads(),
        cores=_cores(),
        omp=os.environ.get("OMP_NUM_THREADS"),
        cuda=cuda,
        bind=bind,
        bind_problem=_problem(lambda: listen(bind, 0, "bind").close()),
        port=port,
        port_problem=None if port is None else _problem(lambda: listen(bind, port, "bind").close()),
        ports=(int(ports[1]), int(ports[2])) if ports else Facts.ports,
        firewalls=_firewalls(),
        name_address=_name_address(),
        soft_files=no_limit if soft == resource.RLIM_INFINITY else soft,
        hard_files=no_limit if hard == resource.RLIM_INFINITY else hard,
        make_problem=make_problem,
        open_problem=None if make_problem else _problem(_open_window),
        device_problem=_device_window() if cuda.devices else None,
        shared_free_mb=shutil.disk_usage(SHARED).free / 1e6 if SHARED.is_dir() else None,
        memory_free_mb=int(memory[1]) * 1024 / 1e6 if memory else None,
        folder=str(folder),
        folder_problem=_folder_problem(folder),
        disk_free_mb=shutil.disk_usage(_nearest(folder)).free / 1e6,
        extras=extras,
        links=_links(hosts, mb, tls, progress),
    )


def _links(
    hosts: list[tuple[str, int]], mb: float, tls: Path | None, progress: Callable[[str], None]
) -> dict[str, LinkFigure | str]:
    if not hosts:
        return {LOOPBACK: asyncio.run(loopback(mb, tls))}
    found: dict[str, LinkFigure | str] = {}
    for host, port in hosts:
        progress(f"measuring the link to {host}:{port}")
        try:
            found[f"{host}:{port}"] = measure(host, port, mb, tls)
        except ConfigError as error:
            found[f"{host}:{port}"] = str(error)
    return found


def _requirements() -> tuple[str, str, dict[str, tuple[str, ...]]]:
    """The ranges of Python and torch that the package asks for, and what each extra lacks."""
    about = importlib.metadata.metadata("freewheel")
    needed = [Requirement(line) for line in about.get_all("Requires-Dist") or ()]

    def lacks(extra: str, one: Requirement) -> bool:
        brings = one.marker is not None and one.marker.evaluate({"extra": extra})
        return brings and not any(importlib.metadata.distributions(name=one.name))

    extras = [extra for extra in about.get_all("Provides-Extra") or () if extra != "dev"]
    lacking = {extra: tuple(one.name for one in needed if lacks(extra, one)) for extra in extras}
    of_torch = next((str(one.specifier) for one in needed if one.name == "torch"), "")
    return about["Requires-Python"] or "", of_torch, lacking


def _cuda() -> Cuda:
    built, driver = torch.version.cuda, DRIVER.exists()
    if built is None:
        return Cuda(None, driver)
    devices: list[str] = []
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(index)
            total = (torch.ones(8, device=f"cuda:{index}") * 2).sum().item()
            if total != 16:
                raise RuntimeError(f"device {index} ({name}) computes 8 times 2 as {total:g}")
            devices.append(name)
    except (RuntimeError, AssertionError) as error:  # torch raises both
        return Cuda(built, driver, tuple(devices), first_line(error, 300))
    return Cuda(built, driver, tuple(devices))


def _problem(of: Callable[[], object]) -> str | None:
    """Why something cannot be done here; None: it can."""
    try:
        of()
    except (OSError, ConfigError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _said(path: str | Path, pattern: str) -> re.Match[str] | None:
    """Where a file says so; nothing where it is not there, or hidden, as in some containers."""
    try:
        return re.search(pattern, Path(path).read_text(), flags=re.M | re.I)
    except OSError:
        return None


def _cores() -> int:
    """Those of the scheduler, or fewer where a container may use only so much of them."""
    cores, limit = len(os.sched_getaffinity(0)), _said(QUOTA, r"\A(\d+) (\d+)")
    return max(1, min(cores, int(limit[1]) // int(limit[2]))) if limit else cores


def _firewalls() -> tuple[str, ...]:
    """What can be seen without being root; nothing found does not mean that there is none."""
    ufw = _said("/etc/ufw/ufw.conf", "^ENABLED=yes")
    seen = {"ufw": ufw, "firewalld": Path("/run/firewalld").exists()}
    return tuple(name for name, on in seen.items() if on)


def _name_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _open_window() -> None:
    """Make a window, and open it the way a peer does."""
    window = HostWindow.make(mmap.PAGESIZE)
    HostWindow.open(os.getpid(), mmap.PAGESIZE, window.fd)


def _device_window() -> str | None:
    """Make a window of the first device; why that fails."""
    try:
        DeviceWindow.make(CudaLibrary(), torch.device("cuda", 0), mmap.PAGESIZE)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def _nearest(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.exists())


def _folder_problem(folder: Path) -> str | None:
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    # Asking the system for permission is not enough: root has it on a disk that is read-only.
    why = _problem(lambda: tempfile.TemporaryFile(dir=nearest).close())
    return why and f"{nearest} cannot be written to: {why}"
