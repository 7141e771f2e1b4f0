"""The time a gradient is made to take lies inside the layers."""

from __future__ import annotations

import pytest
import torch

from freewheel import tempo
from freewheel.tempo import Tempo


class Clock:
    """Sleeping is all that takes time, and a little more than asked for."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self.late_s = 100.0, late_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(tempo.time, "monotonic", lambda: made.now_s)
    monkeypatch.setattr(tempo.time, "sleep", made.sleep)
    return made


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    )


def gradients(model):
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("late_s", [0.0, 0.004])
def test_gradients_of_the_last_layers_are_there_while_the_first_ones_take_their_time(clock, late_s):
    model, ready = net(), {}
    own = Tempo(model)
    assert own.measure(lambda: gradients(model), 2) == 0.0

    def note(name):
        def there(_):
            ready[name] = clock.now_s - own.began_s

        return there

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(note(name))
    own.take(0.9)
    clock.late_s = late_s
    for _ in range(2):
        ready.clear()
        own.begin()
        gradients(model)
        own.rest()
        moments = [ready[f"{layer}.weight"] for layer in (3, 2, 0)]
        # Waking up late does not add up.
        assert moments == pytest.approx([0.5 + late_s, 0.7 + late_s, 0.9 + late_s])
        assert own.woken_s - own.began_s == pytest.approx(0.9 + late_s)


def test_what_the_model_computes_lies_within_its_time(clock):
    model = net()
    own = Tempo(model)
    model[2].register_forward_hook(lambda *_: clock.sleep(0.03))
    own_s = own.measure(lambda: gradients(model), 1)
    own.take(0.9, own_s)
    own.begin()
    gradients(model)
    # The first layer's own gradients, a third of two thirds of what is computed, come after the last sleep.
    assert clock.now_s - own.began_s == pytest.approx(0.9 - 0.03 * 2 / 9)


def test_weights_that_are_used_without_a_call_take_their_time_after_the_backward_pass(clock):
    weight = torch.nn.ParameterList([torch.zeros(2)])
    own = Tempo(weight)
    own.measure(lambda: weight[0].sum().backward(), 1)
    own.take(0.5)
    own.begin()
    weight[0].sum().backward()
    own.rest()
    assert clock.now_s - own.began_s == pytest.approx(0.5)


def test_a_gradient_that_takes_as_long_anyway_and_an_end_leave_the_model_as_it_was(clock):
    model = net()
    own = Tempo(model)
    own.measure(lambda: gradients(model), 1)
    own.take(0.0, 0.0)
    assert not any(layer._forward_hooks for layer in model.modules())
    gradients(model)
    assert clock.now_s == 100.0
