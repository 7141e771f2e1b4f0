"""Means of what a script measures: parts that make no sense."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from freewheel.fabric.base import Message
from freewheel.runtime.worker.answers import Means


class Asked:
    """A peer that answers with one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.fabric, self.offences = tensor, self, list[str]()
        self.others = [1]

    def serve(self, *_: Any) -> None:
        """Nobody asks."""

    async def ask(self, peer: int, *_: Any) -> tuple[Message, dict[str, torch.Tensor]]:
        message = Message(peer, ("mean",), None, (1.0, 1.0))
        message.offend = self.offences.append
        return message, {"": self.tensor}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_a_part_of_another_type_is_nobodys(dtype):
    peer = Asked(torch.full((3,), 3, dtype=dtype))
    means = Means(peer, torch.float32, lambda _: False, tuple, lambda: True)
    found = asyncio.run(means.mean(torch.ones(3, dtype=torch.float64), "loss", wait=False))
    good = dtype.is_floating_point
    assert found.tolist() == ([2.0] * 3 if good else [1.0] * 3)
    assert bool(peer.offences) is not good
