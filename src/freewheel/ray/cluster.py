"""A Ray cluster: being connected with it, and how many workers it has room for."""

from __future__ import annotations

import logging
import os
import re
import socket
import time

import ray

from freewheel.errors import ConfigError, first_line

ANSWER_S = 5.0
FREED_S = 3.0
UNIT = 10_000
"""Ray counts resources in such parts."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client begins HTTP/2, which gRPC and so Ray speaks: this, and empty settings."""


def connect(address: str | None) -> None:
    """Be connected with a cluster."""
    if ray.is_initialized():
        return
    try:
        check_answer(address)
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    except (Exception, SystemExit) as error:  # whatever Ray says; SystemExit: it has tried for minutes
        raise ConfigError(
            f"no Ray cluster answers at {address or 'this machine'}: {first_line(error)}. Start one with "
            "`ray start --head`, or leave the address out."
        ) from None


def check_answer(address: str | None) -> None:
    """Raise OSError where HOST:PORT is no Ray: Ray itself would try for minutes before it said so."""
    found = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address or "")
    if found is None or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    with socket.create_connection((found[1], int(found[2])), timeout=ANSWER_S) as connection:
        connection.sendall(PREFACE)
        if connection.recv(9)[3:4] != b"\x04":  # its own settings
            raise ConnectionError("what listens there is something else")


def room(needs: dict[str, float], wanted: int) -> int:
    """How many workers fit the nodes that are there, beside what others use of them.

    What was in use a moment ago is not known to be free at once: asked again for a while where it matters.
    """
    end_s = time.monotonic() + FREED_S
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit, free = sum(_fits(has, needs) for has in nodes), _fits(ray.available_resources(), needs)
        if free >= min(fit, wanted) or time.monotonic() > end_s:
            return min(fit, free)
        time.sleep(0.1)


def _fits(has: dict[str, float], needs: dict[str, float]) -> int:
    return min(
        (round(has.get(key, 0) * UNIT) // round(need * UNIT) for key, need in needs.items()), default=1 << 20
    )
