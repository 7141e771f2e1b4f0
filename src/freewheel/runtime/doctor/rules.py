"""Is a host fit for a run of so many workers, and what is to be done if not? Judges facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from freewheel.numbers import count, short, speed
from freewheel.runtime.doctor.bandwidth import LinkFigure
from freewheel.runtime.doctor.probe import LOOPBACK, Facts
from freewheel.runtime.membership.place import is_loopback

State = Literal["ok", "warning", "problem"]
OK: State = "ok"
WARNING: State = "warning"
PROBLEM: State = "problem"

FILES, FILES_A_PEER = 64, 8  # handles of a process, and more for each peer: a socket, windows, pipes
RECORDS_MB = 50.0  # of one worker, at most
THIN_MBIT = 100.0
LATE_MS = 50.0
SKEW_MS, KEYS_SKEW_MS = 1000.0, 300_000.0  # records are compared by time; keys hold from 5 minutes before
SMALL_SHARED_MB = 512.0
NO_DEVICES = "No CUDA GPUs are available"  # as torch says it
VECTORS = 4  # of the model's size, beside the optimizer's: weights, gradients, two windows
CLOCKS = "Let both keep time by NTP: timedatectl set-ntp true"


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and what to do."""

    what: str
    value: str
    state: State = "ok"
    advice: str = ""


class Case:
    """The facts `f` for `n` workers on each host, and what follows from them: what `CHECKS` speaks of."""

    def __init__(self, facts: Facts, workers: int, model_mb: float | None) -> None:
        self.f, self.n, self.cuda = facts, workers, facts.cuda
        self.why = facts.cuda.problem or NO_DEVICES
        self.hosts = 1 + len([host for host in facts.links if host != LOOPBACK])
        self.afar = self.hosts > 1 or not is_loopback(facts.bind)
        self.python, self.devices = ".".join(map(str, facts.python)), ", ".join(facts.cuda.devices)
        self.cores, self.workers = count(facts.cores, "core"), count(workers, "worker")
        self.fair = max(1, facts.cores // workers)
        self.omp = int(facts.omp) if facts.omp is not None and facts.omp.isdecimal() else 0
        self.files = FILES + FILES_A_PEER * workers * self.hosts
        self.first, self.last = facts.ports
        self.firewalls = ", ".join(facts.firewalls)
        self.rule = f"sudo firewall-cmd --add-port={self.first}-{self.last}/tcp"
        if "ufw" in facts.firewalls[:1]:
            self.rule = f"sudo ufw allow proto tcp from OTHER_HOST to any port {self.first}:{self.last}"
        self.shares = "memory of the host and of the GPU" if facts.cuda.devices else "memory"
        self.shm, self.free, self.disk = map(
            _size, (facts.shared_free_mb, facts.memory_free_mb, facts.disk_free_mb)
        )
        self.records_mb = RECORDS_MB * workers
        self.records, self.model = _size(self.records_mb), _size(model_mb)
        self.needed_mb = None if model_mb is None else VECTORS * model_mb * workers
        self.needed = "" if model_mb is None else f", at least {_size(self.needed_mb)} needed"
        self.extras = ", ".join(sorted(one for one, missing in facts.extras.items() if not missing)) or "none"
        missing = sorted(extra for extra, lacks in facts.extras.items() if lacks)
        first = f"pip install 'freewheel[{missing[0]}]' if you need it" if missing else ""
        self.missing = f"; not installed: {', '.join(missing)} ({first})" if missing else ""


def fits(version: str, bounds: str) -> bool:
    """Whether a version lies in a range such as ``>=2.8,<2.14``."""
    return SpecifierSet(bounds).contains(version, prereleases=True)


Rule = tuple[Callable[[Case], object], State, str, str]
"""When it applies, how bad that is, what is said (nothing: the usual), and what to do."""

CHECKS: dict[str, tuple[str, *tuple[Rule, ...]]] = {
    "python": ("{python}", (
        lambda c: not fits(c.python, c.f.python_range), PROBLEM, "",
        "Freewheel needs {f.python_range}: make a new virtual environment with such a Python.")),
    "torch": ("{f.torch}", (
        lambda c: not fits(c.f.torch, c.f.torch_range), PROBLEM, "",
        "Freewheel is tested with torch {f.torch_range}: pip install 'torch{f.torch_range}'")),
    "cuda": ("{why}",
        (lambda c: c.cuda.devices and c.cuda.problem is None, OK, "{cuda.built}: {devices}", ""),
        (lambda c: not c.cuda.built and not c.cuda.driver, OK, "none: training runs on the CPU", ""),
        (lambda c: not c.cuda.built, WARNING, "there is a driver, but this torch is built without CUDA",
         "Training runs on the CPU. Install a build of torch with CUDA; pytorch.org has the command."),
        (lambda c: not c.cuda.driver, OK,
         "torch is built for {cuda.built}; no driver here, training runs on the CPU", ""),
        # They may be hidden on purpose.
        (lambda c: NO_DEVICES in c.why, WARNING, "there is a driver, but no device for this process",
         "Training runs on the CPU. Is CUDA_VISIBLE_DEVICES right? In a container: is --gpus all given?"),
        (lambda c: "too old" in c.why, PROBLEM, "the NVIDIA driver is too old for this torch",
         "Update the driver, or install a torch for its CUDA (this one is built for {cuda.built})."),
        (lambda c: True, PROBLEM, "",
         "Is a device lost, or used by others alone? nvidia-smi shows what the driver sees; "
         "CUDA_VISIBLE_DEVICES leaves one out.")),
    "cores": ("{cores} for {workers}", (
        lambda c: c.n > c.f.cores, WARNING, "",
        "Workers take turns, so rates say little. Use a smaller -n or more hosts; --compute-ms of `freewheel "
        "compare` lets workers that share cores behave as if each had its own.")),
    "threads": ("OMP_NUM_THREADS is {f.omp}",
        (lambda c: c.f.omp is None, OK, "{fair} for each worker (OMP_NUM_THREADS is not set)", ""),
        (lambda c: c.omp == 0, PROBLEM, "", "Unset it, or set it to a whole number above 0."),
        (lambda c: c.omp * c.n > c.f.cores and c.omp > 1, WARNING,
         "OMP_NUM_THREADS is {f.omp}, with {workers} on {cores}",
         "Threads take cores from each other. Unset it, or set it to {fair}; freewheel run does so.")),
    "listening": ("possible on {f.bind}",
        (lambda c: c.f.bind_problem, PROBLEM, "not on {f.bind}", "{f.bind_problem}"),
        (lambda c: c.hosts > 1 and is_loopback(c.f.bind), WARNING,
         "on {f.bind}, where no other host gets to",
         "Give --bind this host's own address, here and to freewheel run.")),
    "port": ("",
        (lambda c: c.f.port_problem, PROBLEM, "{f.port} is not free", "{f.port_problem}"),
        (lambda c: c.f.port is not None, OK, "{f.port} is free", "")),
    "firewall": ("",
        (lambda c: c.afar and c.firewalls, WARNING, "seen: {firewalls}",
         "Workers listen on ports the system chooses, {first} to {last}. Let the other hosts in: {rule}"),
        (lambda c: c.afar, OK, "none seen (one may be elsewhere)", "")),
    "host name": ("", (
        lambda c: c.afar and is_loopback(c.f.name_address or ""), WARNING,
        "means {f.name_address} on this host itself",
        "As --master or MASTER_ADDR give this host's address, not its name.")),
    "links": ("",),  # a row for each: `_link`
    "open files": ("{f.soft_files:,} in a process, about {files:,} needed",
        (lambda c: c.f.soft_files >= 1 << 30, OK, "no limit", ""),
        (lambda c: c.f.soft_files >= c.files, OK, "", ""),
        (lambda c: c.f.hard_files >= c.files, PROBLEM, "",
         "In this shell, before the run: ulimit -n {files}"),
        (lambda c: True, PROBLEM, "",
         "The hard limit is {f.hard_files:,}. Have it raised (nofile in /etc/security/limits.conf, "
         "LimitNOFILE= of a service, --ulimit nofile= of a container), or use fewer workers.")),
    "windows": ("workers of this host can share {shares}",
        (lambda c: c.f.make_problem, PROBLEM, "memfd_create fails: {f.make_problem}",
         "Exchanges keep snapshots in such memory. Allow that call; a seccomp profile may forbid it."),
        (lambda c: c.f.open_problem, WARNING, "processes cannot open each other's: {f.open_problem}",
         "Workers of one host then exchange through sockets, which is slower. /proc must be mounted."),
        (lambda c: c.f.device_problem, WARNING, "GPU memory cannot be shared: {f.device_problem}",
         "Vectors of workers of this host then go through host memory, which is slower.")),
    "/dev/shm": ("{shm} free",
        (lambda c: c.f.shared_free_mb is None, WARNING, "is not there",
         "DataLoader needs it with num_workers: mount a tmpfs there."),
        (lambda c: c.f.shared_free_mb < SMALL_SHARED_MB, WARNING, "",
         "DataLoader passes batches through it with num_workers. For a container: --shm-size 2g")),
    "memory": ("{free} free{needed}",
        (lambda c: c.f.memory_free_mb is None, OK, "unknown", ""),
        (lambda c: c.needed_mb is not None and c.f.memory_free_mb < c.needed_mb, PROBLEM, "",
         "Each worker holds weights, gradients and two windows of {model}, beside its optimizer's "
         "state. Use fewer workers on this host.")),
    "disk": ("{disk} free for {f.folder}",
        (lambda c: c.f.folder_problem, PROBLEM, "{f.folder_problem}",
         "Give --folder one that can be written to, here and to a run."),
        (lambda c: c.f.disk_free_mb < c.records_mb, WARNING, "",
         "Records may take {records}, and checkpoints more. A full disk costs those, "
         "never training. Make room, or give --folder another place.")),
    "extras": ("installed: {extras}{missing}",),
}  # fmt: skip
"""What is looked at: what is said of it, and the rules, of which the first that applies counts."""


def diagnose(facts: Facts, workers: int, model_mb: float | None = None, tls: bool = False) -> list[Finding]:
    """All findings for so many workers on this host, and as many on each host measured."""
    case, found = Case(facts, workers, model_mb), []
    for what, (usual, *rules) in CHECKS.items():
        if what == "links":
            found += [_link(host, link, model_mb, tls) for host, link in facts.links.items()]
            continue
        _, state, said, advice = next((rule for rule in rules if rule[0](case)), (None, OK, "", ""))
        if value := said or usual:
            found.append(Finding(what, value.format(**vars(case)), state, advice.format(**vars(case))))
    return found


def _link(host: str, link: LinkFigure | str, model_mb: float | None, tls: bool) -> Finding:
    what = "loopback" if host == LOOPBACK else f"link to {host}"
    if isinstance(link, str):
        return Finding(what, "could not be measured", PROBLEM, link)
    slower = min(link.mbit_out, link.mbit_in)
    value = (
        f"{speed(link.mbit_out)} out, {speed(link.mbit_in)} in, {short(link.latency_ms, 2)} ms, "
        f"clock {round(link.clock_skew_ms):+d} ms"
    )
    if model_mb is not None:
        value += f"; {_size(model_mb)} take {short(8 * model_mb / slower, 2)} s"
    skew_ms = abs(link.clock_skew_ms)
    if tls and skew_ms > KEYS_SKEW_MS:
        return Finding(what, value, PROBLEM, f"Keys may not be valid on both clocks. {CLOCKS}")
    advice = []
    if skew_ms > SKEW_MS + link.latency_ms:
        advice.append(f"Times in records of the two hosts cannot be compared. {CLOCKS}")
    if slower < THIN_MBIT:
        advice.append("A thin link: exchange rarely (sasgd, nodelay_free) or with wire=bf16 (adpsgd).")
    if link.latency_ms > LATE_MS:
        advice.append("A long way: avoid strategies that wait for all or for a server in every step.")
    return Finding(what, value, WARNING if advice else OK, " ".join(advice))


def _size(mb: float | None) -> str:
    return "" if mb is None else f"{short(mb / 1000)} GB" if mb >= 1000 else f"{short(mb)} MB"
