"""Keeps a worker in the address book: the store may go and come back empty while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from freewheel.runtime.rendezvous import REGISTER_S, Rendezvous

log = logging.getLogger("freewheel")


class Registrar:
    """Looks after this worker's entry, in a thread of its own: where a network is cut, a store hangs."""

    def __init__(self, rendezvous: Rendezvous, lives: Callable[[], Mapping[int, int]]) -> None:
        self._rendezvous, self._lives = rendezvous, lives
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-registrar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        there = True
        while not self._end.wait(REGISTER_S):
            found = self._rendezvous.register(self._lives())
            if there and not found:
                place = self._rendezvous.place
                log.warning(
                    "the rendezvous at %s:%d does not answer; training goes on, nobody can join",
                    place.host,
                    place.port,
                )
            there = found

    def end(self) -> None:
        """Stop looking."""
        self._end.set()
        self._thread.join(timeout=1.0)
