"""Keeps a worker in the address book, and lets it meet those in it whom it has missed.

The store may go and come back empty while training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from freewheel.errors import PeerLost
from freewheel.fabric.tcp import TcpFabric
from freewheel.runtime.membership.rendezvous import REGISTER_S, Rendezvous
from freewheel.runtime.worker.agent import Events

log = logging.getLogger("freewheel")


async def stay_registered(
    rendezvous: Rendezvous, fabric: TcpFabric, events: Events, lack: Callable[[Mapping[int, str]], None]
) -> None:
    """Look after this worker's entry until it leaves; `lack` is told who was not let into the run.

    The store is asked in threads: where a network is cut, it hangs.
    """
    rendezvous.hurry()
    there, where = True, rendezvous.place.where
    while True:
        await asyncio.sleep(REGISTER_S)
        if events.muted:
            return
        before, members = there, fabric.members
        missed = await asyncio.to_thread(rendezvous.register, dict(fabric.lives), members)
        for peer, address in missed.items():  # they came while this one could not be found
            with contextlib.suppress(PeerLost):
                if peer not in fabric.members:
                    await fabric.connect(peer, *address)
        if there := rendezvous.there:
            lack(await asyncio.to_thread(rendezvous.refused, fabric.members))
        if there != before:
            what = "answers again" if there else "does not answer; training goes on, nobody can join"
            text = f"the rendezvous at {where} {what}"
            events.note("store back" if there else "store lost", rendezvous.place.rank, text)
            if not there:
                log.warning("%s", text)
