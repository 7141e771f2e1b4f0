"""An optimizer's state as bytes: nothing is lost, nothing is run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import freewheel as fw
from freewheel.runtime import states

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
    copy.load_state_dict(states.unpack(states.pack(original.state_dict())))
    twin.load_state_dict(model.state_dict())
    for one, optimizer in ((model, original), (twin, copy)):
        optimizer.zero_grad()
        one(torch.ones(5, 3)).square().mean().backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_no_number_cannot_be_handed_over():
    with pytest.raises(fw.ConfigError, match="cannot be handed over"):
        states.pack({"state": {0: {"rule": object()}}})
