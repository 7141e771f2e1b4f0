"""Keeps a worker in the address book: the store may go and come back empty while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from freewheel.fabric.base import Notice
from freewheel.runtime.rendezvous import REGISTER_S, Rendezvous

log = logging.getLogger("freewheel")


class Registrar:
    """Looks after this worker's entry, in a thread of its own: where a network is cut, a store hangs."""

    def __init__(
        self, rendezvous: Rendezvous, lives: Callable[[], Mapping[int, int]], notice: Notice
    ) -> None:
        self._rendezvous, self._lives, self._notice = rendezvous, lives, notice
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-registrar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        there, place = True, self._rendezvous.place
        while not self._end.wait(REGISTER_S):
            found = self._rendezvous.register(self._lives())
            if there != found:
                what = "answers again" if found else "does not answer: nobody can join"
                text = f"the rendezvous at {place.host}:{place.port} {what}"
                self._notice("store back" if found else "store lost", place.rank, text)
            if there and not found:
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
