"""The store of a benchmark of faults, as a launcher hosts it, in a process of its own that can be killed."""

from __future__ import annotations

import os
import threading

from freewheel.fabric.secret import of_environment
from freewheel.runtime.membership.entries import OPTIONS, Entries
from freewheel.runtime.membership.hosts import host_store
from freewheel_bench.parent import Parent, job


def main() -> None:
    parent, asked = Parent(), job()
    store, *_ = host_store(asked["at"])
    if asked["options"]:
        Entries(store, of_environment(os.environ)).set(OPTIONS, asked["options"])
    parent.say(up=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
