"""What processes take up, by the kernel's count, and what they should not have left."""

from __future__ import annotations

import contextlib
import operator
import os
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from freewheel_bench.namespaces import Network
from freewheel_bench.workers import Life

PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Footprint:
    """Of several processes together."""

    processes: int
    threads: int
    descriptors: int
    memory_mb: float

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(*map(operator.sub, astuple(self), astuple(other)))

    def __str__(self) -> str:
        return (
            f"{self.processes} processes, {self.threads} threads, {self.descriptors} descriptors, "
            f"{self.memory_mb:.0f} MB"
        )


def footprint(pids: Iterable[int]) -> Footprint:
    """Of these processes; one that has ended counts for nothing."""
    found = Footprint(0, 0, 0, 0.0)
    for pid in pids:
        folder = PROCESSES / str(pid)
        with contextlib.suppress(OSError):
            threads, descriptors = (len(list((folder / name).iterdir())) for name in ("task", "fd"))
            pages = int((folder / "statm").read_text().split()[1])
            found += Footprint(1, threads, descriptors, pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return found


def family(without: Collection[int] = ()) -> list[int]:
    """This process and all it has started, less those that are named, with their children."""
    children: dict[int, list[int]] = {}
    for path in PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [os.getpid()]
    for pid in found:
        found += [child for child in children.get(pid, ()) if child not in without]
    return found


def shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def mark() -> str:
    """Put into the environment of all that is started from now on: the numbers of processes return."""
    os.environ["FREEWHEEL_BENCH"] = str(os.getpid())
    return f"FREEWHEEL_BENCH={os.getpid()}"


def left_behind(lives: Sequence[Life], before: set[str], mark: str) -> list[str]:
    """Processes and shared memory that should have gone with their workers."""
    groups, found = {life.process.pid for life in lives}, []
    for folder in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = (
                os.getpgid(int(folder.name)) in groups and mark.encode() in (folder / "environ").read_bytes()
            )
            found += [f"process {folder.name}"] if ours else []
    names = set(map(str, groups))
    new = (name for name in shared_memory() - before if names & set(name.replace("-", "_").split("_")))
    return found + [f"shared memory {name}" for name in new]


def left_standing(network: Network | None) -> list[str]:
    """Namespaces and links that should have gone with their network."""
    if network is None:
        return []
    tag, found = network.bridge[2:], []
    for what, command in (("namespace", ["ip", "netns", "list"]), ("link", ["ip", "-brief", "link"])):
        shown = subprocess.run(command, capture_output=True, text=True).stdout
        found += [f"{what} {line.split()[0]}" for line in shown.splitlines() if tag in line]
    return found
