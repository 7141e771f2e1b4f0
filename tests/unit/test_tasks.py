"""CIFAR-10 and texts: what is read and what is refused, the nets, batches that replay."""

from __future__ import annotations

import copy
import io
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from torch import nn

import freewheel as fw
from freewheel import tasks
from freewheel.records.journal import Journal
from freewheel.records.run import Run
from freewheel.replica import Replica
from freewheel.tasks import nets
from freewheel.tasks.cifar10 import MARGIN, MEAN, STD, divided, shift_and_mirror
from freewheel.training.job import Job
from freewheel.training.process import Samples

TRAIN, TEST = 60, 20


def weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def learn(task: fw.Task, steps: int, lr: float) -> list[float]:
    """The losses of a few steps of SGD."""
    torch.manual_seed(0)
    model, draws, losses = task.model(), generator(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = task.loss(model, task.batch(0, draws))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- CIFAR-10 --


@pytest.fixture
def pixels() -> dict[str, np.ndarray]:
    """A tiny data set in CIFAR-10's form; the label can be seen in the image's brightness."""
    draws, arrays = np.random.default_rng(0), {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(count, dtype=np.uint8) % 10
        noise = draws.integers(0, 25, (count, 32, 32, 3))
        arrays[f"{part}_image"] = (noise + 23 * labels[:, None, None, None]).astype(np.uint8)
        arrays[f"{part}_label"] = labels
    return arrays


@pytest.fixture
def npz(tmp_path, pixels) -> str:
    np.savez(tmp_path / "tiny.npz", **pixels)
    return str(tmp_path / "tiny.npz")


def cifar10(data: str, **settings) -> tasks.Cifar10:
    task = tasks.Cifar10(data=data, **settings)
    task.prepare(workers=2, seed=0)
    return task


def test_pixels_are_read_as_they_are(npz, pixels):
    task = cifar10(npz)
    assert task.images.dtype == torch.uint8
    assert np.array_equal(task.images.permute(0, 2, 3, 1), pixels["train_image"])
    assert np.array_equal(task.test_images.permute(0, 2, 3, 1), pixels["test_image"])
    assert task.labels.tolist() == pixels["train_label"].tolist()
    assert task.test_labels.dtype == torch.int64


class Python2Pickler(pickle._Pickler):
    """Writes as Python 2 and its numpy did, as in the published files."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, text: str | bytes) -> None:
        raw = text.encode("ascii") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_string
    dispatch[bool] = lambda self, value: self.save_long(int(value))  # a dtype had 0 and 1


def published(content: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")


@pytest.fixture
def folder(tmp_path, pixels):
    rows = {
        part: pixels[f"{part}_image"].transpose(0, 3, 1, 2).reshape(-1, 3072) for part in ("train", "test")
    }
    for k in range(5):
        some = slice(k * TRAIN // 5, (k + 1) * TRAIN // 5)
        content = {b"labels": pixels["train_label"][some].tolist(), b"data": rows["train"][some].copy()}
        (tmp_path / f"data_batch_{k + 1}").write_bytes(published(content))
    content = {b"labels": pixels["test_label"].tolist(), b"data": rows["test"]}
    (tmp_path / "test_batch").write_bytes(published(content))
    return tmp_path


def test_the_published_folder_is_read(folder, npz):
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in (folder / "test_batch").read_bytes()
    ours, same = cifar10(str(folder)), cifar10(npz)
    for name in ("images", "labels", "test_images", "test_labels"):
        assert torch.equal(getattr(ours, name), getattr(same, name))


def test_a_pickle_runs_no_code(folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'sprung')!r}, 'w').close()",)

    (folder / "test_batch").write_bytes(pickle.dumps({"data": Trap()}, protocol=2))
    with pytest.raises(fw.ConfigError, match=r"will not do \(it asks for .*exec\)"):
        cifar10(str(folder))
    assert not (tmp_path / "sprung").exists()


def rows(data: np.ndarray, labels: list) -> bytes:
    return published({b"data": data, b"labels": labels})


IMAGE = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3", None, r"it has no data_batch_3\).*Give an \.npz file"),
        ("test_batch", b"", r"Ran out of input"),
        ("test_batch", b"text\n", r""),
        ("test_batch", pickle.dumps([1]), r""),
        ("test_batch", rows(np.zeros((1, 9), np.uint8), [1]), r"reshape"),
        ("test_batch", rows(np.zeros((1, 3072)), [1]), r"float64, \(1, 3, 32, 32\)"),
        ("test_batch", rows(IMAGE, ["x"]), r"its labels are .S1"),
        ("test_batch", rows(IMAGE, [10]), r"its labels go from 10 to 10"),
        ("test_batch", rows(IMAGE, [10**30]), r"its labels are object"),
        ("test_batch", rows(np.zeros((2, 3072), np.uint8), [1]), r"of 2 images"),
    ],
)
def test_a_wrong_folder_is_refused(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(fw.ConfigError, match=f"will not do.*{message}"):
        cifar10(str(folder))


def test_no_data_and_no_file_are_told_apart(tmp_path):
    with pytest.raises(fw.ConfigError, match=r"no data given.*--task cifar10:data=PATH, or --data PATH"):
        tasks.resolve("cifar10").prepare(1, 0)
    with pytest.raises(
        fw.ConfigError, match=r"there is no .*missing\.npz\. Give an \.npz file.*data_batch_1"
    ):
        cifar10(str(tmp_path / "missing.npz"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_label": None}, r"test_label is not a file in the archive"),
        ({"train_image": None}, r"train_image is not a file in the archive"),
        ({"train_image": np.zeros((TRAIN, 28, 28), np.uint8)}, r""),
        ({"test_image": np.zeros((TEST, 32, 32, 3))}, r"images are float64, \(20, 3, 32, 32\)"),
        ({"test_image": np.zeros((TEST, 3, 32, 32), np.uint8)}, r"images are uint8, \(20, 32, 3, 32\)"),
        ({"train_label": np.zeros(TRAIN)}, r"labels are float64, \(60,\)"),
        ({"train_label": np.zeros(TRAIN - 1, int)}, r"labels are int64, \(59,\), of 60 images"),
        ({"train_label": np.full(TRAIN, 10)}, r"labels go from 10 to 10"),
        ({"train_label": np.full(TRAIN, -1)}, r"labels go from -1 to -1"),
        (
            {"test_image": np.zeros((0, 32, 32, 3), np.uint8), "test_label": np.zeros(0, int)},
            r"of 0 images",
        ),
        ({"test_label": np.array([object()])}, r"Object arrays cannot"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path, pixels, change, message):
    arrays = {name: array for name, array in (pixels | change).items() if array is not None}
    np.savez(tmp_path / "wrong.npz", allow_pickle=True, **arrays)
    with pytest.raises(fw.ConfigError, match=f"will not do.*{message}") as refused:
        cifar10(str(tmp_path / "wrong.npz"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_a_file_that_is_no_npz_is_refused(tmp_path, content):
    (tmp_path / "wrong.npz").write_bytes(content)
    with pytest.raises(fw.ConfigError, match=r"will not do .*Give an \.npz file"):
        cifar10(str(tmp_path / "wrong.npz"))


def test_a_single_array_and_a_damaged_file_are_refused(tmp_path, npz):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(fw.ConfigError, match=r"one\.npy will not do"):
        cifar10(str(tmp_path / "one.npy"))
    whole = bytearray((tmp_path / "tiny.npz").read_bytes())
    whole[1000] ^= 255
    (tmp_path / "tiny.npz").write_bytes(whole)
    with pytest.raises(fw.ConfigError, match=r"will not do \(Bad CRC"):
        cifar10(npz)


def jpegs(pixels: dict[str, np.ndarray], side: int = 32) -> dict[str, np.ndarray]:
    image = pytest.importorskip("PIL.Image")
    arrays = {}
    for part in ("train", "test"):
        files = []
        for one in pixels[f"{part}_image"]:
            file = io.BytesIO()
            image.fromarray(one[:side]).save(file, "JPEG", quality=95)
            files.append(file.getvalue())
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        arrays[f"{part}_end"] = np.cumsum([len(file) for file in files])
        arrays[f"{part}_label"] = pixels[f"{part}_label"]
    return arrays


def test_jpeg_images_are_decoded(tmp_path, pixels):
    np.savez(tmp_path / "jpeg.npz", **jpegs(pixels))
    task = cifar10(str(tmp_path / "jpeg.npz"))
    away = task.images.permute(0, 2, 3, 1).float() - torch.from_numpy(pixels["train_image"]).float()
    assert away.abs().mean() < 8  # lossy, but no other image
    assert task.labels.tolist() == pixels["train_label"].tolist()


def test_wrong_jpeg_images_are_refused(tmp_path, pixels):
    def refused(message, **arrays):
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(fw.ConfigError, match=message):
            cifar10(str(tmp_path / "wrong.npz"))

    good = jpegs(pixels)
    refused(r"images are uint8, \(60, 3, 16, 32\)", **jpegs(pixels, side=16))
    refused(r"will not do", **good | {"train_end": good["train_end"] * [1, *[0] * 59]})
    refused(r"of 59 images", **good | {"train_end": good["train_end"][1:]})
    refused(r"will not do", **good | {"train_end": good["train_end"] - 1000})
    refused(r"will not do", **good | {"test_jpeg": np.zeros_like(good["test_jpeg"])})
    refused(r"will not do", **good | {"train_end": good["train_end"] * 1.0})
    refused(r"will not do", **good | {"train_jpeg": good["train_jpeg"].astype(np.int64)})


def test_jpeg_images_without_pillow_say_what_to_install(tmp_path, pixels, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    bare = {"train_jpeg": np.zeros(3, np.uint8), "train_end": np.array([3]), "train_label": np.array([1])}
    np.savez(tmp_path / "jpeg.npz", **bare)
    with pytest.raises(fw.ConfigError, match=r"jpeg\.npz will not do .*PIL.*pip install pillow"):
        cifar10(str(tmp_path / "jpeg.npz"))


def test_resnet20_has_the_paper_s_weights():
    model = nets.resnet20()
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) + 1 == 20  # with the linear layer
    expected = 9 * 3 * 16  # the first convolution
    inputs = 16
    for channels in (16, 32, 64):
        expected += 9 * (inputs * channels + 5 * channels * channels)  # six convolutions a stage
        inputs = channels
    expected += 2 * (16 + 6 * (16 + 32 + 64))  # BatchNorm after each
    expected += 64 * 10 + 10
    assert weights(model) == expected == 269_722
    shapes = []
    for layer in model[3:12]:
        layer.register_forward_hook(lambda _layer, _inputs, out: shapes.append(tuple(out.shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3
    widest = convolutions[-1].weight
    assert widest.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)  # He's


def test_a_shortcut_passes_its_input_on():
    block = nets.BasicBlock(16, 32, stride=2).eval()
    nn.init.zeros_(block.second_norm.weight)  # nothing comes from the convolutions
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_the_vgg_is_small():
    model = nets.vgg()
    assert 0.5e6 < weights(model) < 2e6
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("mirror", [0, 1])
def test_images_are_shifted_and_mirrored(mirror):
    images = torch.randint(1, 256, (1, 3, 32, 32), dtype=torch.uint8)
    for down in range(2 * MARGIN + 1):
        for right in (0, 3, MARGIN, 2 * MARGIN):
            (out,) = shift_and_mirror(images, *(torch.tensor([k]) for k in (down, right, mirror)))
            expected = torch.zeros(3, 40, 40, dtype=torch.uint8)
            expected[:, 4:36, 4:36] = images[0]
            expected = expected[:, down : down + 32, right : right + 32]
            assert torch.equal(out, expected.flip(2) if mirror else expected)


def test_every_image_of_a_batch_is_shifted_by_itself():
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    how = [torch.tensor(k) for k in ([0, 1, 4, 7, 8], [8, 2, 4, 0, 5], [1, 0, 0, 1, 1])]
    together = shift_and_mirror(images, *how)
    for k in range(5):
        assert torch.equal(
            together[k : k + 1], shift_and_mirror(images[k : k + 1], *(h[k : k + 1] for h in how))
        )


def test_batches_replay_from_their_generator(npz):
    task, again = cifar10(npz, batch_size=16), cifar10(npz, batch_size=16)
    draws, same = generator(1), generator(1)
    first, second = task.batch(0, draws), task.batch(0, draws)
    assert first[0].shape == (16, 3, 32, 32)
    assert first[0].dtype == torch.float32
    torch.manual_seed(123)  # whatever others draw
    for images, labels in (first, second):
        their_images, their_labels = again.batch(0, same)
        assert torch.equal(images, their_images)
        assert torch.equal(labels, their_labels)
    assert not torch.equal(first[0], second[0])


def test_without_augmentation_a_batch_holds_the_images(npz):
    task = cifar10(npz, augment=False, batch_size=200)
    images, labels = task.batch(0, generator())
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    known = {label: [] for label in range(10)}
    for image, label in zip(task.images, task.labels.tolist(), strict=True):
        known[label].append((image / 255 - mean) / std)
    for image, label in zip(images, labels.tolist(), strict=True):
        assert any(torch.allclose(image, one, atol=1e-5) for one in known[label])
    shifted, _ = cifar10(npz, batch_size=200).batch(0, generator())
    black = torch.isclose(shifted, -mean / std, atol=1e-5).all(1)
    assert black[:, 0].all(1).float().mean() > 0.3  # a black row on top of those that were shifted down


def test_evaluation_is_the_mean_over_all_test_images(npz, monkeypatch):
    task = cifar10(npz)
    torch.manual_seed(0)
    model = task.model().eval()
    loss, accuracy = task.evaluate(model)
    monkeypatch.setattr("freewheel.tasks.guessing.PART", 7)  # several unequal chunks
    assert task.evaluate(model) == pytest.approx((loss, accuracy))
    with torch.no_grad():
        outputs = model(task._numbers(task.test_images))
    assert loss == pytest.approx(nn.functional.cross_entropy(outputs, task.test_labels).item())
    assert accuracy == (outputs.argmax(1) == task.test_labels).sum().item() / TEST
    monkeypatch.setattr("freewheel.tasks.cifar10.PART", 30)
    with torch.no_grad():
        outputs = model(task._numbers(task.images[:30]))
    assert task.score(model) == pytest.approx(nn.functional.cross_entropy(outputs, task.labels[:30]).item())


@pytest.mark.parametrize("net", ["resnet20", "vgg"])
def test_the_nets_learn(npz, net):
    task = cifar10(npz, net=net, batch_size=10)
    batch = task.batch(0, generator())
    task.batch = lambda _worker, _generator: batch  # a few images by heart
    losses = learn(task, steps=8, lr=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_the_file_is_read_once(npz, monkeypatch):
    task = cifar10(npz)
    monkeypatch.setattr("freewheel.tasks.cifar10.read", None)
    task.prepare(workers=4, seed=1)
    assert len(task.images) == TRAIN


def test_a_simulation_trains_it(npz):
    result = fw.simulate("adpsgd", f"cifar10:data={npz}:batch_size=8", workers=2, steps=2)
    assert result.accuracy is not None


def test_each_worker_has_kinds_of_its_own(npz):
    labels = torch.arange(2000) % 10
    own = divided(labels, 8, 0.1, seed=0)
    assert sorted(torch.cat(own).tolist()) == list(range(2000))  # each image once
    most = [labels[places].bincount(minlength=10).max() / len(places) for places in own]
    assert sum(most) / 8 > 0.4  # a tenth of them would be of each kind
    assert [places.tolist() for places in divided(labels, 8, 0.1, seed=0)] == [p.tolist() for p in own]


def test_a_worker_draws_its_own_images(npz):
    task = cifar10(npz, dirichlet=0.5)
    for worker in (0, 1):
        at = task.draw(worker, generator())[0]
        assert set(at.tolist()) <= set(task.own[worker].tolist())


def test_images_that_do_not_suffice_for_all_are_refused():
    with pytest.raises(fw.ConfigError, match="without images"):
        divided(torch.zeros(20, dtype=torch.int64), 8, 0.1, seed=0)


# -- texts --

TEXT = "the quick brown fox jumps over the lazy dog; " * 60


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "text.txt")


def chars(data: str, **settings) -> tasks.Chars:
    task = tasks.Chars(data=data, **({"context": 16, "width": 16, "layers": 2, "heads": 2} | settings))
    task.prepare(workers=2, seed=0)
    return task


def spell(task: tasks.Chars, numbers: torch.Tensor) -> str:
    return "".join(task.alphabet[k] for k in numbers.tolist())


def test_a_text_is_cut_into_nine_tenths_and_one(text):
    task = chars(text)
    cut = len(TEXT) - len(TEXT) // 10
    assert spell(task, task.text) == TEXT[:cut]
    assert spell(task, task.test_text) == TEXT[cut:]
    assert task.alphabet == "".join(sorted(set(TEXT)))


def test_any_letters_may_occur(tmp_path):
    (tmp_path / "text").write_text("Zürich 東京 🚲\n" * 60, encoding="utf-8")
    task = chars(str(tmp_path / "text"))
    assert spell(task, task.text).startswith("Zürich 東京 🚲\n")
    assert task.model()(task.batch(0, generator())[0]).shape == (32, 16, len(set("Zürich 東京 🚲\n")))


def test_windows_come_from_the_training_text_with_what_follows(text):
    task = chars(text, batch_size=400)
    seen, following = task.batch(0, generator())
    assert seen.shape == following.shape == (400, 16)
    begun = set()
    for window, later in zip(seen, following, strict=True):
        assert spell(task, window)[1:] == spell(task, later)[:-1]
        begun.add(spell(task, window) + spell(task, later)[-1])
    assert begun == {TEXT[k : k + 17] for k in range(45)}  # all places of the sentence
    assert torch.equal(seen, chars(text, batch_size=400).batch(1, generator())[0])


def test_windows_reach_both_ends_of_the_training_text(tmp_path):
    (tmp_path / "text").write_text("".join(chr(0x4E00 + k) for k in range(170)))  # no character twice
    task = chars(str(tmp_path / "text"), batch_size=4000)
    seen, following = task.batch(0, generator())
    assert seen.min() == 0
    assert following.max() == 152  # the last of the first 153


def test_the_gpt_sees_nothing_of_what_comes(text):
    task = chars(text)
    model = task.model().eval()
    window = task.batch(0, generator())[0][:1]
    other = window.clone()
    other[0, 8:] = (other[0, 8:] + 1) % len(task.alphabet)
    before, after = model(window), model(other)
    assert torch.allclose(before[0, :8], after[0, :8], atol=1e-6)
    assert not torch.allclose(before[0, 8:], after[0, 8:], atol=1e-3)
    first_twice = window[:, :1].repeat(1, 2)
    assert not torch.allclose(*model(first_twice)[0], atol=1e-4)  # places differ


def test_the_gpt_s_embedding_is_tied(text):
    task = chars(text)
    model = task.model()
    assert model.guess.weight is model.characters.weight
    vocabulary, width = len(task.alphabet), 16
    block = 4 * width + 12 * width * width + (3 + 1 + 4 + 1) * width
    assert weights(model) == vocabulary * width + 16 * width + 2 * block + 2 * width
    twin = copy.deepcopy(model)
    replica = Replica.of(twin)
    assert replica.size == weights(model)
    replica.correct(torch.ones(replica.size))
    replica.boundary()
    assert torch.equal(twin.guess.weight, model.guess.weight + 1)
    assert torch.equal(twin.characters.weight, twin.guess.weight)
    loss = task.loss(twin, task.batch(0, generator()))
    loss.backward()
    assert twin.guess.weight.grad is twin.characters.weight.grad


class Oracle(nn.Module):
    """Knows the text by heart, but is wrong after an x."""

    def __init__(self, task: tasks.Chars) -> None:
        super().__init__()
        self.task, self.windows = task, []

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        self.windows += [spell(self.task, window) for window in seen]
        guesses = torch.zeros(*seen.shape, len(self.task.alphabet))
        for row, window in enumerate(seen):
            text = spell(self.task, window)
            at = (TEXT + TEXT).index(text)
            for k, character in enumerate(text):
                right = TEXT[(at + k + 1) % len(TEXT)]
                guess = ";" if character == "x" else right
                guesses[row, k, self.task.alphabet.index(guess)] = 100.0
        return guesses


def test_evaluation_reads_the_last_tenth(text):
    task = chars(text)
    oracle = Oracle(task)
    loss, accuracy = task.evaluate(oracle)
    read = "".join(oracle.windows)
    assert read == TEXT[-(len(TEXT) // 10) :][: len(read)]
    assert len(read) == 16 * ((len(TEXT) // 10 - 1) // 16)
    wrong = read.count("x") / len(read)
    assert accuracy == pytest.approx(1 - wrong)
    assert loss == pytest.approx(100 * wrong, rel=1e-4)
    oracle.windows.clear()
    task.score(oracle)
    assert "".join(oracle.windows) == TEXT[: 16 * ((len(task.text) - 1) // 16)]


def test_evaluation_of_a_long_text_is_capped_and_spread(text, monkeypatch):
    monkeypatch.setattr("freewheel.tasks.chars.EVALUATED", 64)
    task = chars(text)
    task.test_text = torch.arange(1000)
    starts = []

    def model(seen):
        starts.extend(seen[:, 0].tolist())
        return torch.zeros(*seen.shape, 1000)

    task.evaluate(model)
    assert starts == [0, 15 * 16, 31 * 16, 46 * 16]


def test_the_gpt_learns(text):
    losses = learn(chars(text, width=32), steps=40, lr=tasks.Chars.lr)
    assert losses[-1] < 0.9 * losses[0]


def test_a_simulation_trains_on_a_text(text):
    result = fw.simulate("adpsgd", f"chars:data={text}:context=16:width=16", workers=2, steps=2)
    assert result.accuracy is not None


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {}, r"cannot read .*text \(.*No such file or directory.*Give a text file in UTF-8"),
        (b"\xff\xfe\x00", {}, r"cannot read .*text \('utf-8' codec.*Give a text file in UTF-8"),
        (b"", {}, r"has 0 characters; a context of 16 needs at least 170 .*smaller context"),
        (b"x" * 169, {}, r"has 169 characters"),
        (b"x" * 170, {"context": 17}, r"a context of 17 needs at least 180"),
    ],
)
def test_a_wrong_text_is_refused(tmp_path, content, settings, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(fw.ConfigError, match=message):
        chars(str(tmp_path / "text"), **settings)


def test_the_shortest_text_will_do(tmp_path):
    (tmp_path / "text").write_text("x" * 170)
    task = chars(str(tmp_path / "text"))
    assert task.evaluate(task.model().eval()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chars", r"chars: no text given.*--task chars:data=PATH, or --data PATH"),
        ("chars:context=0", r"chars: context must be at least 1, not 0"),
        ("chars:width=65:heads=4", r"65 does not divide into 4 heads"),
        ("chars:batch_size=0", r"chars: batch_size must be at least 1"),
        ("cifar10:batch_size=0", r"cifar10: batch_size must be at least 1"),
        ("cifar10:net=resnet", r"'resnet'\. Did you mean 'resnet20'"),
        ("cifar10:dat=x", r"'dat'.*Did you mean 'data'"),
    ],
)
def test_wrong_settings_are_refused(spec, message):
    with pytest.raises(fw.ConfigError, match=message):
        tasks.resolve(spec).prepare(1, 0)


# -- both --


def everything(value: object) -> list[torch.Tensor]:
    """All tensors that an object holds or a batch consists of."""
    parts = value if isinstance(value, list | tuple) else vars(value).values()
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", ["cifar10", "chars"])
def test_data_move_to_a_device_before_or_after_they_are_read(npz, text, name, early):
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    task = tasks.resolve(f"{name}:data={npz if name == 'cifar10' else text}")
    if early:
        task.to(device)
    task.prepare(1, 0)
    if not early:
        task.to(device)
    assert {one.device.type for one in everything(task)} == {device.type}
    assert {one.device.type for one in everything(task.batch(0, generator()))} == {device.type}
    if device.type == "cuda":
        assert task.evaluate(task.model().to(device).eval())[0] > 0


def test_how_far_apart_workers_are_is_in_the_records_while_they_train(tmp_path):
    samples = Samples(Job(workers=2), True, Journal(tmp_path, 0), lockstep=False)
    no_buffers = torch.empty(0)
    parts = [(0, torch.zeros(4), no_buffers, 3), (1, torch.ones(4), no_buffers, 5)]
    samples.keep(parts, parts)
    (known,) = Run(tmp_path).evaluations
    assert (known["worker_steps"], known["discrepancy"], known.get("loss")) == (8, 2.0, None)


def test_of_workers_that_step_together_only_those_at_the_same_step_are_compared(tmp_path):
    samples = Samples(Job(workers=3), True, Journal(tmp_path, 0), lockstep=True)
    no_buffers = torch.empty(0)
    parts = [(rank, torch.full((4,), float(k)), no_buffers, k) for rank, k in enumerate((3, 4, 3))]
    samples.keep(parts, parts)
    samples.keep(parts[:2], parts[:2])
    first, second = Run(tmp_path).evaluations
    assert (first["worker_steps"], first["discrepancy"]) == (10, 0.0)
    assert (second["worker_steps"], second.get("discrepancy")) == (7, None)  # nobody was at the same step
