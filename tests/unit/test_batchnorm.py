"""BatchNorm's statistics of a mean model are measured, not averaged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import freewheel as fw


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


def test_statistics_are_those_of_the_batches():
    torch.manual_seed(0)
    model, batches = net().eval(), [(torch.randn(64, 4) * 3 + 1, None) for _ in range(5)]
    momentum = model[1].momentum
    assert fw.recalibrate(model, batches) is model
    seen = model[0](torch.cat([x for x, _ in batches]))
    torch.testing.assert_close(model[1].running_mean, seen.mean(0))
    assert model[1].momentum == momentum
    assert not any(module.training for module in model.modules())


def test_the_mean_of_two_models_needs_them():
    torch.manual_seed(0)
    one = net().train()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight += 2.0
    batches = [torch.randn(64, 4) + 1 for _ in range(20)]
    for model in (one, other):
        for batch in batches:
            model(batch)
    mean = copy.deepcopy(one)
    with torch.no_grad():
        for p, q in zip(mean.parameters(), other.parameters(), strict=True):
            p.add_(q).div_(2)
        mean[1].running_var.add_(other[1].running_var).div_(2)
    wrong = mean[1].running_var.clone()
    fw.recalibrate(mean, batches)
    right = torch.cat([mean[0](batch).detach() for batch in batches]).var(0)
    torch.testing.assert_close(mean[1].running_var, right, rtol=0.1, atol=0.05)
    assert float((wrong / right).max()) > 1.2


@pytest.mark.parametrize("batch", [torch.randn(8, 4), (torch.randn(8, 4), 1), {"input": torch.randn(8, 4)}])
def test_batches_of_the_usual_kinds(batch):
    fw.recalibrate(net(), [batch])


def test_a_model_without_statistics_is_left_alone():
    assert fw.recalibrate(nn.Linear(2, 2), iter(int, 1)) is not None  # of an endless loader nothing is drawn


def test_only_so_many_batches_are_drawn():
    drawn = iter([torch.randn(8, 4)] * 10)
    fw.recalibrate(net(), drawn, count=3)
    assert len(list(drawn)) == 7


@pytest.mark.parametrize(
    ("batches", "count", "words"),
    [
        ([], 32, "gave no batch"),
        ([torch.ones(2, 4)], 0, "from 1 on, not 0"),
        ([torch.ones(2, 3)], 1, "shape"),
    ],
)
def test_statistics_stay_where_nothing_can_be_measured(batches, count, words):
    model = net().train()
    model(torch.randn(8, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((fw.ConfigError, RuntimeError), match=words):
        fw.recalibrate(model, batches, count=count)
    torch.testing.assert_close(model.state_dict(), before)
    assert model[1].training
