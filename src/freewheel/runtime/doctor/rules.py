"""Judge facts: is a host fit for so many workers, and what is to be done if not?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from freewheel.numbers import count, short, speed
from freewheel.runtime.doctor.bandwidth import LinkFigure
from freewheel.runtime.doctor.probe import LOOPBACK, Facts
from freewheel.runtime.membership.place import is_loopback

State = Literal["ok", "warning", "problem"]

FILES, FILES_A_PEER = 64, 8  # handles of a process, and more for each peer: a socket, windows, pipes
RECORDS_MB = 50.0  # of one worker, at most
THIN_MBIT = 100.0
LATE_MS = 50.0
SKEW_MS, KEYS_SKEW_MS = 1000.0, 300_000.0  # records are compared by time; keys are predated by 5 minutes
SMALL_SHARED_MB = 512.0
NO_DEVICES = "No CUDA GPUs are available"  # as torch says it
VECTORS = 4  # of the model's size, beside the optimizer's: weights, gradients, two windows

ADVICE = {  # what to do
    "torch": "Install a version that Freewheel is tested with: pip install 'torch{range}'",
    "no CUDA": "There is a driver. Install a build of torch with CUDA; pytorch.org has the command.",
    "no device": "There is a driver. Is CUDA_VISIBLE_DEVICES right? In a container: is --gpus all given?",
    "bad device": "nvidia-smi shows what the driver sees. Update the driver if it is too old for torch; "
    "CUDA_VISIBLE_DEVICES leaves a broken device out.",
    "cores": "Workers take turns, so rates say little. Use a smaller -n or more hosts; --compute-ms of "
    "`freewheel compare` lets workers that share cores behave as if each had its own.",
    "no number": "Unset it, or set it to a whole number above 0.",
    "threads": "Threads take cores from each other. Unset it, or set it to {fair}; freewheel run does so.",
    "loopback": "No other host gets there. Give --bind this host's own address, here and to freewheel run.",
    "firewall": "Workers listen on TCP ports of /proc/sys/net/ipv4/ip_local_port_range. Let others in.",
    "keys": "Keys may not be valid on both clocks. Let both keep time by NTP: timedatectl set-ntp true",
    "clock": "Times in records cannot be compared. Let both hosts keep time by NTP: timedatectl set-ntp true",
    "thin": "A thin link: exchange rarely (sasgd, nodelay_free) or with wire=bf16 (adpsgd).",
    "late": "A long way: avoid strategies that wait for all or for a server in every step.",
    "files": "In this shell, before the run: ulimit -n {files}. A hard limit is raised by nofile in "
    "/etc/security/limits.conf, LimitNOFILE= of a service, --ulimit nofile= of a container.",
    "no windows": "Exchanges keep snapshots there. Allow memfd_create; a seccomp profile may forbid it.",
    "no sharing": "Vectors of workers of this host then travel through sockets, or from a GPU through the "
    "host, which is slower. /proc must be mounted.",
    "shm": "DataLoader passes batches through this tmpfs with num_workers. For a container: --shm-size 2g",
    "memory": "A worker holds weights, gradients and two windows, beside its optimizer's state. Use fewer "
    "workers on this host.",
    "folder": "Give --folder one that can be written to, here and to a run.",
    "disk": "Records may take {records}, checkpoints more. A full disk costs those, never training. Make "
    "room, or give --folder another place.",
}


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do."""

    what: str
    value: str
    state: State = "ok"
    advice: str = ""


def diagnose(facts: Facts, workers: int, model_mb: float | None = None, tls: bool = False) -> list[Finding]:
    """All findings for so many workers on this host, and as many on each host measured."""
    links = [_link(host, link, model_mb, tls) for host, link in facts.links.items()]
    return [*_software(facts, workers), *_network(facts), *links, *_room(facts, workers, model_mb or 0.0)]


def _judged(what: str, value: str, *rules: tuple[object, State, str], **numbers: object) -> Finding:
    """The first rule that applies counts; a rule is a condition, a state and a key of ADVICE."""
    for applies, state, advice in rules:
        if applies:
            return Finding(what, value, state, ADVICE[advice].format(**numbers))
    return Finding(what, value)


def _software(f: Facts, workers: int) -> Iterator[Finding]:
    yield Finding("python", f.python)
    fits = SpecifierSet(f.torch_range).contains(f.torch, prereleases=True)
    yield _judged("torch", f.torch, (not fits, "problem", "torch"), range=f.torch_range)
    cuda, trouble = f.cuda, f.cuda.driver and (f.cuda.problem or (not f.cuda.devices and NO_DEVICES))
    found = f"{cuda.built}: {', '.join(cuda.devices)}" if cuda.devices else "none: training runs on the CPU"
    yield _judged(
        "cuda",
        trouble or found,
        (cuda.driver and not cuda.built, "warning", "no CUDA"),
        (trouble and NO_DEVICES in trouble, "warning", "no device"),
        (trouble, "problem", "bad device"),
    )
    cores = f"{count(f.cores, 'core')} for {count(workers, 'worker')}"
    yield _judged("cores", cores, (workers > f.cores, "warning", "cores"))
    given = "not set" if f.omp is None else f.omp
    threads = 1 if f.omp is None else int(f.omp) if f.omp.isdecimal() else 0
    yield _judged(
        "threads",
        f"OMP_NUM_THREADS is {given}",
        (threads == 0, "problem", "no number"),
        (threads > 1 and threads * workers > f.cores, "warning", "threads"),
        fair=max(1, f.cores // workers),
    )


def _network(f: Facts) -> Iterator[Finding]:
    several = bool(f.links.keys() - {LOOPBACK})
    local = several and is_loopback(f.bind)
    if f.bind_problem:
        yield Finding("listening", f"not on {f.bind}", "problem", f.bind_problem)
    else:
        yield _judged("listening", f"possible on {f.bind}", (local, "warning", "loopback"))
    if f.port_problem:
        yield Finding("port", f"{f.port} is not free", "problem", f.port_problem)
    elif f.port is not None:
        yield Finding("port", f"{f.port} is free")
    if several or not is_loopback(f.bind):
        seen = f"seen: {', '.join(f.firewalls)}" if f.firewalls else "none seen (one may be elsewhere)"
        yield _judged("firewall", seen, (f.firewalls, "warning", "firewall"))


def _room(f: Facts, workers: int, model_mb: float) -> Iterator[Finding]:
    files = FILES + FILES_A_PEER * workers * (1 + len(f.links.keys() - {LOOPBACK}))
    value = f"{f.open_files:,} in a process, about {files:,} needed"
    yield _judged("open files", value, (f.open_files < files, "problem", "files"), files=files)
    yield _judged(
        "windows",
        f.window_problem or f.sharing_problem or "workers of this host can share memory",
        (f.window_problem, "problem", "no windows"),
        (f.sharing_problem, "warning", "no sharing"),
    )
    small = f.shared_free_mb < SMALL_SHARED_MB
    yield _judged("/dev/shm", f"{_size(f.shared_free_mb)} free", (small, "warning", "shm"))
    needed_mb = VECTORS * model_mb * workers
    value = f"{_size(f.memory_free_mb)} free" + f", at least {_size(needed_mb)} needed" * (needed_mb > 0)
    yield _judged("memory", value, (f.memory_free_mb < needed_mb, "problem", "memory"))
    yield _judged(
        "disk",
        f.folder_problem or f"{_size(f.disk_free_mb)} free for {f.folder}",
        (f.folder_problem, "problem", "folder"),
        (f.disk_free_mb < RECORDS_MB * workers, "warning", "disk"),
        records=_size(RECORDS_MB * workers),
    )


def _link(host: str, link: LinkFigure | str, model_mb: float | None, tls: bool) -> Finding:
    what = LOOPBACK if host == LOOPBACK else f"link to {host}"
    if isinstance(link, str):
        return Finding(what, "could not be measured", "problem", link)
    slower, skew_ms = min(link.mbit_out, link.mbit_in), abs(link.clock_skew_ms)
    value = (
        f"{speed(link.mbit_out)} out, {speed(link.mbit_in)} in, {short(link.latency_ms, 2)} ms, "
        f"clock {link.clock_skew_ms:+.0f} ms"
    )
    if model_mb is not None:
        value += f"; {_size(model_mb)} take {short(8 * model_mb / slower, 2)} s"
    return _judged(
        what,
        value,
        (tls and skew_ms > KEYS_SKEW_MS, "problem", "keys"),
        (skew_ms > SKEW_MS + link.latency_ms, "warning", "clock"),
        (slower < THIN_MBIT, "warning", "thin"),
        (link.latency_ms > LATE_MS, "warning", "late"),
    )


def _size(mb: float) -> str:
    return f"{short(mb / 1000)} GB" if mb >= 1000 else f"{short(mb)} MB"
