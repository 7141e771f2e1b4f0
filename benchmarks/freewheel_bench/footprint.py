"""What processes take up, by the kernel's count, and what they should not have left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
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

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def footprint(without: Collection[int]) -> Footprint:
    """Of this process and all it has started, less those that are named with their children."""
    children: dict[int, list[int]] = {}
    for path in PROCESSES.glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(path.parent.name))
    counted, found = [os.getpid()], Footprint(0, 0, 0, 0.0)
    for pid in counted:
        counted += [child for child in children.get(pid, ()) if child not in without]
        try:
            threads = len(list((PROCESSES / str(pid) / "task").iterdir()))
            descriptors = len(list((PROCESSES / str(pid) / "fd").iterdir()))
            pages = int((PROCESSES / str(pid) / "statm").read_text().split()[1])
        except OSError:
            continue
        memory_mb = found.memory_mb + pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        found = Footprint(
            found.processes + 1, found.threads + threads, found.descriptors + descriptors, memory_mb
        )
    return found


def shared_memory() -> set[str]:
    """The names in shared memory now."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def left_behind(lives: Sequence[Life], before: set[str]) -> list[str]:
    """Processes and shared memory that should have gone with their workers."""
    found = []
    for life in lives:
        try:
            os.killpg(life.process.pid, 0)
            found.append(f"process group {life.process.pid}")
        except ProcessLookupError:
            pass
    pids = {str(life.process.pid) for life in lives}
    new = (name for name in shared_memory() - before if pids & set(name.replace("-", "_").split("_")))
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
