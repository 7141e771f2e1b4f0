"""Looking whether a peer's process still takes connections."""

from __future__ import annotations

import socket
import struct

from freewheel.runtime.membership.rendezvous import Rendezvous


def test_a_connection_that_was_reset_is_closed_and_says_no():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = object.__new__(Rendezvous)
        found._probes = {}
        found.look_up = lambda peer: listener.getsockname()[:2]
        assert found.listens(1)
        probe = found._probes[1]
        theirs, _ = listener.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()  # with a reset, as the system does it for a process that was killed
        assert not found.listens(1)
        assert probe.fileno() == -1
