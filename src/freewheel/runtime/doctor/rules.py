"""Is a host fit for a run of so many workers, and what is to be done if not? Judges facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from freewheel.numbers import count, short, speed
from freewheel.runtime.doctor.bandwidth import LinkFigure
from freewheel.runtime.doctor.probe import LOOPBACK, Facts
from freewheel.runtime.membership.place import is_loopback

State = Literal["ok", "warning", "problem"]
Verdict = str | tuple[str, State, str]
"""What was found, where all is well; else with a state, and what to do."""

FILES, FILES_A_PEER = 64, 8  # handles of a process, and more for each peer: a socket, windows, pipes
RECORDS_MB = 50.0  # of one worker, at most
THIN_MBIT = 100.0
LATE_MS = 50.0
SKEW_MS, KEYS_SKEW_MS = 1000.0, 300_000.0  # records are compared by time; keys hold from 5 minutes before
SMALL_SHARED_MB = 512.0
NO_DEVICES = "No CUDA GPUs are available"  # as torch says it
VECTORS = 4  # of the model's size, beside the optimizer's: weights, gradients, two windows
PYTHON = "Freewheel needs {0}: make a new virtual environment with such a Python."
TORCH = "Freewheel is tested with torch {0}: pip install 'torch{0}'"
CLOCKS = "Let both keep time by NTP: timedatectl set-ntp true"


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
    afar = hosts > 1 or not is_loopback(facts.bind)
    rows: dict[str, Verdict | None] = {
        "python": _version(".".join(map(str, facts.python)), facts.python_range, PYTHON),
        "torch": _version(facts.torch, facts.torch_range, TORCH),
        "cuda": _cuda(facts),
        "cores": _cores(facts, workers),
        "threads": _threads(facts, workers),
        "listening": _listening(facts, hosts),
        "port": _port(facts),
        "firewall": _firewall(facts) if afar else None,
        "host name": _host_name(facts) if afar else None,
    }
    for host, link in facts.links.items():
        name = "loopback" if host == LOOPBACK else f"link to {host}"
        rows[name] = _link(link, model_mb, tls)
    rows |= {
        "open files": _files(facts, workers * hosts),
        "windows": _windows(facts),
        "/dev/shm": _shared(facts),
        "memory": _memory(facts, workers, model_mb),
        "disk": _disk(facts, workers),
        "extras": _extras(facts),
    }
    found = {what: (row,) if isinstance(row, str) else row for what, row in rows.items() if row is not None}
    return [Finding(what, *row) for what, row in found.items()]


def _warning(value: str, advice: str) -> Verdict:
    return value, "warning", advice


def _problem(value: str, advice: str) -> Verdict:
    return value, "problem", advice


def fits(version: str, bounds: str) -> bool:
    """Whether a version lies in a range such as ``>=2.8,<2.14``."""
    return SpecifierSet(bounds).contains(version, prereleases=True)


def _version(version: str, bounds: str, advice: str) -> Verdict:
    return version if fits(version, bounds) else _problem(version, advice.format(bounds))


def _cuda(facts: Facts) -> Verdict:
    cuda = facts.cuda
    if cuda.devices and cuda.problem is None:
        return f"{cuda.built}: {', '.join(cuda.devices)}"
    if cuda.built is None:
        if not cuda.driver:
            return "none: training runs on the CPU"
        return _warning(
            "there is a driver, but this torch is built without CUDA",
            "Training runs on the CPU. Install a build of torch with CUDA; pytorch.org has the command.",
        )
    if not cuda.driver:
        return f"torch is built for {cuda.built}; no driver here, training runs on the CPU"
    why = cuda.problem or NO_DEVICES
    if NO_DEVICES in why:  # they may be hidden on purpose
        return _warning(
            "there is a driver, but no device for this process",
            "Training runs on the CPU. Is CUDA_VISIBLE_DEVICES right? In a container: is --gpus all given?",
        )
    if "too old" in why:
        return _problem(
            "the NVIDIA driver is too old for this torch",
            f"Update the driver, or install a torch for its CUDA (this one is built for {cuda.built}).",
        )
    return _problem(
        why,
        "Is a device lost, or used by others alone? nvidia-smi shows what the driver sees; "
        "CUDA_VISIBLE_DEVICES leaves one out.",
    )


def _cores(facts: Facts, workers: int) -> Verdict:
    value = f"{count(facts.cores, 'core')} for {count(workers, 'worker')}"
    if workers <= facts.cores:
        return value
    return _warning(
        value,
        "Workers take turns, so rates say little. Use a smaller -n or more hosts; --compute-ms of `freewheel "
        "compare` lets workers that share cores behave as if each had its own.",
    )


def _threads(facts: Facts, workers: int) -> Verdict:
    fair = max(1, facts.cores // workers)
    if facts.omp is None:
        return f"{fair} for each worker (OMP_NUM_THREADS is not set)"
    value = f"OMP_NUM_THREADS is {facts.omp}"
    if not facts.omp.isdecimal() or int(facts.omp) == 0:
        return _problem(value, "Unset it, or set it to a whole number above 0.")
    if int(facts.omp) * workers > facts.cores and int(facts.omp) > 1:
        return _warning(
            f"{value}, with {count(workers, 'worker')} on {count(facts.cores, 'core')}",
            f"Threads take cores from each other. Unset it, or set it to {fair}; freewheel run does so.",
        )
    return value


def _listening(facts: Facts, hosts: int) -> Verdict:
    if facts.bind_problem:
        return _problem(f"not on {facts.bind}", facts.bind_problem)
    if hosts > 1 and is_loopback(facts.bind):
        return _warning(
            f"on {facts.bind}, where no other host gets to",
            "Give --bind this host's own address, here and to freewheel run.",
        )
    return f"possible on {facts.bind}"


def _port(facts: Facts) -> Verdict | None:
    if facts.port_problem:
        return _problem(f"{facts.port} is not free", facts.port_problem)
    return None if facts.port is None else f"{facts.port} is free"


def _firewall(facts: Facts) -> Verdict:
    if not facts.firewalls:
        return "none seen (one may be elsewhere)"
    first, last = facts.ports
    rule = f"sudo firewall-cmd --add-port={first}-{last}/tcp"
    if facts.firewalls[0] == "ufw":
        rule = f"sudo ufw allow proto tcp from OTHER_HOST to any port {first}:{last}"
    return _warning(
        f"seen: {', '.join(facts.firewalls)}",
        f"Workers listen on ports the system chooses, {first} to {last}. Let the other hosts in: {rule}",
    )


def _host_name(facts: Facts) -> Verdict | None:
    if facts.name_address is None or not is_loopback(facts.name_address):
        return None
    return _warning(
        f"means {facts.name_address} on this host itself",
        "As --master or MASTER_ADDR give this host's address, not its name.",
    )


def _link(link: LinkFigure | str, model_mb: float | None, tls: bool) -> Verdict:
    if isinstance(link, str):
        return _problem("could not be measured", link)
    slower = min(link.mbit_out, link.mbit_in)
    value = (
        f"{speed(link.mbit_out)} out, {speed(link.mbit_in)} in, {short(link.latency_ms, 2)} ms, "
        f"clock {round(link.clock_skew_ms):+d} ms"
    )
    if model_mb is not None:
        value += f"; {_size(model_mb)} take {short(8 * model_mb / slower, 2)} s"
    skew_ms = abs(link.clock_skew_ms)
    if tls and skew_ms > KEYS_SKEW_MS:
        return _problem(value, f"Keys may not be valid on both clocks. {CLOCKS}")
    advice = []
    if skew_ms > SKEW_MS + link.latency_ms:
        advice.append(f"Times in records of the two hosts cannot be compared. {CLOCKS}")
    if slower < THIN_MBIT:
        advice.append("A thin link: exchange rarely (sasgd, nodelay_free) or with wire=bf16 (adpsgd).")
    if link.latency_ms > LATE_MS:
        advice.append("A long way: avoid strategies that wait for all or for a server in every step.")
    return _warning(value, " ".join(advice)) if advice else value


def _files(facts: Facts, workers: int) -> Verdict:
    needed = FILES + FILES_A_PEER * workers
    value = f"{facts.soft_files:,} in a process, about {needed:,} needed"
    if facts.soft_files >= 1 << 30:
        return "no limit"
    if facts.soft_files >= needed:
        return value
    if facts.hard_files >= needed:
        return _problem(value, f"In this shell, before the run: ulimit -n {needed}")
    return _problem(
        value,
        f"The hard limit is {facts.hard_files:,}. Have it raised (nofile in /etc/security/limits.conf, "
        "LimitNOFILE= of a service, --ulimit nofile= of a container), or use fewer workers.",
    )


def _windows(facts: Facts) -> Verdict:
    if facts.make_problem:
        return _problem(
            f"memfd_create fails: {facts.make_problem}",
            "Exchanges keep snapshots in such memory. Allow that call; a seccomp profile may forbid it.",
        )
    if facts.open_problem:
        return _warning(
            f"processes cannot open each other's: {facts.open_problem}",
            "Workers of one host then exchange through sockets, which is slower. /proc must be mounted.",
        )
    if facts.device_problem:
        return _warning(
            f"GPU memory cannot be shared: {facts.device_problem}",
            "Vectors of workers of this host then go through host memory, which is slower.",
        )
    shared = "memory of the host and of the GPU" if facts.cuda.devices else "memory"
    return f"workers of this host can share {shared}"


def _shared(facts: Facts) -> Verdict:
    if facts.shared_free_mb is None:
        return _warning("is not there", "DataLoader needs it with num_workers: mount a tmpfs there.")
    value = f"{_size(facts.shared_free_mb)} free"
    if facts.shared_free_mb >= SMALL_SHARED_MB:
        return value
    advice = "DataLoader passes batches through it with num_workers. For a container: --shm-size 2g"
    return _warning(value, advice)


def _memory(facts: Facts, workers: int, model_mb: float | None) -> Verdict:
    if facts.memory_free_mb is None:
        return "unknown"
    value = f"{_size(facts.memory_free_mb)} free"
    if model_mb is None:
        return value
    needed = VECTORS * model_mb * workers
    value += f", at least {_size(needed)} needed"
    if facts.memory_free_mb >= needed:
        return value
    return _problem(
        value,
        f"Each worker holds weights, gradients and two windows of {_size(model_mb)}, beside its optimizer's "
        "state. Use fewer workers on this host.",
    )


def _disk(facts: Facts, workers: int) -> Verdict:
    if facts.folder_problem:
        return _problem(facts.folder_problem, "Give --folder one that can be written to, here and to a run.")
    value = f"{_size(facts.disk_free_mb)} free for {facts.folder}"
    if facts.disk_free_mb >= RECORDS_MB * workers:
        return value
    return _warning(
        value,
        f"Records may take {_size(RECORDS_MB * workers)}, and checkpoints more. A full disk costs those, "
        "never training. Make room, or give --folder another place.",
    )


def _extras(facts: Facts) -> Verdict:
    there = sorted(extra for extra, missing in facts.extras.items() if not missing)
    missing = sorted(extra for extra, missing in facts.extras.items() if missing)
    value = f"installed: {', '.join(there) or 'none'}"
    if missing:
        first = f"pip install 'freewheel[{missing[0]}]' if you need it"
        value += f"; not installed: {', '.join(missing)} ({first})"
    return value


def _size(mb: float) -> str:
    return f"{short(mb / 1000)} GB" if mb >= 1000 else f"{short(mb)} MB"
