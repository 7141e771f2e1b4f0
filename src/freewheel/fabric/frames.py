"""What travels over a connection: a header that is checked before anything else is read.

    header   magic, protocol, kind, dtype, lengths of tag and note, sender, incarnation, numbers
    tag      JSON, a list of words and whole numbers
    note     numbers (doubles)
    seal     of all before it and of how many frames went before; see fabric/secret.py
    vector   raw numbers, in pieces; see fabric/transfers.py

A bad header ends the connection before the rest is read; a wrong seal, before tag and note are parsed.
"""

import enum
import hmac
import json
import struct
from dataclasses import dataclass

import torch

from freewheel.fabric.base import BYTES_PIECE, Note, Tag
from freewheel.fabric.secret import SEAL_BYTES, Seals

MAGIC = b"FWHL"
PROTOCOL = 7
HEADER = struct.Struct("!4sBBBxHHIIQ")
TAG_BYTES = 512
NOTES = 1 << 15

DTYPES = (None, torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.uint8)


class Kind(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1  # the first one in both directions
    REFUSE = 2  # instead of a hello: the tag says why
    MESSAGE = 3
    PING = 4  # a heartbeat
    BYE = 5  # I leave; the tag says why
    NEAR = 6  # a message whose vector lies in a window: the end of its note says where (fabric/windows.py)
    READ = 7  # I have read the window with this number
    SEES = 8  # the second frame in both directions: which kinds of the other's windows can be opened


class BadFrame(Exception):
    """Bytes that are no frame of this run; the message says what is wrong with them."""


class Crossed(BadFrame):
    """Two workers have called each other at once, and one call is enough."""


@dataclass(slots=True)
class Frame:
    """A frame's header."""

    kind: Kind
    sender: int
    incarnation: int
    dtype: torch.dtype | None
    numel: int
    tag_bytes: int
    notes: int
    head: bytes  # as it came

    @property
    def rest(self) -> int:
        return self.tag_bytes + 8 * self.notes + SEAL_BYTES


def pack(
    kind: Kind,
    sender: int,
    incarnation: int,
    tag: Tag = (),
    note: Note = (),
    dtype: torch.dtype | None = None,
    numel: int = 0,
) -> bytes:
    """A frame up to its seal."""
    words = json.dumps(tag, separators=(",", ":")).encode() if tag else b""
    if len(words) > TAG_BYTES or len(note) > NOTES:
        raise ValueError(f"a tag of {len(words)} bytes and a note of {len(note)} numbers do not fit a frame")
    sizes = len(words), len(note), sender, incarnation, numel
    head = HEADER.pack(MAGIC, PROTOCOL, kind, DTYPES.index(dtype), *sizes)
    return head + words + struct.pack(f"!{len(note)}d", *note)


def parse(head: bytes, longest: int) -> Frame:
    """Check a header; nothing of this run has a vector of more than `longest` numbers."""
    magic, protocol, kind, code, tag_bytes, notes, sender, incarnation, numel = HEADER.unpack(head)
    check_protocol(magic, protocol)
    if not 1 <= kind <= len(Kind):
        raise BadFrame(f"it sent a frame of unknown kind {kind}")
    if tag_bytes > TAG_BYTES or notes > NOTES:
        raise BadFrame(f"it sent a tag of {tag_bytes} bytes and a note of {notes} numbers")
    if code >= len(DTYPES):
        raise BadFrame(f"it sent numbers of unknown type {code}")
    dtype = DTYPES[code]
    longest = BYTES_PIECE if dtype is torch.uint8 else longest
    if numel > longest or (numel and dtype is None):
        raise BadFrame(f"it sent a vector of {numel} numbers, where the longest of this run has {longest}")
    return Frame(Kind(kind), sender, incarnation, dtype, numel, tag_bytes, notes, head)


def check_protocol(magic: bytes, protocol: int) -> None:
    if magic != MAGIC:
        raise BadFrame("it does not speak Freewheel's protocol")
    if protocol != PROTOCOL:
        raise BadFrame(f"it speaks protocol {protocol}, not {PROTOCOL}: another version of freewheel")


def parse_rest(frame: Frame, rest: bytes, seals: Seals) -> tuple[Tag, Note]:
    """Check the seal; tag and note."""
    if not hmac.compare_digest(rest[-SEAL_BYTES:], seals.next(frame.head + rest[:-SEAL_BYTES])):
        raise BadFrame("it sent a frame that is damaged, or not the next one of this connection")
    try:
        words = json.loads(rest[: frame.tag_bytes]) if frame.tag_bytes else []
    except (ValueError, RecursionError):
        raise BadFrame("it sent a tag that is not JSON") from None
    if not isinstance(words, list) or not all(type(word) in (str, int) for word in words):
        raise BadFrame("it sent a tag that is not a list of words and whole numbers")
    if not all(str(word).isprintable() for word in words):  # what is logged must stay one line
        raise BadFrame("it sent a tag with characters that cannot be printed")
    return tuple(words), struct.unpack(f"!{frame.notes}d", rest[frame.tag_bytes : -SEAL_BYTES])
