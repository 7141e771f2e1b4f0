"""``freewheel store``: the meeting place of a run that no launcher of ours starts."""

from __future__ import annotations

import signal

from freewheel.cli.options import argument


def store(address: str = argument(..., "Where to listen.", metavar="HOST:PORT")) -> None:
    """Hold the place where workers meet, for torchrun, Slurm or Kubernetes; Ctrl-C or SIGTERM ends it.

    Without it worker 0 holds the store: started again, it would begin a second run. Training goes on when
    the store is lost; nobody can join until it is back.
    """
    from freewheel.runtime.membership.hosts import host_store
    from freewheel.runtime.membership.place import STORE

    held, host, port = host_store(address)
    print(f"Workers: {STORE}={host}:{port}, RANK, WORLD_SIZE and the same FREEWHEEL_SECRET_FILE", flush=True)
    wanted = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    signal.sigwait(wanted)
    del held
