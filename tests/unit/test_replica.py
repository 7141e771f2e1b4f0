from __future__ import annotations

import pytest
import torch
from torch import nn

from freewheel.errors import ConfigError
from freewheel.replica import Replica
from freewheel.sim.clock import at_once


class Tied(nn.Module):
    """An embedding whose weights are the output layer's, as in a language model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.middle(self.embedding(x)))


def test_parameters_become_views_of_one_vector_and_keep_their_values():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    values = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(2, 4)
    before = model(x)
    replica = Replica.of(model)
    assert replica.size == 4 * 3 + 3 + 3 * 2 + 2
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))
    assert torch.equal(replica.weights, torch.cat([v.flatten() for v in values]))
    assert torch.equal(model(x), before)
    replica.load(torch.zeros(replica.size))
    assert all(not p.any() for p in model.parameters())


def test_the_names_in_a_state_dict_do_not_change():
    model = Tied()
    names = list(model.state_dict())
    Replica.of(model)
    assert list(model.state_dict()) == names


def test_tied_weights_appear_once_and_stay_tied():
    model = Tied()
    replica = Replica.of(model)
    assert replica.size == 5 * 3 + 3 * 3 + 3
    assert model.output.weight is model.embedding.weight
    model(torch.tensor([1, 2])).sum().backward()
    assert torch.equal(replica.gradient[:15].view(5, 3), model.output.weight.grad)
    assert replica.gradient[:15].any()


def test_weights_tied_by_memory_appear_once_too():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    replica = Replica.of(model)
    assert replica.size == 9
    replica.load(torch.arange(9.0))
    assert torch.equal(model[0].weight, model[1].weight)
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        expected = torch.outer(model[1].weight.sum(0), torch.ones(3)) + model[0](torch.ones(3)).expand(3, 3)
    torch.testing.assert_close(replica.gradient.view(3, 3), expected)


def test_weights_that_share_memory_with_other_shapes_are_refused():
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data.view(2, 3))
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight share memory"):
        Replica.of(model)


def test_frozen_parameters_and_buffers_are_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    replica = Replica.of(model)
    assert replica.size == 2 + 2 + 2
    replica.load(torch.full((6,), 7.0))
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model[1].running_var, torch.ones(2))


def test_mixed_dtypes_travel_in_the_widest_and_come_back_in_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16), nn.Linear(2, 2).double())
    replica = Replica.of(model)
    assert [block.weights.dtype for block in replica.blocks] == [torch.float32, torch.bfloat16, torch.float64]
    assert at_once(replica.snapshot()).dtype == torch.float64
    replica.load(torch.zeros(18, dtype=torch.float64))
    replica.correct(torch.linspace(0, 1, 18, dtype=torch.float64))
    replica.boundary()
    assert model[1].weight.dtype == torch.bfloat16
    expected = torch.linspace(0, 1, 18, dtype=torch.float64)
    torch.testing.assert_close(replica.weights, expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(replica.weights[12:], expected[12:], rtol=0, atol=0)
    replica.set_gradient(expected)
    assert model[2].bias.grad.tolist() == expected[16:].tolist()


def test_memory_order_of_channels_last_weights_is_kept():
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    stride, weight = model.weight.stride(), model.weight.detach().clone()
    Replica.of(model)
    assert model.weight.stride() == stride
    assert torch.equal(model.weight, weight)


def test_a_snapshot_contains_what_is_pending_and_weights_move_at_the_boundary():
    model = nn.Linear(2, 1, bias=False)
    replica = Replica.of(model)
    replica.load(torch.tensor([1.0, 2.0]))
    first = torch.tensor([10.0, 0.0])
    replica.correct(first)
    replica.correct(torch.tensor([0.0, 5.0]))
    assert at_once(replica.snapshot()).tolist() == [11.0, 7.0]
    assert model.weight.tolist() == [[1.0, 2.0]]
    replica.boundary()
    assert model.weight.tolist() == [[11.0, 7.0]]
    assert first.tolist() == [10.0, 0.0]  # a vector that was handed over may still be another's
    replica.boundary()
    assert at_once(replica.snapshot()).tolist() == [11.0, 7.0]


def test_a_snapshot_is_a_copy():
    replica = Replica.of(nn.Linear(2, 1))
    snapshot = at_once(replica.snapshot())
    replica.load(torch.zeros(3))
    assert snapshot.any()


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Replica.of(nn.ReLU())
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"weight is torch\.complex64"):
        Replica.of(model)
