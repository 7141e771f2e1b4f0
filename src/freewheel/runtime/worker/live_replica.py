"""A replica used by two threads: the training thread moves the weights, the communication thread reads them.

It is a seqlock. `version` is odd while weights move (from the optimizer's step to the end of the boundary)
and even while they stand still. A snapshot is good if the same even version was there before anything was
read, pending corrections included, and after it was copied. There is no lock, and the training thread never
waits for a copy. A correction is handed over through a slot, by pointer; the boundary adds it in one pass.

On a CUDA device the seqlock holds in the order of streams. Snapshots are copied on a side stream that waits
for the last boundary, into memory of the same device; the stream of the next optimizer step waits for that
copy; the host waits for neither. A copy that was queued under a version that has changed since is thrown
away: the step between may not have known that it must wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from freewheel.errors import ConfigError, Diverged
from freewheel.fabric import kernels
from freewheel.replica import Block, Replica, flatten, strides

POLL_S = 5e-5
TRIES = 20  # snapshots torn by a boundary before the training thread is asked to make one
SPARE_S = 1.0  # how long to wait for a vector that is being added, before a third one is made
SOON_S = 0.1  # how long one step may move the weights before an exchange is put off: closures compute in it
PATIENCE_S = 0.1  # how long weights may move before the training thread is asked to make the snapshot
CLOSE = 0.1  # which share of the weights lies before the early layer
PIECE = 1 << 18  # numbers that are copied, and then summed while they are in the cache


@dataclass(slots=True)
class Correction:
    """What is pending: `own` if nobody else holds the vector; `ready`: when a device has computed it."""

    vector: Tensor
    own: bool
    ready: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class Order:
    """A snapshot that the training thread is to make; `changes` is the count of changes it was made at."""

    into: Tensor
    made: bool = False
    changes: int = -1


class Gradients:
    """The gradients of one optimizer's parameters as one vector, for strategies that average gradients.

        the gradients, parameter by parameter | for each parameter, whether it has one | the loss of a closure

    A parameter that has no gradient on any worker keeps none, as in a loop of its own: zeros would let
    momentum and weight decay move it. The loss is averaged too, since an optimizer that calls its closure
    again and again (LBFGS) goes by it: all workers must take the same way.
    """

    def __init__(self, replica: LiveReplica, parameters: Iterable[nn.Parameter]) -> None:
        wanted = {id(one) for one in parameters}
        self._replica, self._parameters = replica, [one for one in replica.trained if id(one) in wanted]
        *starts, self._numbers = itertools.accumulate((one.numel() for one in self._parameters), initial=0)
        places = zip(self._parameters, starts, strict=True)
        self._places = [(one.shape, strides(one), at) for one, at in places]
        self.size = self._numbers + len(self._parameters) + 1
        self.loss = 0.0  # what the closure has said; the mean of all workers' once gradients were merged
        self._in_use: Tensor | None = None
        self._spare: deque[Tensor] = deque(maxlen=2)
        self._sparse: set[int] = set()  # those stay sparse, for optimizers that need them so

    def take(self) -> Tensor:
        """All gradients as one vector, zeros where there is none; Diverged if a number is not finite."""
        replica = self._replica
        flat = self._spare.popleft() if self._spare else replica.make_vector(self.size, replica.dtype)
        into, given = list[Tensor](), list[Tensor]()
        for one, piece in self._pieces(flat):
            if one.grad is None:
                piece.zero_()
            elif one.grad.layout != torch.strided:
                self._sparse.add(id(one))
                # Coalesced first, as optimizers do: another order of adding rounds differently.
                added = one.grad.coalesce() if one.grad.layout == torch.sparse_coo else one.grad
                piece.copy_(added.to_dense())
            else:
                into.append(piece)
                given.append(one.grad)
        if into:
            torch._foreach_copy_(into, given)
        marks = [float(one.grad is not None) for one in self._parameters]
        flat[self._numbers :].copy_(torch.tensor([*marks, self.loss], dtype=torch.float64))
        if not math.isfinite(flat.sum().item()):
            for one, piece in self._pieces(flat):
                if not piece.isfinite().all():
                    raise Diverged(f"gradients of {replica.names.get(id(one), '?')} are not finite")
            if not math.isfinite(self.loss):
                raise Diverged("the closure's loss is not finite")
        return flat

    def put(self, vector: Tensor) -> None:
        """Let the optimizer use this vector in place: it is in use until the next call."""
        *marks, self.loss = vector[self._numbers :].tolist()
        for (one, piece), mark in zip(self._pieces(vector), marks, strict=True):
            if not mark:
                one.grad = None  # nobody has one
            elif id(one) in self._sparse:
                one.grad = piece.to_sparse(1).to(one.dtype)
            else:
                one.grad = piece.to(one.dtype)
        if vector.is_cuda:  # what was converted is there before the optimizer goes on
            torch.cuda.current_stream(vector.device).synchronize()
        if self._in_use is not None and self._replica.reusable(self._in_use):
            self._spare.append(self._in_use)
        self._in_use = vector

    def let_go(self) -> None:
        self._in_use = None
        self._spare.clear()

    def _pieces(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        begins = vector.storage_offset()
        for one, (shape, stride, at) in zip(self._parameters, self._places, strict=True):
            yield one, vector.as_strided(shape, stride, begins + at)


class LiveReplica(Replica):
    """Flat weights of a model that is being trained."""

    side: torch.cuda.Stream | None = None  # where a device works for communication

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        super().__init__(blocks)
        self.version = 0
        self.parked = False  # the training thread waits: the other one, which says so, may add corrections
        # Allocates snapshots, perhaps in memory that other workers can map.
        self.make_vector: Callable[[int, torch.dtype], Tensor] = self.plain_vector
        self.reusable: Callable[[Tensor], bool] = lambda vector: True  # whether a vector is such memory
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._slot: deque[Correction] = deque()
        self._spare: deque[Tensor] = deque(maxlen=2)
        self._orders: deque[Order] = deque()
        self._changes = 0
        self._standing: Order | None = None  # for the training thread, where exchanges are put off
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.gradients = Gradients(self, self.trained)  # of the optimizer that steps

    @property
    def device(self) -> torch.device:
        return self.blocks[0].weights.device

    def plain_vector(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    # -- the training thread --

    def begin_moving(self) -> None:
        self.version += 1 - self.version % 2  # a step that raised has left it odd

    def end_moving(self) -> None:
        """The weights stand still, or on a device will; copies that were ordered are made."""
        self.version += self.version % 2
        while self._orders:
            with contextlib.suppress(IndexError):  # it may have been taken back
                order, changes = self._orders.popleft(), self._changes
                self._copy(order.into)
                if changes % 2 or changes != self._changes:  # a correction came between: next time
                    self._orders.append(order)
                    break
                order.changes, order.made = changes, True

    def boundary(self) -> None:
        """Add what is pending to the weights; call between begin_moving and end_moving."""
        try:
            correction = self._slot.popleft()
        except IndexError:
            return
        self._add(correction)

    def _add(self, correction: Correction) -> None:
        with torch.no_grad():
            for block in self.blocks:
                block.weights.add_(correction.vector[block.start : block.stop])
        if correction.own:
            self.unused(correction.vector)

    def catch_up(self) -> None:
        """Before the training thread waits: let a device finish what was queued."""

    # -- the communication thread --

    def keep_close(self) -> None:
        """Prepare for snapshots beside training: between any two steps, and soon."""

    async def snapshot(self, keep: bool = False) -> Tensor:
        """A copy of the weights, with what is pending, of one moment; Diverged if a number is not finite."""
        taken = await self._snapshot(keep, math.inf)
        assert taken is not None
        return taken

    async def snapshot_soon(self) -> Tensor | None:
        """As `snapshot`; None if the weights move for SOON_S on end.

        The training thread then makes a copy at the end of its step, for the next call.
        """
        order = self._standing
        if order is not None and order.made:
            self._standing = None
            if order.changes == self._changes:  # nothing was corrected since
                await self._copied(order.into)
                return order.into
            self.unused(order.into)
        return await self._snapshot(False, SOON_S)

    def unused(self, vector: Tensor) -> None:
        """Hand back a vector, to be filled again."""
        if self.reusable(vector):
            self._spare.append(vector)

    async def _snapshot(self, keep: bool, patience_s: float) -> Tensor | None:
        now_s = still_s = time.monotonic()
        version, end_s = self.version, now_s + SPARE_S
        while not keep and self.version % 2 and not self._spare and now_s < min(end_s, still_s + patience_s):
            await asyncio.sleep(POLL_S)  # after the boundary the vector it has added can be used again
            now_s = time.monotonic()
        if keep or not self._spare:
            into = (self.plain_vector if keep else self.make_vector)(self.size, self.dtype)
        else:
            into = self._spare.popleft()
        tries, ask_s, order = 0, now_s + PATIENCE_S, None
        try:
            while order is None or not order.made:
                seen = self.version
                if order is None and (tries == TRIES or now_s > ask_s):
                    # Weights move nearly all the time: let the training thread make the copy after its step.
                    order = Order(into)
                    self._orders.append(order)
                elif order is None and not seen % 2:
                    tries += 1
                    self._copy(into)
                    if seen == self.version:
                        break
                    continue
                await asyncio.sleep(POLL_S)
                now_s = time.monotonic()
                if version != self.version or not version % 2:
                    version, still_s = self.version, now_s
                elif now_s - still_s > patience_s:
                    if self._standing is None:
                        self._standing = Order(into)
                        self._orders.append(self._standing)
                    return None
                if order is not None and seen == self.version and not seen % 2:
                    with contextlib.suppress(ValueError):  # it is being copied
                        self._orders.remove(order)  # training computes, or waits for this very thread
                        tries, ask_s, order = 0, now_s + PATIENCE_S, None
        finally:
            if order is not None and not order.made:
                with contextlib.suppress(ValueError):
                    self._orders.remove(order)
        await self._copied(into)
        return into

    async def _copied(self, vector: Tensor) -> None:
        for parameter, piece in self.pieces(vector) if not self._finite else ():
            if not piece.isfinite().all():
                raise Diverged(f"weights of {self.names.get(id(parameter), '?')} are not finite")

    def copy_now(self, into: Tensor) -> None:
        """A snapshot at once; the training thread must be waiting."""
        self._copy(into)

    def correct(self, vector: Tensor, own: bool = False) -> None:
        self._changes += 1  # odd while what is pending changes
        correction = Correction(vector, own)
        with contextlib.suppress(IndexError):  # there is none, or the boundary was faster
            before = self._slot.popleft()
            if before.own:
                before.vector.add_(vector)
                if own:
                    self.unused(vector)
            correction = Correction(before.vector if before.own else before.vector + vector, True)
        if self.parked:
            self._add(correction)
        else:
            if self.side is not None:  # after what the device has computed so far
                correction.ready = record(self.side)
            self._slot.append(correction)
        self._changes += 1

    async def take_over(self, vector: Tensor) -> None:
        """Go on with these weights: at once where the training thread waits, else from the next boundary."""
        if self.parked:
            self.load(vector)
        else:
            self.correct(vector.to(self.device) - await self.snapshot(), own=True)

    def load(self, vector: Tensor) -> None:
        """Overwrite the weights and drop what is pending; the training thread must not be in a step."""
        self._slot.clear()
        with torch.no_grad():
            for block in self.blocks:
                block.weights.copy_(vector[block.start : block.stop])

    def let_go(self) -> None:
        self.make_vector = self.plain_vector  # there are no exchanges any more
        self._spare.clear()
        self._standing = None
        self.gradients.let_go()

    @property
    def gradient(self) -> Tensor:
        return self.gradients.take()

    def set_gradient(self, vector: Tensor) -> None:
        self.gradients.put(vector)

    # -- both --

    def _seen_pending(self) -> Tensor | None:
        try:
            return self._slot[0].vector
        except IndexError:  # the boundary may take it at any moment
            return None

    def _copy(self, into: Tensor) -> None:
        """Copy the weights with what is pending; note whether all numbers are finite."""
        pending, total = self._seen_pending(), 0.0
        for block in self.blocks:
            for at in range(0, block.weights.numel(), PIECE):
                piece = block.weights[at : at + PIECE]
                start = block.start + at
                copied = into[start : start + piece.numel()]
                if pending is None:
                    copied.copy_(piece)
                elif piece.dtype == copied.dtype:
                    torch.add(piece, pending[start : start + piece.numel()], out=copied)
                else:
                    copied.copy_(piece).add_(pending[start : start + piece.numel()])
                total += copied.sum().item()
        self._finite = math.isfinite(total)  # a sum is finite only if all numbers are


class CudaReplica(LiveReplica):
    """Flat weights of a model that is being trained on a device."""

    def __init__(self, model: nn.Module, blocks: list[Block]) -> None:
        super().__init__(model, blocks)
        self.side: torch.cuda.Stream = torch.cuda.Stream(device=self.device)  # type: ignore[no-untyped-call]
        self._moved: torch.cuda.Event | None = None  # after the last boundary, in the training stream
        self._read: torch.cuda.Event | None = None  # after the last copy, in the side stream; a step waits
        self._bad = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # not 0: the last copy is not finite
        self._near: torch.cuda.Event | None = None  # near the end of the last backward pass
        self._hook: RemovableHandle | None = None
        self._kernels = kernels.for_device(self.device)

    def keep_close(self) -> None:
        """Let the host be ahead of the device by the end of a backward pass at the most.

        A host that queues a whole step ahead makes a snapshot take a step, and its correction come two steps
        late. One that waits for the gradients leaves the device idle. So it waits for the gradient of an
        early layer, which is among the last to be computed.
        """
        early, seen = None, 0
        for parameter in self.blocks[0].parameters:
            if seen <= CLOSE * self.size:
                early = parameter
            seen += parameter.numel()
        assert early is not None
        self._hook = early.register_post_accumulate_grad_hook(self._nearly)  # type: ignore[no-untyped-call]

    def _nearly(self, _: Tensor) -> None:
        self._near = record(torch.cuda.current_stream(self.device))

    def let_go(self) -> None:
        super().let_go()
        if self._hook is not None:
            self._hook.remove()

    def begin_moving(self) -> None:
        """The training stream waits until snapshots have been copied."""
        near, self._near = self._near, None
        if near is not None:
            near.synchronize()
        super().begin_moving()
        if (read := self._read) is not None:
            self._read = None
            torch.cuda.current_stream(self.device).wait_event(read)

    def end_moving(self) -> None:
        self._moved = record(torch.cuda.current_stream(self.device))
        super().end_moving()

    def catch_up(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def load(self, vector: Tensor) -> None:
        super().load(vector)
        torch.cuda.synchronize(self.device)

    def _add(self, correction: Correction) -> None:
        stream = torch.cuda.current_stream(self.device)
        if correction.ready is not None:
            stream.wait_event(correction.ready)
        correction.vector.record_stream(stream)
        super()._add(correction)
        if self.parked:  # added by the communication thread, beside a training thread that waits
            stream.synchronize()

    def _copy(self, into: Tensor) -> None:
        pending = self._seen_pending()
        with torch.cuda.stream(self.side), torch.no_grad():
            if self._moved is not None:
                self.side.wait_event(self._moved)
            self._bad.zero_()
            whole, more = self.blocks[0].weights, () if pending is None else (pending,)
            if self._kernels is not None and len(self.blocks) == 1 and kernels.fits(whole, into, *more):
                self._kernels.copy(whole, pending, into, self._bad)
                self._read = record(self.side)
                return
            for block in self.blocks:
                copied = into[block.start : block.stop]
                if pending is None:
                    copied.copy_(block.weights, non_blocking=True)
                elif block.weights.dtype == copied.dtype and into.is_cuda:
                    torch.add(block.weights, pending[block.start : block.stop], out=copied)
                else:
                    copied.copy_(block.weights + pending[block.start : block.stop], non_blocking=True)
            if into.is_cuda:
                good = into.sum(dtype=torch.float32).isfinite()
                self._bad.copy_(good.logical_not().to(torch.int32).reshape(1), non_blocking=True)
            self._read = record(self.side)

    async def _copied(self, vector: Tensor) -> None:
        copied = record(self.side)
        await asyncio.get_running_loop().run_in_executor(None, copied.synchronize)
        self._finite = not int(self._bad)
        await super()._copied(vector)

    def copy_now(self, into: Tensor) -> None:
        super().copy_now(into)
        self.side.synchronize()


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def live_replica(model: nn.Module) -> LiveReplica:
    blocks = flatten(model.named_parameters(), gradients=False)
    devices = {block.weights.device for block in blocks}
    if len(devices) > 1 and any(device.type == "cuda" for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model's parameters lie on {names}; put all of them on one device.")
    return (CudaReplica if blocks[0].weights.is_cuda else LiveReplica)(model, blocks)
