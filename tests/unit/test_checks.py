"""Mistakes with a model or an optimizer are named at once."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn

import freewheel as fw
from freewheel.runtime.worker.settings import Given, Settings


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 2, dtype=next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def test_arguments_in_the_wrong_places():
    model, optimizer = made()
    with pytest.raises(fw.ConfigError, match=r"a torch.nn.Module first, not a SGD"):
        fw.attach(optimizer, model)
    with pytest.raises(fw.ConfigError, match="optimizer second, not a Sequential"):
        fw.attach(model, model)
    with pytest.raises(fw.ConfigError, match=r"write ADPSGD\(\), or a name"):
        fw.attach(model, optimizer, fw.ADPSGD)


def test_a_model_without_shapes():
    model = nn.LazyLinear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fw.ConfigError, match="the parameter weight has no shape yet"):
        fw.attach(model, optimizer)


@pytest.mark.parametrize("ask", ["consensus", "metrics", "stop"])
def test_a_worker_outside_of_its_block(ask):
    worker = fw.attach(*made())
    with pytest.raises(fw.FreewheelError, match="has not begun"):
        getattr(worker, ask)()


def test_a_model_is_attached_once_at_a_time_and_a_worker_used_once():
    model, optimizer = made()
    with fw.attach(model, optimizer) as worker:
        step(model, optimizer)
        with pytest.raises(fw.ConfigError, match="attached already"), fw.attach(model, optimizer):
            pass
    with pytest.raises(fw.FreewheelError, match="call attach again"), worker:
        pass
    with fw.attach(model, optimizer) as again:
        step(model, optimizer)
    assert again.metrics()["steps"] == 1


@pytest.mark.parametrize("move", [nn.Module.double, nn.Module.bfloat16])
def test_parameters_that_are_given_other_memory(move):
    model, optimizer = made()

    def train() -> None:
        with fw.attach(model, optimizer):
            step(model, optimizer)
            move(model)
            for _ in range(4):  # one parameter is looked at in each step
                step(model, optimizer)

    with pytest.raises(fw.FreewheelError, match="lies in other memory than when the model was attached"):
        train()


@pytest.mark.parametrize("loss", ["x", torch.ones(3)])
def test_a_loss_is_a_number(loss):
    with fw.attach(*made()) as worker, pytest.raises(fw.ConfigError, match="report takes"):
        worker.report(loss)


def test_weights_that_are_not_finite_are_no_answer():
    model, optimizer = made()
    worker = fw.attach(model, optimizer)

    def train() -> None:
        with worker:
            model[0].weight.data.fill_(torch.nan)
            step(model, optimizer)

    with pytest.raises(fw.Diverged, match="not finite"):
        train()
    with pytest.raises(fw.FreewheelError, match="no consensus"):
        worker.consensus()


def test_a_setting_that_is_none_is_named():
    with pytest.raises(fw.UnknownName, match=r"unknown setting of attach 'hearbeat_s'.*'heartbeat_s'"):
        fw.attach(*made(), hearbeat_s=1.0)


def test_settings_are_named_alike_for_editors_and_in_the_run():
    assert list(Given.__annotations__) == [field.name for field in fields(Settings)]
