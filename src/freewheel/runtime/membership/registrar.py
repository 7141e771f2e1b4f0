"""Keeps a worker in the address book, and lets it meet those in it whom it has missed.

The store may go and come back empty while training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from freewheel.errors import PeerLost
from freewheel.runtime.membership.rendezvous import REGISTER_S, Rendezvous

if TYPE_CHECKING:
    from freewheel.runtime.worker.agent import Agent

log = logging.getLogger("freewheel")


class Registrar:
    """Looks after this worker's entry, in a thread of its own: where a network is cut, a store hangs."""

    def __init__(self, rendezvous: Rendezvous, agent: Agent) -> None:
        self._rendezvous, self._agent = rendezvous, agent
        rendezvous.hurry()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="freewheel-registrar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        there, place = True, self._rendezvous.place
        while not self._end.wait(REGISTER_S) and not self._agent.events.muted:
            fabric, before = self._agent.fabric, there
            missed = self._rendezvous.register(dict(fabric.lives), fabric.members)
            if missed:
                with contextlib.suppress(RuntimeError):  # this worker has left meanwhile
                    self._agent.begin(self._meet(missed))
            if (there := self._rendezvous.there) and (refused := self._rendezvous.refused(fabric.members)):
                self._agent.lack(refused)
            if there != before:
                what = "answers again" if there else "does not answer: nobody can join"
                text = f"the rendezvous at {place.where} {what}"
                self._agent.events.note("store back" if there else "store lost", place.rank, text)
            if before and not there:
                log.warning(
                    "the rendezvous at %s does not answer; training goes on, nobody can join", place.where
                )

    async def _meet(self, missed: Mapping[int, tuple[str, int]]) -> None:
        """Connect with workers that came while this one could not be found."""
        fabric = self._agent.fabric
        for peer, where in missed.items():
            with contextlib.suppress(PeerLost):
                if peer not in fabric.members:
                    await fabric.connect(peer, *where)

    def end(self) -> None:
        """Stop looking."""
        self._end.set()
        self._thread.join(timeout=1.0)
