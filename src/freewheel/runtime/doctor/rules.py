"""Is a host fit for a run of so many workers, and what is to be done if not? Judges facts."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from freewheel.numbers import count, short, speed
from freewheel.runtime.doctor.bandwidth import LinkFigure
from freewheel.runtime.doctor.probe import LOOPBACK, Facts, is_loopback

State = Literal["ok", "warning", "problem"]

FILES, FILES_A_PEER = 64, 8  # handles of a process, and more for each peer: a socket, windows, pipes
RECORDS_MB = 50.0  # of one worker, at most
THIN_MBIT = 100.0
LATE_MS = 50.0
SKEW_MS, KEYS_SKEW_MS = 1000.0, 300_000.0  # records are compared by time; keys hold from 5 minutes before
SMALL_SHARED_MB = 512.0
NO_DEVICES = "No CUDA GPUs are available"  # as torch says it
VECTORS = 4  # of the model's size, beside the optimizer's: weights, gradients, two windows
OPERATORS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do."""

    what: str
    value: str
    state: State = "ok"
    advice: str = ""


def diagnose(facts: Facts, workers: int, model_mb: float | None = None, tls: bool = False) -> list[Finding]:
    """All findings for so many workers on this host, and as many on each host measured."""
    hosts = 1 + len([host for host in facts.links if host != LOOPBACK])
    return [
        _python(facts),
        _torch(facts),
        _cuda(facts),
        _cores(facts, workers),
        _threads(facts, workers),
        *_ports(facts, hosts),
        *(_link(host, link, model_mb, tls) for host, link in facts.links.items()),
        _files(facts, workers * hosts),
        _windows(facts),
        _shared(facts),
        _memory(facts, workers, model_mb),
        _disk(facts, workers),
        _extras(facts),
    ]


def fits(version: str, bounds: str) -> bool:
    """Whether a version lies in a range such as ``>=2.8,<2.14``; what follows its numbers does not count."""
    found = _numbers(version)
    for bound in filter(None, bounds.replace(" ", "").split(",")):
        sign, limit = re.match(r"([<>=!~]+)(.*)", bound).groups()  # type: ignore[union-attr]
        wanted = _numbers(limit)
        length = max(len(found), len(wanted))
        mine, theirs = (numbers + (0,) * (length - len(numbers)) for numbers in (found, wanted))
        if sign in OPERATORS and not OPERATORS[sign](mine, theirs):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    start = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in start[0].split(".")) if start else ()


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if fits(version, facts.python_range):
        return Finding("python", version)
    return Finding(
        "python",
        version,
        "problem",
        f"Freewheel needs {facts.python_range}: make a new virtual environment with such a Python.",
    )


def _torch(facts: Facts) -> Finding:
    if fits(facts.torch, facts.torch_range):
        return Finding("torch", facts.torch)
    return Finding(
        "torch",
        facts.torch,
        "problem",
        f"Freewheel is tested with torch {facts.torch_range}: pip install 'torch{facts.torch_range}'",
    )


def _cuda(facts: Facts) -> Finding:
    cuda = facts.cuda
    if cuda.devices and cuda.problem is None:
        return Finding("cuda", f"{cuda.built}: {', '.join(cuda.devices)}")
    if cuda.built is None:
        if cuda.driver:
            return Finding(
                "cuda",
                "there is a driver, but this torch is built without CUDA",
                "warning",
                "Training runs on the CPU. Install a build of torch with CUDA; pytorch.org has the command.",
            )
        return Finding("cuda", "none: training runs on the CPU")
    if not cuda.driver:
        return Finding("cuda", f"torch is built for {cuda.built}; no driver here, training runs on the CPU")
    why = cuda.problem or NO_DEVICES
    if NO_DEVICES in why:  # they may be hidden on purpose
        return Finding(
            "cuda",
            "there is a driver, but no device for this process",
            "warning",
            "Training runs on the CPU. Is CUDA_VISIBLE_DEVICES right? In a container: is --gpus all given?",
        )
    old = "too old" in why
    return Finding(
        "cuda",
        why if not old else "the NVIDIA driver is too old for this torch",
        "problem",
        f"Update the driver, or install a torch for its CUDA (this one is built for {cuda.built})."
        if old
        else "Is a device lost, or used by others alone? nvidia-smi shows what the driver sees; "
        "CUDA_VISIBLE_DEVICES leaves one out.",
    )


def _cores(facts: Facts, workers: int) -> Finding:
    value = f"{count(facts.cores, 'core')} for {count(workers, 'worker')}"
    if workers <= facts.cores:
        return Finding("cores", value)
    return Finding(
        "cores",
        value,
        "warning",
        "Workers take turns, so rates say little. Use a smaller -n or more hosts; --compute-ms of `freewheel "
        "compare` lets workers that share cores behave as if each had its own.",
    )


def _threads(facts: Facts, workers: int) -> Finding:
    fair = max(1, facts.cores // workers)
    if facts.omp is None:
        return Finding("threads", f"{fair} for each worker (OMP_NUM_THREADS is not set)")
    value = f"OMP_NUM_THREADS is {facts.omp}"
    if not facts.omp.isdecimal() or int(facts.omp) == 0:
        return Finding("threads", value, "problem", "Unset it, or set it to a whole number above 0.")
    if int(facts.omp) * workers > facts.cores and int(facts.omp) > 1:
        return Finding(
            "threads",
            f"{value}, with {count(workers, 'worker')} on {count(facts.cores, 'core')}",
            "warning",
            f"Threads take cores from each other. Unset it, or set it to {fair}; freewheel run does so.",
        )
    return Finding("threads", value)


def _ports(facts: Facts, hosts: int) -> Iterator[Finding]:
    if facts.bind_problem:
        yield Finding("listening", f"not on {facts.bind}", "problem", facts.bind_problem)
    elif hosts > 1 and is_loopback(facts.bind):
        yield Finding(
            "listening",
            f"on {facts.bind}, where no other host gets to",
            "warning",
            "Give --bind this host's own address, here and to freewheel run.",
        )
    else:
        yield Finding("listening", f"possible on {facts.bind}")
    if facts.port is not None:
        yield Finding(
            "port",
            f"{facts.port} is {'not free' if facts.port_problem else 'free'}",
            "problem" if facts.port_problem else "ok",
            facts.port_problem or "",
        )
    if hosts > 1 or not is_loopback(facts.bind):
        yield _firewall(facts)
        if facts.name_address is not None and is_loopback(facts.name_address):
            yield Finding(
                "host name",
                f"means {facts.name_address} on this host itself",
                "warning",
                "As --master or MASTER_ADDR give this host's address, not its name.",
            )


def _firewall(facts: Facts) -> Finding:
    first, last = facts.ports
    if not facts.firewalls:
        return Finding("firewall", "none seen (one may be elsewhere)")
    return Finding(
        "firewall",
        f"seen: {', '.join(facts.firewalls)}",
        "warning",
        f"Workers listen on ports the system chooses, {first} to {last}. Let the other hosts in: "
        f"{_rule(facts.firewalls[0], first, last)}",
    )


def _rule(firewall: str, first: int, last: int) -> str:
    if firewall == "ufw":
        return f"sudo ufw allow proto tcp from OTHER_HOST to any port {first}:{last}"
    return f"sudo firewall-cmd --add-port={first}-{last}/tcp"


def _link(host: str, link: LinkFigure | str, model_mb: float | None, tls: bool) -> Finding:
    what = "loopback" if host == LOOPBACK else f"link to {host}"
    if isinstance(link, str):
        return Finding(what, "could not be measured", "problem", link)
    slower = min(link.mbit_out, link.mbit_in)
    value = (
        f"{speed(link.mbit_out)} out, {speed(link.mbit_in)} in, {short(link.latency_ms, 2)} ms, "
        f"clock {round(link.clock_skew_ms):+d} ms"
    )
    if model_mb is not None:
        value += f"; {_size(model_mb)} take {short(8 * model_mb / slower, 2)} s"
    skew_ms = abs(link.clock_skew_ms)
    if tls and skew_ms > KEYS_SKEW_MS:
        return Finding(what, value, "problem", f"Keys may not be valid on both clocks. {_CLOCKS}")
    advice = []
    if skew_ms > SKEW_MS + link.latency_ms:
        advice.append(f"Times in records of the two hosts cannot be compared. {_CLOCKS}")
    if slower < THIN_MBIT:
        advice.append("A thin link: exchange rarely (sasgd, nodelay_free) or with wire=bf16 (adpsgd).")
    if link.latency_ms > LATE_MS:
        advice.append("A long way: avoid strategies that wait for all or for a server in every step.")
    return Finding(what, value, "warning" if advice else "ok", " ".join(advice))


_CLOCKS = "Let both keep time by NTP: timedatectl set-ntp true"


def _files(facts: Facts, workers: int) -> Finding:
    needed = FILES + FILES_A_PEER * workers
    value = f"{facts.soft_files:,} in a process, about {needed:,} needed"
    if facts.soft_files >= 1 << 30:
        return Finding("open files", "no limit")
    if facts.soft_files >= needed:
        return Finding("open files", value)
    if facts.hard_files >= needed:
        return Finding("open files", value, "problem", f"In this shell, before the run: ulimit -n {needed}")
    return Finding(
        "open files",
        value,
        "problem",
        f"The hard limit is {facts.hard_files:,}. Have it raised (nofile in /etc/security/limits.conf, "
        "LimitNOFILE= of a service, --ulimit nofile= of a container), or use fewer workers.",
    )


def _windows(facts: Facts) -> Finding:
    if facts.make_problem:
        return Finding(
            "windows",
            f"memfd_create fails: {facts.make_problem}",
            "problem",
            "Exchanges keep snapshots in such memory. Allow that call; a seccomp profile may forbid it.",
        )
    if facts.open_problem:
        return Finding(
            "windows",
            f"processes cannot open each other's: {facts.open_problem}",
            "warning",
            "Workers of one host then exchange through sockets, which is slower. /proc must be mounted.",
        )
    if facts.device_problem:
        return Finding(
            "windows",
            f"GPU memory cannot be shared: {facts.device_problem}",
            "warning",
            "Vectors of workers of this host then go through host memory, which is slower.",
        )
    shared = "memory of the host and of the GPU" if facts.cuda.devices else "memory"
    return Finding("windows", f"workers of this host can share {shared}")


def _shared(facts: Facts) -> Finding:
    if facts.shared_free_mb is None:
        return Finding(
            "/dev/shm",
            "is not there",
            "warning",
            "DataLoader needs it with num_workers: mount a tmpfs there.",
        )
    value = f"{_size(facts.shared_free_mb)} free"
    if facts.shared_free_mb < SMALL_SHARED_MB:
        return Finding(
            "/dev/shm",
            value,
            "warning",
            "DataLoader passes batches through it with num_workers. For a container: --shm-size 2g",
        )
    return Finding("/dev/shm", value)


def _memory(facts: Facts, workers: int, model_mb: float | None) -> Finding:
    if facts.memory_free_mb is None:
        return Finding("memory", "unknown")
    value = f"{_size(facts.memory_free_mb)} free"
    if model_mb is None:
        return Finding("memory", value)
    needed = VECTORS * model_mb * workers
    value += f", at least {_size(needed)} needed"
    if facts.memory_free_mb >= needed:
        return Finding("memory", value)
    return Finding(
        "memory",
        value,
        "problem",
        f"Each worker holds weights, gradients and two windows of {_size(model_mb)}, beside its optimizer's "
        "state. Use fewer workers on this host.",
    )


def _disk(facts: Facts, workers: int) -> Finding:
    what = "disk"
    if facts.folder_problem:
        return Finding(
            what,
            facts.folder_problem,
            "problem",
            "Give --folder one that can be written to, here and to a run.",
        )
    value = f"{_size(facts.disk_free_mb)} free for {facts.folder}"
    if facts.disk_free_mb < RECORDS_MB * workers:
        return Finding(
            what,
            value,
            "warning",
            f"Records may take {_size(RECORDS_MB * workers)}, and checkpoints more. A full disk costs those, "
            "never training. Make room, or give --folder another place.",
        )
    return Finding(what, value)


def _extras(facts: Facts) -> Finding:
    there = sorted(extra for extra, missing in facts.extras.items() if not missing)
    missing = sorted(extra for extra, missing in facts.extras.items() if missing)
    value = f"installed: {', '.join(there) or 'none'}"
    if missing:
        value += (
            f"; not installed: {', '.join(missing)} (pip install 'freewheel[{missing[0]}]' if you need it)"
        )
    return Finding("extras", value)


def _size(mb: float) -> str:
    return f"{short(mb / 1000)} GB" if mb >= 1000 else f"{short(mb)} MB"
