"""Checkpoints: what comes back after everything was killed, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forked
import freewheel as fw
import resumable
from crew import outcomes, together
from freewheel import strategies
from freewheel.runtime.checkpoint import shards
from resumable import EVERY, train

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


class Killed(Exception):
    """Stands for the end of a process where that is not what is tested."""


def die_at(last: int):
    def at_step(step: int) -> None:
        if step == last:
            raise Killed

    return at_step


def interrupted(folder: Path, last: int = 17, **settings: Any) -> None:
    with pytest.raises(Killed):
        train(folder, at_step=die_at(last), **settings)


def sets(folder: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in folder.iterdir())


def shard_of(folder: Path, step: int, rank: int = 0) -> Path:
    (path,) = folder.glob(f"step-{step:08d}-*/worker-{rank}-*.pt")
    return path


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"]
    assert got["losses"] == {step: want["losses"][step] for step in got["losses"]}
    assert got["model"].keys() == want["model"].keys()
    for name, tensor in want["model"].items():
        assert torch.equal(got["model"][name], tensor), name
    assert (got["lr"], got["random"], got["steps"]) == (want["lr"], want["random"], want["steps"])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def child(program: list[str]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# -- one worker, to the bit --


KILLED = """
import os, sys
from pathlib import Path
import torch
from resumable import train
torch.set_num_threads(1)
home = Path(sys.argv[1])
flush, flushed = os.fsync, 0
def fsync(number):
    global flushed
    flushed += 1
    if flushed == 6:  # the second checkpoint's shard: written, not yet safe
        print("writing", flush=True)
        sys.stdin.read()
    flush(number)
def hang(step):
    if step == 18:
        os.fsync = fsync
        train(home / "hang")
def adam(step):
    if step == 18:
        train(home / "adam", optimizer="adam", at_step=hang)
train(home / "sgd", at_step=adam)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a process leaves that is killed in the middle of three trainings, and of a checkpoint of one."""
    home = tmp_path_factory.mktemp("killed")
    process = forked.start("-c", KILLED, str(home), stdin=forked.PIPE, stderr=2, env=environment())
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.kill()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    process.communicate()
    return home


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_killed_run_goes_on_to_the_bit(killed, optimizer):
    assert sets(killed / optimizer) == ["step-00000005", "step-00000010", "step-00000015"]
    got = train(killed / optimizer, optimizer=optimizer, resume=True)
    assert min(got["losses"]) == 16  # in the second pass, with three batches of it done
    assert_same(got, train(None, optimizer=optimizer))


def test_killed_while_it_writes_the_one_before_counts(killed):
    (left,) = killed.glob("hang/*/*.tmp")
    assert left.parent.name.startswith("step-00000010")
    got = train(killed / "hang", resume=True)
    assert min(got["losses"]) == 6
    assert not left.parent.exists()
    assert_same(got, train(None))


@pytest.mark.parametrize("strategy", strategies.ALL)
def test_every_strategy_goes_on_to_the_bit_alone(tmp_path, strategy):
    interrupted(tmp_path, 12, strategy=strategy)
    got = train(tmp_path, strategy=strategy, resume=True, passes=2)
    assert min(got["losses"]) == 11
    assert_same(got, train(None, strategy=strategy, passes=2))


def test_a_checkpoint_of_the_end_of_a_pass(tmp_path):
    interrupted(tmp_path, 13, every=12)
    got = train(tmp_path, resume=True)
    assert min(got["losses"]) == 13
    assert_same(got, train(None))


def test_a_resumed_run_can_be_resumed(tmp_path):
    interrupted(tmp_path, 7)
    interrupted(tmp_path, 21, resume=True)
    assert_same(train(tmp_path, resume=True), train(None))


def test_a_set_s_folder_that_another_worker_clears_away_is_made_again(tmp_path, monkeypatch):
    """It was empty when that worker looked."""
    make, cleared = Path.mkdir, []

    def clear_once(path: Path, *arguments: Any, **named: Any) -> None:
        make(path, *arguments, **named)
        if path.name.startswith("step-") and path not in cleared:
            cleared.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", clear_once)
    got = train(tmp_path, passes=1)
    assert cleared
    assert got["checkpoints"] == {"done": 3, "skipped": 0, "failed": 0}


def test_the_last_few_are_kept(tmp_path):
    train(tmp_path, keep=2)
    assert sets(tmp_path) == ["step-00000035", "step-00000036"]  # the last is of the end
    assert len(list(tmp_path.rglob("*.*"))) == 4


def test_where_nothing_is_yet_training_begins_anew(tmp_path, caplog):
    want = train(None)
    with caplog.at_level("WARNING", "freewheel"):
        got = train(tmp_path / "new", resume=True)
    assert caplog.messages == [f"there is no checkpoint in {tmp_path / 'new'} yet: training begins anew"]
    assert min(got["losses"]) == 1
    assert got["losses"].keys() == want["losses"].keys()


def simple(folder: Path, steps: int, **settings: Any) -> tuple[fw.Worker, nn.Module]:
    """A loop with batches of its own."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer, resume=folder) as worker:
        worker.checkpoint(folder, **settings)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            worker._checkpoints.wait()
    return worker, model


def test_a_loop_without_a_loader_is_copied_at_the_boundary(tmp_path):
    worker, model = simple(tmp_path, 4, every=2)
    assert worker.metrics()["checkpoints"] == {"done": 2, "skipped": 0, "failed": 0}
    after, resumed = simple(tmp_path, 0, every=2)
    assert after.metrics()["steps"] == 4
    assert torch.equal(resumed.weight, model.weight)


def test_a_checkpoint_now(tmp_path):
    """In the middle of a batch it is taken when the batch is done; else at once."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with fw.attach(model, optimizer) as worker:
        worker.checkpoint(tmp_path, every=None, extra={"scheduler": scheduler})
        for k, (inputs, _) in enumerate(worker.loader(resumable.Noisy(), 12)):
            if k == 2:
                worker.checkpoint(tmp_path, every=None)
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            scheduler.step()
    assert sets(tmp_path) == ["step-00000000", "step-00000003"]
    state = torch.load(shard_of(tmp_path, 3), weights_only=True)
    assert state["extra"]["scheduler"]["last_epoch"] == 3
    assert state["loaders"][0]["given"] == 3


def test_what_the_documentation_shows_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "RUNNING.md").read_text(), flags=re.S)
    (block,) = [one for one in blocks if 'resume="saved"' in one]
    for _ in range(2):
        scope: dict[str, Any] = {}
        exec(compile(block, "RUNNING.md", "exec"), scope)
        assert scope["worker"].metrics()["steps"] == 80


def test_wrong_arguments_are_refused(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = fw.attach(model, optimizer)
    with pytest.raises(fw.ConfigError, match="inside the with-block"):
        worker.checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with worker:
        with pytest.raises(fw.ConfigError, match="every must be at least 1, not 0"):
            worker.checkpoint(tmp_path, every=0)
        with pytest.raises(fw.ConfigError, match="keep must be at least 1, not 0"):
            worker.checkpoint(tmp_path, keep=0)
        with pytest.raises(fw.ConfigError, match=r"cannot be written to .*file: File exists"):
            worker.checkpoint(tmp_path / "file")
        with pytest.raises(fw.ConfigError, match="'rate', a float without state_dict"):
            worker.checkpoint(tmp_path, extra={"rate": 0.1})
        with pytest.raises(fw.ConfigError, match="a second place"):
            worker.checkpoint(tmp_path / "other")

        class Odd(nn.Module):
            def state_dict(self):
                return {"rule": [print]}

        with pytest.raises(fw.ConfigError, match=r"extra\['odd'\]\['rule'\]\[0\], a builtin_function"):
            worker.checkpoint(tmp_path, every=None, extra={"odd": Odd()})


def test_what_is_not_resumed_is_said(tmp_path, caplog):
    simple(tmp_path, 2, every=2, extra={"gone": nn.Linear(1, 1), "there": nn.Linear(1, 1)})
    simple(tmp_path, 2, every=2, extra={"there": nn.Linear(1, 1), "new": nn.Linear(1, 1)})
    assert caplog.messages[1:] == ["the checkpoint has gone, which begins anew: not in extra"]


def test_an_extra_that_does_not_fit_is_named(tmp_path):
    simple(tmp_path, 2, every=2, extra={"layer": nn.Linear(1, 1)})
    with pytest.raises(fw.ConfigError, match=r"layer cannot be resumed: .*size mismatch"):
        simple(tmp_path, 2, every=2, extra={"layer": nn.Linear(2, 1)})


# -- damage, and what is not ours --


def test_a_damaged_newest_one_falls_back(tmp_path, caplog):
    interrupted(tmp_path)
    want = train(None)
    path = shard_of(tmp_path, 15)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    got = train(tmp_path, resume=True, at_step=lambda step: None)
    assert any(f"{path} was changed after it was written" in message for message in caplog.messages)
    assert min(got["losses"]) == 11
    assert_same(got, want)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def noise(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def gone(path: Path) -> None:
    path.unlink()


def no_manifest(path: Path) -> None:
    (path.parent / "worker-0.json").write_bytes(os.urandom(100))


def newer(path: Path) -> None:
    manifest = path.parent / "worker-0.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 3, "version": "9.9"}))


def elsewhere(path: Path) -> None:
    manifest = path.parent / "worker-0.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "file": "../../secret.pt"}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, r"worker-0-\w+\.pt has 1000 bytes and should have \d+: it was cut off"),
        (noise, r"worker-0-\w+\.pt was changed after it was written: its SHA-256 is another"),
        (gone, r"worker-0-\w+\.pt is missing"),
        (no_manifest, r"worker-0\.json: it is not a manifest of Freewheel"),
        (newer, r"worker-0\.json: it was written by another Freewheel \(9\.9\)"),
        (elsewhere, r"worker-0\.json: it is not a manifest of Freewheel"),
    ],
)
def test_where_none_is_good_the_file_is_named(tmp_path, damage, why):
    interrupted(tmp_path, 7)
    damage(shard_of(tmp_path, 5))
    with pytest.raises(fw.ConfigError, match=f"nothing in .* can be resumed: .*{why}.* Give resume"):
        train(tmp_path, resume=True)


def test_a_checkpoint_runs_no_code(tmp_path):
    interrupted(tmp_path, 7)
    path = shard_of(tmp_path, 5)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    state = {name: Evil() for name in shards.PARTS}
    torch.save(state, path, pickle_module=pickle)
    manifest = path.parent / "worker-0.json"
    digest = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **digest}))
    with pytest.raises(fw.ConfigError, match=r"worker-0-\w+\.pt is not a shard of Freewheel: Weights only"):
        train(tmp_path, resume=True)
    assert not (tmp_path / "evil").exists()


def test_another_program_s_checkpoint_is_named(tmp_path):
    torch.save(resumable.net().state_dict(), tmp_path / "model.pt")
    with pytest.raises(fw.ConfigError, match=r"model\.pt was not written by Freewheel; load it"):
        train(tmp_path, resume=True)
    with pytest.raises(fw.ConfigError, match=r"model\.pt is a file; resume takes the folder"):
        train(tmp_path / "model.pt", resume=True)


def test_another_run_s_checkpoint_is_refused(tmp_path):
    interrupted(tmp_path, 7)
    with pytest.raises(
        fw.ConfigError,
        match=r"its model is another one\. The first difference: 0\.weight of shape \(9, 6\) in float32 here"
        r", 0\.weight of shape \(8, 6\) in float32 in the checkpoint\. Build the model",
    ):
        train(tmp_path, resume=True, width=9)
    with pytest.raises(fw.ConfigError, match=r"its strategy is adpsgd, not sasgd\. Take adpsgd"):
        train(tmp_path, resume=True, strategy="sasgd")
    with pytest.raises(fw.ConfigError, match=r"its optimizer is SGD, not Adam\. Take SGD"):
        train(tmp_path, resume=True, optimizer="adam")
    with pytest.raises(fw.ConfigError, match=r"the dataset has 60 samples, the one of the checkpoint had 48"):
        train(tmp_path, resume=True, samples=60)


def test_a_fresh_run_leaves_an_older_one_s_checkpoints_alone(tmp_path, caplog):
    interrupted(tmp_path, 17)
    interrupted(tmp_path, 7)
    assert sets(tmp_path) == ["step-00000005", "step-00000005", "step-00000010", "step-00000015"]
    assert f"{tmp_path} holds checkpoints of another training, too: they stay" in caplog.messages
    assert min(train(tmp_path, resume=True)["losses"]) == 6


# -- the disk --


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for two checkpoints, not for three."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def assert_training_went_on(got: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert got["steps"] == 36
    assert got["checkpoints"]["failed"] > 1
    assert sum("No space left on device" in message for message in caplog.messages) == 1
    assert_same(got, train(None))


def test_a_full_disk_costs_checkpoints_and_nothing_else(small_disk, caplog):
    filler, done = small_disk / "filler", small_disk / "done"

    def fill(step: int) -> None:
        if step == 6:  # no room for anything but the one checkpoint that is there
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1024)):
                    pass

    got = train(done, keep=100, at_step=fill)
    assert_training_went_on(got, caplog)
    assert got["checkpoints"]["done"] == 1
    assert len(list(done.rglob("*.pt"))) == len(list(done.rglob("*.json"))) == 1
    assert not list(done.rglob("*.tmp"))
    filler.unlink()
    assert min(train(done, resume=True)["losses"]) == EVERY + 1


def test_a_disk_that_is_full_when_data_are_flushed(tmp_path, monkeypatch, caplog):
    fsync = os.fsync
    left = [4]  # shard, manifest, and twice their folder: one checkpoint less the folder above

    def full(number: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    interrupted(tmp_path, 7)
    monkeypatch.setattr(os, "fsync", full)
    got = train(tmp_path / "other", keep=1)
    assert_training_went_on(got, caplog)
    assert sets(tmp_path / "other") == ["step-00000005"]


def test_a_slow_disk_makes_training_skip_checkpoints(tmp_path, monkeypatch):
    slow = threading.Event()
    write = shards.write
    monkeypatch.setattr(shards, "write", lambda *given: (slow.wait(DEADLINE_S), write(*given)))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fw.attach(model, optimizer) as worker:
        worker.checkpoint(tmp_path, every=1)
        for k in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if k == 0:
                first = model.weight.detach().clone()
        slow.set()
    assert worker.metrics()["checkpoints"] == {"done": 2, "skipped": 3, "failed": 0}  # and that of the end
    saved = torch.load(shard_of(tmp_path, 1), weights_only=True)
    assert torch.equal(saved["weights"]["weight"], first)  # training went on, the copy did not


# -- several workers --


def team(folder: Path | None, n: int = 2, last: int | None = None, **settings: Any) -> list[Any]:
    """Workers as threads; they all die after a step, or train to the end."""
    settings = {"noise": False, **settings}
    if last is None:
        return together(n, lambda place: train(folder, place=place, **settings))
    together_at, die = threading.Barrier(n), die_at(last)

    def at_step(step: int) -> None:
        if step == last:
            together_at.wait(DEADLINE_S)
        die(step)

    ended = outcomes(n, lambda place: train(folder, place=place, at_step=at_step, **settings))
    assert all(isinstance(one, Killed) for one in ended)
    return ended


@pytest.mark.parametrize(
    "strategy", ["allreduce", "sasgd:interval=4", "nodelay:tau=4", "nodelay:tau=6", "leader", "dpsgd"]
)
def test_where_all_step_together_all_go_on_from_one_set(tmp_path, strategy):
    whole = team(None, strategy=strategy)
    team(tmp_path, last=13, strategy=strategy, every=4, keep=2)
    for path in tmp_path.glob("step-00000012-*/worker-1*"):
        path.unlink()  # the last set is not whole any more
    got = team(tmp_path, strategy=strategy, resume=True)
    assert [min(one["losses"]) for one in got] == [9, 9]
    for one, want in zip(got, whole, strict=True):
        assert one["steps"] == want["steps"] == 18
        for name, tensor in want["model"].items():
            if strategy != "nodelay:tau=6":  # whose merge, in the middle of a cycle, begins anew
                assert torch.equal(one["model"][name], tensor), name


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # a pass may bring a worker nothing
@pytest.mark.parametrize("strategy", ["adpsgd", "nodelay_free", "easgd", "none"])
def test_else_each_goes_on_from_its_own(tmp_path, strategy):
    team(tmp_path, last=8, strategy=strategy)
    saved = [torch.load(shard_of(tmp_path, EVERY, rank), weights_only=True) for rank in (0, 1)]
    got = team(tmp_path, strategy=strategy, resume=True)
    for rank, one in enumerate(got):
        # Who comes a moment later may find that the other has taken all batches.
        assert min(one["losses"], default=EVERY + 1) == EVERY + 1
        assert one["steps"] == max(one["losses"], default=EVERY)
        for name, tensor in saved[rank]["weights"].items():
            if strategy == "none":  # in others a correction may have come by now
                assert torch.equal(one["began"][name], tensor), name
    assert 30 <= sum(one["steps"] for one in got) <= 42  # 36, but for what only one of them knew of


def test_as_many_workers_need_only_their_own_files(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]
    team(folders[0], last=8, strategy="allreduce")
    shutil.copytree(*folders)
    for rank, folder in enumerate(folders):
        for path in folder.glob(f"step-*/worker-{1 - rank}*"):
            path.unlink()
    settings = {"strategy": "allreduce", "noise": False, "resume": True}
    got = together(2, lambda place: train(folders[place.rank], place=place, **settings))
    assert [min(one["losses"]) for one in got] == [EVERY + 1] * 2


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_where_updates_add_up_all_go_on_from_the_mean(tmp_path):
    strategy = "dasgd:interval=100"  # nobody has heard of anybody
    team(tmp_path, last=8, strategy=strategy)
    saved = [torch.load(shard_of(tmp_path, EVERY, rank), weights_only=True)["weights"] for rank in (0, 1)]
    got = team(tmp_path, strategy=strategy, resume=True, passes=0)
    assert not torch.equal(saved[0]["0.weight"], saved[1]["0.weight"])
    for one in got:
        for name in saved[0]:
            torch.testing.assert_close(one["began"][name], (saved[0][name] + saved[1][name]) / 2)


def test_grouping_goes_on_from_a_set_or_at_the_least_step_of_all(tmp_path):
    team(tmp_path, last=12, strategy="grouping")
    for path in tmp_path.glob("step-00000010-*/worker-1*"):
        path.unlink()
    got = team(tmp_path, strategy="grouping", resume=True, every=100)
    assert [min(one["losses"]) for one in got] == [6, 6]
    for path in [*tmp_path.glob("step-00000005-*/worker-0*"), *tmp_path.glob("step-00000018-*/worker-*")]:
        path.unlink()
    got = team(tmp_path, strategy="grouping", resume=True, passes=0)
    assert [one["steps"] for one in got] == [5, 5]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("n", [1, 3])
# Where batches are dealt as they are needed, a worker may get none on a busy machine, and save nothing.
@pytest.mark.parametrize("strategy", [pytest.param("none", marks=pytest.mark.slow), "allreduce"])
def test_another_number_of_workers_begins_with_the_mean(tmp_path, n, strategy):
    team(tmp_path, last=7, strategy=strategy)
    saved = [torch.load(shard_of(tmp_path, EVERY, rank), weights_only=True) for rank in (0, 1)]
    got = team(tmp_path, n, strategy=strategy, resume=True, keep=1)
    for one in got:
        assert min(one["losses"]) == EVERY + 1
        for part in ("weights", "buffers"):
            for name in saved[0][part]:
                mean = (saved[0][part][name] + saved[1][part][name]) / 2
                torch.testing.assert_close(one["began"][name], mean.to(one["began"][name].dtype))
    ranks = {path.stem for path in tmp_path.rglob("*.json")}
    assert ranks == {f"worker-{rank}" for rank in range(n)}, "shards of workers that are no more have gone"


def test_the_newest_set_that_all_have_is_kept(tmp_path, monkeypatch):
    write = shards.write

    def full_for_worker_1(home: Path, manifest: shards.Manifest, state: dict[str, Any]) -> None:
        if manifest.rank == 1 and manifest.step > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(home, manifest, state)

    monkeypatch.setattr(shards, "write", full_for_worker_1)
    team(tmp_path, strategy="allreduce", every=4, keep=1)
    assert sets(tmp_path) == ["step-00000004", "step-00000018"]
    got = team(tmp_path, strategy="allreduce", resume=True)
    assert [min(one["losses"]) for one in got] == [5, 5]


def test_all_are_told_what_is_wrong(tmp_path):
    team(tmp_path, last=7, strategy="allreduce")
    shard_of(tmp_path, EVERY, 1).write_bytes(b"")
    ended = outcomes(2, lambda place: train(tmp_path, place=place, strategy="allreduce", resume=True))
    for error in ended:
        assert isinstance(error, fw.ConfigError)
        assert "worker-1-" in str(error)
        assert "has 0 bytes" in str(error)


def test_one_damaged_shard_makes_all_take_the_set_before(tmp_path):
    team(tmp_path, last=12, strategy="allreduce")
    noise(shard_of(tmp_path, 10, 1))
    got = team(tmp_path, strategy="allreduce", resume=True)
    assert [min(one["losses"]) for one in got] == [6, 6]


TEAM = """
import os, signal, sys
from pathlib import Path
import torch
import resumable
from freewheel.runtime.membership.place import Place
torch.set_num_threads(1)
def wait(step):
    if step == 10 and sys.argv[2] == "die":
        print("at 10", flush=True)
        signal.pause()
got = resumable.train(Path(sys.argv[1]), place=Place.read(), strategy="sasgd:interval=4", at_step=wait,
                      resume=True, every=4)
torch.save((got["losses"], got["model"]), Path(sys.argv[1]).parent / f"{sys.argv[2]}-{os.environ['RANK']}")
"""


@pytest.mark.slow
def test_a_launcher_s_run_is_killed_and_started_again(tmp_path):
    (tmp_path / "train.py").write_text(TEAM)
    command = [sys.executable, "-c", "from freewheel.cli.main import main; main()", "run", "-n", "2"]
    command += ["--folder", str(tmp_path / "run")]
    command += [str(tmp_path / "train.py")]
    with child([*command, str(tmp_path / "whole"), "whole"]) as process:
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    with child([*command, str(tmp_path / "saved"), "die"]) as process:
        for _ in range(2):
            while "at 10" not in process.stdout.readline():
                assert process.poll() is None
        process.send_signal(signal.SIGKILL)  # the workers go with it
    with child([*command, str(tmp_path / "saved"), "again"]) as process:
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    for rank in range(2):
        losses, model = torch.load(tmp_path / f"again-{rank}")
        all_losses, want = torch.load(tmp_path / f"whole-{rank}")
        assert min(losses) == 9
        assert losses == {step: all_losses[step] for step in losses}
        assert all(torch.equal(model[name], want[name]) for name in want)


COMES_BACK = """
import logging, os, sys
from pathlib import Path
import resumable
from freewheel.runtime.membership.place import Place
home = Path(sys.argv[1])
second = (home / "second").exists()
met = False
def die(step):
    global met
    if step == 8 and os.environ["RANK"] == "1" and not second:
        (home / "second").touch()
        os.kill(os.getpid(), 9)
    if not met and (second or (step == 8 and os.environ["RANK"] == "0")):  # worker 0 waits for worker 1
        met = True
        os.close(os.open(home / "gate", os.O_WRONLY if second else os.O_RDONLY))
second = second and os.environ["RANK"] == "1"
got = resumable.train(home / "saved", place=Place.read(), at_step=die, resume=True)
if os.environ["RANK"] == "1":
    print("first step:", min(got["losses"]), flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_comes_back_copies_a_living_one(tmp_path):
    team(tmp_path / "saved", last=7, strategy="adpsgd")
    (tmp_path / "train.py").write_text(COMES_BACK)
    os.mkfifo(tmp_path / "gate")
    command = [sys.executable, "-c", "from freewheel.cli.main import main; main()", "run", "-n", "2"]
    command += ["--restarts", "1", "--folder", str(tmp_path / "run")]
    with child([*command, str(tmp_path / "train.py"), str(tmp_path)]) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "first step: 1\n" in output  # the checkpoint is of step 5
    found, wrong = shards.find(tmp_path / "saved")
    assert not wrong
    assert len({one.origin for one in found}) == 1
    assert len({one.run for one in found}) == 2
