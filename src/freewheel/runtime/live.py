"""A replica that two threads use: the training thread moves the weights, the communication thread looks on.

No lock is held while a vector is copied, and the training thread never waits for a copy. On the CPU:

- `version` is odd while weights move (from the optimizer's step to the end of the boundary), even while they
  stand still. A snapshot is good if the same even version was there before and after it was copied.
- A correction is handed over through a slot, by pointer; the boundary adds it in one pass.

On CUDA the same holds in the order of streams: a snapshot is copied to pinned memory on a side stream that
waits for the last boundary, and the next optimizer step's stream waits for that copy. The host waits for
neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError
from freewheel.replica import Replica, flatten

POLL_S = 5e-5
TRIES = 20
"""Snapshots torn by a boundary before the training thread is asked to make one."""
SPARE_S = 1.0
"""How long a vector that is being added is waited for, before there is a third one."""
PATIENCE_S = 0.1
"""How long weights may be found moving before it is asked: a step with a closure computes while they move."""


@dataclass(slots=True)
class Correction:
    """What is pending, where the boundary wants it."""

    vector: Tensor
    """In the communication thread's memory."""
    own: bool
    """Whether nobody else holds the vector, so that it may be changed and used again."""
    placed: Tensor | None = None
    """The same on the device."""
    ready: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class Order:
    """A snapshot the training thread is asked to make."""

    into: Tensor
    made: bool = False


class LiveReplica(Replica):
    """Flat weights of a model that is being trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(flatten(model.named_parameters(), gradients=False))
        self.version = 0
        self.parked = False
        """The training thread waits after its step: corrections may be added at once. Set by the other."""
        self.make_vector: Callable[[int, torch.dtype], Tensor] | None = None
        """Makes memory for snapshots that other processes can see."""
        self._slot: deque[Correction] = deque()
        self._spare: deque[Tensor] = deque(maxlen=2)
        self._orders: deque[Order] = deque()
        self._seen = 0
        self.cuda = any(block.weights.is_cuda for block in self.blocks)
        devices = {block.weights.device for block in self.blocks}
        if self.cuda and len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"the model's parameters lie on {names}; put all of them on one device.")
        if self.cuda:
            self._side = torch.cuda.Stream(device=self.blocks[0].weights.device)  # type: ignore[no-untyped-call]
            self._moved: torch.cuda.Event | None = None
            self._copied: torch.cuda.Event | None = None

    # -- the training thread --

    def begin_moving(self) -> None:
        """The optimizer is about to move the weights."""
        self.version += 1 - self.version % 2  # a step that raised has left it odd
        if self.cuda and (copied := self._copied) is not None:
            self._copied = None
            torch.cuda.current_stream(self.blocks[0].weights.device).wait_event(copied)

    def end_moving(self) -> None:
        """The weights stand still; whatever moved them has been queued."""
        if self.cuda:
            moved = torch.cuda.Event()  # type: ignore[no-untyped-call]
            moved.record(torch.cuda.current_stream(self.blocks[0].weights.device))
            self._moved = moved
        self.version += self.version % 2
        while self._orders:
            with contextlib.suppress(IndexError):  # it may have been taken back
                order = self._orders.popleft()
                self._copy(order.into)
                order.made = True

    def boundary(self) -> None:
        """Add what is pending to the weights; call between begin_moving and end_moving."""
        try:
            correction = self._slot.popleft()
        except IndexError:
            return
        self._add(correction)

    def _add(self, correction: Correction) -> None:
        vector = correction.vector
        if correction.placed is not None:
            stream = torch.cuda.current_stream(correction.placed.device)
            assert correction.ready is not None
            stream.wait_event(correction.ready)
            vector = correction.placed
            vector.record_stream(stream)
        with torch.no_grad():
            for block in self.blocks:
                block.weights.add_(vector[block.start : block.stop])
        if correction.own:
            self._spare.append(correction.vector)

    # -- the communication thread --

    def snapshot(self, into: Tensor | None = None) -> Tensor:
        """A copy of the weights, with what is pending, of one moment between two steps."""
        if into is None:
            end_s = time.monotonic() + SPARE_S
            while self.version % 2 and not self._spare and time.monotonic() < end_s:
                time.sleep(POLL_S)  # after the boundary the vector it has added can be used again
            into = self._take()
        for _ in self._copying(into):
            time.sleep(POLL_S)
        return into

    async def fresh(self) -> Tensor:
        """The same; the communication thread goes on with other things while the weights move."""
        end_s = time.monotonic() + SPARE_S
        while self.version % 2 and not self._spare and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
        into = self._take()
        for _ in self._copying(into):
            await asyncio.sleep(POLL_S)
        return into

    def _copying(self, into: Tensor) -> Iterator[None]:
        """Fill a vector with a snapshot; yields where it must wait for a moment."""
        while True:
            tries, end_s = 0, time.monotonic() + PATIENCE_S
            while tries < TRIES and time.monotonic() < end_s:
                if (version := self.version) % 2:
                    yield
                    continue
                tries += 1
                if self._copy(into) and (self.cuda or version == self.version):
                    return
            # Weights move nearly all the time: let the training thread make the copy after its step.
            order = Order(into)
            self._orders.append(order)
            try:
                while not order.made:
                    yield
                    if self._stands_still():  # it computes, or waits for this very thread
                        self._orders.remove(order)
                        break
                else:
                    return
            except ValueError:  # it is being copied
                while not order.made:
                    yield
                return
            except GeneratorExit:  # nobody wants it any more
                with contextlib.suppress(ValueError):
                    self._orders.remove(order)
                raise

    def _stands_still(self) -> bool:
        """Whether no step was made since this was asked before."""
        before, self._seen = self._seen, self.version
        return before == self.version and not before % 2

    def correct(self, vector: Tensor, own: bool = False) -> None:
        """Let a vector be added at the next boundary."""
        correction = Correction(vector, own)
        if self._slot:
            try:
                before = self._slot.popleft()
            except IndexError:  # the boundary was faster
                pass
            else:
                correction = self._joined(before, correction)
        if self.parked and not self.cuda:
            self._add(correction)
            return
        if self.cuda:
            self._place(correction)
        self._slot.append(correction)

    def take_over(self, vector: Tensor) -> None:
        """Go on with these weights: at once where the training thread waits, else from the next boundary."""
        if self.parked:
            self.load(vector)
        else:
            self.correct(vector - self.snapshot(), own=True)

    def load(self, vector: Tensor) -> None:
        """Overwrite the weights and drop what is pending; the training thread must not be in a step."""
        self._slot.clear()
        with torch.no_grad():
            for block in self.blocks:
                block.weights.copy_(vector[block.start : block.stop])
        if self.cuda:
            torch.cuda.synchronize(self.blocks[0].weights.device)

    def let_go(self) -> None:
        """Keep no memory that was made for exchanges: there are none any more."""
        self.make_vector = None
        self._spare.clear()

    @property
    def gradient(self) -> Tensor:
        """The gradients as one vector, in `before_step`; where there is none, zeros."""
        flat = self._take()
        for parameter, at in self._places():
            into = flat[at : at + parameter.numel()]
            if parameter.grad is None:
                into.zero_()
            else:
                into.view(parameter.shape).copy_(parameter.grad)
        return flat

    def set_gradient(self, vector: Tensor) -> None:
        """Let the optimizer use these gradients."""
        for parameter, at in self._places():
            piece = vector[at : at + parameter.numel()].view(parameter.shape)
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(piece)

    # -- both --

    def _copy(self, into: Tensor) -> bool:
        """Copy the weights and what is pending; False if a boundary came between."""
        pending = None
        with contextlib.suppress(IndexError):  # the boundary may take it at any moment
            pending = self._slot[0].vector
        if not self.cuda and pending is not None and len(self.blocks) == 1:
            torch.add(self.blocks[0].weights, pending, out=into)
            return True
        if self.cuda and not self._copy_from_device(into):
            return False
        if not self.cuda:
            for block in self.blocks:
                into[block.start : block.stop].copy_(block.weights)
        if pending is not None:
            into.add_(pending)
        return True

    def _copy_from_device(self, into: Tensor) -> bool:
        version, moved = self.version, self._moved
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            if moved is not None:
                self._side.wait_event(moved)
            for block in self.blocks:
                into[block.start : block.stop].copy_(block.weights, non_blocking=True)
            copied.record(self._side)
        self._copied = copied
        good = version == self.version  # else the step that came between has not seen that it must wait
        copied.synchronize()
        return good

    def _place(self, correction: Correction) -> None:
        """Bring a correction to the device, beside the training."""
        device = self.blocks[0].weights.device
        with torch.cuda.stream(self._side):
            correction.placed = correction.vector.to(device, non_blocking=True)
            correction.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            correction.ready.record(self._side)
        correction.ready.synchronize()

    def _joined(self, before: Correction, after: Correction) -> Correction:
        if before.own:
            before.vector.add_(after.vector)
            if after.own:
                self._spare.append(after.vector)
            return Correction(before.vector, True)
        return Correction(before.vector + after.vector, True)

    def _take(self) -> Tensor:
        """A vector to fill: one that was used before where there is one."""
        try:
            return self._spare.popleft()
        except IndexError:
            if self.make_vector is not None and not self.cuda:
                return self.make_vector(self.size, self.dtype)
            return torch.empty(self.size, dtype=self.dtype, pin_memory=self.cuda)

    def _places(self) -> Iterator[tuple[nn.Parameter, int]]:
        for block in self.blocks:
            at = block.start
            for parameter in block.parameters:
                yield parameter, at
                at += parameter.numel()
