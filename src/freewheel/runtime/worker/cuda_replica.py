"""The live replica of a model on a CUDA device: the seqlock, in the order of streams.

Snapshots are copied on a side stream that waits for the last boundary, into memory of the same device; the
stream of the next optimizer step waits for that copy. The host waits for neither. What was queued under a
version that has changed since is thrown away: the step that came between may not have seen that it must wait.
"""

from __future__ import annotations

import asyncio
import contextlib

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from freewheel.fabric import kernels
from freewheel.replica import Block
from freewheel.runtime.worker.live_replica import Correction, LiveReplica

CLOSE = 0.1  # which share of the weights lies before the early layer


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
        self._near = self._event(torch.cuda.current_stream(self.device))

    def let_go(self) -> None:
        """Keep no memory and no hook."""
        super().let_go()
        if self._hook is not None:
            self._hook.remove()

    def begin_moving(self) -> None:
        """The optimizer is about to move the weights: it waits for those who copy them."""
        near, self._near = self._near, None
        if near is not None:
            near.synchronize()
        super().begin_moving()
        if (read := self._read) is not None:
            self._read = None
            torch.cuda.current_stream(self.device).wait_event(read)

    def end_moving(self) -> None:
        """The weights stand still, once the device gets here."""
        self._moved = self._event(torch.cuda.current_stream(self.device))
        super().end_moving()

    def catch_up(self) -> None:
        """Wait for the device."""
        torch.cuda.current_stream(self.device).synchronize()

    def load(self, vector: Tensor) -> None:
        """Overwrite the weights and drop what is pending."""
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

    def _ready(self) -> torch.cuda.Event:
        return self._event(self.side)

    def _copy(self, into: Tensor) -> None:
        pending = None
        with contextlib.suppress(IndexError):  # the boundary may take it at any moment
            pending = self._slot[0].vector
        with torch.cuda.stream(self.side), torch.no_grad():
            if self._moved is not None:
                self.side.wait_event(self._moved)
            self._bad.zero_()
            whole, more = self.blocks[0].weights, () if pending is None else (pending,)
            if self._kernels is not None and len(self.blocks) == 1 and kernels.fits(whole, into, *more):
                self._kernels.copy(whole, pending, into, self._bad)
                self._read = self._event(self.side)
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
            self._read = self._event(self.side)

    async def _copied(self, vector: Tensor) -> None:
        copied = self._event(self.side)
        await asyncio.get_running_loop().run_in_executor(None, copied.synchronize)
        self._finite = not int(self._bad)
        await super()._copied(vector)

    def still(self, into: Tensor) -> Tensor:
        """A copy while the training thread waits."""
        super().still(into)
        self.side.synchronize()
        return into

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
