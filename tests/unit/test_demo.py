"""The demo says what was measured, whatever that is."""

from __future__ import annotations

import pytest

import freewheel as fw
from freewheel.cli import train as demo


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
    (sentence,) = [one for one in text if "reaches 90 % accuracy first" in one]
    assert "times sooner than AllReduce" in sentence
    assert "AllReduce makes" in sentence
    (table,) = [one for one in said if not isinstance(one, str)]
    assert len(table.columns) <= 6
