"""Windows: memory a peer of the same machine reads where it lies."""

from __future__ import annotations

import os

import pytest
import torch

from freewheel.fabric.shared import Windows

SIZE = 1000


def test_a_peer_sees_what_lies_in_a_window():
    ours, theirs = Windows(), Windows()
    vector = ours.make(SIZE, torch.float32)
    window = ours.of(vector)
    seen = theirs.open(os.getpid(), window.fd, SIZE, torch.float32)
    vector.fill_(3.0)
    assert bool((seen.vector() == 3).all())
    before = seen.serial
    assert before != window.renew() == seen.serial
    seen.read = 7
    assert window.read == 7
    assert theirs.open(os.getpid(), window.fd, SIZE, torch.float32) is seen


def test_a_handle_that_is_given_out_again_is_another_window():
    ours, theirs = Windows(), Windows()
    handles, serials = [], set()
    for value in (1.0, 2.0):
        vector = ours.make(SIZE, torch.float32).fill_(value)
        window = ours.of(vector)
        serials.add(window.renew())
        handles.append(window.fd)
        seen = theirs.open(os.getpid(), window.fd, SIZE, torch.float32)
        assert seen.serial in serials
        assert bool((seen.vector() == value).all())
        del vector, window
    assert handles[0] == handles[1]
    assert len(serials) == 2  # who was shown the first sees that this is not it


def test_what_is_no_window_is_not_opened(tmp_path):
    ours, theirs = Windows(), Windows()
    vector = ours.make(SIZE, torch.float32)
    with pytest.raises(OSError, match="has another size"):
        theirs.open(os.getpid(), ours.of(vector).fd, SIZE + 1, torch.float32)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="is not a window"):
        theirs.open(os.getpid(), file.fileno(), SIZE, torch.float32)
    with pytest.raises(OSError, match="No such file"):
        theirs.open(os.getpid(), 10**6, SIZE, torch.float32)
