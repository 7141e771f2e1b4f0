"""A worker's place in its run, read from the environment or given as an object (`give`)."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Protocol

from freewheel.errors import ConfigError
from freewheel.fabric import secret
from freewheel.runtime.membership.entries import Store

# Set by our launcher for its workers: its store's address (with another store they are not its own), keys.
LAUNCHED, KEYS = "FREEWHEEL_LAUNCHED", "FREEWHEEL_TLS"
STORE = "FREEWHEEL_STORE"  # HOST:PORT of a store that `freewheel store` holds, not a launcher or worker 0
RUN, BIND = "FREEWHEEL_RUN", "FREEWHEEL_BIND"  # which of a store's runs; attach's `bind`
# RANK and WORLD_SIZE of Slurm and of an Indexed Job of Kubernetes.
SCHEDULERS = (("SLURM_PROCID", "SLURM_NTASKS"), ("JOB_COMPLETION_INDEX", "WORLD_SIZE"))
HIDES = "FREEWHEEL_HIDE_RANKS"  # set where another library would start processes of its own if it saw ranks
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Meeting(Protocol):
    """An engine's meeting place, instead of a TCPStore; `str` of it says where it is, for people."""

    def connect(self, timeout_s: float) -> Store:
        """Connect; this and all calls raise OSError or RuntimeError if nobody answers."""


@dataclass(frozen=True)
class Place:
    """A worker's place in its run."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    hosted: bool = False  # whether a launcher holds the store
    attempt: str = "0"  # of torchrun, which restarts all workers after a failure; or the name of the run
    launched: bool = False  # by our launcher: the store has the run's options before it has workers
    secret: bytes = field(default=b"", repr=False)  # the run's; empty: everybody is believed
    # Keys, the address to listen on and the records' folder, if whoever started this worker knows them.
    tls: str | None = None
    bind: str | None = None
    folder: str | None = None
    life: int = 0  # how often this worker was started, if that is counted
    meeting: Meeting | None = None  # None: a TCPStore at `host` and `port`

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """An engine's, or by RANK, WORLD_SIZE and MASTER_*, or by a scheduler's variables; else alone."""
        if _given is not None and environment is os.environ:
            return _given
        environment = dict(shown(environment))
        for rank_name, size_name in SCHEDULERS:
            given = environment.get(size_name, "1")
            if "RANK" not in environment and rank_name in environment and given != "1":
                environment.update(RANK=environment[rank_name], WORLD_SIZE=given)
        if environment.get(STORE):
            host, store_port = parse_address(environment[STORE], STORE)
            environment.update(MASTER_ADDR=host, MASTER_PORT=str(store_port))
        known = {"RANK", "WORLD_SIZE"} & environment.keys()
        if not known and not any(environment.get(name) for name in (STORE, "JOB_COMPLETION_INDEX")):
            return cls()
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environment.get(name)]
        if missing and environment.get("WORLD_SIZE") != "1":
            raise ConfigError(
                f"the environment has no {', '.join(missing)}. Start workers with `freewheel run` or "
                f"torchrun, or set {', '.join(names)}; with WORLD_SIZE=1 a script trains alone."
            )
        numbers = (_whole(environment, name) for name in (*names[:2], "MASTER_PORT", "LOCAL_WORLD_SIZE"))
        rank, world_size, port, local_world_size = numbers
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={world_size} in the environment do not fit: ranks go from 0 to "
                "WORLD_SIZE - 1."
            )
        host = environment.get("MASTER_ADDR", "127.0.0.1")
        launched = environment.get(LAUNCHED) == f"{host}:{port}"
        return cls(
            rank,
            world_size,
            local_world_size,
            host,
            port,
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or STORE in environment,
            environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get(RUN, "0"),
            launched,
            secret.of_environment(environment),
            environment.get(KEYS) if launched else None,
            environment.get(BIND) or None,
        )

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}" if self.meeting is None else str(self.meeting)

    def loopback(self) -> str:
        """The address to listen on if none is given; refuses a run that may span hosts."""
        # A machine's own name may mean loopback on that machine, and something else on others.
        if self.local_world_size == self.world_size or is_loopback(self.host):
            return "127.0.0.1"
        raise ConfigError(
            f"this run may span machines (MASTER_ADDR={self.host}), and workers listen on loopback "
            'unless told otherwise. Give attach bind="auto" (the address that reaches MASTER_ADDR) or an '
            "address of this machine, or start with `freewheel run --bind ADDRESS`."
        )


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address; an unknown name counts as another host."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def address_for(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def hide(environment: MutableMapping[str, str]) -> None:
    for name in RANKS:
        if name in environment:
            environment[f"FREEWHEEL_{name}"] = environment.pop(name)


def shown(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with hidden ranks under their usual names, unless others were set since."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return environment
    hidden = {name: environment[key] for name in RANKS if (key := f"FREEWHEEL_{name}") in environment}
    return {**environment, **hidden}


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this worker on its host, for the choice of a device."""
    return _whole({"LOCAL_RANK": environment.get("SLURM_LOCALID", "0"), **shown(environment)}, "LOCAL_RANK")


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number.")
    return int(text)


def parse_address(text: str, name: str = "master", default: int | None = None) -> tuple[str, int]:
    """Read HOST:PORT, or HOST if there is a default; an IPv6 address has brackets."""
    bare = ":" not in text or text.endswith("]") or (text.count(":") > 1 and text[0] != "[")
    if text and bare and default is not None:
        return text.strip("[]"), default
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"cannot read {name} {text!r}: write HOST:PORT, as in 10.0.0.1:29500.")
    return host, int(port)


_given: Place | None = None


def give(place: Place | None) -> None:
    """Set this process's place before its script runs; None: the environment says it."""
    global _given
    _given = place
