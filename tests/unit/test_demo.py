"""The demo says what was measured, whatever that is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import freewheel as fw
from freewheel.cli import demo


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the demo would measure with AllReduce in DDP's place, in virtual time."""
    folder = tmp_path_factory.mktemp("demo")

    def simulated(jobs, home, tensorboard):
        return [
            fw.simulate(
                job.strategy, job.task, workers=4, steps=steps, lr=job.lr, momentum=job.momentum, target=0.9,
                compute=fw.Compute(ms=job.compute_ms, slow=job.slow), folder=home / demo.name(number, job),
            )
            for number, (job, steps) in enumerate(zip(jobs, (60, 250, 250), strict=True))
        ]  # fmt: skip

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "STRATEGIES", ("allreduce", "adpsgd", "nodelay_free"))
        patched.setattr(demo, "run_all", simulated)
        said = []
        patched.setattr(demo, "output", lambda: Spoken(said))
        demo.demo(seconds=8, folder=folder)
    return folder, said


class Spoken:
    def __init__(self, said):
        self.said = said

    def print(self, *parts, **_):
        self.said += parts


def test_it_ends_with_the_result_and_where_the_replay_is(measured):
    folder, said = measured
    text = [one for one in said if isinstance(one, str)]
    assert text[-1].endswith(str(folder / "replay.html"))
    assert "AD-PSGD" in (folder / "replay.html").read_text()
    assert (folder / "report.html").exists()
    (sentence,) = [one for one in text if "; AD-PSGD does not" in one]
    assert "waits for the slow worker" in sentence
    assert "final accuracy" in sentence
    (first,) = [one for one in text if "reaches 90 % accuracy" in one]
    assert "times sooner than AllReduce" in first
    (table,) = [one for one in said if not isinstance(one, str)]
    assert len(table.columns) <= 6


def result(name, target_s, accuracy, idle):
    one = fw.simulate(name, "quadratic", workers=2, steps=2)
    begin, end = replace(one.curve[0], virtual_s=0.0, accuracy=0.1), one.curve[-1]
    reached = [] if target_s is None else [replace(end, virtual_s=target_s, accuracy=0.9)]
    curve = (begin, *reached, replace(end, virtual_s=15.0, accuracy=accuracy))
    return replace(one, curve=curve, accuracy=accuracy, idle_share=idle, target=0.9, target_s=target_s)


@pytest.mark.parametrize(
    ("base", "other", "words"),
    [
        ((6.0, 0.96, 0.6), (2.0, 0.955, 0.02), "does not (2 %): the same final accuracy within a point"),
        ((6.0, 0.96, 0.6), (2.0, 0.93, 0.02), "3 times sooner than AllReduce (what DDP does) (6 s)."),
        ((6.0, 0.96, 0.6), (2.0, 0.93, 0.02), "a lower final accuracy (93.0 %"),
        ((2.0, 0.95, 0.0), (6.0, 0.97, 0.0), "DDP does) reaches 90 % accuracy first"),
        ((2.0, 0.95, 0.0), (6.0, 0.97, 0.0), "a higher final accuracy"),
        ((2.0, 0.95, 0.0), (2.1, 0.95, 0.0), "of its time, AD-PSGD 0 %: the same final accuracy"),
        ((None, 0.8, 0.6), (2.0, 0.95, 0.0), "after 2 s; AllReduce (what DDP does) does not reach it"),
        ((2.0, 0.95, 0.6), (None, 0.7, 0.5), "AD-PSGD does not reach it"),
        ((None, 0.8, 0.6), (None, 0.8, 0.0), "No run reaches 90 % accuracy."),
    ],
)  # fmt: skip
def test_it_says_what_was_measured_whatever_that_is(base, other, words):
    said = demo.story([result("allreduce", *base), result("adpsgd", *other)])
    assert len(said) == 2
    assert words in " ".join(said)
