"""What a run has written in its store: every entry sealed with the run's secret, under its own name.

A store lets everybody write who reaches it. An entry that is not sealed is never used: `get` says so with an
error, `read` takes it for absent and warns once. Who reaches the store can so keep workers from joining, and
nothing else. What is sealed for one run, or under one name, does not fit another.
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
    """What the launcher tells every worker of a run."""

    run: str = ""
    folder: str | Path | None = None
    bind: str | None = None
    tls: str | Path | None = None
    typed: str | None = None  # the command line, for the records
    console: bool = False
    tensorboard: str | Path | None = None
    workers: int = 0  # how many the run begins with; 0: as many as the environment says
    most: int = 0  # how many it may have at once; 0: no more than it begins with

    @classmethod
    def read(cls, text: str) -> Options:
        """What the store has; what an older or newer Freewheel says more is left out."""
        return cls(**{key: value for key, value in json.loads(text).items() if key in cls.__annotations__})

    @property
    def text(self) -> str:
        """As the store has it."""
        return json.dumps(asdict(self))

    def whole(self) -> Options:
        """The same with whole paths, for workers that may be in another folder."""
        folder, tls, board = (
            str(Path(path).resolve()) if path else None for path in (self.folder, self.tls, self.tensorboard)
        )
        return replace(self, folder=folder, tls=tls, tensorboard=board)


def _call(name: str) -> Any:
    return lambda self, *words: self.ask(name, *words)


class Asked:
    """A store that has one way for what is called of torch's, `ask`."""

    check, get, set, compare_set, delete_key = map(_call, CALLS)


Store = TorchStore | Asked


class Entries:
    """A store as a run uses it."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._prefix = store, ""
        self._secret, self._key = secret, derive(secret, "store")
        self._warned: set[str] = set()

    def of_run(self, run: str) -> Entries:
        """The same for what belongs to one run alone: a secret may serve for several."""
        return self._but(_key=derive(self._secret, "store", run))

    def under(self, prefix: str) -> Entries:
        """The same, all names beginning with a prefix."""
        return self._but(_prefix=f"{self._prefix}{prefix}/")

    def _but(self, **changed: object) -> Entries:
        made = copy.copy(self)
        vars(made).update(changed)
        return made

    def check(self, key: str) -> bool:
        """Whether something is there, sealed or not."""
        return bool(self._store.check([self._prefix + key]))

    def get(self, key: str) -> str:
        """What is there; Forged if nobody of this run has written it."""
        name = self._prefix + key
        return unseal(self._key, name, bytes(self._store.get(name)))

    def read(self, key: str) -> str | None:
        """What is there; None: nothing, or nothing of this run's."""
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
        """Write."""
        name = self._prefix + key
        self._store.set(name, seal(self._key, name, text))

    def compare_set(self, key: str, expected: str, text: str) -> str:
        """Write where this is there (nothing, if it is empty); what is there then."""
        name = self._prefix + key
        before = seal(self._key, name, expected) if expected else ""
        found = self._store.compare_set(name, before, seal(self._key, name, text))
        return unseal(self._key, name, bytes(found))

    def number(self, key: str) -> int | None:
        """A count that is there."""
        text = self.read(key)
        return int(text.split()[0]) if text is not None else None

    def add(self, key: str, number: int) -> int:
        """Count; the sum. Two who add the same at once are told apart by a random word."""
        before = self.get(key) if self.check(key) else ""
        while True:
            total = int(before.split()[0]) + number if before else number
            after = f"{total} {secrets.token_hex(4)}"
            found = self.compare_set(key, before, after)
            if found == after:
                return total
            before = found if found != before else ""  # it was deleted meanwhile

    def delete_key(self, key: str) -> None:
        """Remove."""
        self._store.delete_key(self._prefix + key)
