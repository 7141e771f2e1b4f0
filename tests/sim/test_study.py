"""What a simulated worker learns must be what PyTorch would have made of it."""

import copy

import pytest
import torch

from freewheel.sim.study import AdamStudy, Study
from freewheel.tasks import Digits


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9, None])  # None: AdamW
def test_a_study_steps_as_torch_s_optimizers_do(momentum, decay):
    task = Digits()
    task.prepare(1, 0)
    torch.manual_seed(0)
    start = task.model()
    plain = copy.deepcopy(start)
    if momentum is None:
        study = AdamStudy(task, start, 0, "seed", 0.0, decay)
        optimizer = torch.optim.AdamW(plain.parameters(), 0.1, weight_decay=decay)
    else:
        study = Study(task, start, 0, "seed", momentum, decay)
        nesterov = {"nesterov": momentum > 0, "weight_decay": decay}
        optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum, **nesterov)
    generator = torch.Generator()
    generator.set_state(study.generator.get_state())
    for _ in range(8):
        study.gradient(study.draw())
        study.step(0.1)
        optimizer.zero_grad()
        task.loss(plain, task.batch(0, generator)).backward()
        optimizer.step()
    for ours, theirs in zip(study.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
