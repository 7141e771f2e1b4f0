"""Lightning's Trainer as a worker: alone it is the plain run; several share the samples, one is killed."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import freewheel as fw
import guests

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

MODULE = '''
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def data(length, seed):
    """A line and noise: the loss ends near the noise, whoever trains."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.5 * torch.randn(length, 1, generator=generator))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self.rates = []

    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, index):
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
'''


@pytest.fixture(scope="module", autouse=True)
def library():
    """Importing it takes seconds, and every process collects every file: only who tests it imports it."""
    global lightning, FreewheelCallback, Module, data
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning comes with the extra lightning")
    from freewheel.lightning import FreewheelCallback

    exec(MODULE, globals())
    Module, data = globals()["Module"], globals()["data"]


def train(callbacks, folder, loader=None, ckpt_path=None, module=None, **settings):
    torch.manual_seed(0)
    module = module or Module()
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, **settings}
    trainer = lightning.Trainer(
        devices=1,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    loader = DataLoader(data(168, 1), batch_size=8) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module, trainer


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_alone_it_is_the_plain_run(strategy, tmp_path):
    """Closures, gradients accumulated over a pass that does not divide, a schedule that knows its end."""
    plain, trainer = train([], tmp_path, accumulate_grad_batches=2)
    callback = FreewheelCallback(strategy)
    mine, mines = train([callback], tmp_path, accumulate_grad_batches=2)
    assert same(plain, mine)
    assert plain.rates == mine.rates
    assert trainer.global_step == mines.global_step == 33
    assert callback.worker.metrics()["samples"] == 3 * 168
    assert callback.worker.progress == 3


@pytest.mark.parametrize("settings", [{"max_steps": 30, "max_epochs": -1}, {"limit_train_batches": 7}])
def test_the_trainer_s_limits_hold(settings, tmp_path):
    plain, trainer = train([], tmp_path, **settings)
    mine, mines = train([FreewheelCallback()], tmp_path, **settings)
    assert trainer.global_step == mines.global_step
    assert same(plain, mine)


def test_resuming_goes_on_at_the_next_sample(tmp_path):
    """From any checkpoint to the weights of the run that was not interrupted, to the bit."""
    shuffled = DataLoader(data(168, 1), batch_size=8, shuffle=True)
    saver = lightning.callbacks.ModelCheckpoint(
        tmp_path / "saved", filename="{step}", every_n_train_steps=10, save_top_k=-1
    )
    whole, _ = train([FreewheelCallback(), saver], tmp_path, shuffled, enable_checkpointing=True)
    for step in (10, 30, 40):
        callback = FreewheelCallback()
        again, trainer = train([callback], tmp_path, shuffled, str(tmp_path / "saved" / f"step={step}.ckpt"))
        assert trainer.global_step == 63
        assert callback.worker.metrics()["samples"] == 8 * (63 - step)
        assert same(whole, again)


def test_a_module_that_steps_several_optimizers_itself(tmp_path):
    class TwoOptimizers(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD([one], lr=0.05) for one in self.net.parameters()]

        def training_step(self, batch, index):
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            for one in self.optimizers():
                one.zero_grad()
            self.manual_backward(loss)
            for one in self.optimizers():
                one.step()

    torch.manual_seed(0)
    plain, _ = train([], tmp_path, module=TwoOptimizers())
    torch.manual_seed(0)
    callback = FreewheelCallback()
    mine, _ = train([callback], tmp_path, module=TwoOptimizers())
    assert same(plain, mine)
    assert callback.worker.metrics()["steps"] == 63


def test_a_sampler_of_the_script_s_own(tmp_path):
    torch.manual_seed(0)
    drawn = DataLoader(data(168, 1), 8, sampler=WeightedRandomSampler([1.0, 0.0] * 84, 80))
    callback = FreewheelCallback()
    _, trainer = train([callback], tmp_path, drawn)
    assert trainer.global_step == 30
    assert callback.worker.metrics()["samples"] == 240


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield data(1, 0)[0]


@pytest.mark.parametrize(("at", "several"), [(4, 1), (20, 1), (21, 1), (3, 2)])  # an epoch has 21 batches
def test_notice_lets_it_leave_and_what_it_has_used_is_what_it_has_finished(at, several, tmp_path):
    class Noticed(Module):
        used = 0

        def training_step(self, batch, index):
            self.used += 1
            if self.used == at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, index)

    before = signal.getsignal(signal.SIGTERM)
    callback, module = FreewheelCallback(), Noticed()
    with pytest.raises(SystemExit) as left:
        train([callback], tmp_path, module=module, accumulate_grad_batches=several)
    assert not left.value.code
    assert signal.getsignal(signal.SIGTERM) is before
    assert callback.worker.metrics()["samples"] == 8 * module.used
    assert callback.worker.progress == pytest.approx(8 * module.used / 168)
    assert module.used in (at, at + 1)
    assert module.used % several == 0  # no gradient is left behind


def test_a_loop_that_raises_leaves(tmp_path):
    class Broken(Module):
        def training_step(self, batch, index):
            if index == 3:
                raise ArithmeticError("broken")
            return super().training_step(batch, index)

    callback = FreewheelCallback()
    with pytest.raises(ArithmeticError):
        train([callback], tmp_path, module=Broken())
    with pytest.raises(fw.RunStopped, match="no consensus"):
        callback.worker.consensus()


@pytest.mark.parametrize(
    ("loader", "settings", "why"),
    [
        (lambda: DataLoader(Endless(), 8), {"max_steps": 5}, "Endless, which cannot be dealt"),
        (lambda: [DataLoader(data(64, 1), 8), DataLoader(data(64, 1), 8)], {}, "2 training DataLoaders"),
        (lambda: [torch.zeros(8, 8)], {}, "come from a Tensor"),
        (lambda: DataLoader(data(64, 1), 8), {"reload_dataloaders_every_n_epochs": 1}, "Leave out reload"),
    ],
)
def test_data_that_cannot_be_dealt_are_refused(loader, settings, why, tmp_path):
    with pytest.raises(fw.ConfigError, match=why) as refused:
        train([FreewheelCallback()], tmp_path, loader(), **settings)
    assert len(str(refused.value).split()) <= 30


def test_a_trainer_that_starts_processes_is_refused():
    trainer = lightning.Trainer(strategy="ddp", devices=1, accelerator="cpu", logger=False)
    with pytest.raises(fw.ConfigError, match=r"DDPStrategy.*devices=1"):
        FreewheelCallback().setup(trainer, None, "fit")
    with pytest.raises(fw.ConfigError, match="ckpt_path"):
        FreewheelCallback(resume="saved")


SCRIPT = (
    MODULE
    + """
from pathlib import Path

from freewheel.lightning import FreewheelCallback
from guests import Accident, say

TRAIN, TEST = data(3072, 1), data(512, 2)


class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TRAIN, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TEST, batch_size=128)


class Kills(lightning.Callback):
    def __init__(self, accident):
        self.step = accident.step

    def on_train_batch_end(self, *_):
        self.step()


if __name__ == "__main__":
    lightning.seed_everything(0)
    module, freewheel = Module(), FreewheelCallback("adpsgd")
    saver = lightning.callbacks.ModelCheckpoint("saved", filename="{epoch}", save_top_k=-1)
    kills = Kills(Accident(lambda: freewheel.worker, 20))
    trainer = lightning.Trainer(
        max_epochs=3,
        devices=1,
        accelerator="cpu",
        enable_model_summary=False,
        default_root_dir="logs",
        logger=lightning.loggers.CSVLogger("logs"),
        callbacks=[lightning.callbacks.TQDMProgressBar(), freewheel, saver, kills],
    )
    trainer.fit(module, datamodule=Data())
    x, y = TEST.tensors
    saved = sorted(Path("saved").glob("*"), key=lambda path: path.stat().st_mtime)
    say(
        rank=trainer.global_rank,
        zero=trainer.is_global_zero,
        size=trainer.world_size,
        samples=freewheel.worker.metrics()["samples"],
        again=freewheel.worker.metrics()["samples_again"],
        progress=freewheel.worker.progress,
        loss=(module.net(x) - y).square().mean().item(),
        weights=module.net.weight.flatten().tolist(),
        rates=[module.rates[0], module.rates[-1]],
        late=freewheel.worker.metrics()["life"],
        bars=[one.is_disabled for one in trainer.callbacks if hasattr(one, "is_disabled")],
        saved=[path.name for path in saved],
    )
"""
)


@pytest.mark.slow
def test_three_workers_of_which_one_is_killed_and_comes_back(tmp_path):
    found = guests.run(tmp_path, SCRIPT, "-n", "3", "--restarts", "1")
    assert list(found) == [0, 1, 2]
    assert [one["zero"] for one in found.values()] == [True, False, False]
    assert {one["size"] for one in found.values()} == {3}
    assert {one["progress"] for one in found.values()} == {3.0}
    samples = sum(one["samples"] for one in found.values())
    killed = 8 * 20
    assert 3 * 3072 - killed <= samples <= 3 * 3072 + sum(one["again"] for one in found.values())
    assert found[1]["late"] == 2
    assert found[1]["samples"] > 0
    assert len({tuple(one["weights"]) for one in found.values()}) == 1  # the mean, in every module
    # Only worker 0 shows, logs and writes.
    assert [one["bars"] for one in found.values()] == [[False], [True], [True]]
    assert [path.name for path in (tmp_path / "logs").rglob("metrics.csv")] == ["metrics.csv"]
    assert sorted(found[0]["saved"]) == [f"epoch={k}.ckpt" for k in range(3)]
    shuffled = DataLoader(data(3072, 1), 8, shuffle=True)
    # Rates go by what all have done: the killed worker's begins again where the others are.
    plain, _ = train([], tmp_path, shuffled)
    low, high = min(plain.rates), max(plain.rates)
    for rank, one in found.items():
        assert one["rates"][-1] < low + 0.05 * (high - low)
        assert rank == 1 or one["rates"][0] < low + 0.1 * (high - low)
    assert found[1]["rates"][0] > found[0]["rates"][0]
    x, y = data(512, 2).tensors
    loss = (plain.net(x) - y).square().mean().item()
    assert all(math.isclose(one["loss"], loss, rel_tol=0.05) for one in found.values())
    # A checkpoint holds the mean of its moment, and goes on with one worker.
    state = torch.load(tmp_path / "saved" / "epoch=1.ckpt", weights_only=False)
    assert state["state_dict"].keys() == plain.state_dict().keys()
    callback = FreewheelCallback()
    again, _ = train(
        [callback],
        tmp_path,
        DataLoader(data(3072, 1), 8, shuffle=True),
        str(tmp_path / "saved" / "epoch=1.ckpt"),
    )
    assert 3072 <= callback.worker.metrics()["samples"] <= 3072 + 8 * 100
    assert callback.worker.progress == 3
    assert math.isclose((again.net(x) - y).square().mean().item(), loss, rel_tol=0.05)
