"""The Transformers Trainer as a worker: alone it is the plain run; two share the samples, one is killed."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import torch

import freewheel as fw
import guests
from freewheel.runtime.membership.place import Place, local_rank

transformers = pytest.importorskip("transformers", reason="Transformers comes with the extra transformers")
pytest.importorskip("accelerate", reason="Accelerate comes with the extra transformers")

from freewheel.transformers import POSITION, FreewheelCallback  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

MODEL = '''
import torch
import transformers


def data(length, seed):
    """Tokens that mostly count up: the loss ends near their entropy, whoever trains."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 8, (length,), generator=generator)]
    for _ in range(7):
        other = torch.randint(0, 8, (length,), generator=generator)
        lucky = torch.rand(length, generator=generator) < 0.25
        rows.append(torch.where(lucky, other, (rows[-1] + 1) % 8))
    return [{"input_ids": row, "labels": row} for row in torch.stack(rows, 1)]


def model():
    transformers.set_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=16, n_layer=1, n_head=2, **none)
    return transformers.GPT2LMHeadModel(config)


def arguments(folder, **settings):
    settings = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1000,
        **settings,
    }
    return transformers.TrainingArguments(str(folder), **settings)
'''
exec(MODEL)
data, model, arguments = (globals()[name] for name in ("data", "model", "arguments"))


def train(folder, *callbacks, resume=None, length=168, **settings):
    mine = model()
    trainer = transformers.Trainer(
        mine, arguments(folder, **settings), train_dataset=data(length, 1), callbacks=[*callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return mine, trainer


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def entropy(mine, length=512):
    ids = torch.stack([one["input_ids"] for one in data(length, 2)])
    with torch.no_grad():
        return mine.eval()(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}, {"max_steps": 30}])
@pytest.mark.parametrize("strategy", ["adpsgd", "allreduce"])
def test_alone_it_is_the_plain_run(strategy, settings, tmp_path):
    settings["train_sampling_strategy"] = "sequential"
    plain, trainer = train(tmp_path, **settings)
    callback = FreewheelCallback(strategy)
    mine, other = train(tmp_path, callback, **settings)
    assert same(plain, mine)
    assert trainer.state.global_step == other.state.global_step
    assert trainer.lr_scheduler.get_last_lr() == other.lr_scheduler.get_last_lr()
    assert callback.worker.metrics()["steps"] == trainer.state.global_step


@pytest.mark.parametrize("at", [4, 20, 21])  # an epoch has 21 batches
def test_notice_lets_it_leave_and_what_it_has_used_is_what_it_has_finished(at, tmp_path):
    class Notice(transformers.TrainerCallback):
        steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1
            if self.steps == at:
                os.kill(os.getpid(), signal.SIGTERM)

    callback, notice = FreewheelCallback(), Notice()
    with pytest.raises(SystemExit) as left:
        train(tmp_path, callback, notice)
    assert not left.value.code
    assert callback.worker.metrics()["samples"] == 8 * notice.steps
    assert callback.worker.progress == pytest.approx(8 * notice.steps / 168)
    assert notice.steps in (at, at + 1)


def test_resuming_goes_on_at_the_next_sample(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 10}
    whole, trainer = train(tmp_path, FreewheelCallback(), **saves)
    assert same(whole, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))
    for step in (10, 30):
        callback = FreewheelCallback()
        again, other = train(tmp_path / "other", callback, resume=str(tmp_path / f"checkpoint-{step}"))
        assert other.state.global_step == trainer.state.global_step == 63
        assert callback.worker.metrics()["samples"] == 8 * (63 - step)
        assert same(whole, again)


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    """The best is loaded when the run has its answer, so it is not averaged into it."""
    mine = model()
    settings = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 1.0}
    callback = FreewheelCallback()
    trainer = transformers.Trainer(
        mine,
        arguments(tmp_path, **settings),
        train_dataset=data(168, 1),
        eval_dataset=data(64, 2),
        callbacks=[callback, transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    assert trainer.state.global_step < 63
    best = transformers.GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
    assert same(mine, best)


def test_what_cannot_be_is_refused(tmp_path):
    for settings, why in (
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "in_order"),
    ):
        with pytest.raises(fw.ConfigError, match=why) as refused:
            train(tmp_path, FreewheelCallback(), **settings)
        assert len(str(refused.value).split()) <= 30
    with pytest.raises(fw.ConfigError, match="resume_from_checkpoint"):
        FreewheelCallback(resume="saved")


def test_the_launcher_hides_ranks_from_scripts_with_an_accelerator_of_their_own(tmp_path):
    script = "import os, json\nnames = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')\n"
    script += "hidden = {name: os.environ['FREEWHEEL_' + name] for name in names}\n"
    script += "seen = [name for name in names if name in os.environ]\n"
    script += "print('END', json.dumps({'rank': int(hidden['RANK']), 'hidden': hidden, 'seen': seen}))\n"
    found = guests.run(tmp_path, script, "-n", "2", "--hide-ranks")
    assert [one["seen"] for one in found.values()] == [[], []]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank, one in found.items():
        environment = {**where, **{f"FREEWHEEL_{name}": value for name, value in one["hidden"].items()}}
        place = Place.read(environment)
        assert (place.rank, place.world_size, local_rank(environment)) == (rank, 2, rank)
        assert Place.read({**environment, "RANK": "4", "WORLD_SIZE": "5"}).rank == 4  # set by another since


SCRIPT = (
    MODEL
    + """
from pathlib import Path

from freewheel.transformers import FreewheelCallback
from guests import Accident, say


class Kills(transformers.TrainerCallback):
    def __init__(self, accident):
        self.step = accident.step
        self.rates, self.evaluations = [], 0

    def on_step_end(self, args, state, control, lr_scheduler, **_):
        self.rates.append(lr_scheduler.get_last_lr()[0])
        self.step()

    def on_evaluate(self, *_, **__):
        self.evaluations += 1


if __name__ == "__main__":
    mine, freewheel = model(), FreewheelCallback("adpsgd")
    kills = Kills(Accident(lambda: freewheel.worker, 20))
    args = arguments("out", save_strategy="epoch", eval_strategy="epoch")
    trainer = transformers.Trainer(
        mine,
        args,
        train_dataset=data(2048, 1),
        eval_dataset=data(64, 2),
        callbacks=[freewheel, kills],
    )
    trainer.train()
    trainer.save_model("saved")
    ids = torch.stack([one["input_ids"] for one in data(512, 2)])
    with torch.no_grad():
        loss = mine.eval()(input_ids=ids, labels=ids).loss.item()
    say(
        rank=freewheel.worker.rank,
        mode=args.parallel_mode.value,
        zero=trainer.is_world_process_zero(),
        samples=freewheel.worker.metrics()["samples"],
        again=freewheel.worker.metrics()["samples_again"],
        life=freewheel.worker.metrics()["life"],
        progress=freewheel.worker.progress,
        evaluations=kills.evaluations,
        rates=kills.rates,
        loss=loss,
        weights=mine.transformer.wte.weight.flatten().tolist(),
    )
"""
)


@pytest.mark.slow
def test_two_workers_of_which_one_is_killed_and_comes_back(tmp_path, caplog):
    found = guests.run(tmp_path, SCRIPT, "-n", "2", "--restarts", "1")
    assert list(found) == [0, 1]
    assert {one["mode"] for one in found.values()} == {"not_parallel"}  # Accelerate has started nothing
    assert [one["zero"] for one in found.values()] == [True, False]
    assert {one["progress"] for one in found.values()} == {3.0}
    samples = sum(one["samples"] for one in found.values())
    again = sum(one["again"] for one in found.values())
    assert 3 * 2048 - 8 * 20 <= samples <= 3 * 2048 + again
    assert found[1]["life"] == 2
    assert found[1]["samples"] > 0
    assert len({tuple(one["weights"]) for one in found.values()}) == 1  # the mean, in every model
    assert [one["evaluations"] for one in found.values()] == [3, 0]
    plain, _ = train(tmp_path / "plain", length=2048)
    for one in found.values():
        assert one["rates"][-1] < 1e-4  # all end where the schedule does
    assert found[1]["rates"][0] > 0.9e-2  # who comes late is where the others are: the warm-up is over
    loss = entropy(plain)
    assert all(math.isclose(one["loss"], loss, rel_tol=0.05) for one in found.values())
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert saved.transformer.wte.weight.flatten().tolist() == found[0]["weights"]
    # Checkpoints are worker 0's, hold the mean, and go on with one worker.
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert len(checkpoints) == 3
    state = json.loads((checkpoints[1] / "trainer_state.json").read_text())
    done = 8 * state["stateful_callbacks"][POSITION]["steps"]
    callback = FreewheelCallback()
    again, _ = train(tmp_path / "again", callback, resume=str(checkpoints[1]), length=2048)
    made = callback.worker.metrics()["samples"]
    assert 0 < made <= 3 * 2048 - done, (state["stateful_callbacks"][POSITION], caplog.text)
    assert callback.worker.progress == 3
    assert math.isclose(entropy(again), loss, rel_tol=0.05)
