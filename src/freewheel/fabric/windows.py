"""Windows: memory for vectors that peers on the same host read and write where it lies.

A *host* window is a memfd: it has no name in any file system, ends with its last user, and is sealed, so that
nobody can shrink it under a reader. A peer of the same user opens it through /proc. A *device* window is CUDA
memory, made by cudaMalloc and shared by CUDA IPC, whatever PyTorch's allocator is set to.

A locator is what a peer needs to open a window, as numbers: kind, number, process, bytes, then a file handle
or the 64 bytes of a CUDA handle.

A peer that was thought lost may still write into a window it was shown, so the window of a failed transfer is
not used again (`retire`). Host memory is simply let go: the peer's mapping keeps its own pages. Device memory
waits until the peer is known to be well or dead. It is not freed before the worker leaves, because peers keep
it open, and CUDA does not say what happens then; the next window of its size takes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import ConfigError
from freewheel.fabric.base import Note

STREAM, HOST, DEVICE = "stream", "host", "device"
KINDS = (STREAM, HOST, DEVICE)  # how vectors travel between two workers, the slowest first
NAME = "freewheel"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
QUARANTINE_S = 10.0  # so long a peer must be well, or dead, before memory that it might write is used again
PROBE_BYTES = 4096
SPARES = 8  # host windows that are kept for vectors that lie elsewhere
OPEN = 16  # windows of one peer that are kept open
LONGEST_LOCATOR = 68  # numbers: a device window's, with its handle

log = logging.getLogger("freewheel")
_numbers = itertools.count(secrets.randbits(48))  # no two of a host have the same, in any life of a worker
# This process's windows: workers that are threads of one process open each other's here.
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class HostWindow(mmap.mmap):
    """Shared host memory; if it is this process's own, `fd` is open as long as it lives."""

    kind = HOST
    number: int
    fd: int
    locator: Note  # what a peer opens it by

    @classmethod
    def make(cls, size: int) -> HostWindow:
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            window = cls(fd, size)
        except BaseException:
            os.close(fd)
            raise
        window.fd, window.number = fd, next(_numbers)
        window.locator = (KINDS.index(HOST), window.number, os.getpid(), size, fd)
        _made[window.number] = window
        return window

    @classmethod
    def open(cls, pid: int, size: int, fd: int) -> HostWindow:
        """A peer's; OSError if this is no window, ProcessLookupError if it is gone."""
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            name = path.readlink().name
        except (FileNotFoundError, PermissionError):  # the files of a process that has ended are root's
            raise ProcessLookupError("it is gone, or its process has ended") from None
        if name != f"memfd:{NAME} (deleted)":
            raise OSError(f"{path} is not a window")
        with path.open("r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise OSError(f"{path} has another size")
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise OSError(f"{path} is not sealed")
            return cls(file.fileno(), size)

    def memory(self) -> Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    def pin(self) -> None:
        """Lock its pages, so that a GPU copies to and from it by itself."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.memory().data_ptr()
        if int(cudart.cudaHostRegister(address, len(self), 0)) == 0:
            weakref.finalize(self, cudart.cudaHostUnregister, address)
        else:  # it is slower then, and no more
            with contextlib.suppress(OSError):
                Cuda().forget_error()

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.fd)


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Cuda:
    """The few functions of CUDA that PyTorch does not offer, from the libraries it has loaded."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
        path = next((path for path in paths if "/libcudart" in path), None)
        if path is None or torch.version.hip:
            raise OSError("CUDA's runtime library is not loaded")
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def forget_error(self) -> None:
        """Without this PyTorch would report the last error at its next kernel."""
        self._library.cudaGetLastError()

    def do(self, name: str, *arguments: Any) -> None:
        """Call a function; OSError with its reason where it fails."""
        if error := getattr(self._library, name)(*arguments):
            self.forget_error()
            raise OSError(f"{name}: {self._library.cudaGetErrorString(error).decode()}")

    def malloc(self, size: int) -> int:
        address = ctypes.c_void_p()
        self.do("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        self.do("cudaFree", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self.do("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        shared = _Handle((ctypes.c_ubyte * 64)(*handle))
        self.do("cudaIpcOpenMemHandle", ctypes.byref(address), shared, ctypes.c_uint(1))  # other devices' too
        return int(address.value or 0)

    def close(self, address: int) -> None:
        self.do("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def size(self, address: int) -> int | None:
        """How much memory begins here; None: the driver does not say."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            said = driver.cuMemGetAddressRange_v2(
                ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)
            )
        except (OSError, AttributeError):
            return None
        return None if said else int(size.value) - (address - int(start.value))


class DeviceWindow:
    """CUDA memory that other processes can open."""

    kind = DEVICE
    number: int

    def __init__(
        self, device: torch.device, address: int, size: int, end: Callable[[int], None], locator: Note = ()
    ) -> None:
        self.device, self._address = device, address
        self._end = functools.partial(end, address)
        self.locator = locator  # what a peer opens it by, where it is this process's own
        if locator:
            self.number = int(locator[1])
            _made[self.number] = self
        interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = interface

    @classmethod
    def open(cls, cuda: Cuda, device: torch.device, size: int, handle: bytes) -> DeviceWindow:
        """A peer's; OSError if it cannot be opened, or is smaller than the peer says."""
        with torch.cuda.device(device):
            window = cls(device, cuda.open(handle), size, cuda.close)
            real = cuda.size(window._address)
            if real is not None and real < size:
                raise OSError(f"it has {real} bytes, not {size}")
            return window

    def memory(self) -> Tensor:
        memory = torch.as_tensor(self, device=self.device)
        if memory.data_ptr() != self._address:  # of another device, and copied: what is written would be lost
            raise OSError(f"the memory cannot be used on {self.device} where it is")
        return memory

    def __del__(self) -> None:
        # At the end of the interpreter CUDA may be gone already.
        with contextlib.suppress(Exception), torch.cuda.device(self.device):
            self._end()


Window = HostWindow | DeviceWindow


class Windows:
    """A worker's own windows, and those of its peers that it has opened."""

    def __init__(self, device: torch.device | None = None) -> None:
        # Where this worker's vectors lie, if not on the host.
        self.device = device if device is not None and device.type == "cuda" else None
        self.cuda: Cuda | None = None
        self._probes: list[Window] = []
        self._by_address: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()
        self._peers: dict[tuple[int, int], Window] = {}
        self._spare: list[Tensor] = []  # windows for vectors that lie elsewhere, free to be borrowed
        # Device memory that peers might still write; since when each of them is known to be well or dead.
        self._retired: list[tuple[Tensor, dict[int, float | None]]] = []
        self._unused: list[tuple[int, Note]] = []  # device memory without a vector, which peers may have open
        self._cleared = False
        if self.device is not None:
            try:
                self.cuda = Cuda()
                self._probes.append(self._device_window(PROBE_BYTES))
            except (OSError, RuntimeError) as error:
                self.cuda = None
                log.warning("no device windows: %s; vectors go through host memory", error)
        with contextlib.suppress(OSError):
            self._probes.append(HostWindow.make(PROBE_BYTES))
        self.kinds = {window.kind for window in self._probes}  # the kinds this worker can make
        best = HOST if self.device is None else DEVICE
        self.native = best if best in self.kinds else STREAM  # the kind this worker's vectors lie in

    # -- one's own --

    def make(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A vector where this worker's weights are, in a window if possible."""
        size = max(1, numel) * dtype.itemsize
        if self.native == DEVICE and (spare := self._spare_one(numel, dtype, DEVICE)) is not None:
            return spare
        if self.native == HOST:
            return self._vector(HostWindow.make(size), numel, dtype)
        if self.device is None:
            return torch.empty(numel, dtype=dtype)
        for empty in (torch.cuda.empty_cache, None):
            try:
                if self.cuda is None:
                    return torch.empty(numel, dtype=dtype, device=self.device)
                return self._vector(self._device_window(size), numel, dtype)
            except (OSError, torch.cuda.OutOfMemoryError) as error:
                if empty is None:
                    free, _ = torch.cuda.mem_get_info(self.device)
                    raise ConfigError(
                        f"a snapshot of the weights needs {size / 1e6:,.0f} MB on {self.device}, which has "
                        f"{free / 1e6:,.0f} MB left: make the batch or the model smaller ({error})."
                    ) from None
                empty()
        raise AssertionError

    def _device_window(self, size: int) -> DeviceWindow:
        assert self.cuda is not None
        assert self.device is not None
        with torch.cuda.device(self.device):
            for address, locator in self._unused:
                if locator[3] == size:
                    self._unused.remove((address, locator))
                    torch.cuda.synchronize()  # whoever queued something with it last
                    break
            else:
                address = self.cuda.malloc(size)
                try:
                    handle = self.cuda.handle(address)
                except OSError:
                    self.cuda.free(address)
                    raise
                locator = (KINDS.index(DEVICE), next(_numbers), os.getpid(), size, *handle)
        return DeviceWindow(self.device, address, size, functools.partial(self._ended, locator), locator)

    def _ended(self, locator: Note, address: int) -> None:
        if self._cleared and self.cuda is not None:
            self.cuda.free(address)
        else:
            self._unused.append((address, locator))

    def _vector(self, window: Window, numel: int, dtype: torch.dtype) -> Tensor:
        memory = window.memory()
        self._by_address[memory.data_ptr()] = window
        return memory[: numel * dtype.itemsize].view(dtype)

    def of(self, vector: Tensor) -> Window | None:
        return self._by_address.get(vector.untyped_storage().data_ptr())

    def borrow(self, like: Tensor, kind: str) -> Tensor:
        """A window's memory for a vector that lies elsewhere; `give_back` it."""
        if (spare := self._spare_one(like.numel(), like.dtype, kind)) is not None:
            return spare
        if kind == DEVICE:
            return self.make(like.numel(), like.dtype)
        window = HostWindow.make(max(1, like.numel()) * like.dtype.itemsize)
        if self.device is not None:
            window.pin()
        return self._vector(window, like.numel(), like.dtype)

    def _spare_one(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor | None:
        wanted = numel, dtype, kind == DEVICE
        for at, spare in enumerate(self._spare):
            if (spare.numel(), spare.dtype, spare.is_cuda) == wanted:
                return self._spare.pop(at)
        return None

    def give_back(self, vector: Tensor) -> None:
        """Keep a borrowed vector for the next who borrows; of the host's only the last few."""
        self._spare.append(vector)
        host = [spare for spare in self._spare if not spare.is_cuda]
        if len(host) > SPARES:
            self._spare = [spare for spare in self._spare if spare is not host[0]]

    def nbytes(self) -> int:
        return sum(window.memory().nbytes for window in self._by_address.values())

    def retire(self, vector: Tensor, peers: Iterable[int]) -> None:
        """Never use a vector again that these peers might still write."""
        window = self.of(vector)
        if window is not None and window.kind == DEVICE:
            self._retired.append((vector, dict.fromkeys(peers)))

    def settle(self, now_s: float, harmless: Callable[[int], bool]) -> None:
        """Use retired memory again whose peers have been well, or dead, for QUARANTINE_S."""
        for _, peers in self._retired:
            for peer, since_s in list(peers.items()):
                if not harmless(peer):
                    peers[peer] = None
                elif since_s is None:
                    peers[peer] = now_s
                elif now_s - since_s > QUARANTINE_S:
                    del peers[peer]
        self._spare += [vector for vector, peers in self._retired if not peers]
        self._retired = [one for one in self._retired if one[1]]

    # -- peers' --

    def offer(self, secret: bytes) -> list[Note]:
        """Locators of a small window of each kind, for a peer to try."""
        mark = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        for window in self._probes:
            window.memory()[: len(secret)].copy_(mark)
        return [window.locator for window in self._probes]

    def tried(self, offers: Iterable[Note], secret: bytes) -> list[str]:
        """The kinds of windows a peer offers that can be opened and read."""
        seen = []
        for locator in offers:
            if locator[3] != PROBE_BYTES:
                continue
            kind = KINDS[int(locator[0])]
            try:
                if bytes(self.open(locator).memory()[: len(secret)].cpu().numpy()) == secret:
                    seen.append(kind)
            except (OSError, RuntimeError) as error:
                log.info("cannot open a peer's %s window: %s", kind, error)
        return seen

    def known(self, locator: Note) -> Window | None:
        number, pid = int(locator[1]), int(locator[2])
        made: Window | None = _made.get(number) if pid == os.getpid() else None
        return self._peers.get((pid, number)) if made is None else made

    def keep(self, locator: Note, window: Window) -> None:
        """Keep a peer's window open: the last few of each process."""
        pid = int(locator[2])
        self._peers[pid, int(locator[1])] = window
        for key in [key for key in self._peers if key[0] == pid][:-OPEN]:
            del self._peers[key]

    def open(self, locator: Note) -> Window:
        """A peer's window; OSError if it cannot be opened."""
        kind, _, pid, size, *rest = map(int, locator)
        if (known := self.known(locator)) is not None:
            return known
        if KINDS[kind] == HOST:
            window = HostWindow.open(pid, size, rest[0])
            if self.device is not None:
                window.pin()
            return window
        if self.cuda is None or self.device is None:
            raise OSError("this worker has no CUDA device")
        return DeviceWindow.open(self.cuda, self.device, size, bytes(rest))

    def forget(self, pid: int) -> None:
        self._peers = {key: window for key, window in self._peers.items() if key[0] != pid}

    def clear(self) -> None:
        """Let go of everything but windows that vectors still lie in."""
        self._peers.clear()
        self._spare.clear()
        self._probes.clear()
        self._cleared = True
        while self._unused and self.cuda is not None:
            self.cuda.free(self._unused.pop()[0])


def is_locator(note: Note) -> bool:
    """Whether numbers that came from a peer can be a locator."""
    if len(note) < 5 or not all(0 <= number < 2**53 and number == int(number) for number in note):
        return False
    host, device = (note[0] == KINDS.index(kind) for kind in (HOST, DEVICE))
    return (host and len(note) == 5) or (device and len(note) == LONGEST_LOCATOR and max(note[4:]) < 256)


def place() -> str:
    """Equal for two processes that could see each other's windows: of one machine and one user."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    return ""
