"""An optimizer's state as bytes: nothing is lost, nothing is run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import freewheel as fw
from freewheel.runtime.worker import tensor_codec

OPTIMIZERS = {
    "plain": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, betas=(0.8, 0.95), amsgrad=True),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, centered=True),
    "adagrad": torch.optim.Adagrad,
}


def stepped(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_copy_as_the_original_does(name, steps):
    (model, original), (twin, copy) = stepped(name, steps), stepped(name, 0)
    copy.load_state_dict(tensor_codec.unpack(tensor_codec.pack(original.state_dict())))
    twin.load_state_dict(model.state_dict())
    for one, optimizer in ((model, original), (twin, copy)):
        optimizer.zero_grad()
        one(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_type_comes_back_to_the_bit():
    given = {
        "mask": torch.tensor([float("-inf"), float("nan"), -0.0]),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
        "table": torch.rand(3, dtype=torch.float64).unsqueeze(1).expand(3, 2),
        "half": torch.rand(5).half()[::2],
        "turns": torch.rand(2, dtype=torch.complex64),
        "eight": torch.rand(3).to(torch.float8_e4m3fn),
        "count": torch.tensor(2**40),
    }
    found = tensor_codec.unpack(tensor_codec.pack(given))
    assert found.keys() == given.keys()
    for name, one in given.items():
        assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
        assert torch.equal(tensor_codec.raw(found[name]), tensor_codec.raw(one))


def test_bytes_that_nobody_has_packed_are_a_value_error():
    good, draw = tensor_codec.pack({"one": torch.rand(4), "two": [torch.rand(2), 3]}), torch.Generator()
    for seed in range(3000):
        draw.manual_seed(seed)
        bad = good.clone()
        at = torch.randint(0, len(bad), (1 + seed % 3,), generator=draw)
        bad[at] = torch.randint(0, 256, at.shape, generator=draw, dtype=torch.uint8)
        cut = int(torch.randint(0, len(bad) + 1, (1,), generator=draw)) if seed % 2 else len(bad)
        with contextlib.suppress(ValueError):
            tensor_codec.unpack(bad[:cut])


def test_what_is_no_number_cannot_be_handed_over():
    with pytest.raises(fw.ConfigError, match="cannot be handed over"):
        tensor_codec.pack({"state": {0: {"rule": object()}}})
