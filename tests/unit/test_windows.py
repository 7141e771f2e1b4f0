"""Windows: memory that workers of the same host read and write where it lies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freewheel.fabric import windows
from freewheel.fabric.windows import HOST, KINDS, HostWindow, Windows, is_locator

SIZE = 1000


def as_a_peer(monkeypatch) -> Windows:
    """Windows of another worker, which does not find ours in its own process."""
    monkeypatch.setattr(windows, "_made", {})
    return Windows()


def test_a_peer_sees_what_lies_in_a_window_and_changes_it(monkeypatch):
    ours = Windows()
    vector = ours.make(SIZE, torch.float32)
    window = ours.of(vector)
    theirs = as_a_peer(monkeypatch)
    seen = theirs.open(window.locator)
    assert seen is not window
    vector.fill_(3.0)
    mapped = seen.memory().view(torch.float32)
    assert bool((mapped == 3).all())
    mapped.fill_(4.0)
    assert bool((vector == 4).all())
    assert theirs.known(window.locator) is None
    theirs.keep(window.locator, seen)
    assert theirs.open(window.locator) is theirs.known(window.locator) is seen
    theirs.forget(os.getpid())
    assert theirs.known(window.locator) is None


def test_a_piece_of_a_vector_lies_in_the_same_window():
    ours = Windows()
    vector = ours.make(SIZE, torch.float32)
    assert ours.of(vector[10:20]) is ours.of(vector)
    assert ours.of(vector.clone()) is None


def test_the_window_of_a_process_that_has_ended_is_not_called_a_fault_of_its():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError, match="its process has ended"):
        HostWindow.open(child.pid, SIZE, 3)


def test_nor_is_one_that_has_ended_and_that_its_parent_has_not_looked_after(monkeypatch):
    """What it had open is root's then."""

    def readlink(path: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(windows.Path, "readlink", readlink)
    with pytest.raises(ProcessLookupError, match="its process has ended"):
        HostWindow.open(os.getpid(), SIZE, 3)


def test_nobody_can_shrink_a_window_under_a_reader(monkeypatch):
    ours = Windows()
    vector = ours.make(SIZE, torch.float32)
    seen = as_a_peer(monkeypatch).open(ours.of(vector).locator)
    with open(f"/proc/self/fd/{ours.of(vector).fd}", "r+b") as file:  # as a peer opens it
        for fd in (ours.of(vector).fd, file.fileno()):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        seen.resize(0)


def test_a_window_that_is_not_sealed_is_not_opened():
    fd = os.memfd_create("freewheel", os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as ends:
        ends.callback(os.close, fd)
        os.ftruncate(fd, 4096)
        with pytest.raises(OSError, match="is not sealed"):
            HostWindow.open(os.getpid(), 4096, fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, windows.SEALS)
        HostWindow.open(os.getpid(), 4096, fd)


def test_no_two_windows_have_the_same_number(monkeypatch):
    ours = Windows()
    handles, numbers = [], set()
    theirs = as_a_peer(monkeypatch)
    for value in (1.0, 2.0):  # the handle is given out again
        vector = ours.make(SIZE, torch.float32).fill_(value)
        window = ours.of(vector)
        handles.append(window.fd)
        numbers.add(window.number)
        assert bool((theirs.open(window.locator).memory().view(torch.float32) == value).all())
        del vector, window
    assert len(numbers) == 2


def test_what_is_no_window_is_not_opened(tmp_path):
    window = HostWindow.make(SIZE)
    with pytest.raises(OSError, match="has another size"):
        HostWindow.open(os.getpid(), SIZE + 1, window.fd)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="is not a window"):
        HostWindow.open(os.getpid(), SIZE, file.fileno())
    with pytest.raises(OSError, match="it is gone"):
        HostWindow.open(os.getpid(), SIZE, 10**6)


def test_a_probe_is_seen_by_who_can_read_it_and_by_nobody_else(monkeypatch):
    ours = Windows()
    offers = ours.offer(b"secret")
    theirs = as_a_peer(monkeypatch)
    assert theirs.tried(offers, b"secret") == [HOST]
    assert theirs.tried(offers, b"others") == []
    monkeypatch.setattr(HostWindow, "open", lambda *_: (_ for _ in ()).throw(OSError("not here")))
    assert Windows().tried(offers, b"secret") == []


def test_memory_for_vectors_that_lie_elsewhere_is_used_again():
    ours = Windows()
    like = torch.zeros(SIZE)
    first = ours.borrow(like, HOST)
    second = ours.borrow(like, HOST)
    assert first.data_ptr() != second.data_ptr()
    ours.give_back(first)
    assert ours.borrow(like, HOST).data_ptr() == first.data_ptr()
    assert ours.borrow(torch.zeros(SIZE + 1), HOST).numel() == SIZE + 1


@pytest.mark.parametrize(
    "note",
    [
        (),
        (0, 1, 2, 3, 4),
        (1, 2, 3),
        (1, 2, 3, 4, 5, 6),
        (1, 2, 3, 4, -5),
        (1, 2, 3, 4, float("nan")),
        (1, 2, 3, float("inf"), 5),
        (2, 1, 1, 1, *[256] * 64),
        (2, 1, 1, 1, *[7] * 63),
    ],
)
def test_numbers_that_are_no_locator_are_known(note):
    assert not is_locator(note)
    assert is_locator((1, 2, 3, 4, 5))
    assert is_locator((KINDS.index("device"), 1, 1, 1, *[255] * 64))


class Buffer:
    """Stands for a device window: all that retiring asks of it."""

    kind = "device"


def test_device_memory_is_kept_until_those_who_might_write_it_are_well_or_dead(monkeypatch):
    ours, buffer, vector = Windows(), Buffer(), torch.zeros(1)
    monkeypatch.setattr(ours, "of", lambda vector: buffer)
    ours.retire(vector, [1, 2])
    well = {1}
    for now_s in (0.0, 5.0, 20.0):  # worker 2 is out of reach, and may only be stopped
        ours.settle(now_s, lambda peer: peer in well)
    assert ours._retired
    well.add(2)
    ours.settle(21.0, lambda peer: peer in well)
    assert ours._retired  # it is back, but what it had begun may not have ended
    assert not ours._spare
    ours.settle(32.0, lambda peer: peer in well)
    assert not ours._retired
    assert ours._spare[0] is vector  # it is used again, and not freed: a peer may have it open


class Library:
    """Stands for CUDA."""

    def __init__(self) -> None:
        self.made, self.freed = 0, []

    def malloc(self, size: int) -> int:
        self.made += 1
        return 4096 * self.made

    def handle(self, address: int) -> bytes:
        return bytes(64)

    def free(self, address: int) -> None:
        self.freed.append(address)


def test_device_memory_that_peers_may_have_open_is_used_again_and_freed_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours = Windows()
    ours.device, ours.cuda = torch.device("cuda", 0), Library()
    shown = ours._device_window(100).locator  # and nobody holds it any more
    other, again = ours._device_window(200), ours._device_window(100)
    assert again.locator == shown != other.locator
    assert ours.known(shown) is again
    del other
    assert not ours.cuda.freed
    ours.clear()
    assert ours.cuda.freed == [8192]
    del again
    assert ours.cuda.freed == [8192, 4096]


def test_windows_that_are_given_back_and_kept_open_are_few():
    ours = Windows()
    for size in range(1, 30):
        ours.give_back(ours.borrow(torch.zeros(size), HOST))
    assert len(ours._spare) == windows.SPARES
    for number in range(30):
        ours.keep((1, number, 42, 4096, 3), HostWindow.make(16))
    assert len(ours._peers) == windows.OPEN
    assert (42, 29) in ours._peers
