"""A run's entries in its store, each sealed with the run's secret, for this run and under this name.

Everybody who reaches a store can write to it. An entry without a valid seal is never used: `get` raises,
`read` takes it for absent and warns once. So an intruder can keep workers from joining, and nothing else.
"""

from __future__ import annotations

import copy
import json
import logging
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from freewheel.fabric.secret import Forged, derive, seal, unseal

OPTIONS = "freewheel/options"  # what a launcher tells all workers of a run
CALLS = ("check", "get", "set", "compare_set", "delete_key")

log = logging.getLogger("freewheel")


@dataclass(frozen=True)
class Options:
    """What the launcher tells every worker of a run; the store has it as `text`."""

    run: str = ""
    folder: str | Path | None = None
    bind: str | None = None
    tls: str | Path | None = None
    typed: str | None = None  # the command line, for the records
    console: bool = False
    tensorboard: str | Path | None = None
    workers: int = 0  # the run begins with so many; 0: WORLD_SIZE
    most: int = 0  # it may have so many at once; 0: no more than it begins with

    @classmethod
    def read(cls, text: str) -> Options:
        """The options in a text; unknown ones, of another version, are left out."""
        return cls(**{key: value for key, value in json.loads(text).items() if key in cls.__annotations__})

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    def whole(self) -> Options:
        """With absolute paths, for workers in other folders."""
        folder, tls, board = (
            str(Path(path).resolve()) if path else None for path in (self.folder, self.tls, self.tensorboard)
        )
        return replace(self, folder=folder, tls=tls, tensorboard=board)


def _call(name: str) -> Any:
    return lambda self, *words: self.ask(name, *words)


class Asked:
    """A store whose calls, those used of torch's, all go through `ask`."""

    check, get, set, compare_set, delete_key = map(_call, CALLS)


Store = TorchStore | Asked


class Entries:
    """A store whose entries are sealed and named with a prefix."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._prefix = store, ""
        self._secret, self._key = secret, derive(secret, "store")
        self._warned: set[str] = set()

    def of_run(self, run: str) -> Entries:
        """The entries of one run alone: several may share a secret."""
        return self._but(_key=derive(self._secret, "store", run))

    def under(self, prefix: str) -> Entries:
        return self._but(_prefix=f"{self._prefix}{prefix}/")

    def _but(self, **changed: object) -> Entries:
        made = copy.copy(self)
        vars(made).update(changed)
        return made

    def check(self, key: str) -> bool:
        """Whether an entry is there, sealed or not."""
        return bool(self._store.check([self._prefix + key]))

    def get(self, key: str) -> str:
        """Wait for an entry; Forged: its seal is not this run's."""
        name = self._prefix + key
        return unseal(self._key, name, bytes(self._store.get(name)))

    def read(self, key: str) -> str | None:
        """The entry, without waiting; None: there is none with this run's seal."""
        if not self.check(key):
            return None
        try:
            return self.get(key)
        except Forged as error:
            if (name := self._prefix + key) not in self._warned:
                self._warned.add(name)
                log.warning("%s", error)
            return None

    def set(self, key: str, text: str) -> None:
        name = self._prefix + key
        self._store.set(name, seal(self._key, name, text))

    def compare_set(self, key: str, expected: str, text: str) -> str:
        """Write if the entry is `expected` (empty: missing); return what it is then."""
        name = self._prefix + key
        before = seal(self._key, name, expected) if expected else ""
        found = self._store.compare_set(name, before, seal(self._key, name, text))
        return unseal(self._key, name, bytes(found))

    def number(self, key: str) -> int | None:
        text = self.read(key)
        return int(text.split()[0]) if text is not None else None

    def add(self, key: str, number: int) -> int:
        """Add to a count and return the sum; a random word tells concurrent equal sums apart."""
        before = self.get(key) if self.check(key) else ""
        while True:
            total = int(before.split()[0]) + number if before else number
            after = f"{total} {secrets.token_hex(4)}"
            found = self.compare_set(key, before, after)
            if found == after:
                return total
            before = found if found != before else ""  # it was deleted meanwhile

    def delete_key(self, key: str) -> None:
        self._store.delete_key(self._prefix + key)
