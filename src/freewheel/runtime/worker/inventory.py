"""What of a model travels, fixed at attach: its trainable parameters, by name, as one vector.

A layer that is frozen in the with-block keeps its place. What would have to travel and has no place is
refused by name: a layer that was frozen and is trained now, a new parameter, one that lies in other memory.
Of buffers BatchNorm's statistics are averaged; masks, counters and tables are not.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, RunStopped
from freewheel.runtime.worker import tensor_codec
from freewheel.runtime.worker.checks import parameters
from freewheel.runtime.worker.live_replica import live_replica

REQUIRES = operator.attrgetter("requires_grad")
MOVED, REPLACED = "lies in other memory than", "is not the one there was"
LOOKS = 32  # how many of the frozen parameters are checked in a step


class Inventory:
    """A model and its optimizer: the replica of what travels, and what else a worker has."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # a compiled one has other names
        self.optimizer = optimizer
        self.replica = live_replica(self.model)
        self._all = dict(self.model.named_parameters())
        self.trained = {name: one for name, one in self._all.items() if one.requires_grad}
        self.names = self.replica.names
        self._slots = [
            (name, one, one.data_ptr(), self.model.get_submodule(owner)._parameters, last)
            for name, one in self.trained.items()
            for owner, _, last in [name.rpartition(".")]
        ]
        frozen = [one for name, one in self._all.items() if name not in self.trained]
        self._next = itertools.cycle(self._slots)
        self._next_frozen = itertools.cycle(
            frozen[at : at + LOOKS] for at in range(0, max(1, len(frozen)), LOOKS)
        )
        self._enrolled = 0  # how many parameters the optimizer had at the last check
        self._held: list[nn.Parameter] = []  # its frozen ones: once one requires gradients, it is trained

    def still(self) -> dict[str, Tensor]:
        """What no step moves: parameters that were frozen, and buffers."""
        frozen = {name: one.data for name, one in self._all.items() if name not in self.trained}
        return {**frozen, **dict(self.model.named_buffers())}

    def buffers(self) -> dict[str, Tensor]:
        """A copy of the buffers, such as BatchNorm's statistics, on the CPU."""
        found = {name: one for name, one in self.model.named_buffers() if in_memory(one)}
        return {name: one.detach().to("cpu", copy=True) for name, one in found.items()}

    def fixed(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters that can be sent: all workers begin with the same."""
        return {name: one for name, one in self.still().items() if in_memory(one)}

    @torch.no_grad()
    def set_fixed(self, given: Mapping[str, Tensor]) -> None:
        mine = self.fixed()
        for name in [*mine, *given]:
            here, there = _kind(mine.get(name)), _kind(given.get(name))
            if here != there:
                raise ConfigError(
                    f"the buffer or frozen parameter {name} is {here} here and {there} at the worker this "
                    "one begins with. Build the same model on all workers."
                )
        for name, one in mine.items():
            if not alike(one, given[name]):
                one.copy_(given[name])

    def look(self) -> None:
        """Before every step, a few parameters in turn: RunStopped if one is trained that does not travel."""
        name, parameter, pointer, slots, last = next(self._next)
        if parameter.data_ptr() != pointer:
            raise _other(name, MOVED)
        if slots.get(last) is not parameter:
            raise _other(name, REPLACED)
        held = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if held != self._enrolled:
            self._enrolled = held
            travels = set(map(id, self.trained.values()))
            self._held = [one for one in parameters(self.optimizer) if id(one) not in travels]
            for one in filter(REQUIRES, self._held):
                if id(one) not in self.names:
                    raise RunStopped(
                        f"the optimizer trains a parameter of shape {tuple(one.shape)} that the model "
                        "did not have when it was attached: it is not merged. Make it whole before attach."
                    )
        for one in filter(REQUIRES, (*next(self._next_frozen), *self._held)):
            raise RunStopped(
                f"the parameter {self.names.get(id(one), '?')} was frozen when the model was attached and "
                "requires gradients now: it is not merged. Let it require them at attach, and freeze it in "
                "the with-block."
            )

    def check(self) -> None:
        """RunStopped unless the model has the parameters it had at attach, where they were."""
        now = dict(self.model.named_parameters())
        for name in [*self._all, *now]:
            if now.get(name) is not self._all.get(name):
                raise _other(name, REPLACED)
        for name, one, pointer, *_ in self._slots:
            if one.data_ptr() != pointer:
                raise _other(name, MOVED)

    def pieces(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        return ((self.names[id(one)], piece) for one, piece in self.replica.pieces(vector))

    @torch.no_grad()
    def fill(self, clone: nn.Module, weights: Tensor, buffers: Mapping[str, Tensor]) -> None:
        pieces = {one.data_ptr(): piece for one, piece in self.replica.pieces(weights) if one.numel()}
        copies = dict(clone.named_parameters())
        for name, one in self.trained.items():
            if one.numel():
                copies[name].copy_(pieces[one.data_ptr()])
        for name, one in [*clone.named_buffers()]:
            new = buffers.get(name, one)
            if (one.shape, one.dtype) != (new.shape, new.dtype):  # it has grown on its way
                owner, _, last = name.rpartition(".")
                setattr(clone.get_submodule(owner), last, new.to(one.device))
            elif new is not one and not alike(one, new):
                one.copy_(new)


class TensorMean:
    """The mean of all workers' tensors, by name, added one worker after the other.

    Tensors that all have alike stay as they are, to the bit. Of `buffers` only floating numbers are averaged,
    if all are finite; of masks, counters and the like the first worker's are taken.
    """

    def __init__(self, buffers: bool = False) -> None:
        self._first: dict[str, Tensor] = {}
        self._count, self._buffers = 0, buffers
        self._totals: dict[str, Tensor | None] = {}  # of those that differ; None: there is no mean

    def add(self, part: Mapping[str, Tensor]) -> None:
        self._count += 1
        if self._count == 1:
            self._first = dict(part)
            return
        for name, first in self._first.items():
            other = part.get(name, torch.empty(0))
            total = self._totals.get(name)
            other_kind = (other.shape, other.dtype) != (first.shape, first.dtype)
            if self._buffers and (other_kind or not first.is_floating_point()):
                self._totals[name] = None
            elif total is not None:
                self._totals[name] = total + other
            elif name not in self._totals and not alike(first, other):
                wide = torch.promote_types(first.dtype, torch.float64)
                self._totals[name] = first.to(wide) * (self._count - 1) + other

    def result(self) -> dict[str, Tensor]:
        found = dict(self._first)
        for name, total in self._totals.items():
            if total is not None and (not self._buffers or total.isfinite().all()):
                found[name] = (total / self._count).to(found[name].dtype)
        return found


def in_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def alike(one: Tensor, other: Tensor) -> bool:
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same and torch.equal(tensor_codec.raw(one), tensor_codec.raw(other))


def _kind(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _other(name: str, what: str) -> RunStopped:
    return RunStopped(
        f"the parameter {name} {what} when the model was attached, so it would not be merged. Change the "
        "model before attach, also by .to(), .half(), .double() and load_state_dict(assign=True)."
    )
