"""Mutated frames against the real reader: python benchmarks/fuzz.py [--frames 1000000] [--seed 0]

Frames of every kind are damaged (bits turned, bytes overwritten, cut off, doubled, put together from two,
vectors with numbers that are not finite) and read by a worker's fabric as if they came from a member. Each
must be refused or end the connection; none may crash the reader, be delivered, or take memory that was not
announced within bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import struct
import sys
import time
from collections import Counter

import torch
from rich.progress import track

from freewheel.fabric import frames
from freewheel.fabric.connection import Connection
from freewheel.fabric.frames import BadFrame, Kind
from freewheel.fabric.handshake import Identity
from freewheel.fabric.tcp import TcpFabric, _Left
from freewheel.observe.counters import Counters

LONGEST = 64
ME = Identity(bytes(range(16)), 0, 4, 1, "fuzz", "model", LONGEST, place="here")
PEER = 1


class Bytes:
    """A transport on which given bytes come, and then nothing."""

    local = True
    heard_s = 0.0

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, into: memoryview) -> None:
        """The next ones."""
        if len(into) > len(self._data):
            raise EOFError("the connection was closed")
        into[:], self._data = self._data[: len(into)], self._data[len(into) :]

    async def write(self, data: memoryview | bytes) -> None:
        """Nobody reads it."""

    def write_now(self, data: bytes) -> int:
        """Nobody reads it."""
        return len(data)

    def blocking(self) -> None:
        """Short vectors only."""

    def close(self) -> None:
        """Nothing is open."""


def good(rng: random.Random) -> bytes:
    """A frame a member may send."""
    kind = rng.choice(list(Kind))
    tag = rng.choice(
        [
            ("exchange", 1, rng.randrange(2**40)),
            ("call",),
            ("run", "copy", 3),
            ("hello", "fuzz", "model", "here", "fp32"),
        ]
    )
    note = tuple(rng.uniform(-1e6, 1e6) for _ in range(rng.randrange(6)))
    if kind is Kind.NEAR:
        note = (1.0, float(rng.randrange(2**48)), float(rng.randrange(2**22)), 4.0, 7.0, 5.0)
    numel = rng.randrange(LONGEST) if kind is Kind.MESSAGE and rng.random() < 0.7 else 0
    dtype = torch.float32 if numel else None
    head = frames.pack(kind, ME.run, PEER, 1, tag, note, dtype, numel)
    return head + struct.pack(f"={numel}f", *(rng.uniform(-1, 1) for _ in range(numel)))


def damaged(rng: random.Random) -> bytes:
    """The same, damaged: never the vector's own finite numbers alone, which nobody can tell from others."""
    whole = good(rng)
    head = frames.HEADER.size
    frame = frames.parse(whole[:head], ME.run, LONGEST)
    end = head + frame.rest
    data = bytearray(whole)
    way = rng.randrange(6)
    if way == 0:  # bits
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    elif way == 1:  # bytes
        at = rng.randrange(end)
        count = min(rng.randrange(1, 9), end - at)
        data[at : at + count] = rng.randbytes(count)
    elif way == 2:  # the end is missing
        del data[rng.randrange(len(data)) :]
    elif way == 3:  # something in between
        at = rng.randrange(1, end)
        data[at:at] = rng.randbytes(rng.randrange(1, 32))
    elif way == 4:  # half of this, half of that
        at = rng.randrange(1, end)
        data[at:] = good(rng)[at // 2 :]
    elif frame.numel:  # numbers that are none
        at = end + 4 * rng.randrange(frame.numel)
        data[at : at + 4] = struct.pack("=f", rng.choice([math.nan, math.inf, -math.inf]))
    else:
        data[rng.randrange(end)] ^= 0xFF
    # What begins with the whole frame is that frame, and something after it.
    return bytes(data) if not data.startswith(whole) else damaged(rng)


async def fuzz(count: int, seed: int) -> Counter[str]:
    """Read so many; how they ended."""
    rng, found = random.Random(seed), Counter[str]()
    fabric = TcpFabric(ME, Counters())
    delivered: list[object] = []
    fabric.deliver = delivered.append  # type: ignore[method-assign, assignment]
    for _ in track(range(count), "frames", disable=not sys.stderr.isatty()):
        link = Connection(Bytes(damaged(rng)), PEER, 1, "fuzz", PEER)
        link.kind = "host"
        try:
            await fabric._read(link)
        except (BadFrame, EOFError, OSError) as error:
            found["refused" if isinstance(error, BadFrame) else "cut off"] += 1
        except _Left:
            found["APPLIED"] += 1
        except Exception as error:
            found[f"CRASHED: {type(error).__name__}: {error}"] += 1
        if delivered:
            found["APPLIED"] += 1
            delivered.clear()
    await fabric.close()
    return found


def main() -> int:
    """Fuzz and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    found = asyncio.run(fuzz(given.frames, given.seed))
    for how, count in found.most_common():
        print(f"  {count:>9,}  {how}")
    bad = sum(count for how, count in found.items() if how not in ("refused", "cut off"))
    print(f"  {given.frames:,} damaged frames in {time.monotonic() - begin:.0f} s: {bad} crashed or applied")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
