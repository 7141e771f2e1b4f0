"""The learning rate goes by what all workers have done."""

from __future__ import annotations

import pytest
import torch

import freewheel as fw
from crew import together
from freewheel.errors import ConfigError
from freewheel.runtime.worker.settings import Settings
from freewheel.schedule import Schedule
from freewheel.strategies import resolve
from lab import FAST, make


def test_the_rate_grows_over_a_twentieth_and_then_follows_its_curve():
    factors = [Schedule(100, "cosine").factor(done) for done in range(101)]
    assert factors[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.0, abs=1e-12)
    assert Schedule(100, "linear", 20).factor(60) == pytest.approx(0.5)
    assert {Schedule(100, warmup=0).factor(done) for done in range(101)} == {1.0}
    assert Schedule(10, "cosine", 10).factor(9) < 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 10, "warmup": 11}, "does not fit a budget of 10"),
        ({"steps": 10, "warmup": -1}, "give 0"),
        ({"steps": 10, "curve": "sinus"}, "constant, linear, cosine"),
        ({"steps": 0}, "needs an end"),
        ({"steps": float("inf")}, "needs an end"),
    ],
)
def test_what_cannot_be_is_refused_with_a_cure(given, words):
    with pytest.raises(ConfigError, match=words):
        Schedule(**given)


def learner() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def test_a_workers_scheduler_counts_passes_over_the_loaders_data():
    model, optimizer = learner()
    dataset = torch.utils.data.TensorDataset(torch.randn(40, 2))
    rates = []
    with fw.attach(model, optimizer, "none") as worker:
        loader = worker.loader(dataset, batch_size=4, epochs=2)
        scheduler = worker.scheduler("linear", warmup=0.5)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
        for _ in range(2):
            for (x,) in loader:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                scheduler.step()
    assert rates[0] == pytest.approx(0.5 / 6)
    assert max(rates) == pytest.approx(0.5, rel=0.1)
    assert rates[-1] < 0.1
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


def test_a_scheduler_without_an_end_is_refused_and_one_by_steps_needs_no_loader():
    model, optimizer = learner()
    with fw.attach(model, optimizer, "none") as worker:
        with pytest.raises(ConfigError, match="needs an end"):
            worker.scheduler()
        with pytest.raises(ConfigError, match="epochs=2 or steps=4, not both"):
            worker.scheduler(epochs=2, steps=4)
        scheduler = worker.scheduler("linear", steps=4, warmup=0)
        rates = []
        for _ in range(4):
            rates.append(optimizer.param_groups[0]["lr"])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    assert rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_a_rate_that_is_a_tensor_is_scheduled_as_any_other():
    model, _ = learner()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    with fw.attach(model, optimizer, "none") as worker:
        scheduler = worker.scheduler("constant", steps=20, warmup=4)
        for _ in range(10):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5)


def used(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rates of its steps from now on, as each is made."""
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(float(optimizer.param_groups[0]["lr"])))
    return rates


def cut_off_and_resumed(folder, warmup: float, *, early: bool) -> list[tuple[list[float], list[float]]]:
    """Of two runs, cut off in the middle of the pass and resumed: the rates before each step, and in it."""
    dataset = torch.utils.data.TensorDataset(torch.randn(40, 2))
    runs: list[tuple[list[float], list[float]]] = []
    for most in (5, 10):
        model, optimizer = learner()
        with fw.attach(model, optimizer, "none", resume=folder) as worker:
            if early:  # before there is a loader
                scheduler = worker.scheduler("linear", epochs=1, warmup=warmup)
            loader = worker.loader(dataset, batch_size=4, epochs=1)
            if not early:
                scheduler = worker.scheduler("linear", warmup=warmup)
            before: list[float] = []
            runs.append((before, used(optimizer)))
            for (x,) in loader:
                before.append(optimizer.param_groups[0]["lr"])
                model(x).mean().backward()
                optimizer.step()
                scheduler.step()
                if len(before) == most:
                    worker.checkpoint(folder, every=None)
                    break
    return runs


def test_a_scheduler_made_in_a_resumed_run_goes_on_from_the_scripts_own_rate(tmp_path):
    (first, _), (second, _) = cut_off_and_resumed(tmp_path, 0, early=False)
    assert first[0] == 0.5
    assert first[-1] - 0.11 < second[0] <= first[-1] < 0.5
    assert second == sorted(second, reverse=True)
    assert second[-1] <= 0.11


def test_where_all_step_together_all_have_the_same_rate_whatever_they_have_heard():
    dataset = torch.utils.data.TensorDataset(torch.randn(96, 2))

    def work(place):
        model, optimizer = learner()
        used = []
        with fw.Worker(
            model, optimizer, resolve("sasgd:interval=2"), Settings(join_timeout_s=30.0), place
        ) as me:
            loader = me.loader(dataset, batch_size=4, epochs=2)
            scheduler = me.scheduler("linear", warmup=0)
            for _ in range(2):
                for (x,) in loader:
                    used.append(optimizer.param_groups[0]["lr"])
                    model(x).mean().backward()
                    optimizer.step()
                    scheduler.step()
        return [*used, optimizer.param_groups[0]["lr"]]

    first, *others = together(3, work)
    assert len(first) == 17
    # A batch counts when the loop comes for the next.
    assert first == pytest.approx([0.5, *(0.5 * (1 - k / 16) for k in range(16))])
    for other in others:
        assert other == pytest.approx(first)


def test_where_all_step_together_all_are_equally_far_in_uneven_batches_and_after_a_state_was_loaded():
    dataset = torch.utils.data.TensorDataset(torch.randn(101, 2))

    def work(place, state=None):
        model, optimizer = learner()
        found = []
        with fw.Worker(model, optimizer, resolve("allreduce"), Settings(join_timeout_s=30.0), place) as me:
            loader = me.loader(dataset, batch_size=5)
            if state is not None:
                loader.load_state_dict(state)
            for k, (x,) in enumerate(loader):
                found.append(me.progress)
                model(x).mean().backward()
                optimizer.step()
                if state is not None:
                    break
                if k == 4:
                    me.mean(0.0, wait=True)
                    saved = loader.state_dict()
            return found, me.progress, saved if state is None else None

    (first, end, saved), (second, other_end, _) = together(2, work)
    assert first == second == sorted(first)
    assert end == other_end == 1.0
    (first, _, _), (second, _, _) = together(2, lambda place: work(place, saved))
    assert first == second == [pytest.approx(0.5, abs=0.2)]


@pytest.mark.parametrize(
    ("epochs", "passes", "said"), [(3, 1, True), (3, 3, False), (1, 1, False), (None, 1, False)]
)
def test_who_announces_more_passes_than_it_makes_is_told(epochs, passes, said, caplog):
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 2))
    model, optimizer = learner()
    with fw.attach(model, optimizer, "none") as worker:
        loader = worker.loader(dataset, batch_size=4, epochs=epochs)
        for _ in range(passes):
            for (x,) in loader:
                model(x).mean().backward()
                optimizer.step()
    assert ("made 1 of the loader's 3 epochs" in caplog.text) is said


def rates_in_use(strategy: str, **settings) -> list[list[float]]:
    """The learning rates of all steps of each worker."""
    simulation = make(strategy, links=FAST, **settings)
    used: list[list[float]] = [[] for _ in simulation.workers]
    for rank, worker in simulation.workers.items():
        inner = worker.study.step

        def step(lr, rank=rank, inner=inner):
            used[rank].append(lr)
            inner(lr)

        worker.study.step = step
    simulation.run()
    return used


def test_a_slow_worker_is_where_the_others_are():
    compute = fw.Compute(slow={0: 5})
    used = rates_in_use(
        "adpsgd", workers=4, steps=40, lr=1.0, schedule="linear", warmup=None, compute=compute
    )
    assert len(used[0]) < len(used[1]) / 3
    assert used[0][-1] < 0.2  # near the end, though it has made few steps
    assert used[0].index(max(used[0])) <= 2  # its warm-up is over as soon as theirs


def test_a_rate_is_that_of_the_averaged_update():
    shares = {"adpsgd": 1, "asgd": 4, "dasgd": 1, "dasgd:form=sum": 4, "asgd:raw=true": 1}
    for strategy, share in shares.items():
        used = rates_in_use(strategy, workers=4, steps=4, lr=0.1)
        assert used[1][0] == pytest.approx(0.1 / share), strategy


def test_the_first_step_has_the_rate_of_what_is_done_as_it_is_made(tmp_path):
    """Also that of a worker that begins in the middle and knew nothing when it made its scheduler."""
    (_, first), (_, second) = cut_off_and_resumed(tmp_path, 0.2, early=True)
    # A batch counts when the loop comes for the next.
    assert first == pytest.approx([0.5 / 3, 0.5 / 3, 1.0 / 3, 0.5, 0.4375])
    assert second == pytest.approx([0.3125, 0.3125, 0.25, 0.1875, 0.125])


def test_other_schedulers_and_the_script_have_their_say():
    model, optimizer = learner()
    with fw.attach(model, optimizer, "none") as worker:
        ours = worker.scheduler("constant", steps=20, warmup=3)
        theirs = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [ours, theirs], [4])
        rates = used(optimizer)
        for _ in range(8):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            both.step()
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.25, 0.125, 0.0625])
    model, optimizer = learner()
    with fw.attach(model, optimizer, "none") as worker:
        worker.scheduler("constant", steps=20, warmup=0)
        optimizer.param_groups[0]["lr"] = 0.01
        rates = used(optimizer)
        for _ in range(8):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert rates == [0.01] * 8


def test_a_schedule_of_passes_in_a_loop_without_a_loader_is_refused():
    model, optimizer = learner()
    with fw.attach(model, optimizer, "none") as worker:
        scheduler = worker.scheduler(epochs=3)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(ConfigError, match="give steps="):
            scheduler.step()
        with pytest.raises(ConfigError, match="warmup must be a number, not '5%'"):
            worker.scheduler(epochs=3, warmup="5%")


def test_a_schedule_goes_by_the_loader_that_was_given_epochs():
    model, optimizer = learner()
    data = [torch.utils.data.TensorDataset(torch.randn(size, 2)) for size in (8, 40)]
    with fw.attach(model, optimizer, "none") as worker:
        worker.loader(data[0], batch_size=4)  # to look how good it is
        loader = worker.loader(data[1], batch_size=4, epochs=1)
        scheduler = worker.scheduler("linear", warmup=0)
        rates = used(optimizer)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            scheduler.step()
        for _ in worker.loader(data[0], batch_size=4, epochs=1):  # one that is made later changes nothing
            scheduler.step()
    assert rates == pytest.approx([0.5, *(0.5 - 0.05 * k for k in range(9))])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


@pytest.mark.parametrize("tensor", [False, True])
def test_parameters_that_come_later_follow_the_schedule_from_their_own_rate(tensor):
    """In an optimizer that is not the last, too, and with a tensor that torch shares between groups."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    rate = torch.tensor(0.5) if tensor else 0.5
    one = torch.optim.SGD([model[0].weight], lr=rate)
    two = torch.optim.SGD(model[1].parameters(), lr=0.01)
    with fw.attach(model, [one, two], "none") as worker:
        scheduler = worker.scheduler("linear", steps=4, warmup=0)
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            one.step()
            two.step()
            scheduler.step()
            if step == 0:
                one.add_param_group({"params": [model[0].bias], **({} if tensor else {"lr": 0.1})})
        found = [float(group["lr"]) for group in (*one.param_groups, *two.param_groups)]
    assert found == pytest.approx([0.25, 0.25 if tensor else 0.05, 0.005])
