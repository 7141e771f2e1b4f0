"""Frames: what is packed is read again, and nothing else is ever taken for a frame."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freewheel.fabric import frames
from freewheel.fabric.frames import BadFrame, Kind, pack, parse
from freewheel.fabric.handshake import Identity
from freewheel.fabric.secret import Seals

KEY = bytes(range(16))
SIZE = frames.HEADER.size
LONGEST = 1000

texts = st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
words = st.lists(st.one_of(texts, st.integers(-(2**63), 2**63)), max_size=6).map(tuple)
notes = st.lists(st.floats(width=64), max_size=8).map(tuple)
dtypes = st.sampled_from(frames.DTYPES)


def sealed(data: bytes) -> bytes:
    """As the first frame of a connection."""
    return data + Seals(KEY).next(data)


def parse_rest(frame: frames.Frame, rest: bytes) -> tuple[tuple[str | int, ...], tuple[float, ...]]:
    """Of the first frame of a connection."""
    return frames.parse_rest(frame, rest, Seals(KEY))


def header(**changes: int | bytes) -> bytes:
    """A good header, but for what is changed."""
    fields: dict[str, int | bytes] = {
        "magic": frames.MAGIC,
        "protocol": frames.PROTOCOL,
        "kind": Kind.MESSAGE,
        "dtype": 1,
        "tag_bytes": 0,
        "notes": 0,
        "sender": 1,
        "incarnation": 1,
        "numel": 10,
    }
    return frames.HEADER.pack(*{**fields, **changes}.values())


@given(
    st.sampled_from(Kind),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    words,
    notes,
    dtypes,
    st.integers(0, LONGEST),
)
def test_what_is_packed_is_read_again(kind, sender, incarnation, tag, note, dtype, numel):
    numel = numel if dtype is not None else 0
    data = sealed(pack(kind, sender, incarnation, tag, note, dtype, numel))
    frame = parse(data[:SIZE], LONGEST)
    assert (frame.kind, frame.sender, frame.incarnation) == (kind, sender, incarnation)
    assert (frame.dtype, frame.numel, frame.rest) == (dtype, numel, len(data) - SIZE)
    its_tag, its_note = parse_rest(frame, data[SIZE:])
    assert its_tag == tag
    assert struct.pack(f"{len(note)}d", *its_note) == struct.pack(f"{len(note)}d", *note)


@given(st.binary(min_size=SIZE, max_size=SIZE))
def test_random_bytes_are_no_frame(head):
    with pytest.raises(BadFrame):
        parse(head, LONGEST)


@given(st.integers(0, SIZE - 1), st.integers(0, 255))
def test_a_header_with_one_byte_changed_is_refused_or_a_frame_within_bounds(at, value):
    head = bytearray(header(tag_bytes=4, notes=2))
    head[at] = value
    try:
        frame = parse(head, LONGEST)
    except BadFrame:
        return
    assert frame.numel <= LONGEST
    assert frame.rest <= frames.TAG_BYTES + 8 * frames.NOTES
    assert not frame.numel or frame.dtype is not None


@given(st.binary(max_size=frames.TAG_BYTES))
def test_a_tag_of_random_bytes_is_refused_or_words_and_whole_numbers(data):
    head = header(tag_bytes=len(data))
    try:
        tag, _ = parse_rest(parse(head, LONGEST), sealed(head + data)[SIZE:])
    except BadFrame:
        return
    assert all(type(word) in (str, int) for word in tag)


@pytest.mark.parametrize(
    "data",
    [b"[" * 512, b"{}", b"[1.5]", b"[NaN]", b"[true]", b"[null]", b"[[1]]", b'"word"', b"[1", b"\xff\xfe[1]"],
)
def test_tags_that_look_like_json_but_are_none_of_ours(data):
    head = header(tag_bytes=len(data))
    with pytest.raises(BadFrame, match="tag"):
        parse_rest(parse(head, LONGEST), sealed(head + data)[SIZE:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"HTTP"}, "does not speak Freewheel's protocol"),
        ({"protocol": 5}, "protocol 5, not 7: another version"),
        ({"kind": 0}, "unknown kind 0"),
        ({"kind": 99}, "unknown kind 99"),
        ({"dtype": 77}, "unknown type 77"),
        ({"tag_bytes": frames.TAG_BYTES + 1}, "a tag of 513 bytes"),
        ({"notes": frames.NOTES + 1}, "a note of 32769 numbers"),
        ({"numel": LONGEST + 1}, "a vector of 1001 numbers, where the longest of this run has 1000"),
        ({"numel": 2**64 - 1}, "a vector of"),
        ({"dtype": 0}, "a vector of 10 numbers"),
    ],
)
def test_each_field_is_checked(changes, words):
    parse(header(), LONGEST)  # good, but for the change
    with pytest.raises(BadFrame, match=words):
        parse(header(**changes), LONGEST)


def test_what_does_not_fit_is_not_packed():
    with pytest.raises(ValueError, match="do not fit"):
        pack(Kind.MESSAGE, 0, 1, ("a" * frames.TAG_BYTES,))
    with pytest.raises(ValueError, match="do not fit"):
        pack(Kind.MESSAGE, 0, 1, note=(math.pi,) * (frames.NOTES + 1))


# -- the greeting --


def identity(**changes) -> Identity:
    given = {"key": KEY, "rank": 0, "world_size": 3, "incarnation": 1, "version": "1.0", "model": "m"}
    return Identity(**{**given, "longest": LONGEST, **changes})


def greet(me: Identity, data: bytes, peer: int | None = None) -> None:
    frame = parse(data[:SIZE], me.longest)
    me.check(frame, parse_rest(frame, sealed(data)[SIZE:])[0], peer)


def test_two_that_agree_may_talk():
    me = identity()
    greet(me, identity(rank=2).hello())
    greet(me, identity(rank=2).hello(), peer=2)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"rank": 1, "version": "2.0"}, "freewheel '?2.0'?, this worker"),
        ({"rank": 1, "model": "n"}, "its model has other parameters"),
        ({"rank": 0}, "worker 0 of 3"),
        ({"rank": 3}, "worker 3 of 3"),
        ({"rank": 2**32 - 1}, "worker 4294967295 of 3"),
    ],
)
def test_two_that_differ_may_not(theirs, words):
    with pytest.raises(BadFrame, match=words):
        greet(identity(), identity(**theirs).hello())


def test_the_one_who_answers_must_be_the_one_who_was_called():
    with pytest.raises(BadFrame, match="it is worker 1, not 2"):
        greet(identity(), identity(rank=1).hello(), peer=2)


@pytest.mark.parametrize(
    "tag", [(), ("hello",), ("hello", "1.0", "m", "", "fp32", "more"), ("good day", "1.0", "m")]
)
def test_a_greeting_has_its_form(tag):
    with pytest.raises(BadFrame, match="did not say hello"):
        greet(identity(), pack(Kind.HELLO, 1, 1, tag))
    with pytest.raises(BadFrame, match="did not say hello"):
        greet(identity(), pack(Kind.MESSAGE, 1, 1, ("hello", "1.0", "m"), dtype=torch.float32, numel=1))


@pytest.mark.parametrize(
    "data",
    [
        pack(Kind.REFUSE, 1, 1, ("no\nERROR all is lost",)),
        pack(Kind.HELLO, 1, 1, ("hello", "2.0\nERROR all is lost", "m")),
        pack(Kind.HELLO, 1, 1, ("hello", "\x1b[2J\ud800", "m")),
    ],
    ids=["refusal", "version", "escapes"],
)
def test_what_a_stranger_says_cannot_forge_lines_of_the_log(data):
    with pytest.raises(BadFrame, match="cannot be printed") as caught:
        greet(identity(), data)
    assert str(caught.value).isprintable()


@given(st.data())
def test_a_frame_with_any_byte_changed_is_refused(data):
    frame = bytearray(sealed(pack(Kind.MESSAGE, 1, 1, ("exchange", 1, 77), (1.0, 2.0), torch.float32, 10)))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    if at == 7:  # the header's one byte without a meaning is sealed as well
        parse(frame[:SIZE], LONGEST)

    def read() -> None:
        head = parse(frame[:SIZE], LONGEST)
        rest = bytes(frame[SIZE : SIZE + head.rest]).ljust(head.rest, b"\0")
        parse_rest(head, rest)

    with pytest.raises(BadFrame):
        read()


def test_a_seal_fits_one_frame_of_one_connection():
    ours, data = Seals(KEY), pack(Kind.PING, 1, 1)
    first = ours.next(data)
    assert first not in (ours.next(data), Seals(bytes(16)).next(data))
